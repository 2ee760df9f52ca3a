"""The executable itself: phases, threads, several at a time, forks, references, and what it refuses."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.cpu.net import CPU, ISAS, Net
from torch_mpk import _C

HIDDEN, FFN = 192, 520


def elementwise(net: Net, op: str, args: list[_C.Tensor], out: _C.Tensor) -> _C.Tensor:
    program = _C.Program(out.shape)
    values = [program.emit("load", t.dtype, operand=i, strides=t.strides) for i, t in enumerate(args)]
    program.emit("store", out.dtype, [program.emit(op, out.dtype, values)], operand=len(args), strides=out.strides)
    net.program("pointwise", program, args, [out])
    return out


class Mlp:
    """norm, gate, up, silu, mul, down, residual: linears of one phase, workspace between phases."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, rows: int = 2, layers: int = 3) -> None:
        self.x = torch.randn(rows, HIDDEN).to(dtype)
        shapes = ((HIDDEN,), (FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN))
        self.weights = [[torch.randn(s).mul(s[-1] ** -0.5).to(dtype) for s in shapes] for _ in range(layers)]
        self.net = net = Net()
        x = net.input(self.x)
        for i, (norm, *matrices) in enumerate(self.weights):
            gate, up, down = (net.input(w) for w in matrices)

            def space(size: int) -> _C.Tensor:
                return net.workspace((rows, size), dtype)

            normed, g, u, act, d = space(HIDDEN), space(FFN), space(FFN), space(FFN), space(HIDDEN)
            net.node("rms_norm", {"eps": 1e-6, "style": "llama"}, x=x, weight=net.input(norm), y=normed)
            net.node("linear", x=normed, weight=gate, y=g)
            net.node("linear", x=normed, weight=up, y=u)
            elementwise(net, "mul", [elementwise(net, "silu", [g], space(FFN)), u], act)
            net.node("linear", x=act, weight=down, y=d)
            out = net.output(torch.empty(rows, HIDDEN, dtype=dtype)) if i == layers - 1 else space(HIDDEN)
            x = elementwise(net, "add", [x, d], out)

    def eager(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        x = self.x.to(dtype or self.x.dtype)
        for layer in self.weights:
            norm, gate, up, down = (w.to(x.dtype) for w in layer)
            wide = x.float() if x.dtype != torch.float64 else x
            normed = norm * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
            x = x + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)
        return x


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_chain_of_phases_is_as_accurate_as_eager(isa: str, dtype: torch.dtype) -> None:
    ours, eager = [], []
    for _ in range(3):
        mlp = Mlp(dtype, rows=16, layers=2)
        exact = mlp.eager(torch.float64)
        [y] = mlp.net.run(isa=isa)
        ours.append((y.double() - exact).square().mean())
        eager.append((mlp.eager().double() - exact).square().mean())
    assert math.sqrt(sum(ours)) <= 1.1 * math.sqrt(sum(eager))


@pytest.mark.parametrize("isa", ISAS)
def test_a_chain_has_the_same_bits_on_any_number_of_threads(isa: str) -> None:
    Mlp(rows=1).net.assert_same_bits(isa)


def test_nothing_of_an_earlier_run_is_left() -> None:
    mlp = Mlp()
    [expected] = mlp.net.run()
    executable, good = mlp.net.compile(), mlp.x.clone()
    mlp.x.fill_(torch.nan)  # fills the workspace with NaN too
    executable.run(mlp.net.inputs, mlp.net.outputs)
    assert mlp.net.outputs[0].isnan().all()
    mlp.x.copy_(good)
    executable.run(mlp.net.inputs, mlp.net.outputs)
    assert torch.equal(mlp.net.outputs[0], expected)


def test_more_threads_than_cores_take_each_others_work_once() -> None:
    net, x = Net(), torch.randn(2, 512).bfloat16()
    weight, arrivals = torch.randn(20000, 512).bfloat16(), torch.zeros(1 << 17, dtype=torch.int64)
    net.node("linear", x=net.input(x), weight=net.input(weight), y=net.output(torch.empty(2, 20000).bfloat16()))
    counted = net.input(arrivals)
    program = _C.Program(counted.shape)
    value = program.emit("load", counted.dtype, operand=0, strides=[1])
    one = program.emit("const", counted.dtype, imm=1)
    program.emit("store", counted.dtype, [program.emit("add", counted.dtype, [value, one])], operand=1, strides=[1])
    net.program("pointwise", program, [counted], [counted])
    [expected] = net.run(1)
    executable = net.compile(12)
    for _ in range(20):
        net.outputs[0].fill_(torch.nan)
        executable.run(net.inputs, net.outputs)
        assert torch.equal(net.outputs[0], expected)
    assert (arrivals == 21).all()  # a block done twice would have counted twice


