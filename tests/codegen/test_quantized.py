"""Kernels of quantised linears, run thread by thread, against the task's reference; and compiled."""

from __future__ import annotations

import functools
import math
from typing import Any, get_args

import pytest
import torch

from tests.codegen.emulated_calls import allocate, tensors
from tests.codegen.test_emulated import check_decoder
from tests.codegen.test_expert_runs import fresh, in_place, lowered_call
from tests.quantized_formats import random_bits
from tests.schedule.decoder_graph import Builder, decoder
from tests.schedule.taken_apart import Parts
from tests.tasks.test_every_way import launch
from torch_mpk import _C
from torch_mpk.jit import compile_cuda
from torch_mpk.registry.calls import Call
from torch_mpk.tasks.quantise_rows import quantise_rows
from torch_mpk.tasks.quantized_linear import E4M3, quantized_linear
from torch_mpk.testing.emulator import SMEM_BYTES, Order, emulate, emulate_schedule
from torch_mpk.testing.tasks import Calls, compare

pytestmark = pytest.mark.slow  # compilers; tests/tasks/test_every_way.py runs samples of both kernels

FP8 = {"block_rows": 128, "block_columns": 128, "x_columns": 128}
ROWS = {"block_rows": 1, "block_columns": 0}  # a scale for each row of the weight
GROUPS = {"packed": 2, "block_rows": 1, "block_columns": 128}
INT4 = {"storage": torch.int8, "scale": torch.bfloat16, "zero": torch.bfloat16, **GROUPS}
INT8 = {"storage": torch.int8, "scale": torch.bfloat16, "zero": torch.int8, **GROUPS, "packed": 1}


