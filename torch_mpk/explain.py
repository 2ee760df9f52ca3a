"""What becomes of a model under ``torch.compile(backend="mpk")``: how much of it is ours, what is not and why, and what
a call costs."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import statistics
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode, tracing

from torch_mpk import _C, registry
from torch_mpk.backend.calls import compile_call
from torch_mpk.builds import timing
from torch_mpk.builds.dry_run import dry_run, will_write
from torch_mpk.capture.aliasing import tensors
from torch_mpk.capture.graph import capture, written_inputs
from torch_mpk.config import Options
from torch_mpk.dispatch.compiled_graph import CompiledGraph
from torch_mpk.dispatch.fallback import reason
from torch_mpk.errors import PrefillDeclined, UnsupportedError
from torch_mpk.lowering import lower
from torch_mpk.partition.costs import COSTS, Estimate, extent_bytes
from torch_mpk.partition.segments import Fallback, Segment, operations
from torch_mpk.patterns import apply
from torch_mpk.ranks.exchanges import Exchange, exchanges_of
from torch_mpk.ranks.sharding import localise
from torch_mpk.registry import Task
from torch_mpk.runtime import synchronize
from torch_mpk.runtime.bandwidth import bytes_per_second
from torch_mpk.runtime.cpu import num_threads
from torch_mpk.runtime.cuda import absent_target
from torch_mpk.runtime.ranks import RankedExecutable
from torch_mpk.runtime.timeline import kinds_of
from torch_mpk.tasks.embedding import embedding
from torch_mpk.verify.comparison import copied
from torch_mpk.warn_once import quiet

aten = torch.ops.aten

_NUM_RUNS = 5  # timed, after one that is not
_STORED = {torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.int8}  # that a quantised weight is named by
_GATHERS = {embedding: 1, aten.embedding.default: 0, aten.index_select.default: 0}  # -> the argument they read rows of
_LAYER = re.compile(r"^((?:[^.]+\.)*?\d+)(?:\.|$)")  # "model.layers.7.mlp" -> "model.layers.7"


@dataclass
class KernelUse:
    """Jobs that one kernel computes on a GPU, and what they are expected to take. ``next_best`` has what others of
    these jobs' kernels would take instead, by name, where a job has another."""

    num_jobs: int = 0
    us: float = 0.0
    next_best: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Elsewhere:
    """What a segment would be on a device that need not be there: its CUDA source and the kernels of its jobs, or
    ``why`` it would not be ours."""

    arch: str
    source: str = ""
    kernels: Mapping[str, KernelUse] = field(default_factory=dict)
    why: str | None = None


@dataclass(frozen=True)
class Part:
    """A segment of a graph. ``num_bytes`` are those of inputs and constants, each counted once, caches in full."""

    name: str
    is_megakernel: bool
    num_operations: int
    flops: int  # of matrix products and attention
    num_bytes: int
    tasks: Mapping[str, int] = field(default_factory=dict)  # how many of the operations are calls of each, by name
    phases: list[str] = field(default_factory=list)  # the module path that each phase of a megakernel makes a value of
    kernels: Mapping[str, KernelUse] = field(default_factory=dict)  # by their names; none on the CPU
    num_awaited: int = 0  # events that its phases wait for
    elsewhere: Elsewhere | None = None  # where another architecture was asked for
    workspace_bytes: int = 0
    result_bytes: int = 0  # allocated for each call
    group: str = ""  # of the ranks that it exchanges with
    peers: Sequence[int] = ()  # numbers of the other ranks in it
    exchanges: Sequence[Exchange] = ()  # with each of them


