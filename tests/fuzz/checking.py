"""Runs a random program through torch_mpk and compares every result and effect with eager PyTorch."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.fuzz.random_experts import ExpertProgram
from tests.fuzz.random_formats import FormatProgram
from tests.fuzz.random_integers import IntegerProgram
from tests.fuzz.random_programs import Program
from torch_mpk import _C, lowering
from torch_mpk.builds.dump import Dump
from torch_mpk.capture.graph import capture
from torch_mpk.config import Options
from torch_mpk.dispatch.admission import check_call, check_graph
from torch_mpk.dispatch.compiled_graph import CompiledGraph
from torch_mpk.errors import DeclinedError, MpkWarning, UnsupportedError
from torch_mpk.partition.segments import Partitioned, partition
from torch_mpk.patterns import apply
from torch_mpk.runtime.backend import backend_of
from torch_mpk.runtime.overlaps import check_apart, memory_of
from torch_mpk.testing import reference_vm
from torch_mpk.testing.emulator import emulate

NOISY_RUNS = 3
H200 = _C.Target("cuda", 90, 132, 232448, True, True)
ZERO_DIVISOR = "ZeroDivisionError"  # what eager's RuntimeError says on the CPU
# How much further than noisy runs of eager from the plain one a right result may lie.
MARGIN = 8


AnyProgram = Program | IntegerProgram | ExpertProgram | FormatProgram
# Makes a callable of a graph, for inputs like these, and tells how many of its segments are torch_mpk's.
Way = Callable[[fx.GraphModule, list[Tensor]], tuple[Callable, int]]


class Wrong(AssertionError):
    """A program whose results differ from eager's."""


def graph_of(program: AnyProgram) -> fx.GraphModule:
    """The program as one node, which the capture traces into."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in program.input_names]
    graph.output(graph.call_function(program.run, tuple(inputs)))
    return fx.GraphModule(torch.nn.Module(), graph)


def check(program: AnyProgram, how: Way, device: torch.device | str = "cpu", seed: int = 0) -> int:
    """Runs the program twice, on new values, with the callable that ``how`` makes of its graph.

    Returns how many segments of the graph were torch_mpk's: 0 where all of it was left to PyTorch.

    Raises Wrong where a result, an effect on an input, or what shares memory with what is not eager's.
    """
    gm = graph_of(program)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", MpkWarning)
        try:
            run, num_segments = how(gm, program.inputs(device, seed))
        except (UnsupportedError, DeclinedError):
            return 0
        for again in (seed, seed + 1):
            compare(program, run, device, again)
    return num_segments


def check_drawn(
    kind: type[ExpertProgram | FormatProgram], how: Way, num_programs: int, device: torch.device | str = "cpu"
) -> None:
    """Checks so many programs of a kind. An AssertionError names the seed, and the program, of one that is wrong."""
    first = random.randrange(1 << 30)
    for seed in range(first, first + num_programs):
        program = kind.draw(random.Random(seed), is_small=how is by_emulator)
        try:
            check(program, how, device, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {program}") from error


def compare(program: AnyProgram, run: Callable, device: torch.device | str, seed: int) -> None:
    inputs = program.inputs(device, seed)
    if isinstance(program, (ExpertProgram, FormatProgram)):
        results, given = list(run(*inputs)), program.inputs(device, seed)
        if isinstance(program, ExpertProgram):
            error = program.difference(given, results, getattr(run, "is_ours", True))
        else:
            error = program.difference(given, results)
        if error:
            raise Wrong(error)
        return
    if _divides_by_zero(program, seed):
        if torch.device(device).type == "cpu":  # elsewhere eager's results are undefined
            _expect_zero_divisor(run, inputs)
        return
    expected, allowed = _expectation(program, device, seed)
    actual = run(*inputs)
    everything = [*actual, *inputs]
    names = [*(f"result {i}" for i in range(len(actual))), *(f"input {i}" for i in range(len(inputs)))]
    for name, ours, eager, tolerance in zip(names, everything, expected, allowed, strict=True):
        if (ours.shape, ours.dtype) != (eager.shape, eager.dtype):
            raise Wrong(f"{name} is {ours.dtype}{list(ours.shape)}, expected {eager.dtype}{list(eager.shape)}")
        if ours.numel() and not _agree(ours, eager, tolerance):
            raise Wrong(f"{name} is off by {_distance(ours, eager)}, allowed {tolerance}:\n{ours}\n{eager}")
    if _sharing(everything) != _sharing(expected):
        raise Wrong(f"memory shared with: {_sharing(everything)}, expected {_sharing(expected)}")


def _divides_by_zero(program: AnyProgram, seed: int) -> bool:
    if not program.may_divide_by_zero:
        return False
    try:
        program.run(*program.inputs("cpu", seed))
    except RuntimeError as error:
        if str(error) != ZERO_DIVISOR:
            raise
        return True
    return False


def _expect_zero_divisor(run: Callable, inputs: list[Tensor]) -> None:
    """Ours raises as eager does; a GPU's kernels, and what imitates them, have a result."""
    try:
        run(*inputs)
    except RuntimeError as error:
        if str(error) != ZERO_DIVISOR:
            raise
    else:
        if getattr(run, "raises", True):
            raise Wrong("eager divides by zero, and this does not")