def call(rows: int, n: int, k: int, *, dtype: torch.dtype = torch.bfloat16, storage: torch.dtype = E4M3,
         scale: torch.dtype = torch.float32, x_scale: float = 0, bias: bool = False, packed: int = 1,
         zero: torch.dtype | None = None, apart: bool = False, bias_dtype: torch.dtype | None = None,
         grouped: bool = False, coded: bool = False, **attrs: int) -> Call:  # fmt: skip
    x = (torch.randn(rows, k) * 10 ** (2 * torch.rand(rows, 1) - 1)).to(dtype)
    stored = [n // 8, k] if storage == torch.int32 and packed == 1 else [n, k // packed]
    weight = torch.randn(n, k).to(E4M3) if storage == E4M3 else random_bits(stored, storage)
    sizes = [-(-size // (attrs[name] or size)) for name, size in (("block_rows", n), ("block_columns", k))]
    scales = random_bits(sizes, scale) if scale == torch.uint8 else (torch.rand(sizes) + 0.1).to(scale)
    operands = [x, weight, scales, torch.randn(n).to(bias_dtype or dtype) if bias else None]
    operands.append(torch.tensor([x_scale]) if x_scale else None)
    if zero is not None:
        shape = [-(-sizes[0] // 8), sizes[1]] if zero == torch.int32 else sizes
        operands.append(torch.randn(shape).to(zero) if zero.is_floating_point else random_bits(shape, zero))
    else:
        operands.append(None)
    operands.append(torch.randint(0, sizes[1], [k], dtype=torch.int32) if grouped else None)
    operands.append(torch.randn(16) if coded else None)
    if scale == torch.uint8:
        operands += [torch.rand(256), torch.rand(-(-scales.numel() // attrs["scale_block"])), torch.rand(1)]
    else:
        operands += [None] * 3
    if apart:
        operands[1:3] = [t.T.contiguous().T for t in (weight, operands[2])]
    return Call(quantized_linear, operands, quantized_linear.bind_attrs(attrs))


def check(calls: list[Call], arch: int, kernels: set[str], workers: int = 3) -> None:
    made = Calls(calls)
    kernel = emulate(made.lowered.graph, arch=arch, workers=workers)
    assert {job.cut.kernel for phase in kernel.schedule.phases for job in phase.jobs} == kernels
    for order in get_args(Order):
        made.check_graph(functools.partial(launch, kernel, order))


def test_boxes_of_every_format() -> None:
    """Whole rows of x, one and several passes, several blocks to a warp; steps, rows and all of x with a scale."""
    check(
        [
            call(1, 64, 256, **FP8),
            call(2, 200, 384, bias=True, **FP8),
            call(9, 72, 128, scale=torch.float8_e8m0fnu, **FP8),
            call(20, 40, 1152, **FP8),
            call(3, 48, 256, storage=torch.int8, bias=True, **ROWS),
            call(1, 40, 128, scale=torch.bfloat16, **ROWS),
            call(5, 48, 384, x_columns=-1, **ROWS),
            call(4, 32, 256, x_scale=0.02, block_rows=0, block_columns=0),
        ],
        90,
        {"quantized_linear.rows", "quantized_linear.columns"},
    )


def test_lines_of_every_format() -> None:
    """Boxes of several and of half a block, several to a pass and to a worker; an x that is copied line by line."""
    lines = {"quantized_linear.columns"}
    check(
        [
            call(1, 64, 4096, **FP8),
            call(2, 200, 1664, bias=True, **FP8),
            call(4, 320, 2560, x_scale=0.02, block_rows=0, block_columns=0),
            call(5, 480, 3840, x_columns=-1, **ROWS),
        ],
        90,
        lines,
        workers=4,
    )
    check(
        [
            call(3, 480, 2560, storage=torch.int8, bias=True, **ROWS),
            call(5, 480, 2560, storage=torch.int8, packed=1, zero=torch.int8, block_rows=1, block_columns=128),
            call(11, 200, 2048, storage=torch.uint8, zero=torch.uint8, bias=True, **GROUPS),
            call(3, 1240, 3072, storage=torch.int8, scale=torch.bfloat16, zero=torch.bfloat16, **GROUPS),
            call(
                7, 100, 4096, storage=torch.int32, dtype=torch.float16, **(GROUPS | {"packed": 8, "block_columns": 0})
            ),
        ],
        90,
        lines,
        workers=4,
    )


def test_boxes_of_4_bits() -> None:
    """Groups of each size, of rows and of a scale's own blocks; zero points of each kind; 8 bits in groups as well."""
    check(
        [
            call(1, 64, 512, storage=torch.int8, scale=torch.bfloat16, zero=torch.bfloat16, **GROUPS),
            call(2, 200, 768, storage=torch.uint8, bias=True, **GROUPS),
            call(9, 72, 256, storage=torch.int32, zero=torch.int32, **(GROUPS | {"packed": 8, "block_columns": 32})),
            call(20, 40, 1280, storage=torch.int8, zero=torch.float32, **(GROUPS | {"block_columns": 64})),
            call(
                3,
                43,
                512,
                storage=torch.uint8,
                scale=torch.float16,
                zero=torch.uint8,
                **(GROUPS | {"block_columns": 0}),
            ),
            call(1, 40, 256, storage=torch.uint8, **(GROUPS | {"block_columns": 0})),
            call(4, 32, 512, storage=torch.int8, x_columns=128, **(GROUPS | {"block_rows": 16})),
            call(5, 48, 256, storage=torch.int8, packed=1, zero=torch.int8, block_rows=1, block_columns=64),
        ],
        90,
        {"quantized_linear.rows", "quantized_linear.columns"},
    )


def test_x_in_stages() -> None:
    check(
        [
            call(16, 24, 4096, storage=torch.uint8, zero=torch.bfloat16, scale=torch.bfloat16, **GROUPS),
            call(40, 40, 1536, storage=torch.int8, dtype=torch.float16, bias=True, **(GROUPS | {"block_columns": 32})),
            call(16, 24, 4096, **FP8),
            call(40, 40, 1408, dtype=torch.float16, bias=True, **FP8),
            call(14, 24, 4096, x_columns=-1, storage=torch.int8, **ROWS),
        ],
        90,
        {"quantized_linear.rows", "quantized_linear.columns"},
    )


WORDS = GROUPS | {"storage": torch.int32, "packed": 8}


# Rows of x, its columns and dtype, and linears of x.
LINES: list[tuple[int, int, torch.dtype, list[dict[str, Any]]]] = [
    (32, 1024, torch.bfloat16, [
        {"n": 400, "storage": torch.int8, "scale": torch.bfloat16, "zero": torch.bfloat16, **GROUPS},
        {"n": 72, "storage": torch.int8, "bias": True, **ROWS},
        {"n": 72, **ROWS},
    ]),
    (24, 2048, torch.float16, [
        {"n": 232, "scale": torch.float16, "zero": torch.int32, "bias": True, **(WORDS | {"block_columns": 64})},
        {"n": 40, "storage": torch.uint8, "scale": torch.float16, **GROUPS},
        {"n": 40, "storage": torch.int8, "scale": torch.float16, "zero": torch.int8, "block_rows": 1,
         "block_columns": 128},
        {"n": 120, "storage": torch.int8, **ROWS},
        {"n": 120, "scale": torch.bfloat16, **ROWS},
    ]),
    (17, 512, torch.bfloat16, [
        {"n": 88, "scale": torch.bfloat16, "zero": torch.int32, **(WORDS | {"block_columns": 512})},
        {"n": 64, "storage": torch.uint8, "bias": True, **(GROUPS | {"block_columns": 0})},
    ]),
    (60, 1536, torch.bfloat16, [
        {"n": 264, "storage": torch.uint8, "scale": torch.bfloat16, "zero": torch.uint8, **GROUPS},
        {"n": 136, "storage": torch.int8, **ROWS},
    ]),
    (13, 1024, torch.bfloat16, [
        {"n": 328, "storage": torch.int8, "scale": torch.bfloat16, "zero": torch.bfloat16, **GROUPS},
        {"n": 72, "storage": torch.int8, **ROWS},
    ]),
    (12, 1024, torch.float16, [
        {"n": 520, "bias": True, **FP8},
        {"n": 200, "scale": torch.float8_e8m0fnu, **FP8},
    ]),
    (8, 4096, torch.bfloat16, [
        {"n": 456, "bias": True, **FP8},
        {"n": 136, **FP8},
    ]),
    (40, 4096, torch.bfloat16, [
        {"n": 200, **FP8},
        {"n": 72, "bias": True, "x_columns": -1, **ROWS},
        {"n": 136, "x_scale": 0.02, "block_rows": 0, "block_columns": 0},
    ]),
]  # fmt: skip


class Products:
    """Linears, each of an x that the launch makes of the same input, as copies in boxes ask for it."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls

    def operands(self) -> list[torch.Tensor]:
        x = self.calls[0].operands[0]
        assert x is not None
        return [torch.randn_like(x), *(t for each in self.calls for t in each.operands[1:] if t is not None)]

    def __call__(self, x: torch.Tensor, *operands: torch.Tensor) -> list[torch.Tensor]:
        left, results = list(operands), []
        for each, of_call in zip(self.calls, self.inputs(x), strict=True):
            given = [None if t is None else left.pop(0) for t in each.operands[1:]]
            results.append(torch.ops.mpk.quantized_linear(of_call, *given, **each.attrs))
        return results

    def inputs(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x * (i + 2) for i in range(len(self.calls))]


# The same with many rows of x.
TILES: list[tuple[int, int, torch.dtype, list[dict[str, Any]]]] = [
    (130, 512, torch.bfloat16, [
        {"n": 200, "storage": torch.int8, "scale": torch.bfloat16, "zero": torch.bfloat16, **GROUPS},
        {"n": 72, "storage": torch.int8, "bias": True, **ROWS},
        {"n": 72, **ROWS},
    ]),
    (70, 768, torch.float16, [
        {"n": 136, "scale": torch.float16, "zero": torch.int32, "bias": True, **(WORDS | {"block_columns": 64})},
        {"n": 40, "storage": torch.uint8, "scale": torch.float16, **GROUPS},
        {"n": 40, "storage": torch.int8, "scale": torch.float16, "zero": torch.int8, "block_rows": 1,
         "block_columns": 128},
        {"n": 120, "storage": torch.int8, **ROWS},
        {"n": 120, "scale": torch.bfloat16, **ROWS},
    ]),
    (517, 256, torch.bfloat16, [
        {"n": 264, "scale": torch.bfloat16, "zero": torch.int32, **(WORDS | {"block_columns": 256})},
        {"n": 43, "storage": torch.uint8, "scale": torch.bfloat16, "zero": torch.bfloat16, **GROUPS},
        {"n": 16, "storage": torch.uint8, "bias": True, **(GROUPS | {"block_columns": 0})},
    ]),
    (66, 3072, torch.bfloat16, [
        {"n": 40, "storage": torch.int8, "scale": torch.bfloat16, "zero": torch.bfloat16,
         **(GROUPS | {"block_columns": 384})},
        {"n": 72, "storage": torch.int8, "bias": True, **ROWS},
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "k", "dtype", "sizes"), LINES + TILES, ids=str)
def test_warpgroups_of_every_format(rows: int, k: int, dtype: torch.dtype, sizes: list[dict[str, Any]]) -> None:
    """One and several passes, boxes and parts of a worker; groups of columns, and of whole rows, with zero points of
    each kind; heights that are no whole blocks; rows of x that are no eights. An x that is quantised is so before."""
    products = Products([call(rows, k=k, dtype=dtype, **each) for each in sizes])
    given = in_place(products.operands())
    lowered = lowered_call(products, given)
    kernel = emulate(lowered.graph, workers=4)
    cuts = [job.cut for phase in kernel.schedule.phases for job in phase.jobs]
    task = "e4m3_linear" if any("x_scale" in each or "x_columns" in each for each in sizes) else "quantized_linear"
    way = "tiles" if rows > 64 else "warpgroups"
    assert {cut.kernel for cut in cuts} - {"pointwise", "tile"} == {f"{task}.{way}"}
    assert rows not in (24, 40, 66) or {cut.fields.get("split", 1) for cut in cuts} > {1}
    for order in get_args(Order):
        results = fresh(lowered)
        launch(kernel, order, given, results, ())
        for result, want in zip(results, products(*given), strict=True):
            compare("y", result, want)


@pytest.mark.parametrize(
    ("rows", "groups", "storage"), [(2, 384, 4), (12, 640, 4), (17, 192, 4), (9, 320, 4), (17, 192, 8), (12, 384, 8)]
)
def test_groups_that_no_line_has_whole(rows: int, groups: int, storage: int) -> None:
    """Some kernels find a line's scales by its number."""
    each = (INT4 if storage == 4 else INT8) | {"block_columns": groups}
    products = Products([call(rows, 64, 3840, **each)])
    given = in_place(products.operands())
    lowered = lowered_call(products, given)
    kernel, results = emulate(lowered.graph, workers=4), fresh(lowered)
    launch(kernel, get_args(Order)[0], given, results, ())
    compare("y", results[0], products(*given)[0])


# Linears of an x whose columns are in order: of one and several passes, boxes and parts of a worker.
ORDERED: list[tuple[int, int, str, list[dict[str, Any]]]] = [
    (9, 1024, "bfloat16", [{"n": 400, **INT4}, {"n": 72, "bias": True, **(INT4 | {"zero": None})}]),
    (16, 512, "bfloat16", [
        {"n": 88, "scale": torch.bfloat16, "zero": torch.int32, **(WORDS | {"block_columns": 512})},
    ]),
    (24, 2048, "float16", [
        {"n": 232, "scale": torch.float16, "zero": torch.int32, "bias": True, **(WORDS | {"block_columns": 64})},
    ]),
    (32, 1536, "bfloat16", [
        {"n": 264, "storage": torch.uint8, "scale": torch.bfloat16, "zero": torch.uint8, **GROUPS},
        {"n": 64, "storage": torch.uint8, "bias": True, **(GROUPS | {"block_columns": 0})},
    ]),
    (40, 4096, "bfloat16", [{"n": 40, **(INT4 | {"block_columns": 256})}]),
    (9, 4096, "bfloat16", [{"n": 40, **INT4}]),  # workers share rows past the last, too
    (13, 4096, "bfloat16", [{"n": 40, **INT4}]),
    (60, 768, "float16", [{"n": 200, "storage": torch.uint8, "scale": torch.float16, **GROUPS}]),
]  # fmt: skip


@pytest.mark.parametrize("is_gated", [False, True], ids=["apart", "gated"])
@pytest.mark.parametrize(("rows", "k", "dtype", "sizes"), ORDERED, ids=str)
def test_words_of_4_bits_in_front_of_their_scales(
    rows: int, k: int, dtype: str, sizes: list[dict[str, Any]], is_gated: bool
) -> None:
    """Scales of parts of lines, of lines, and of rows; zero points of each kind; heights that are no whole blocks."""
    if is_gated:
        sizes = [sizes[0]] * 2
    calls = [call(rows, k=k, dtype=getattr(torch, dtype), **each) for each in sizes]
    b, given = Builder(), [calls[0].operands[0]]
    x, ordered = b.buffer("input", "x", dtype, [rows, k]), {}
    results = []
    for i, each in enumerate(calls):
        columns = min(int(each.attrs["block_columns"]) or k, 256)
        if columns not in ordered:
            ordered[columns] = order_columns_in(b, x, columns)
        operands = []
        for name, t in zip(("weight", "weight_scale", "bias", "x_scale", "zero"), each.operands[1:6], strict=True):
            if t is not None:
                operands.append((name, b.buffer("input", f"{name}{i}", str(t.dtype)[6:], list(t.shape))))
                given.append(t)
        kind = "workspace" if is_gated else "output"
        y = b.buffer(kind, f"y{i}", dtype, [rows, sizes[i]["n"]])
        attrs = {name: each.attrs[name] for name in ("block_rows", "block_columns")}
        results.append(b.node("ordered_linear", [*ordered[columns], *operands], y, attrs, f"y{i}"))
    wants = [quantized_linear(calls[0].operands[0], *each.operands[1:], **each.attrs) for each in calls]
    if is_gated:
        b.pointwise("add", results, b.buffer("output", "y", dtype, results[0].shape))
        wants = [wants[0] + wants[1]]
    kernel = emulate(b.graph, workers=4)
    cuts = [job.cut for phase in kernel.schedule.phases for job in phase.jobs]
    assert {cut.kernel for cut in cuts} == {"tile", "ordered_linear.warpgroups"}
    assert k < 4096 or is_gated or {cut.fields.get("split", 1) for cut in cuts} > {1}
    inputs = [allocate(t).copy_(value.view(t.shape)) for t, value in zip(tensors(b.graph, "input"), given, strict=True)]
    for order in get_args(Order):
        outputs = [allocate(t) for t in tensors(b.graph, "output")]
        kernel.launch(inputs, outputs, order=order)
        for result, want in zip(outputs, wants, strict=True):
            compare("y", result, want)


def order_columns_in(b: Builder, x: _C.Tensor, columns: int) -> list[tuple[str, _C.Tensor]]:
    """Adds the node, with sums side by side for all rows of x; an ordered_linear's operands."""
    rows, size = x.shape
    blocks, pitch = size // columns, -(-rows // 8) * 8
    ordered = b.buffer("workspace", f"ordered{columns}", x.dtype, [rows, size])
    sums = b.buffer("workspace", f"sums{columns}", "float32", [blocks, pitch])
    sums = _C.Tensor(sums.buffer, sums.dtype, [rows, blocks], [1, pitch])
    parts = [b.view(t, [rows, blocks, columns]) for t in (x, ordered)]
    made = [("x", parts[0], True, False), ("ordered", parts[1], False, True), ("sums", sums, False, True)]
    b.graph.add_node("order_columns", made, {}, None, "x")
    return [("x", ordered), ("x_sums", sums)]


class Gated(Products):
    """Gate and up, of one input."""

    def __call__(self, x: torch.Tensor, *operands: torch.Tensor) -> list[torch.Tensor]:
        gate, up = super().__call__(x, *operands)
        return [torch.nn.functional.silu(gate) * up]

    def inputs(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x * 2] * 2


@pytest.mark.parametrize(
    ("rows", "k", "workers", "passes", "weight"),
    [
        (24, 512, 5, 2, {"n": 768, **FP8}),  # of three tiles, two and one
        (12, 1024, 12, 1, {"n": 800, "x_columns": -1, **ROWS}),
        (32, 512, 3, 2, {"n": 400, **FP8}),  # rows that are not there
        (32, 1024, 3, 2, {"n": 476, **INT4}),
        (17, 2048, 8, 1, {"n": 256, "storage": torch.int8, **ROWS}),
        (9, 4096, 4, 1, {"n": 384, **INT4}),
    ],
    ids=str,
)
def test_gate_and_up_share_boxes(rows: int, k: int, workers: int, passes: int, weight: dict[str, Any]) -> None:
    products = Gated([call(rows, k=k, **weight) for _ in range(2)])
    given = in_place(products.operands())
    lowered = lowered_call(products, given)
    kernel = emulate(lowered.graph, workers=workers)
    cuts = [job.cut for phase in kernel.schedule.phases for job in phase.jobs]
    [cut] = [cut for cut in cuts if cut.kernel.endswith(".warpgroups")]
    assert cut.shape is not None
    assert (cut.shape.tile_rows, cut.shape.parts, cut.shape.chunk_parts) == (32, 2, 2)
    share = math.ceil(cut.num_tiles / workers)
    assert math.ceil(share / cut.fields["mainloop_tiles"]) == passes
    for order in get_args(Order):
        results = fresh(lowered)
        launch(kernel, order, given, results, ())
        compare("y", results[0], products(*given)[0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "k", "dtype", "sizes"),
    [
        *LINES,
        *TILES,
        *((rows, 4096, torch.bfloat16, [
            {"n": 24576, "storage": torch.int8, "scale": torch.bfloat16, "zero": torch.bfloat16, **GROUPS},
            {"n": 4096, "storage": torch.int8, **ROWS},
            {"n": 6144, **FP8},
        ]) for rows in (17, 32, 64)),
        *((rows, 4096, torch.bfloat16, [{"n": 24576, **INT4}, {"n": 6144, **INT4}]) for rows in (9, 16, 33, 64)),
        (24, 4096, torch.float16, [
            {"n": 24576, "scale": torch.float16, "zero": torch.int32, "bias": True, **(WORDS | {"block_columns": 64})},
        ]),
        *((rows, 4096, dtype, [
            {"n": 24576, "storage": torch.int8, "scale": dtype, "zero": dtype, **GROUPS},
            {"n": 6144, "scale": dtype, "zero": torch.int32, **(WORDS | {"block_columns": 64})},
            {"n": 1024, "bias": True, **ROWS},
            *([{"n": 4096, "storage": torch.int8, **ROWS}] if dtype == torch.bfloat16 else []),  # else some exceed it
        ]) for rows, dtype in (
            (128, torch.float16), (512, torch.bfloat16), (517, torch.float16), (2048, torch.bfloat16)
        )),
    ],
    ids=str,
)  # fmt: skip
def test_warpgroups_on_a_gpu(rows: int, k: int, dtype: torch.dtype, sizes: list[dict[str, Any]]) -> None:
    """Also linears of Qwen3-8B. The same inputs give the same bits."""
    products = Products([call(rows, k=k, dtype=dtype, **each) for each in sizes])
    given = [t.cuda() for t in products.operands()]
    run = torch.compile(products, backend="mpk", options={"min_segment_nodes": 1, "fallback": "error"})
    for _ in range(3):
        results = run(*given)
        for result, again, want in zip(results, run(*given), products(*given), strict=True):
            compare("y", result, want)
            assert torch.equal(result, again)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [9, 32])
@pytest.mark.parametrize("weight", [FP8, INT4, {"storage": torch.int8} | ROWS], ids=["fp8", "int4", "int8"])
def test_gate_and_up_on_a_gpu(rows: int, weight: dict[str, Any]) -> None:
    """Gate and up of Qwen3-8B share boxes."""
    products = Gated([call(rows, 12288, 4096, **weight) for _ in range(2)])
    given = [t.cuda() for t in products.operands()]
    run = torch.compile(products, backend="mpk", options={"min_segment_nodes": 1, "fallback": "error"})
    for _ in range(3):
        [result], [again], [want] = run(*given), run(*given), products(*given)
        compare("y", result, want)
        assert torch.equal(result, again)


@pytest.mark.parametrize("arch", [80, 90])
def test_weights_that_no_boxes_are_made_of(arch: int) -> None:
    check(
        [
            call(1, 33, 100, **FP8),
            call(3, 20, 192, dtype=torch.float32, **FP8),
            call(2, 17, 65, storage=torch.int8, bias=True, **ROWS),
            call(2, 16, 80, block_rows=4, block_columns=16),
            call(3, 21, 96, storage=torch.int8, zero=torch.bfloat16, **(GROUPS | {"block_columns": 16})),
            call(2, 24, 256, storage=torch.int32, zero=torch.int32, apart=True, **(GROUPS | {"packed": 8})),
            call(3, 40, 256, storage=torch.int32, zero=torch.int32, apart=True, **(GROUPS | {"packed": 1})),
            call(
                2, 24, 256, storage=torch.int32, zero=torch.int32, apart=True, grouped=True, **(GROUPS | {"packed": 8})
            ),
            call(3, 21, 96, storage=torch.uint8, dtype=torch.float32, grouped=True, **(GROUPS | {"block_columns": 32})),
            call(2, 24, 256, storage=torch.uint8, coded=True, **(GROUPS | {"block_columns": 64})),
            call(
                2,
                24,
                256,
                storage=torch.uint8,
                coded=True,
                bias=True,
                scale=torch.uint8,
                scale_block=16,
                **(GROUPS | {"block_columns": 64}),
            ),
            call(1, 16, 96, storage=torch.int32, bias=True, bias_dtype=torch.float16, **ROWS),
        ],
        arch,
        {"quantized_linear.direct"},
    )


def test_formats_of_one_input_are_jobs_of_their_own() -> None:
    """They share a storage and blocks: 8 and 4 bits, words of columns and of rows, some with zero points."""
    x, attrs = torch.randn(2, 256).bfloat16(), ROWS | {"x_columns": -1}  # else they become matrices
    words = {"storage": torch.int32, **attrs}
    made = [
        call(2, 48, 256, storage=torch.int8, **attrs),
        call(2, 48, 256, storage=torch.int8, packed=2, **attrs),
        call(2, 48, 256, packed=8, scale=torch.float16, zero=torch.int32, apart=True, **words),
        call(2, 48, 256, packed=1, scale=torch.float16, zero=torch.int32, apart=True, **words),
        call(2, 48, 256, packed=1, scale=torch.float16, **words),
    ]

    def products(x: torch.Tensor, *operands: torch.Tensor) -> list[torch.Tensor]:
        left, results = list(operands), []
        for each in made:
            given = [None if t is None else left.pop(0) for t in each.operands[1:]]
            results.append(torch.ops.mpk.quantized_linear(x, *given, **attrs))
        return results

    given = in_place([x, *(t for each in made for t in each.operands[1:] if t is not None)])
    lowered = lowered_call(products, given)
    kernel = emulate(lowered.graph, workers=4)
    assert all(len(job.body) == 1 for phase in kernel.schedule.phases for job in phase.jobs)
    results = fresh(lowered)
    kernel.launch(given, results)
    for result, want in zip(results, products(*given), strict=True):
        torch.testing.assert_close(result, want, rtol=2e-2, atol=2e-2 * want.float().abs().max().item())


def special(call: Call) -> Call:
    """NaN bytes among the weights, infinities and NaN in x."""
    x, weight = call.operands[:2]
    assert x is not None and weight is not None
    weight.view(torch.uint8)[3, 5] = 0x7F
    weight.view(torch.uint8)[7, 1] = 0xFF
    x[1, 2], x[2, 3] = torch.inf, torch.nan
    return call


def test_numbers_that_are_none() -> None:
    given = call(2, 32, 256, x_scale=0.02, block_rows=0, block_columns=0)
    assert given.operands[0] is not None
    given.operands[0][1, 2] = torch.inf  # becomes 448
    check([given], 90, {"quantized_linear.columns"})
    calls = [special(call(4, 24, 256, **attrs)) for attrs in (FP8, ROWS, ROWS | {"x_columns": -1})]
    kernels = {f"quantized_linear.{kernel}" for kernel in ("rows", "columns", "direct")}
    check([*calls, special(call(20, 24, 256, **FP8)), special(call(4, 24, 100, **FP8))], 90, kernels)


PROMPTS: list[dict[str, Any]] = [
    {"rows": 70, "n": 200, "k": 384, "bias": True, **FP8},
    {"rows": 130, "n": 72, "k": 128, "dtype": torch.float16, "scale": torch.float8_e8m0fnu, **FP8},
    {"rows": 70, "n": 200, "k": 256, "bias": True, "x_columns": -1, **ROWS},
    {"rows": 66, "n": 40, "k": 384, "x_scale": 0.02, "block_rows": 0, "block_columns": 0},
]


@pytest.mark.parametrize("arch", [80, 90])
def test_every_number_is_rounded_to_e4m3(arch: int) -> None:
    """All of bfloat16, infinities too, by an instruction, and where a chip has none."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.where(x.isnan(), 1, x).view(1, 512, 128)
    made = Calls([Call(quantise_rows, [x, torch.ones(1)], quantise_rows.bind_attrs({}))])
    kernel = emulate(made.lowered.graph, arch=arch)

    def run(inputs: list[torch.Tensor], outputs: list[torch.Tensor], scalars: tuple[int, ...]) -> None:
        launch(kernel, "forward", inputs, outputs, scalars)
        want, _ = quantise_rows(*inputs)
        assert torch.equal(outputs[0].float(), want.float())

    made.check_graph(run)


MATRICES: list[dict[str, Any]] = [
    {"n": 200, "k": 192, "storage": torch.int8, "bias": True, **ROWS},
    {"n": 96, "k": 384, "block_rows": 128, "block_columns": 128},
    {"n": 72, "k": 384, "storage": torch.int8, "scale": torch.bfloat16, "zero": torch.bfloat16, **GROUPS},
    {"n": 43, "k": 512, "storage": torch.uint8, "zero": torch.uint8, **GROUPS},
    {"n": 48, "k": 256, "storage": torch.int32, "zero": torch.int32, "dtype": torch.float16, "apart": True,
     **(GROUPS | {"packed": 8, "block_columns": 32})},
    {"n": 48, "k": 192, "storage": torch.int32, "zero": torch.int32, "apart": True,
     **(GROUPS | {"packed": 1, "block_columns": 64})},
    {"n": 24, "k": 128, "storage": torch.int8, "apart": True, **ROWS},
]  # fmt: skip


@pytest.mark.parametrize(("rows", "arch", "kernel"), [(70, 90, "tiles"), (20, 100, "rows"), (3, 80, "vector")])
def test_weights_that_become_matrices(rows: int, arch: int, kernel: str) -> None:
    """Weights of a prompt do that warpgroups do not convert, and weights that come in no boxes."""
    sizes = MATRICES if rows == 70 else MATRICES[-4:-1]
    check([call(rows=rows, **each) for each in sizes], arch, {"dequantise", f"linear.{kernel}"})


def test_prompts_in_fp8() -> None:
    """Rows of x, and of weights, that are no whole tiles; blocks, rows and all of x with a scale."""
    check([call(**sizes) for sizes in PROMPTS], 90, {"tile", "e4m3_linear.tiles"})


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes",
    [
        *PROMPTS,
        {"rows": 512, "n": 6144, "k": 4096, **FP8},
        {"rows": 300, "n": 1024, "k": 12288, "bias": True, **FP8},
        {"rows": 2048, "n": 1024, "k": 3072, "x_columns": -1, **ROWS},
    ],
    ids=str,
)
def test_prompts_in_fp8_on_a_gpu(sizes: dict[str, Any]) -> None:
    made = call(**sizes)
    operands = [None if t is None else t.cuda() for t in made.operands]
    run = Calls([Call(made.task, operands, made.attrs)]).callable(torch.device("cuda", 0))
    [result] = run(*(t for t in operands if t is not None))
    compare("y", result, made.task(*operands, **made.attrs))


@pytest.mark.parametrize(("weights", "batch"), [("fp8", 1), ("fp8", 5), ("int8", 3), ("int4", 2)])
def test_a_decoder_and_what_fuses_with_its_linears(weights: str, batch: int) -> None:
    """Norms in front, residuals and products behind, several linears of one input, elements that are polled."""
    sizes = {"hidden": 256, "heads": 4, "groups": 2, "head_dim": 64, "ffn": 384, "length": 40, "layers": 1}
    kernel = emulate(decoder(batch=batch, weights=weights, **sizes), polled=True)
    jobs = [job for phase in kernel.schedule.phases for job in phase.jobs if "quantized" in job.cut.kernel]
    assert [len(job.body) for job in jobs] == [3, 1, 2, 1]
    assert all(job.prologue or job.epilogue for job in jobs)
    check_decoder(kernel, [40 - i for i in range(batch)], 39, 4e-2)


@pytest.mark.parametrize(("weights", "batch"), [("fp8", 8), ("int4", 7)])
def test_an_x_that_warps_copy_line_by_line(weights: str, batch: int) -> None:
    sizes = {"hidden": 256, "heads": 4, "groups": 2, "head_dim": 64, "ffn": 4096, "length": 40, "layers": 1}
    kernel = emulate(decoder(batch=batch, weights=weights, **sizes), workers=8)
    cuts = [job.cut for phase in kernel.schedule.phases for job in phase.jobs]
    assert [cut.input for cut in cuts if cut.kernel == "quantized_linear.columns"].count("in place") == 1
    check_decoder(kernel, [40 - i for i in range(batch)], 39, 4e-2)


@pytest.mark.parametrize(("weights", "task"), [("int4", "ordered_linear"), ("fp8", "e4m3_linear")])
def test_a_decoder_whose_warpgroups_multiply_lines(weights: str, task: str) -> None:
    sizes = {"hidden": 512, "heads": 4, "groups": 2, "head_dim": 128, "ffn": 1024, "length": 40, "layers": 1}
    kernel = emulate(decoder(batch=24, weights=weights, **sizes), workers=6)
    jobs = [job for phase in kernel.schedule.phases for job in phase.jobs if job.cut.kernel == f"{task}.warpgroups"]
    assert [len(job.body) for job in jobs] == [3, 1, 2, 1]
    check_decoder(kernel, [40 - i for i in range(24)], 39, 4e-2)


@pytest.mark.parametrize(
    ("weights", "batch", "kernel"),
    [("fp8", 70, "e4m3_linear.tiles"), ("int4", 70, "quantized_linear.tiles")],
)
def test_a_decoder_whose_warps_multiply_together(weights: str, batch: int, kernel: str) -> None:
    sizes = {"hidden": 512, "heads": 4, "groups": 2, "head_dim": 128, "ffn": 1024, "length": 90}
    layers = 1 if weights == "fp8" else 2  # another layer would round its x to other numbers of e4m3
    made = emulate(decoder(batch=batch, weights=weights, layers=layers, **sizes), workers=8, polled=True)
    kernels = {job.cut.kernel for phase in made.schedule.phases for job in phase.jobs}
    assert {kernel, "linear.tiles", "attention.split_kv"} <= kernels
    check_decoder(made, [90 - i for i in range(batch)], 89, 4e-2)


# Bytes of what a launch keeps from phase to phase that are in local memory during a phase: no loop reads them.
KEPT = {("fp8", 24): 20, ("int4", 16): 12, ("int4", 32): 52, ("int4", 64): 218, ("int8", 64): 16}


@pytest.mark.parametrize(
    ("weights", "batch"),
    [
        ("fp8", 1),
        ("fp8", 8),
        ("fp8", 24),
        ("fp8", 96),
        ("int8", 1),
        ("int8", 64),
        ("int8", 96),
        ("int4", 1),
        ("int4", 16),
        ("int4", 32),
        ("int4", 64),
        ("int4", 96),
    ],
)
def test_compiles_without_spills(weights: str, batch: int) -> None:
    sizes: dict[str, Any] = {"hidden": 4096, "heads": 32, "groups": 8, "head_dim": 128, "ffn": 12288}
    graph = decoder(batch=batch, layers=1, length=1024, vocab=512, weights=weights, **sizes)
    schedule = _C.make_schedule(graph, _C.Target("cuda", 90, 132, 232448, polled=True))
    resources = compile_cuda(_C.generate_cuda(schedule).source, 90).resources
    assert resources.warnings == ()
    assert resources.spill_store_bytes <= KEPT.get((weights, batch), 0)


@pytest.mark.parametrize(
    ("slots", "is_gated"), [(2, False), (3, False), (4, False), (5, False), (2, True), (3, True), (6, True), (7, True)]
)
def test_lines_in_a_small_ring(slots: int, is_gated: bool) -> None:
    """Warpgroups that took several lines at a time would wait for slots that others hold."""
    if is_gated:
        products: Products = Gated([call(24, k=512, n=768, **FP8) for _ in range(2)])
    else:
        products = Products([call(12, k=1024, dtype=torch.float16, n=520, bias=True, **FP8)])
    given = in_place(products.operands())
    lowered = lowered_call(products, given)
    parts = Parts.of(_C.make_schedule(lowered.graph, _C.Target("cuda", 90, 5, SMEM_BYTES, True)))
    parts.warps["max_slots"] = slots
    kernel = emulate_schedule(parts.build())
    assert "e4m3_linear.warpgroups" in {job.cut.kernel for phase in kernel.schedule.phases for job in phase.jobs}
    for order in get_args(Order):
        results = fresh(lowered)
        launch(kernel, order, given, results, ())
        for result, want in zip(results, products(*given), strict=True):
            compare("y", result, want)