@dataclass(frozen=True)
class Graph:
    """One graph that Dynamo captured. ``why`` says what keeps it from being ours, if anything keeps all of it;
    ``misses`` what tasks declared with ``pattern=True`` almost took, and why they did not."""

    parts: list[Part]
    fallbacks: list[Fallback]
    why: str | None
    seconds: Mapping[str, float]  # stages of the build
    measured_us: float | None  # of a call, from Python on the CPU, of the device's work on CUDA
    estimate: Estimate | None = None  # where it is ours in part
    misses: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """What ``explain`` found. Print it, or read the fields."""

    graphs: list[Graph]
    device: torch.device
    bytes_per_second: float | None  # of the device's memory
    breaks: list[str] = field(default_factory=list)  # why Dynamo ends a graph, or captures none of a function

    @property
    def parts(self) -> list[Part]:
        return [part for graph in self.graphs for part in graph.parts]

    @property
    def num_megakernels(self) -> int:
        """Megakernel launches of a call."""
        return sum(part.is_megakernel for part in self.parts)

    @property
    def num_operations(self) -> int:
        """Operations that a call leaves to Inductor or PyTorch."""
        return sum(part.num_operations for part in self.parts if not part.is_megakernel)

    def share(self, what: str) -> float:
        """The part of ``flops``, ``num_bytes`` or ``num_operations`` that megakernels do, in [0, 1]."""
        total = sum(getattr(part, what) for part in self.parts)
        return sum(getattr(part, what) for part in self.parts if part.is_megakernel) / total if total else 0.0

    @property
    def floor_us(self) -> float | None:
        """The time that memory takes to deliver the bytes."""
        if self.bytes_per_second is None:
            return None
        return 1e6 * sum(part.num_bytes for part in self.parts) / self.bytes_per_second

    @property
    def estimated_us(self) -> float | None:
        """The floor, and what launches and dependent phases add on CUDA (docs/performance.md)."""
        if self.floor_us is None or self.device.type != "cuda":
            return None
        costs, num_phases = COSTS["cuda"], sum(len(part.phases) for part in self.parts)
        fixed = costs.segment * self.num_megakernels + costs.phase * num_phases + costs.kernel * self.num_operations
        return self.floor_us + fixed

    @property
    def measured_us(self) -> float | None:
        times = [graph.measured_us for graph in self.graphs]
        return sum(t for t in times if t is not None) if times and None not in times else None

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def explain(
    model: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    arch: str | None = None,
    **kwargs: Any,
) -> Report:
    """What ``torch.compile(model, backend="mpk", options=options)(*args, **kwargs)`` does, under ``inference_mode``.

    The call is captured and built, run in eager for its results, and its graphs are timed. All of that works on deep
    copies of the arguments, but for modules and what cannot be copied, and everything is afterwards what it was, also
    where the call raises: the model's attributes, buffers and parameters are the same objects with the same contents,
    and so are caches and random state. It takes memory for one such copy, and for two of what a graph writes.

    Args:
        model: a module or function, compiled already or not.
        options: of the backend. ``verify`` plays no part.
        arch: "sm_80", "sm_90a", "sm_100a" or "sm_120a": the report also has what the megakernels would be on an A100,
            H200, B200 or RTX 5090, which need not be there: ``report.parts[0].elsewhere.source`` is CUDA, generated and
            not compiled.

    Returns:
        a report; ``print`` shows it.

    Raises:
        OptionError: an option has an unknown name or a value that cannot be used, or there is no such ``arch``.
        Exception: whatever the model itself raises for these arguments.
    """
    settings = dataclasses.replace(Options.parse(None, options), verify=False)
    elsewhere = None if arch is None else (arch, absent_target(arch, settings))
    fn = getattr(model, "_orig_mod", model)  # the name that torch.compile's own wrapper uses: provenance.py knows it
    graphs: list[Graph] = []
    devices: list[torch.device] = []
    start = time.perf_counter()

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        dynamo = {} if graphs else {"dynamo": time.perf_counter() - start}
        devices.extend(value.device for value in inputs if isinstance(value, torch.Tensor))
        own, given = _own_part(gm, inputs)
        written = written_inputs(own, given)
        will_write(given[i] for i in written)
        graphs.append(_explain_graph(own, given, written, settings, dynamo, elsewhere))
        return gm.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    # A code object of its own: Dynamo counts recompilations by it.
    call = types.FunctionType(call.__code__.replace(), globals(), "call", None, call.__closure__)
    known = _breaks()
    with torch.inference_mode(), quiet(), dry_run(fn, args, kwargs, is_compiled=False) as (copied_args, copied_kwargs):
        torch.compile(call, backend=backend, dynamic=False)(*copied_args, **copied_kwargs)
    device = devices[0] if devices else torch.device("cpu")
    breaks = [_shortened(message) for message in _breaks() - known]
    return Report(graphs, device, bytes_per_second(device, num_threads(settings)), breaks)


