"""Norms, or attention, and what quantises their rows as one job: the bits are those of two phases, and only what is
read is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.codegen.emulated_calls import allocate, reference, relative_error, tensors
from tests.schedule.decoder_graph import Builder, decoder
from tests.schedule.taken_apart import Parts
from torch_mpk import _C
from torch_mpk.tasks.quantise_rows import quantise_rows
from torch_mpk.tasks.rms_norm import rms_norm
from torch_mpk.testing.emulator import emulate

Shape = list[int]


@dataclass
class Rows:
    """A norm of rows, and a quantise_rows of each of ``blocks``: rows, blocks and their columns."""

    rows: int
    columns: int
    blocks: list[Shape]
    dtype: str = "bfloat16"
    kind: str = "workspace"  # of the norm's buffer
    has_scale: bool = False
    router: bool = False  # a linear reads the norm, too
    overwritten: bool = False  # the norm is, before it is quantised
    negated: bool = False  # a pointwise node reads the norm, too

    def add_to(self, b: Builder) -> _C.Tensor:
        """The norm. Inputs are x, the weight, and the scale; outputs the norm, if it is one, numbers and scales."""
        at = str(len(b.graph.buffers))
        shape = [self.rows, self.columns]
        x, weight = (b.buffer("input", name + at, self.dtype, each) for name, each in (("x", shape), ("w", shape[1:])))
        scale = [("scale", b.buffer("input", "scale" + at, "float32", [1]), True, False)] if self.has_scale else []
        y = b.buffer(self.kind, "y" + at, self.dtype, shape)
        b.node("rms_norm", [("x", x), ("weight", weight)], y, {"eps": 1e-6, "style": "llama"})
        if self.overwritten:
            b.pointwise("add", [y, y], y)
        if self.negated:
            b.pointwise("neg", [y], b.buffer("output", "negated" + at, self.dtype, shape))
        for i, each in enumerate(self.blocks):
            made = [
                ("numbers", b.buffer("output", f"numbers{at}.{i}", "float8_e4m3fn", each), False, True),
                ("scales", b.buffer("output", f"scales{at}.{i}", "float32", each[:2]), False, True),
            ]
            b.graph.add_node("quantise_rows", [("x", b.view(y, each), True, False), *scale, *made], {})
        if self.router:
            matrix = b.buffer("input", "router" + at, self.dtype, [64, self.columns])
            b.node("linear", [("x", y), ("weight", matrix)], b.buffer("output", "z" + at, self.dtype, [self.rows, 64]))
        return y


def graph(*all_rows: Rows) -> _C.TBGraph:
    b = Builder()
    for rows in all_rows:
        rows.add_to(b)
    return b.graph


def schedule_of(*all_rows: Rows) -> _C.Schedule:
    made = _C.make_schedule(graph(*all_rows), _C.Target("cuda", 90, 132, 232448, polled=True))
    _C.validate(made)
    return made


def jobs(schedule: _C.Schedule) -> list[list[str]]:
    """The tasks of each, without those in front."""
    nodes = schedule.graph.nodes
    return [[nodes[n].task for n in [*job.body, *job.epilogue]] for phase in schedule.phases for job in phase.jobs]


NORM = ["rms_norm", "quantise_rows"]


# Rows are made by all warps, with more tiles than warps, by one warp, or several at a time by one. They have one block,
# or blocks too narrow for wide accesses. They lie in memory, too, or do not.
CASES = {
    "bfloat16": [
        Rows(5, 2304, [[5, 18, 128]], kind="output"),
        Rows(1, 16384, [[1, 128, 128]]),
        Rows(7, 768, [[7, 6, 128]], kind="output", has_scale=True),
        Rows(53, 256, [[53, 2, 128]], kind="output"),
    ],
    "others": [
        Rows(4, 1280, [[4, 1, 1280], [4, 10, 128]], "float16", kind="output"),
        Rows(3, 360, [[3, 18, 20]], kind="output"),
        Rows(3, 512, [[3, 4, 128]], "float32", kind="output"),
        Rows(11, 512, [[11, 4, 128]], kind="output", negated=True),
    ],
}


@pytest.mark.parametrize("all_rows", CASES.values(), ids=CASES)
def test_rows_are_rounded_and_then_quantised(all_rows: list[Rows]) -> None:
    """The bits are those of a phase that reads what the norm stores."""
    made = graph(*all_rows)
    kernel = emulate(made, workers=2)
    of_rows = [["pointwise"] * rows.negated + NORM[1:] * len(rows.blocks) for rows in all_rows]
    assert jobs(kernel.schedule) == [NORM[:1] + behind for behind in of_rows]
    inputs = [allocate(t) for t in tensors(made, "input")]
    for t in inputs:
        t.copy_(torch.randn(t.shape) if t.numel() > 1 else torch.tensor([0.01]))
        if t.dim() == 2:
            t[0, : t.shape[1] // 2] = 0  # blocks without a largest number
    outputs = [allocate(t) for t in tensors(made, "output")]
    kernel.launch(inputs, outputs, order="shuffled", jitter=3)
    given, results = iter(inputs), iter(outputs)
    for rows in all_rows:
        x, weight = next(given), next(given)
        scale = next(given) if rows.has_scale else None
        eager = rms_norm(x, weight, eps=1e-6, style="llama")
        y = next(results) if rows.kind == "output" else eager
        torch.testing.assert_close(y, eager, rtol=2e-2, atol=1e-6)
        assert not rows.negated or torch.equal(next(results), -y)
        exact = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
        for shape in rows.blocks:
            numbers, scales = next(results), next(results)
            want, want_scales = quantise_rows(y.view(shape), scale)
            if rows.kind == "output":
                assert torch.equal(numbers.float(), want.float())
                assert torch.equal(scales, want_scales)
            product = numbers.double() * scales.double()[..., None]
            if scale is None:
                assert relative_error(product, exact.view(shape)) < 4e-2


def test_another_reader_finds_the_rows() -> None:
    made = graph(Rows(18, 512, [[18, 4, 128]], router=True))
    kernel = emulate(made, workers=2)
    assert jobs(kernel.schedule) == [NORM, ["linear"]]
    inputs = [allocate(t).copy_(torch.randn(t.shape)) for t in tensors(made, "input")]
    outputs = [allocate(t) for t in tensors(made, "output")]
    kernel.launch(inputs, outputs, order="shuffled", jitter=3)
    _, eager = reference(made, inputs)
    assert relative_error(outputs[-1], eager[-1]) < 1e-2
    assert relative_error(outputs[0], eager[0]) < 1e-2


@pytest.mark.parametrize("router", [False, True])
@pytest.mark.parametrize("rows", [9, 32, 64, 512])
def test_rows_are_stored_for_other_readers_alone(rows: int, router: bool) -> None:
    schedule = schedule_of(Rows(rows, 4096, [[rows, 32, 128]], router=router))
    [job] = schedule.phases[0].jobs
    assert jobs(schedule) == [NORM, ["linear"]][: 1 + router]
    y = next(o.tensor.buffer for o in schedule.graph.nodes[0].operands if o.name == "y")
    assert (job.unstored == [y]) == (not router)


@pytest.mark.parametrize("batch", [16, 64, 512])
def test_a_decoder_quantises_in_a_phase_of_its_own_in_front_of_down_alone(batch: int) -> None:
    sizes: dict[str, Any] = {"hidden": 4096, "heads": 32, "groups": 8, "head_dim": 128, "ffn": 12288}
    step = decoder(batch=batch, layers=2, weights="fp8", **sizes)
    schedule = _C.make_schedule(step, _C.Target("cuda", 90, 132, 232448, polled=True))
    _C.validate(schedule)
    of_layer = [NORM, ["e4m3_linear"] * 3, ["attention", "quantise_rows"], ["e4m3_linear", "pointwise"], NORM]
    of_layer += [["e4m3_linear"] * 2 + ["pointwise"], ["quantise_rows"], ["e4m3_linear", "pointwise"]]
    assert [tasks for tasks in jobs(schedule) if tasks != ["rope"]][: 2 * len(of_layer)] == of_layer * 2


@pytest.mark.parametrize(
    "rows",
    [
        Rows(9, 512, [[9, 4, 128]], overwritten=True),
        Rows(9, 512, [[3, 12, 128]]),  # the same elements in longer rows
    ],
    ids=str,
)
def test_what_is_no_row_of_the_norm_is_a_phase_of_its_own(rows: Rows) -> None:
    assert ["quantise_rows"] in jobs(schedule_of(rows))


def test_tiles_that_are_not_of_its_rows_are_caught() -> None:
    """Three rows as one, of which a worker has each in shared memory alone."""
    parts = Parts.of(schedule_of(Rows(9, 512, [[3, 12, 128]], kind="output")))
    [[job], _], *_ = parts.phases
    job["epilogue"] = [1]
    del parts.phases[1:]
    with pytest.raises(
        RuntimeError, match="unsound schedule: rms_norm .*: tile tasks end it that are not tiles of its"
    ):
        _C.validate(parts.build())


def test_tiles_of_what_an_epilogue_makes_are_caught() -> None:
    """The rows in shared memory are not what another node has made of them."""
    parts = Parts.of(schedule_of(Rows(9, 512, [[9, 4, 128]], kind="output", overwritten=True)))
    first, *others = [job for jobs, _ in parts.phases for job in jobs]
    first["epilogue"] = [n for job in others for n in job["body"]]
    del parts.phases[1:]
    with pytest.raises(RuntimeError, match="unsound schedule"):
        _C.validate(parts.build())


# Rows, heads, groups and positions: several splits of a row, which are merged, and several of a worker.
HEADS = [(2, 2, 1, 700), (9, 4, 2, 70)]


@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_heads_are_rounded_and_then_quantised(sizes: tuple[int, int, int, int]) -> None:
    rows, heads, groups, length = sizes
    b = Builder()
    q = b.buffer("input", "q", "bfloat16", [rows, heads, 128])
    caches = [(n, b.buffer("input", n, "bfloat16", [rows, groups, length, 128])) for n in ("k_cache", "v_cache")]
    y = b.buffer("output", "y", "bfloat16", [rows, heads, 128])
    b.node("attention", [("q", q), *caches], y, {"scale": 128**-0.5, "style": "sdpa"})
    made = [b.buffer("output", "numbers", "float8_e4m3fn", [rows, heads, 128])]
    made.append(b.buffer("output", "scales", "float32", [rows, heads]))
    written = [(name, t, False, True) for name, t in zip(("numbers", "scales"), made)]
    b.graph.add_node("quantise_rows", [("x", y, True, False), *written], {})
    kernel = emulate(b.graph, workers=3)
    assert jobs(kernel.schedule) == [["attention", "quantise_rows"]]
    inputs = [allocate(t).copy_(torch.randn(t.shape)) for t in tensors(b.graph, "input")]
    outputs = [allocate(t) for t in tensors(b.graph, "output")]
    kernel.launch(inputs, outputs, order="shuffled", jitter=3)
    _, eager = reference(b.graph, inputs)
    assert relative_error(outputs[0], eager[0]) < 1e-2
    numbers, scales = quantise_rows(outputs[0])
    assert torch.equal(outputs[1].float(), numbers.float())
    assert torch.equal(outputs[2], scales)