def _expectation(program: AnyProgram, device: torch.device | str, seed: int) -> tuple[list[Tensor], list[float]]:
    """Eager's results and inputs afterwards, and the difference that rounding in another order may make to each."""
    inputs = program.inputs(device, seed)
    plain = [*program.run(*inputs), *inputs]
    spread = [0.0] * len(plain)
    for i in range(0 if program.is_exact else NOISY_RUNS):
        inputs = program.inputs(device, seed)
        noisy = [*program.run(*inputs, noise=torch.Generator().manual_seed(i)), *inputs]
        spread = [max(s, _distance(n, p)) for s, n, p in zip(spread, noisy, plain, strict=True)]
    return plain, [MARGIN * s for s in spread]


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().nan_to_num(0, posinf=0).max()) if a.numel() else 0.0


def _agree(ours: Tensor, eager: Tensor, tolerance: float) -> bool:
    if tolerance == 0:
        return bool(((ours == eager) | (ours.isnan() & eager.isnan())).all())
    difference = (ours.double() - eager.double()).abs()
    return bool(((difference <= tolerance) | (ours == eager) | (ours.isnan() & eager.isnan())).all())


def _sharing(tensors: list[Tensor]) -> list[int]:
    """For each tensor the first that lies in the same memory."""
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [storages.index(storage) for storage in storages]


# ---- ways to run a graph ----


def _partitioned(gm: fx.GraphModule, inputs: list[Tensor], target: _C.Target | None = None) -> Partitioned:
    check_call(inputs)
    captured = capture(gm, inputs)
    check_graph(captured)
    mutated = [i for i, graph_input in enumerate(captured.inputs) if graph_input.is_mutated]
    check_apart(inputs, memory_of([graph_input.source for graph_input in captured.inputs], inputs, mutated))
    return partition(apply(captured.graph_module), 1, target)


def _num_ours(partitioned: Partitioned) -> int:
    return sum(segment.ours for segment in partitioned.segments)


def by_stages(gm: fx.GraphModule, inputs: list[Tensor]) -> tuple[Callable, int]:
    """The backend without Dynamo, and without the net that turns an error of ours into a fallback."""
    device, options = inputs[0].device, Options(fallback="eager")
    partitioned = _partitioned(gm, inputs, backend_of(device).target(device, options))
    program = CompiledGraph.build(partitioned, device, options, Dump.next())
    return program.callable(gm.forward), _num_ours(partitioned)


def by_codegen(gm: fx.GraphModule, inputs: list[Tensor]) -> tuple[Callable, int]:
    """The graph as it is divided for an H200, run by PyTorch. What is ours and has no kernel is wrong."""
    partitioned = _partitioned(gm, inputs, H200)
    for segment in partitioned.segments:
        if segment.ours:
            try:
                _C.generate_cuda(_C.make_schedule(lowering.lower(segment.gm).graph, H200))
            except UnsupportedError as error:
                raise Wrong(f"{segment.name} is ours and has no kernel: {error}") from error
    partitioned.gm.is_ours = False
    return partitioned.gm, _num_ours(partitioned)