def _own_part(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, Sequence[Any]]:
    """This rank's part of a sharded model's graph, with its inputs; else the graph."""
    with contextlib.suppress(UnsupportedError):  # which compiling will meet, too
        if (local := localise(gm, inputs)) is not None:
            return local.gm, local.pick(inputs)
    return gm, inputs


def _breaks() -> Counter[str]:
    """What Dynamo has said so far of what it cannot capture, and how often."""
    counters = torch._dynamo.utils.counters
    return Counter(counters["unimplemented"]) | Counter(counters["graph_break"])


def _shortened(message: str) -> str:
    """The first line, the explanation and the first hint of a message of Dynamo's, in a line."""
    lines = [line.strip() for line in message.split("Developer debug context")[0].splitlines() if line.strip()]
    hints = [line for line in lines if line.startswith("Hint: ")]
    told = [line.removeprefix("Explanation: ") for line in lines if line not in hints]
    return " ".join([f"{told[0]}:", *told[1:], *hints[:1]])


def _explain_graph(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    written: Sequence[int],
    options: Options,
    seconds: dict[str, float],
    elsewhere: tuple[str, _C.Target] | None,
) -> Graph:
    try:
        with timing.build():
            call = compile_call(gm, inputs, options, needs_graph=True)
        compiled: CompiledGraph | None = getattr(call, "compiled_graph", None)
        why = "it is built for each value of the numbers it is called with" if compiled is None else None
    except Exception as error:
        compiled = None
        why = reason(error) + (" (as intended)" if isinstance(error, PrefillDeclined) else "")
    with tracing(None):
        if compiled is None:
            return Graph([_whole(gm, inputs)], [], why, seconds, None, misses=_misses(gm, inputs))
        assert compiled.partitioned is not None
        parts = [_part(segment, compiled) for segment in compiled.partitioned.segments if _is_work(segment)]
        if elsewhere is not None:
            ours = {segment.name: segment.gm for segment in compiled.partitioned.segments if segment.ours}
            parts = [
                dataclasses.replace(part, elsewhere=_elsewhere(ours[part.name], *elsewhere, options))
                if part.is_megakernel
                else part
                for part in parts
            ]
        misses = _misses(gm, inputs)
    return Graph(
        parts,
        compiled.partitioned.fallbacks,
        None,
        seconds | compiled.seconds,
        _measure(call, inputs, written),
        compiled.partitioned.estimate,
        misses,
    )


