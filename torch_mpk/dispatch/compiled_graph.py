"""A built graph: its segments in program order, each an executable or what runs it instead."""

from __future__ import annotations

import types
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.autograd import _profiler_enabled as is_profiling
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.profiler import record_function

from torch_mpk.builds.dump import Dump
from torch_mpk.capture.provenance import where
from torch_mpk.config import Options, env
from torch_mpk.errors import MpkError, UnsupportedError
from torch_mpk.partition.segments import Partitioned
from torch_mpk.plan import Plan
from torch_mpk.planning import make_plan
from torch_mpk.runtime.backend import backend_of
from torch_mpk.runtime.cuda import absent_target
from torch_mpk.runtime.overlaps import Memory, guarded
from torch_mpk.runtime.segment import CompiledSegment, decline_none


def build_segment(
    gm: torch.fx.GraphModule, device: torch.device, options: Options, dump: Dump, name: str = "whole"
) -> CompiledSegment:
    """Stages 4 to 8.

    Raises:
        UnsupportedError: a node cannot be lowered or generated, or the device is not supported.
    """
    if dump.is_wanted and env.dump_arch is not None:
        _dump_elsewhere(gm, env.dump_arch, options, dump)
    plan = make_plan(gm, backend_of(device).target(device, options), options, dump)
    return CompiledSegment(plan, device, options, dump, name)


def _dump_elsewhere(gm: torch.fx.GraphModule, arch: str, options: Options, dump: Dump) -> None:
    """What the segment would be on a device that need not be there, or why it would not be ours."""
    target = absent_target(arch, options)
    try:
        make_plan(gm, target, options, dump.inside(arch))
    except UnsupportedError as error:
        dump.inside(arch).write("unsupported.txt", f"{error}\n")


class CompiledGraph:
    """What a build leaves. The callables made from it share its executables.

    Attributes:
        partitioned: the graph's segments; None where the build is an earlier process's.
        segments: the executables of those that are ours, by name.
        others: what runs segments that are not ours, by name; those without run as captured.
        seconds: what each stage of the build took.
    """

    def __init__(self, segments: dict[str, CompiledSegment], partitioned: Partitioned | None) -> None:
        self.segments, self.partitioned = segments, partitioned
        self.others: dict[str, Callable[..., Any]] = {}
        self.seconds: dict[str, float] = {}

    @classmethod
    def build(cls, partitioned: Partitioned, device: torch.device, options: Options, dump: Dump) -> CompiledGraph:
        ours = [segment for segment in partitioned.segments if segment.ours]
        segments = {}
        for index, segment in enumerate(ours):
            part = dump.segment(index, len(ours))
            segments[segment.name] = build_segment(segment.gm, device, options, part, segment.name)
        return cls(segments, partitioned)

    @classmethod
    def of_plan(cls, plan: Plan, device: torch.device, options: Options) -> CompiledGraph:
        """A graph that is one segment, whose plan an earlier build has left."""
        return cls({"whole": CompiledSegment(plan, device, options, Dump(None))}, None)

    @property
    def is_compiled(self) -> bool:
        """Whether a call would wait for no compiler."""
        return all(segment.is_compiled for segment in self.segments.values())

    @property
    def plan(self) -> Plan | None:
        """What ``of_plan`` takes, where the graph is one segment."""
        return next(iter(self.segments.values())).plan if self._is_whole else None

    @property
    def _is_whole(self) -> bool:
        """Whether the one segment is all of the graph."""
        return self.partitioned is None or len(self.partitioned.segments) == len(self.segments) == 1

    def callable(
        self,
        eager: Callable[..., Any],
        freeze: bool = False,
        memory: Sequence[Memory] = (),
        decline: Callable[[MpkError], None] = decline_none,
    ) -> Callable[..., Any]:
        """A function of the captured graph's arguments; ``eager`` is the graph as PyTorch runs it. See
        ``CompiledSegment.callable``.

        It lives as long as one of its callables.
        """
        if self._is_whole:
            call = next(iter(self.segments.values())).callable(eager, freeze, memory, decline)
        else:
            assert self.partitioned is not None
            root = self.partitioned.gm  # calls the segments by their names
            plain = {name: _forward(module) for name, module in root.named_children()}
            ours = {
                name: segment.callable(plain[name], freeze, decline=decline) for name, segment in self.segments.items()
            }
            runs = plain | self.others
            runs |= {name: _checked_results(runs[name], handed) for name, handed in _handed_over(root.graph, ours)}
            call = _named(guarded(_straight_line(root.graph, runs | ours), eager, memory, decline))
        call.__dict__["compiled_graph"] = self
        return call


class _Handed(NamedTuple):
    """A result of a part that is not ours, which a segment of ours takes."""

    position: int
    node: fx.Node
    layout: tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]  # dtype, sizes and strides that the segment expects


def _handed_over(graph: fx.Graph, ours: Container[str]) -> Iterator[tuple[str, list[_Handed]]]:
    """What each part that is not ours hands over to one that is, where its layout is known before a call."""
    for call in graph.find_nodes(op="call_module"):
        items = [item for item in call.users if any(user.target in ours for user in item.users)]
        handed = [_Handed(item.args[1], item, _layout(item.meta["val"])) for item in items if _is_known(item)]
        if handed and call.target not in ours:
            yield call.target, handed


def _is_known(item: fx.Node) -> bool:
    value = item.meta["val"]
    return isinstance(value, torch.Tensor) and all(isinstance(n, int) for n in (*value.shape, *value.stride()))


def _layout(value: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
    return value.dtype, tuple(value.shape), value.stride()


def _checked_results(run: Callable[..., Any], handed: Sequence[_Handed]) -> Callable[..., Any]:
    """``run``, for segments that were built from its fake results: a custom operator may return other strides than its
    fake implementation says."""

    def call(*args: Any) -> list[Any]:
        results = list(run(*args))
        for position, node, layout in handed:
            result = results[position]
            found = _layout(result)
            if found == layout:
                continue
            dtype, shape, strides = layout
            if found[:2] != (dtype, shape):
                raise UnsupportedError(
                    f"it returned {found[0]}{list(found[1])}, but its fake implementation says {dtype}{list(shape)}: "
                    "correct the one that torch.library.register_fake was given",
                    node.name,
                    where(node),
                )
            results[position] = torch.empty_strided(shape, strides, dtype=dtype, device=result.device).copy_(result)
        return results

    return call


def _named(call: Callable[..., Any]) -> Callable[..., Any]:
    """For a profiler: the graph that the segments within are of."""

    def named(*args: Any) -> Any:
        if is_profiling():
            with record_function("mpk graph"):
                return call(*args)
        return call(*args)

    return named


def _forward(module: Any) -> Callable[..., Any]:
    """What calls its code, and nothing of ``torch.nn.Module``'s around it."""
    _LazyGraphModule.force_recompile(module)
    forward = module.forward
    return lambda *args: forward(*args)


def _straight_line(graph: fx.Graph, runs: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """A function that calls the segments of a graph in order: a line of Python for each, and none between them."""
    lines = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            args = fx.node.map_arg(node.args, copies.__getitem__)
            copies[node] = lines.call_function(_function(node.target, runs[node.target]), args)
        else:
            copies[node] = lines.node_copy(node, copies.__getitem__)
    return fx.GraphModule({}, lines).forward


def _function(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """One with a name, by which FX's code calls it."""

    def named(*args: Any) -> Any:
        return run(*args)

    function = run if isinstance(run, types.FunctionType) else named
    function.__name__, function.__module__ = name, __name__
    return function