def huge_page_bytes(t: torch.Tensor) -> int:
    """How much of the mapping that holds a tensor's middle lies in huge pages."""
    address, inside = t.data_ptr() + t.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.startswith("AnonHugePages"):
            return int(line.split()[1]) * 1024
    return 0


def test_weights_move_to_huge_pages_under_a_running_step() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.is_file() or "[never]" in setting.read_text():
        pytest.skip("this system has no transparent huge pages")
    net, x, weight = Net(), torch.randn(1, 1024), torch.randn(8192, 1024)
    net.node("linear", x=net.input(x), weight=net.input(weight), y=net.output(torch.empty(1, 8192)))
    copy, executable, deadline = weight.clone(), net.compile(2), time.monotonic() + 30
    executable.run(net.inputs, net.outputs)
    expected = net.outputs[0].clone()
    while huge_page_bytes(weight) < weight.nbytes // 2 and time.monotonic() < deadline:
        net.outputs[0].fill_(torch.nan)
        executable.run(net.inputs, net.outputs)
        assert torch.equal(net.outputs[0], expected)
    assert huge_page_bytes(weight) >= weight.nbytes // 2
    assert torch.equal(weight, copy)


def in_threads(*functions: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(fn: Callable[[], None]) -> None:
        try:
            fn()
        except BaseException as error:  # reported in the main thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(fn,)) for fn in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_executables_in_several_python_threads() -> None:
    mlps = [Mlp(rows=rows) for rows in (1, 2, 4)]
    expected = [mlp.net.run()[0] for mlp in mlps]
    executables = [mlp.net.compile(num_threads) for num_threads, mlp in zip((1, 2, 3), mlps, strict=True)]

    def repeat(i: int) -> None:
        for _ in range(30):
            out = torch.full_like(expected[i], torch.nan)
            executables[i].run(mlps[i].net.inputs, [out])
            assert torch.equal(out, expected[i])

    in_threads(*(lambda i=i: repeat(i) for i in (0, 1, 2, 0, 1)))


def _run_in_child(mlp: Mlp, executable: _C.CpuExecutable, pipe: multiprocessing.connection.Connection) -> None:
    executable.run(mlp.net.inputs, mlp.net.outputs)
    pipe.send_bytes(bytes(mlp.net.outputs[0].view(torch.uint8).flatten().tolist()))


def test_a_forked_child_runs_too() -> None:
    mlp = Mlp()
    [expected] = mlp.net.run()
    executable = mlp.net.compile(3)
    executable.run(mlp.net.inputs, mlp.net.outputs)  # the pool's threads exist, in this process only
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_run_in_child, args=(mlp, executable, send))
    child.start()
    assert receive.poll(30), "the child hangs"
    assert receive.recv_bytes() == bytes(expected.view(torch.uint8).flatten().tolist())
    child.join()
    executable.run(mlp.net.inputs, mlp.net.outputs)
    assert torch.equal(mlp.net.outputs[0], expected)


# ---- references ----