def _misses(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[str]:
    if not any(task.pattern for task in registry.tasks()):
        return []
    try:
        return apply(capture(gm, inputs).graph_module).meta["misses"]
    except Exception:  # why, the report says of the graph
        return []


def _whole(gm: fx.GraphModule, inputs: Sequence[Any]) -> Part:
    try:
        gm = capture(gm, inputs).graph_module
    except UnsupportedError:
        return Part("graph", False, sum(node.op.startswith("call") for node in gm.graph.nodes), 0, 0)
    return Part("graph", False, len(operations(gm)), _flops(gm), _num_bytes(gm))


def _is_work(segment: Segment) -> bool:
    return segment.ours or segment.num_operations > 0


def _name(node: fx.Node) -> str:
    """A call's task, and how its weights are stored where that is not as x is."""
    dtypes = {arg.meta["val"].dtype for arg in node.all_input_nodes if isinstance(arg.meta["val"], torch.Tensor)}
    stored = dtypes & _STORED if node.target.role == "stream" else set()
    names = " and ".join(str(dtype).removeprefix("torch.") for dtype in stored)
    return f"{node.target.name} of {names}" if names else node.target.name


def _part(segment: Segment, compiled: CompiledGraph) -> Part:
    calls = [_name(node) for node in segment.gm.graph.nodes if isinstance(node.target, Task)]
    tasks = dict(Counter(calls).most_common())
    part = Part(segment.name, segment.ours, segment.num_operations, _flops(segment.gm), _num_bytes(segment.gm), tasks)
    if not segment.ours:
        return part
    plan, executable = compiled.segments[segment.name].plan, compiled.segments[segment.name].executable
    schedule = plan.schedule
    assert schedule is not None
    team = executable if isinstance(executable, RankedExecutable) else None
    nodes, phases = schedule.graph.nodes, schedule.phases
    return dataclasses.replace(
        part,
        kernels=kernels_of([job for phase in phases for job in phase.jobs]),
        phases=[nodes[phase.jobs[0].body[0]].label.split(", ")[-1] for phase in phases],
        num_awaited=sum(len(phase.waits) for phase in phases),
        workspace_bytes=schedule.workspace_bytes + 2 * schedule.polled_bytes,
        result_bytes=sum(fresh.dtype.itemsize * torch.Size(fresh.shape).numel() for fresh in plan.fresh),
        group=team.group if team else "",
        peers=team.peers if team else (),
        exchanges=exchanges_of(schedule),
    )


def _elsewhere(gm: fx.GraphModule, arch: str, target: _C.Target, options: Options) -> Elsewhere:
    try:
        schedule = _C.make_schedule(lower(gm).graph, target)
        source = _C.generate_cuda(schedule, options.profile, named=True).source
    except UnsupportedError as error:
        return Elsewhere(arch, why=str(error))
    return Elsewhere(arch, source, kernels_of([job for phase in schedule.phases for job in phase.jobs]))


def kernels_of(jobs: Sequence[_C.Job]) -> dict[str, KernelUse]:
    kernels: dict[str, KernelUse] = {}
    for job in jobs:
        if not job.cut.kernel:
            continue
        use = kernels.setdefault(job.cut.kernel, KernelUse())
        use.num_jobs += 1
        use.us += job.cut.cost_ns / 1e3
        for other in job.others[:1]:
            if not other.refusal:
                use.next_best[other.kernel] = use.next_best.get(other.kernel, 0.0) + other.cost_ns / 1e3
    return kernels


def _flops(gm: fx.GraphModule) -> int:
    """Floating-point operations of the graph's matrix products, on its example values."""
    from torch.utils.flop_counter import FlopCounterMode  # which imports triton, where there is one

    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    fake_mode = detect_fake_mode(values)
    uncounted = {aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
    counter = FlopCounterMode(display=False, custom_mapping=uncounted)
    try:
        with torch.no_grad(), fake_mode or torch.no_grad(), counter:
            gm(*values)
    except Exception:  # an operation that gives other sizes for other values
        pass
    return int(counter.get_total_flops())


def _attention_flops(q: torch.Size, k: torch.Size, v: torch.Size, *args: Any, **kwargs: Any) -> int:
    """Of q[B, H, S, D], k[B, G, L, D], v[B, G, L, E], given as shapes."""
    return 2 * q.numel() // q[-1] * k[-2] * (q[-1] + v[-1])


def _num_bytes(gm: fx.GraphModule) -> int:
    """Bytes of the arguments and constants that the graph's nodes read, each once; of a table, the rows looked up."""
    read: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        for arg in node.all_input_nodes if node.op == "call_function" else ():
            if arg.op not in ("placeholder", "get_attr"):
                continue
            position = _GATHERS.get(node.target)
            is_table = position is not None and node.args[position] is arg
            needed = sum(map(extent_bytes, tensors(node if is_table else arg)))
            read[arg] = max(read.get(arg, 0), needed)
    return sum(read.values())


def _measure(call: Callable[..., Any], inputs: Sequence[Any], written: Sequence[int]) -> float:
    """Median microseconds of a call, with new copies of the inputs at ``written`` for each."""
    times = []
    for _ in range(1 + _NUM_RUNS):
        args = copied(inputs, written)
        tensor = next(arg for arg in args if isinstance(arg, torch.Tensor))
        if tensor.is_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(tensor.device)
            begin.record()
            call(*args)
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            call(*args)
            times.append(1e6 * (time.perf_counter() - start))
    synchronize()
    return statistics.median(times[1:])


# ---- in words ----


def _lines(report: Report) -> Iterator[str]:
    rest = f" and {_count(report.num_operations, 'operation')} of PyTorch's" if report.num_operations else ""
    yield f"torch_mpk on {report.device}: a call is {_count(report.num_megakernels, 'megakernel')}{rest}"
    shares = {"FLOPs": "flops", "bytes": "num_bytes", "operations": "num_operations"}
    yield "in megakernels: " + ", ".join(f"{report.share(key):.1%} of {what}" for what, key in shares.items())
    for number, graph in enumerate(report.graphs):
        yield from _graph_lines(number, graph)
    for why in report.breaks:
        yield f"\nPython runs what Dynamo does not capture: {why}"
    times = {"memory floor": report.floor_us, "estimated": report.estimated_us, "measured": report.measured_us}
    known = [f"{name} {us / 1e3:.3f} ms" for name, us in times.items() if us is not None]
    yield "time of a call: " + (", ".join(known) or "not known")


def _graph_lines(number: int, graph: Graph) -> Iterator[str]:
    yield ""
    yield f"graph {number}: " + (f"not ours, because {graph.why}" if graph.why else _count(len(graph.parts), "part"))
    for part in graph.parts:
        kind = "megakernel" if part.is_megakernel else "fallback"
        amounts = (
            f"{_count(part.num_operations, 'operation')}, {part.flops / 1e9:.3g} GFLOP, {_mib(part.num_bytes)} read"
        )
        yield f"  {part.name}: {kind}, {amounts}"
        if part.tasks:
            yield f"    tasks: {_tasks(part)}"
        if part.is_megakernel:
            yield f"    {_phases(part)}"
            yield from (f"    {line}" for line in _kernels(part))
            memory = f"{_mib(part.workspace_bytes)} of workspace, {_mib(part.result_bytes)} of results a call"
            yield f"    memory: {memory}; weights are read in place"
            yield from (f"    {line}" for line in _exchanges(part))
            yield from (f"    {line}" for line in _elsewhere_lines(part.elsewhere))
    if graph.estimate is not None:
        yield f"  taken in parts: {graph.estimate}"
    for node, source, why in graph.fallbacks:
        yield f"  falls back: {node}" + (f" from {source}" if source else "") + f": {why}"
    for miss in graph.misses:
        yield f"  {miss}"
    if graph.seconds:
        yield "  compile time: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in graph.seconds.items())


def _tasks(part: Part) -> str:
    named = ", ".join(f"{count} {name}" for name, count in part.tasks.items())
    others = part.num_operations - sum(part.tasks.values())
    return named + (f", and {_count(others, 'other operation')}" if others else "")


def _kernels(part: Part) -> Iterator[str]:
    """A line for each kernel of jobs that might have had another one."""
    for kernel, use in part.kernels.items():
        if use.next_best:
            instead = ", ".join(f"{name} {us:.3g} us" for name, us in use.next_best.items())
            yield f"{_count(use.num_jobs, 'job')} by {kernel}, expected to take {use.us:.3g} us; next best: {instead}"


def _exchanges(part: Part) -> Iterator[str]:
    """What goes to each other rank, and a line for each kind of exchange."""
    if not part.peers:
        return
    ranks = ", ".join(f"rank {rank}" for rank in part.peers)
    total = sum(exchange.num_bytes for exchange in part.exchanges)
    yield f"exchanges with {ranks} of group {part.group}, to each {_mib(total)} a call:"
    kinds: dict[tuple[str, int], list[int]] = {}
    for phase, task, num_bytes in part.exchanges:
        kinds.setdefault((kinds_of(task).strip(), num_bytes), []).append(phase)
    for (kind, num_bytes), phases in kinds.items():
        where = f"phase {phases[0]}" if len(phases) == 1 else f"{len(phases)} phases, {phases[0]} to {phases[-1]}"
        yield f"  {kind}: {_count(num_bytes, 'byte')} in {where}"


def _elsewhere_lines(elsewhere: Elsewhere | None) -> Iterator[str]:
    if elsewhere is None:
        return
    if elsewhere.why is not None:
        yield f"{elsewhere.arch}: not ours, because {elsewhere.why}"
        return
    kernels = ", ".join(f"{use.num_jobs} by {name}" for name, use in sorted(elsewhere.kernels.items()))
    yield f"{elsewhere.arch}: {_count(elsewhere.source.count(chr(10)), 'line')} of CUDA; jobs: {kernels}"


def _phases(part: Part) -> str:
    layers = [match[1] for path in part.phases if (match := _LAYER.match(path))]
    text = f"{_count(len(part.phases), 'phase')}, waiting for {_count(part.num_awaited, 'event')}"
    if not layers:
        return text
    count = len(set(layers))
    return (
        f"{text}: {len(layers) / count:.3g} phases in each of {count} layers, {len(part.phases) - len(layers)} outside"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.3g} MiB"
