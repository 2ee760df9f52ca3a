"""Experts' products on tensor cores, emulated. Which pairs and tiles there are follows from the ids of a launch."""

from __future__ import annotations

import math

import pytest
import torch

from tests.codegen.test_expert_runs import lowered_call
from tests.cpu.test_experts import chosen_ids, exact
from tests.thinned import thinned
from torch_mpk import _C
from torch_mpk.capture.graph import capture
from torch_mpk.lowering import lower
from torch_mpk.patterns import apply
from torch_mpk.testing.emulator import aligned, emulate

ROWS, BOXES = "expert_linear.rows", "expert_linear.boxes"


def lowered_product(operands: list[torch.Tensor]):
    step = torch.fx.symbolic_trace(lambda x, ids, weight: torch.ops.mpk.expert_linear(x, ids, weight))
    return lower(apply(capture(step, operands).graph_module))


def kernel_of(schedule: _C.Schedule) -> str:
    (job,) = (job for phase in schedule.phases for job in phase.jobs)
    return job.cut.kernel


# Rows, choices, experts, rows of weights, depth, and the kernel: boxes that columns fill and do not fill, more than a
# group of pairs for an expert, fewer tiles than workers, weights' rows that no tile divides, more experts than a lane
# has.
SHAPES = [
    ((1, 2, 8, 48, 512), BOXES),
    ((1, 4, 8, 16, 64), BOXES),
    ((9, 2, 3, 80, 320), BOXES),
    ((40, 2, 2, 32, 128), BOXES),
    ((2, 3, 100, 32, 256), BOXES),
    ((9, 2, 3, 72, 96), ROWS),
    ((40, 2, 2, 24, 64), ROWS),
    ((2, 3, 100, 33, 320), ROWS),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(("shape", "name"), thinned(SHAPES, 0, 2, 4, 5), ids=str)
def test_products(shape: tuple[int, ...], name: str, dtype: torch.dtype) -> None:
    rows, choices, experts, n, k = shape
    kernel = None
    for chosen in ("random", "one", "last", "none", "twice"):
        x, weight = torch.randn(rows, choices, k).to(dtype), torch.randn(experts, n, k).to(dtype)
        ids = chosen_ids(rows, choices, experts, chosen if chosen in ("one", "last") else "random")
        if chosen == "twice":
            ids[:, 1] = ids[:, 0]
        if chosen == "none":
            ids.view(-1)[::2] = torch.tensor([-1, experts])[torch.randint(2, ids.view(-1)[::2].shape)]
        operands = [aligned(t.numel() * t.itemsize).view(t.dtype).view(t.shape).copy_(t) for t in (x, ids, weight)]
        lowered = lowered_product(operands)
        kernel = kernel or emulate(lowered.graph)
        assert kernel_of(kernel.schedule) == name
        (made,) = (
            aligned(f.dtype.itemsize * math.prod(f.shape), 0xFF).view(f.dtype).view(f.shape) for f in lowered.fresh
        )
        kernel.launch(operands, [made], order="shuffled", jitter=3)
        valid = (ids >= 0) & (ids < experts)
        expected = exact(x, ids.clamp(0, experts - 1), weight, False) * valid.unsqueeze(-1)
        torch.testing.assert_close(made.double(), expected, rtol=8e-3, atol=2e-2)
        assert not made[~valid].any()


def test_a_row_s_result_does_not_depend_on_others() -> None:
    rows, choices, experts, n, k = 12, 2, 4, 48, 128
    x, weight = torch.randn(rows, choices, k).bfloat16(), torch.randn(experts, n, k).bfloat16()
    ids = chosen_ids(rows, choices, experts, "random")
    kernel, results = None, []
    for change in (False, True):
        if change:
            x[1:], ids[1:] = torch.randn(rows - 1, choices, k), ids[:1]
        operands = [aligned(t.numel() * t.itemsize).view(t.dtype).view(t.shape).copy_(t) for t in (x, ids, weight)]
        kernel = kernel or emulate(lowered_product(operands).graph)
        made = aligned(rows * choices * n * 2, 0xFF).view(torch.bfloat16).view(rows, choices, n)
        kernel.launch(operands, [made])
        results.append(made[0])
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("sizes", "dtype", "why"),
    [
        ((1, 2, 4, 16, 64), torch.float32, "tensor cores multiply 16-bit floats"),
        ((300, 2, 4, 16, 64), torch.bfloat16, "600 pairs of rows and experts, expected 1 to 512"),
        ((1, 2, 4, 16, 40), torch.bfloat16, "rows of 40 elements, expected aligned ones of a multiple of 32"),
    ],
)
def test_others_have_the_plain_kernel(sizes: tuple[int, ...], dtype: torch.dtype, why: str) -> None:
    rows, choices, experts, n, k = sizes
    operands = [torch.randn(rows, choices, k).to(dtype), chosen_ids(rows, choices, experts, "random")]
    lowered = lowered_product([*operands, torch.randn(experts, n, k).to(dtype)])
    schedule = _C.make_schedule(lowered.graph, _C.Target("cuda", 90, 132, 232448))
    assert kernel_of(schedule) == "tile"
    (job,) = (job for phase in schedule.phases for job in phase.jobs)
    assert [(other.kernel, other.refusal) for other in job.others] == [(BOXES, why), (ROWS, why)]


