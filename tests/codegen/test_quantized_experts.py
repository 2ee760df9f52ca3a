"""Kernels of experts with quantised weights, emulated, against the task's reference; and compiled."""

from __future__ import annotations

import functools
from typing import Any, get_args

import pytest
import torch
from torch.nn.functional import silu

from tests.codegen.test_expert_runs import fresh, in_place, kernels, lowered_call
from tests.cpu.test_experts import chosen_ids
from tests.quantized_formats import random_bits
from tests.tasks.test_every_way import launch
from torch_mpk import _C
from torch_mpk.jit import compile_cuda
from torch_mpk.registry.calls import Call
from torch_mpk.tasks.quantized_expert_linear import quantized_expert_linear
from torch_mpk.tasks.quantized_linear import E2M1, E4M3
from torch_mpk.testing.emulator import EmulatedKernel, Order, emulate
from torch_mpk.testing.tasks import Calls

pytestmark = pytest.mark.slow  # compilers; tests/tasks/test_every_way.py runs samples of both kernels

FP8 = {"block_rows": 128, "block_columns": 128, "x_columns": 128}
MXFP4 = {"packed": 2, "block_rows": 1, "block_columns": 32}
GROUPS = {"packed": 2, "block_rows": 1, "block_columns": 128}
BOXES, DIRECT = "quantized_expert_linear.boxes", "quantized_expert_linear.direct"
GATED, SUMMED = "quantized_expert_linear.gated", "quantized_expert_linear.summed"
INTERLEAVED = "quantized_expert_linear.interleaved"