def by_dynamo(gm: fx.GraphModule, inputs: list[Tensor]) -> tuple[Callable, int]:
    """The whole backend. Parts of any size are ours: a call that is left to eager breaks ties as eager does."""
    torch.compiler.reset()
    aten = make_fx(gm, pre_dispatch=True, tracing_mode="fake")(*inputs)
    return torch.compile(aten, backend="mpk", options={"fallback": "eager", "min_segment_nodes": 1}), 1


def by_reference_vm(gm: fx.GraphModule, inputs: list[Tensor]) -> tuple[Callable, int]:
    """Each segment of ours as a fused schedule, proven and then run in an order its events allow."""
    return _with_ours(_partitioned(gm, inputs), _Interleaved)


def by_emulator(gm: fx.GraphModule, inputs: list[Tensor]) -> tuple[Callable, int]:
    """The graph as it is divided for an H200, and its kernels run thread by thread."""
    return _with_ours(_partitioned(gm, inputs, H200), _Emulated)


def _with_ours(partitioned: Partitioned, run: type[_Lowered]) -> tuple[Callable, int]:
    for i, segment in enumerate(partitioned.segments):
        if segment.ours:
            partitioned.gm.register_module(segment.name, run(segment.gm, seed=i))
    partitioned.gm.raises = False
    return partitioned.gm, _num_ours(partitioned)


class _Lowered(torch.nn.Module):
    """A lowered segment, in place of its graph; ``launch`` computes it from memory to memory."""

    def __init__(self, gm: fx.GraphModule, seed: int) -> None:
        super().__init__()
        self.order = random.Random(seed)
        self.lowered = lowering.lower(gm)
        self.placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]

    def launch(self, inputs: list[Tensor], fresh: list[Tensor]) -> None:
        raise NotImplementedError

    def forward(self, *args):
        given = dict(zip(self.placeholders, args, strict=True))
        inputs = [given[node] for node in self.lowered.inputs]
        fresh = [torch.empty_strided(f.shape, f.stride, dtype=f.dtype) for f in self.lowered.fresh]
        for tensor in fresh:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 77)
        self.launch(inputs, fresh)
        results = []
        for output in self.lowered.outputs:
            if output.kind == "value":
                results.append(output.value)
                continue
            source = {"input": inputs, "output": fresh}[output.kind][output.index]
            view = source.as_strided(output.shape, output.stride, source.storage_offset() + output.offset)
            results.append(source if output.whole else view)
        return tuple(results)


class _Interleaved(_Lowered):
    def __init__(self, gm: fx.GraphModule, seed: int) -> None:
        super().__init__(gm, seed)
        target = _C.Target("cuda", 90, self.order.choice([1, 4, 132]), 232448, True, self.order.random() < 0.5)
        self.schedule = _C.make_schedule(self.lowered.graph, target)
        _C.validate(self.schedule)

    def launch(self, inputs: list[Tensor], fresh: list[Tensor]) -> None:
        reference_vm.run(self.schedule, inputs, fresh, seed=self.order.randrange(1 << 30))


class _Emulated(_Lowered):
    def __init__(self, gm: fx.GraphModule, seed: int) -> None:
        super().__init__(gm, seed)
        workers = self.order.choice([1, 2, 5])
        self.kernel = emulate(self.lowered.graph, workers=workers, polled=True)

    def launch(self, inputs: list[Tensor], fresh: list[Tensor]) -> None:
        """Copies inputs that a kernel cannot take where they lie, there and back; the runtime leaves them to eager."""
        aligned = [t if self._is_aligned(i, t) else t.clone() for i, t in enumerate(inputs)]
        seed = self.order.randrange(1 << 30)
        self.kernel.launch(aligned, fresh, seed=seed, jitter=seed % 3, watchdog_ns=20_000_000_000)
        if self.kernel.host_abort.any():
            raise Wrong("the kernel gave up")
        for given, used in zip(inputs, aligned, strict=True):
            if used is not given:
                given.copy_(used)

    def _is_aligned(self, i: int, tensor: Tensor) -> bool:
        return tensor.data_ptr() % self.kernel.program.input_alignment[i] == 0
