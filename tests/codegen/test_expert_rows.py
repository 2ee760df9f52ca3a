"""Experts' products on tensor cores, emulated. Which pairs and tiles there are follows from the ids of a launch."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import linear

from tests.codegen.test_expert_runs import fresh, in_place, kernels, lowered_call
from tests.cpu.test_experts import chosen_ids, exact
from tests.thinned import thinned
from torch_mpk import _C
from torch_mpk.jit import compile_cuda
from torch_mpk.testing.emulator import emulate

ROWS, BOXES = "expert_linear.rows", "expert_linear.boxes"
Form = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def product(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mpk.expert_linear(x, ids, weight)


def transposed(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mpk.expert_linear(x, ids, None, weight)


def kernel_of(schedule: _C.Schedule) -> str:
    (job,) = (job for phase in schedule.phases for job in phase.jobs)
    return job.cut.kernel


# Rows, choices, experts, results of a pair, depth, the form, and the kernel: boxes that a tile fills and does not fill,
# more than a group of pairs for an expert, and more than a warp has sums for, fewer tiles than workers, sizes that no
# tile divides, more experts than a lane has.
SHAPES = [
    ((1, 2, 8, 48, 512), product, BOXES),
    ((1, 4, 8, 16, 64), product, BOXES),
    ((9, 2, 3, 80, 320), product, BOXES),
    ((2, 3, 100, 32, 256), product, BOXES),
    ((70, 2, 3, 16, 64), product, BOXES),
    ((9, 2, 3, 72, 96), product, ROWS),
    ((2, 3, 100, 33, 320), product, ROWS),
    ((70, 2, 3, 24, 64), product, ROWS),
    ((1, 2, 8, 128, 96), transposed, BOXES),
    ((9, 2, 3, 192, 320), transposed, BOXES),
    ((40, 2, 2, 64, 128), transposed, BOXES),
    ((1, 2, 4, 8, 32), transposed, ROWS),
    ((9, 2, 3, 72, 96), transposed, ROWS),
    ((40, 2, 3, 24, 64), transposed, ROWS),
]


def id_of(value: object) -> str:
    return str(getattr(value, "__name__", value))


@pytest.mark.parametrize(("shape", "form", "name"), thinned(SHAPES, 2, 5, 9, 12), ids=id_of)
def test_products(shape: tuple[int, ...], form: Form, name: str) -> None:
    rows, choices, experts, n, k = shape
    dtype = random.choice([torch.bfloat16, torch.float16])
    is_transposed = form is transposed
    kernel = None
    for chosen in ("random", "one", "last", "none", "twice"):
        x, weight = torch.randn(rows, choices, k).to(dtype), torch.randn(experts, n, k).to(dtype)
        weight = weight.mT if is_transposed else weight
        ids = chosen_ids(rows, choices, experts, chosen if chosen in ("one", "last") else "random")
        if chosen == "twice":
            ids[:, 1] = ids[:, 0]
        if chosen == "none":
            ids.view(-1)[::2] = torch.tensor([-1, experts])[torch.randint(2, ids.view(-1)[::2].shape)]
        operands = in_place([x, ids, weight])
        lowered = lowered_call(form, operands)
        kernel = kernel or emulate(lowered.graph)
        assert kernel_of(kernel.schedule) == name
        [made] = fresh(lowered)
        kernel.launch(operands, [made], order="shuffled", jitter=3)
        valid = (ids >= 0) & (ids < experts)
        expected = exact(x, ids.clamp(0, experts - 1), weight, is_transposed) * valid.unsqueeze(-1)
        torch.testing.assert_close(made.double(), expected, rtol=8e-3, atol=2e-2)
        assert not made[~valid].any()


@pytest.mark.parametrize("is_transposed", thinned([False, True], 0))
def test_other_rows_between_those_of_experts(is_transposed: bool) -> None:
    """As of a projection whose rows for keys and for values are a head's, multiplied by themselves."""
    x, wide = torch.randn(3, 5, 64).bfloat16(), torch.randn(5, 80, 128).bfloat16()
    ids = torch.arange(5).expand(3, 5).contiguous()

    def form(x: torch.Tensor, ids: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        if is_transposed:
            return torch.ops.mpk.expert_linear(x, ids, None, wide[:, 16:])
        return torch.ops.mpk.expert_linear(x, ids, wide.view(5, 160, 64)[:, 16:64])

    operands = in_place([x, ids, wide])
    lowered = lowered_call(form, operands)
    kernel = emulate(lowered.graph)
    assert kernel_of(kernel.schedule) == BOXES
    [made] = fresh(lowered)
    kernel.launch(operands, [made], order="shuffled", jitter=3)
    torch.testing.assert_close(made, form(x, ids, wide), rtol=8e-3, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("form", [product, transposed])
def test_prompts(form: Form) -> None:
    """Behind linears of many rows, whose launches have warps that multiply together, and more pairs of an expert than a
    warp has sums for."""
    rows, choices, experts, size = 70, 2, 3, 64

    def call(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        return form(linear(x, weight).unsqueeze(1).expand(rows, choices, size), ids, matrices)

    kernel = None
    for chosen in ("random", "one"):
        x, weight = torch.randn(rows, size).bfloat16(), torch.randn(size, size).bfloat16() / 8
        ids, matrices = chosen_ids(rows, choices, experts, chosen), torch.randn(experts, size, size).bfloat16()
        operands = in_place([x, weight, ids, matrices])
        lowered = lowered_call(call, operands)
        kernel = kernel or emulate(lowered.graph, workers=3)
        assert kernels(kernel.schedule) == ["linear.tiles", ROWS]
        [made] = fresh(lowered)
        kernel.launch(operands, [made], order="shuffled", jitter=2)
        each = linear(x.double(), weight.double()).to(x.dtype).unsqueeze(1).expand(rows, choices, size)
        difference = made.double() - exact(each, ids, matrices, form is transposed)
        assert difference.norm() < 1e-2 * made.double().norm()


@pytest.mark.parametrize(
    ("form", "rows", "n"), thinned([(product, 12, 48), (transposed, 12, 64), (transposed, 70, 64)], 1), ids=id_of
)
def test_a_row_s_result_does_not_depend_on_others(form: Form, rows: int, n: int) -> None:
    choices, experts, k = 2, 4, 128
    x = torch.randn(rows, choices, k).bfloat16()
    weight = torch.randn((experts, k, n) if form is transposed else (experts, n, k)).bfloat16()
    ids = chosen_ids(rows, choices, experts, "random")
    kernel, results = None, []
    for change in (False, True):
        if change:
            x[:-1], ids[:-1] = torch.randn(rows - 1, choices, k), ids[-1:]
        operands = in_place([x, ids, weight])
        lowered = lowered_call(form, operands)
        kernel = kernel or emulate(lowered.graph)
        assert kernel_of(kernel.schedule) == BOXES
        [made] = fresh(lowered)
        kernel.launch(operands, [made])
        results.append(made[-1])
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("sizes", "dtype", "why"),
    [
        ((1, 2, 4, 16, 64), torch.float32, "tensor cores multiply 16-bit floats"),
        ((1, 2, 4, 16, 40), torch.bfloat16, "rows of 40 elements, expected aligned ones of a multiple of 32"),
    ],
)
def test_others_have_the_plain_kernel(sizes: tuple[int, ...], dtype: torch.dtype, why: str) -> None:
    rows, choices, experts, n, k = sizes
    operands = [torch.randn(rows, choices, k).to(dtype), chosen_ids(rows, choices, experts, "random")]
    lowered = lowered_call(product, [*operands, torch.randn(experts, n, k).to(dtype)])
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
        lowered = lowered_call(product, operands)
    schedule = _C.make_schedule(lowered.graph, _C.Target("cuda", 90, 132, 232448))
    assert kernel_of(schedule) == name
    assert _C.generate_cuda(schedule).input_alignment[0] == alignment


@pytest.mark.slow
@pytest.mark.parametrize(("form", "rows", "arch"), [(product, 64, 90), (transposed, 64, 100), (transposed, 1, 80)])
def test_compiles_without_spills(form: Form, rows: int, arch: int) -> None:
    weight = torch.empty((8, 768, 1536) if form is transposed else (8, 1536, 768), dtype=torch.bfloat16)
    operands = [torch.empty(rows, 4, 768, dtype=torch.bfloat16), torch.zeros(rows, 4, dtype=torch.int64), weight]
    smem_bytes = 166912 if arch == 80 else 232448
    schedule = _C.make_schedule(lowered_call(form, operands).graph, _C.Target("cuda", arch, 108, smem_bytes))
    assert kernel_of(schedule) == (ROWS if arch == 80 else BOXES)
    resources = compile_cuda(_C.generate_cuda(schedule).source, arch).resources
    assert resources.warnings == ()
    assert resources.spill_store_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("form", [product, transposed])
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 2048, 2048), (8, 2048, 1024), (33, 1536, 2048), (64, 1536, 768), (200, 1536, 768)]
)
@pytest.mark.parametrize("chosen", ["random", "one"])
def test_products_on_a_gpu(form: Form, rows: int, n: int, k: int, chosen: str) -> None:
    """Of models' sizes, twice, with other experts: nothing of a launch stays behind."""
    experts, choices = 64, 8
    step = torch.compile(form, backend="mpk", fullgraph=True)
    shape = (experts, k, n) if form is transposed else (experts, n, k)
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16) / k**0.5
    for _ in range(2):
        x = torch.randn(rows, choices, k, device="cuda", dtype=torch.bfloat16)
        ids = chosen_ids(rows, choices, experts, chosen).cuda()
        y = step(x, ids, weight)
        expected = exact(x, ids, weight, form is transposed)
        torch.testing.assert_close(y.double(), expected, rtol=8e-3, atol=2e-2)
        assert torch.equal(step(x, ids, weight), y)