def quantized_product(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.ops.mpk.quantized_expert_linear(x, ids, weight, scale, block_rows=128, block_columns=128)


@pytest.mark.parametrize(
    ("n", "dtype", "name", "alignment"),
    [
        (48, torch.bfloat16, BOXES, 16),
        (40, torch.bfloat16, ROWS, 16),
        (48, torch.float32, "tile", 4),
        (48, torch.float8_e4m3fn, "quantized_expert_linear.boxes", 16),
        (40, torch.float8_e4m3fn, "quantized_expert_linear.direct", 2),
    ],
    ids=str,
)
def test_alignment_of_a_call_s_x(n: int, dtype: torch.dtype, name: str, alignment: int) -> None:
    """A launch refuses an address that its kernel cannot read from."""
    is_quantized = dtype.itemsize == 1
    x = torch.randn(2, 2, 128).to(torch.bfloat16 if is_quantized else dtype)
    operands = [x, chosen_ids(2, 2, 4, "random"), torch.randn(4, n, 128).to(dtype)]
    if is_quantized:
        operands.append(torch.rand(4, 1, 1))
        lowered = lowered_call(quantized_product, operands)
    else:
        lowered = lowered_product(operands)
    schedule = _C.make_schedule(lowered.graph, _C.Target("cuda", 90, 132, 232448))
    assert kernel_of(schedule) == name
    assert _C.generate_cuda(schedule).input_alignment[0] == alignment


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 2048, 2048), (8, 2048, 1024), (33, 1536, 2048), (64, 1536, 768)])
@pytest.mark.parametrize("chosen", ["random", "one"])
def test_products_on_a_gpu(rows: int, n: int, k: int, chosen: str) -> None:
    """Of models' sizes, twice, with other experts: nothing of a launch stays behind."""
    experts, choices = 64, 8
    step = torch.compile(lambda *operands: torch.ops.mpk.expert_linear(*operands), backend="mpk", fullgraph=True)
    weight = torch.randn(experts, n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
    for _ in range(2):
        x = torch.randn(rows, choices, k, device="cuda", dtype=torch.bfloat16)
        ids = chosen_ids(rows, choices, experts, chosen).cuda()
        y = step(x, ids, weight)
        expected = torch.einsum("rcnk,rck->rcn", weight[ids].float(), x.float())
        torch.testing.assert_close(y.float(), expected, rtol=8e-3, atol=2e-2)
        assert torch.equal(step(x, ids, weight), y)
