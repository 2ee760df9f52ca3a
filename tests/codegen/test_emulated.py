"""What generated kernels compute, run thread by thread on the CPU, against the tasks' references."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoder_graph import Builder, decoder
from emulated_kernel import EmulatedKernel, allocate, reference, tensors

import torch_mpk.tasks  # noqa: F401  declares the tasks
from torch_mpk import _C


def decoder_inputs(graph: _C.TBGraph, limits: list[int], slot: int) -> list[torch.Tensor]:
    names = {b.index: b.name for b in graph.buffers if b.kind == "input"}
    inputs = []
    for i, t in enumerate(tensors(graph, "input")):
        x = allocate(t)
        if names[i] == "limit":
            x.copy_(torch.tensor(limits))
        elif t.dtype == "int64":
            x.fill_(slot)
        else:
            x.copy_(torch.randn(t.shape) / (t.shape[-1] ** 0.5 if "weight" in names[i] and len(t.shape) > 1 else 1))
        inputs.append(x)
    return inputs


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def check_decoder(kernel: EmulatedKernel, limits: list[int], slot: int, tolerance: float) -> list[torch.Tensor]:
    """Two launches in a row, the second with random delays; returns what the first left behind."""
    graph = kernel.schedule.graph
    inputs = decoder_inputs(graph, limits, slot)
    first = None
    for jitter in (0, 7):
        wanted_inputs, wanted = reference(graph, inputs)
        given = [x.clone() for x in inputs]
        outputs = [allocate(t) for t in tensors(graph, "output")]
        kernel.launch(inputs, outputs, seed=jitter, jitter=jitter)
        for got, want in zip([*outputs, *inputs], [*wanted, *wanted_inputs], strict=True):
            if got.dtype == torch.int64:
                assert torch.equal(got, want)
            else:
                assert relative_error(got, want) < tolerance
        results = [x.clone() for x in [*outputs, *inputs]]
        if first is not None:
            assert all(map(torch.equal, results, first)), "the same call gave other bits"
        first = first or results
        for x, before in zip(inputs, given, strict=True):
            x.copy_(before)
    assert kernel.host_abort.sum() == 0
    return first


def test_decoder_in_bf16_and_its_fusions_bit_by_bit(tmp_path: Path) -> None:
    sizes = {"batch": 3, "heads": 8, "groups": 2, "head_dim": 32, "ffn": 200, "length": 520, "vocab": 5000}
    left_behind = []
    for fuse in (True, False):
        folder = tmp_path / str(fuse)
        folder.mkdir()
        kernel = EmulatedKernel(decoder(**sizes), folder, fuse=fuse)
        if fuse:
            jobs = [job for phase in kernel.schedule.phases for job in phase.jobs]
            assert any(job.assignment == "claimed" for job in jobs)
            assert any(len(job.prologue) > 2 for job in jobs)
            assert any(job.epilogue for job in jobs)
        torch.manual_seed(1)
        left_behind.append(check_decoder(kernel, [0, 133, 520], 132, 2e-2))
    assert all(map(torch.equal, *left_behind))


SLOT_OUTSIDE = {"batch": 2, "heads": 6, "groups": 2, "head_dim": 80, "length": 300}
ROWS_OFF_16_BYTES = {"hidden": 70, "heads": 16, "groups": 1, "head_dim": 256, "ffn": 130, "length": 200}


@pytest.mark.parametrize(
    ("arch", "sizes", "limits", "slot"),
    [(80, SLOT_OUTSIDE, [300, 7], 300), (90, ROWS_OFF_16_BYTES, [150], 3)],
)
def test_decoder_in_fp32(tmp_path: Path, arch: int, sizes: dict, limits: list[int], slot: int) -> None:
    kernel = EmulatedKernel(decoder(layers=1, dtype="float32", **sizes), tmp_path, arch=arch)
    check_decoder(kernel, limits, slot, 1e-5)


def test_a_stalled_launch_is_given_up_and_the_next_one_works(tmp_path: Path) -> None:
    kernel = EmulatedKernel(decoder(layers=1, dtype="float32"), tmp_path)
    graph = kernel.schedule.graph
    inputs = decoder_inputs(graph, [40], 5)
    wanted_inputs, wanted = reference(graph, inputs)
    before = [x.clone() for x in inputs]
    outputs = [allocate(t) for t in tensors(graph, "output")]
    kernel.control[32:36] = torch.tensor([-9], dtype=torch.int32).view(torch.uint8)  # phase 0 seems never to end
    for watchdog_ns in (10**8, 0):  # a launch behind an aborted one runs nothing, and does not wait
        for out in outputs:
            out.zero_()
        kernel.host_abort.zero_()
        kernel.launch(inputs, outputs, watchdog_ns=watchdog_ns)
        assert all(out.isnan().all() for out in outputs)
        assert kernel.host_abort[0] == 1
        assert all(map(torch.equal, inputs, before)), "an aborted launch changed the cache or a counter"
    stalls = kernel.control[kernel.program.stalls_offset :].view(torch.int32).view(-1, 8)
    for valid, phase, role, waiting, event, *_ in stalls.tolist():  # consumers in phase 1 wait for the event of phase 0
        assert (valid, phase, role, waiting, event) == (1, 1, 0, 0, 0)
    kernel.control.zero_()
    kernel.launch(inputs, outputs)
    for got, want in zip([*outputs, *inputs], [*wanted, *wanted_inputs], strict=True):
        assert relative_error(got, want) < 1e-5


def test_programs_and_reductions(tmp_path: Path) -> None:
    """Views, broadcasts, gathers, predicates, casts, in-place stores, sizes, and every reduction."""
    b = Builder()
    x = b.buffer("input", "x", "float32", [4, 6])
    ids = b.buffer("input", "ids", "int64", [5])
    half = b.buffer("input", "half", "bfloat16", [4, 1500])

    def pointwise(p: _C.Program, operands: list[tuple[_C.Tensor, bool, bool]]) -> None:
        named = [(f"{'out0' if write else 'in'}{i}", t, read, write) for i, (t, read, write) in enumerate(operands)]
        b.graph.add_node("pointwise", named, {}, p)

    # y[i, j] = where(j < size, silu(x.T) + 0.3, -inf) as bf16, gathered by ids where an id is below 4, else 0
    y = b.buffer("output", "y", "bfloat16", [5, 6])
    p = _C.Program([5, 6])
    index = p.emit("load", "int64", operand=1, strides=[1, 0])
    row = p.emit("mul", "int64", [index, p.emit("const", "int64", imm=6)])
    in_range = p.emit("lt", "bool", [index, p.emit("const", "int64", imm=4)])
    value = p.emit("silu", "float32", [p.emit("load", "float32", [row, in_range], operand=0, strides=[0, 1])])
    value = p.emit("add", "bfloat16", [p.emit("cast", "bfloat16", [value]), p.emit("const", "float32", imm=0.3)])
    below = p.emit("lt", "bool", [p.emit("index", "int64", operand=1), p.emit("size", "int64", operand=0)])
    value = p.emit("where", "bfloat16", [below, value, p.emit("const", "bfloat16", imm=float("-inf"))])
    p.emit("store", "bfloat16", [value], operand=2, strides=[6, 1])
    pointwise(p, [(x, True, False), (ids, True, False), (y, False, True)])

    # z = floor(x * 4).to(int64) // -3, of x transposed
    z = b.buffer("output", "z", "int64", [6, 4])
    p = _C.Program([6, 4])
    scaled = p.emit(
        "mul", "float32", [p.emit("load", "float32", operand=0, strides=[1, 6]), p.emit("const", "float32", imm=4)]
    )
    whole = p.emit("cast", "int64", [p.emit("floor", "float32", [scaled])])
    p.emit(
        "store",
        "int64",
        [p.emit("floordiv", "int64", [whole, p.emit("const", "int64", imm=-3)])],
        operand=1,
        strides=[4, 1],
    )
    pointwise(p, [(x, True, False), (z, False, True)])

    b.increment([b.buffer("input", "counter", "int64", [1])])

    def reduction(op: str, source: _C.Tensor, dtype: str) -> None:
        out = b.buffer("output", op, dtype, source.shape[:-1])
        program = _C.Program(source.shape)
        program.emit("load", source.dtype, operand=0, strides=source.strides)
        if op in ("any", "all"):
            program.emit("gt", "bool", [0, program.emit("const", "float32", imm=2.5)])
        b.graph.add_node("reduce", [("in0", source, True, False), ("out0", out, False, True)], {"op": op}, program)

    for op in ("sum", "mean"):
        reduction(op, half, "bfloat16")
    for op in ("amax", "amin", "prod"):
        reduction(op, x, "float32")
    for op in ("argmax", "argmin"):
        reduction(op, half, "int64")
    for op in ("any", "all"):
        reduction(op, x, "bool")

    kernel = EmulatedKernel(b.graph, tmp_path)
    inputs = [allocate(t) for t in tensors(b.graph, "input")]
    for t, values in zip(inputs, (torch.randn(4, 6), torch.tensor([3, 0, 9, 1, 2]), torch.randn(4, 1500), 41)):
        t.copy_(torch.as_tensor(values))
    inputs[0][2, 3] = inputs[2][2, 500] = float("nan")
    inputs[2][1, 1234] = inputs[2][1, 77] = 9.0  # a tie
    wanted_inputs, wanted = reference(b.graph, inputs, [4])
    outputs = [allocate(t) for t in tensors(b.graph, "output")]
    kernel.launch(inputs, outputs, [4])
    for got, want in zip([*outputs, *inputs], [*wanted, *wanted_inputs], strict=True):
        tolerance = {torch.bfloat16: 1e-2, torch.float32: 1e-5}.get(got.dtype, 0)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