def call(rows: int, choices: int, experts: int, n: int, k: int, *, chosen: str = "random", packed: int = 1,
         dtype: torch.dtype = torch.bfloat16, storage: torch.dtype = E4M3, scale: torch.dtype = torch.float32,
         zero: torch.dtype | None = None, **attrs: int) -> Call:  # fmt: skip
    x = (torch.randn(rows, choices, k) * 10 ** (2 * torch.rand(rows, choices, 1) - 1)).to(dtype)
    ids = chosen_ids(rows, choices, experts, "random" if chosen in ("none", "twice") else chosen)
    if chosen == "twice":
        ids[:, 1] = ids[:, 0]
    if chosen == "none":
        ids.view(-1)[::2] = torch.tensor([-1, experts])[torch.randint(2, ids.view(-1)[::2].shape)]
    shape = [experts, n, k // packed]
    weight = torch.randn(shape).to(E4M3) if storage == E4M3 else random_bits(shape, storage)
    sizes = [-(-size // (attrs[name] or size)) for name, size in (("block_rows", n), ("block_columns", k))]
    points = None
    if zero is not None:
        points = torch.randn(experts, *sizes).to(zero) if zero.is_floating_point else random_bits(sizes, zero) & 15
        points = points.expand(experts, *sizes).contiguous()
    operands = [x, ids, weight, (torch.rand(experts, *sizes) + 0.1).to(scale), points]
    return Call(quantized_expert_linear, operands, quantized_expert_linear.bind_attrs(attrs))


def check(calls: list[Call], arch: int, kernel_name: str) -> None:
    made = Calls(calls)
    kernel = emulate(made.lowered.graph, arch=arch)
    assert {*kernels(kernel.schedule)} == {kernel_name}
    for order in get_args(Order):
        made.check_graph(functools.partial(launch, kernel, order))


def test_boxes() -> None:
    """Boxes that columns fill and do not fill, more pairs of an expert than a group, scales of all kinds of blocks."""
    check(
        [
            call(1, 2, 8, 256, 256, **FP8),
            call(40, 2, 2, 48, 640, chosen="none", **FP8),
            call(9, 2, 3, 144, 1152, chosen="one", dtype=torch.float16, **FP8),
            call(9, 2, 3, 16, 128, chosen="twice", **FP8),
            call(2, 3, 100, 32, 128, scale=torch.float8_e8m0fnu, **FP8),
            call(4, 2, 4, 32, 256, storage=torch.int8, block_rows=1, block_columns=0),
            call(4, 2, 4, 64, 512, storage=torch.int8, scale=torch.bfloat16, zero=torch.bfloat16, **GROUPS),
            call(9, 2, 4, 64, 2304, storage=torch.uint8, zero=torch.uint8, **(GROUPS | {"block_columns": 32})),
            call(2, 2, 4, 32, 256, storage=torch.uint8, **(GROUPS | {"block_columns": 64})),
            call(2, 2, 4, 32, 256, storage=E2M1, scale=torch.float8_e8m0fnu, **MXFP4),
        ],
        90,
        BOXES,
    )


def test_rows_that_end_between_lines_of_boxes() -> None:
    """gpt-oss's 2,880 columns are 11 lines of 128 bytes, and 32 bytes that are read where they are."""
    scale = torch.float8_e8m0fnu
    check(
        [
            call(2, 4, 8, 32, 2880, storage=E2M1, scale=scale, **MXFP4),
            call(40, 2, 2, 48, 288, chosen="none", storage=E2M1, scale=scale, dtype=torch.float16, **MXFP4),
            call(9, 2, 3, 16, 1056, chosen="one", storage=E2M1, scale=scale, **MXFP4),
            call(3, 2, 4, 16, 480, storage=E2M1, scale=scale, **MXFP4),
            call(3, 2, 4, 16, 704, storage=torch.uint8, zero=torch.uint8, **(GROUPS | {"block_columns": 64})),
            call(3, 2, 4, 16, 384, storage=torch.int8, scale=torch.bfloat16, **GROUPS),
        ],
        90,
        BOXES,
    )


def test_prompts_whose_weights_become_matrices() -> None:
    """More pairs than boxes are for. Rows are of one size, as errors of rounded weights are told by all results'."""
    calls = [
        call(270, 2, 3, 128, 128, chosen="none", **FP8),
        call(260, 2, 3, 48, 256, storage=torch.int8, scale=torch.bfloat16, zero=torch.bfloat16, **GROUPS),
        call(260, 2, 4, 32, 256, storage=torch.int8, dtype=torch.float16, block_rows=1, block_columns=0),
        call(260, 2, 3, 48, 320, storage=E2M1, scale=torch.float8_e8m0fnu, **MXFP4),
    ]
    for each in calls:
        assert each.operands[0] is not None
        each.operands[0].normal_()
    made = Calls(calls)
    kernel = emulate(made.lowered.graph)
    assert {*kernels(kernel.schedule)} == {"tile", "dequantise", "expert_linear.rows"}
    for order in get_args(Order):
        made.check_graph(functools.partial(launch, kernel, order))


def test_weights_that_no_boxes_are_made_of() -> None:
    """Odd sizes, float32, scales of x by row, more pairs than are listed."""
    check(
        [
            call(3, 2, 4, 37, 100, chosen="none", **FP8),
            call(260, 2, 4, 8, 100, **FP8),
            call(2, 2, 4, 16, 256, dtype=torch.float32, **FP8),
            call(5, 2, 3, 24, 130, block_rows=1, block_columns=0, x_columns=-1),
            call(3, 2, 4, 21, 96, storage=E2M1, scale=torch.float8_e8m0fnu, **MXFP4),
            call(3, 2, 4, 21, 96, storage=torch.int8, zero=torch.bfloat16, **(GROUPS | {"block_columns": 16})),
        ],
        80,
        DIRECT,
    )


def experts(x, ids, weights, residual, gate_up, gate_up_scale, down, down_scale):
    rows, choices = ids.shape
    each = x.unsqueeze(1).expand(rows, choices, x.shape[1])
    product = torch.ops.mpk.quantized_expert_linear
    gate, up = product(each, ids, gate_up, gate_up_scale, **FP8).chunk(2, dim=-1)
    products = product(silu(gate) * up, ids, down, down_scale, **FP8)
    return (products * weights.unsqueeze(-1)).sum(1) + residual


def operands(rows: int, choices: int, num: int, width: int, inner: int, draw: Any = torch.randn) -> list[torch.Tensor]:
    x, weights = draw(rows, width).bfloat16(), draw(rows, choices).bfloat16()
    made = [x, chosen_ids(rows, choices, num, "random"), weights, draw(rows, width).bfloat16()]
    for n, k in ((2 * inner, width), (width, inner)):
        made += [draw(num, n, k).to(E4M3), draw(num, -(-n // 128), -(-k // 128)).abs() / k**0.5]
    return made


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ((12, 2, 14, 256, 128), [GATED, SUMMED]),
        ((33, 4, 4, 128, 128), [GATED, SUMMED]),
        ((270, 2, 4, 256, 128), ["expert_linear.rows"] * 2),
    ],
    ids=str,
)
def test_runs(sizes: tuple[int, ...], names: list[str]) -> None:
    """The last one's weights become matrices, and rows of its first x are shared by their choices."""
    kernel: EmulatedKernel | None = None
    for chosen in ("random", "none"):
        given = in_place(operands(*sizes))
        if chosen == "none":
            given[1].view(-1)[::2] = sizes[2]
        lowered = lowered_call(experts, given)
        kernel = kernel or emulate(lowered.graph, workers=4)
        assert [name for name in kernels(kernel.schedule) if "expert" in name] == names
        made = fresh(lowered)
        kernel.launch(given, made, order="shuffled", jitter=3)
        # Where a sum of gate and up is rounded otherwise, an element of the second x may be another number of e4m3.
        want = experts(*given).double()
        # So may one of a matrix, which has 8 bits.
        assert (made[0].double() - want).norm() < (1e-2 if names == [GATED, SUMMED] else 2e-2) * want.norm()


@pytest.mark.parametrize("rows", [32, 512])
def test_compiles_without_spills(rows: int) -> None:
    graph = lowered_call(experts, operands(rows, 8, 32, 2048, 768, torch.zeros)).graph
    schedule = _C.make_schedule(graph, _C.Target("cuda", 90, 132, 232448))
    resources = compile_cuda(_C.generate_cuda(schedule).source, 90).resources
    assert resources.warnings == ()
    assert resources.spill_store_bytes == 0


def gpt_oss_experts(x, ids, weights, residual, gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias):
    product, attrs = torch.ops.mpk.quantized_expert_linear, {"block_rows": 1, "block_columns": 32}
    each = x.unsqueeze(1).expand(-1, ids.shape[1], -1)
    y = product(each, ids, gate_up, gate_up_scale, **attrs) + gate_up_bias[ids]
    gate, up = y[..., ::2].clamp(max=7), y[..., 1::2].clamp(-7, 7)
    y = product((up + 1) * gate * torch.sigmoid(1.702 * gate), ids, down, down_scale, **attrs) + down_bias[ids]
    return (y * weights.unsqueeze(-1)).sum(1) + residual


def gpt_oss_operands(rows: int, choices: int, num: int, size: int, draw: Any = torch.randn) -> list[torch.Tensor]:
    x, weights = draw(rows, size).bfloat16(), draw(rows, choices).bfloat16()
    made = [x, chosen_ids(rows, choices, num, "random"), weights, draw(rows, size).bfloat16()]
    for n in (2 * size, size):
        made.append(random_bits([num, n, size // 2], E2M1))
        made.append((draw(num, n, size // 32).abs() / size**0.5 + 2**-10).to(torch.float8_e8m0fnu))
        made.append(draw(num, n).bfloat16())
    return made


@pytest.mark.parametrize(
    ("sizes", "names"),
    [((12, 2, 14, 288), [INTERLEAVED, SUMMED]), ((64, 4, 4, 256), [INTERLEAVED, BOXES, "reduced_points"])],
    ids=str,
)
def test_interleaved_runs(sizes: tuple[int, ...], names: list[str]) -> None:
    """The last one has more pairs of an expert than are listed."""
    kernel: EmulatedKernel | None = None
    for chosen in ("random", "one"):
        given = in_place(gpt_oss_operands(*sizes))
        if chosen == "one":
            given[1][:] = 1
        lowered = lowered_call(gpt_oss_experts, given)
        kernel = kernel or emulate(lowered.graph, workers=4)
        assert kernels(kernel.schedule) == names
        made = fresh(lowered)
        kernel.launch(given, made, order="shuffled", jitter=3)
        want = gpt_oss_experts(*given).double()
        assert (made[0].double() - want).norm() < 1e-2 * want.norm()


def test_gpt_oss_compiles_without_spills() -> None:
    """With the sizes of gpt-oss-20b, but for the number of experts."""
    made = gpt_oss_operands(1, 4, 8, 2880, torch.zeros)
    schedule = _C.make_schedule(lowered_call(gpt_oss_experts, made).graph, _C.Target("cuda", 90, 132, 232448))
    assert [name for name in kernels(schedule) if "expert" in name] == [INTERLEAVED, SUMMED]
    resources = compile_cuda(_C.generate_cuda(schedule).source, 90).resources
    assert resources.warnings == ()
    assert resources.spill_store_bytes == 0