def tensor_at(address: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    raw = (ctypes.c_char * (extent * getattr(torch, dtype).itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=getattr(torch, dtype)).as_strided(shape, strides)


def with_user_task() -> tuple[Net, torch.Tensor]:
    """y = 2 * cumsum(x) + x, where cumsum is a task the CPU knows nothing of."""
    if "test_cumsum" not in _C.task_names():
        operands = [("x", ["R", "H"], False, True, False), ("y", ["R", "H"], False, False, True)]
        _C.register_task("test_cumsum", "row", operands, ["factor"], "")
    x, net = torch.randn(3, 600), Net()
    source, sums = net.input(x), net.workspace((3, 600), torch.float32)
    net.node("test_cumsum", {"factor": 2.0}, x=source, y=sums)
    elementwise(net, "add", [sums, source], net.output(torch.empty(3, 600)))
    return net, x


def cumsum(operands: dict, attrs: dict, phase: str) -> None:
    assert phase == "0 node"
    x, y = tensor_at(*operands["x"]), tensor_at(*operands["y"])
    torch.mul(x.cumsum(1), attrs["factor"], out=y)


def test_a_task_without_a_body_calls_its_reference() -> None:
    net, x = with_user_task()
    executable = net.compile()
    assert executable.missing_references == ["test_cumsum"]
    with pytest.raises(
        ValueError, match=r"task 'test_cumsum' has no CPU kernel: call set_reference\('test_cumsum', fn\) first"
    ):
        executable.run(net.inputs, net.outputs)
    executable.set_reference("test_cumsum", cumsum)
    executable.run(net.inputs, net.outputs)
    assert torch.equal(net.outputs[0], x.cumsum(1) * 2 + x)
    with pytest.raises(ValueError, match="no node of this schedule needs a reference for task 'linear'"):
        executable.set_reference("linear", cumsum)


def test_a_failing_reference_raises_and_leaves_the_executable_usable() -> None:
    net, x = with_user_task()
    executable = net.compile(3)
    executable.set_reference("test_cumsum", lambda *_: 1 / 0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            executable.run(net.inputs, net.outputs)
    executable.set_reference("test_cumsum", cumsum)
    executable.run(net.inputs, net.outputs)
    assert torch.equal(net.outputs[0], x.cumsum(1) * 2 + x)


def test_a_reference_may_run_another_executable() -> None:
    net, x = with_user_task()
    mlp = Mlp()
    [expected] = mlp.net.run()
    inner, executable = mlp.net.compile(2), net.compile(2)

    def reference(*args: object) -> None:
        inner.run(mlp.net.inputs, mlp.net.outputs)
        cumsum(*args)

    executable.set_reference("test_cumsum", reference)
    executable.run(net.inputs, net.outputs)
    assert torch.equal(net.outputs[0], x.cumsum(1) * 2 + x)
    assert torch.equal(mlp.net.outputs[0], expected)


def test_a_reference_may_not_run_the_executable_it_belongs_to() -> None:
    net, _ = with_user_task()
    executable = net.compile()
    executable.set_reference("test_cumsum", lambda *_: executable.run(net.inputs, net.outputs))
    with pytest.raises(RuntimeError, match="a task's reference runs the executable it belongs to"):
        executable.run(net.inputs, net.outputs)


# ---- arguments ----


def test_addresses_serve_as_well_as_tensors() -> None:
    mlp = Mlp()
    [expected] = mlp.net.run()
    out = torch.full_like(expected, torch.nan)
    mlp.net.compile().run(tuple(t.data_ptr() for t in mlp.net.inputs), (out.data_ptr(),), stream=0)
    assert torch.equal(out, expected)


def test_wrong_arguments() -> None:
    net = Mlp(layers=1).net
    executable = net.compile()
    with pytest.raises(ValueError, match="run: got 4 inputs, expected 5"):
        executable.run(net.inputs[:-1], net.outputs)
    with pytest.raises(ValueError, match="run: got 0 outputs, expected 1"):
        executable.run(net.inputs, [])
    with pytest.raises(ValueError, match=r"run: input 1 \('input1'\) has no memory"):
        executable.run([net.inputs[0], torch.empty(0), *net.inputs[2:]], net.outputs)
    with pytest.raises(ValueError, match=r"run: output 0 \('output0'\) has no memory"):
        executable.run(net.inputs, [0])
    with pytest.raises(TypeError, match="input 0 of the megakernel: expected a tensor or an address, got str"):
        executable.run(["x", *net.inputs[1:]], net.outputs)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        executable.run(7, net.outputs)
    with pytest.raises(TypeError, match="input 0 of the megakernel: expected a tensor or an address, got int"):
        executable.run([-1 << 80, *net.inputs[1:]], net.outputs)


def test_wrong_construction() -> None:
    net = Mlp(layers=1).net
    schedule = _C.make_schedule(net.graph, CPU)
    with pytest.raises(ValueError, match="isa 'mmx' is not available: this machine has 'generic'"):
        _C.CpuExecutable(schedule, 1, "mmx")
    with pytest.raises(ValueError, match="num_threads is -2"):
        _C.CpuExecutable(schedule, -2)
    fused = _C.make_schedule(net.graph, _C.Target("cuda", 90, 132, 232448, True))
    with pytest.raises(ValueError, match=r"make this one with Target\(fuse=False\)"):
        _C.CpuExecutable(fused)


def test_the_fastest_tier_and_every_processor_are_the_default() -> None:
    executable = _C.CpuExecutable(_C.make_schedule(Mlp(layers=1).net.graph, CPU))
    assert executable.isa == ISAS[-1]
    assert executable.num_threads >= 1


def test_a_graph_without_nodes() -> None:
    net = Net()
    net.input(torch.ones(1))
    net.run()


def test_reading_memory_at_full_speed_touches_all_of_it() -> None:
    x = torch.randint(0, 2**31, (1003,), dtype=torch.int64)
    assert {_C.cpu_read_words(x.data_ptr(), 1003, n) for n in (1, 2, 3)} == {int(x.sum())}
