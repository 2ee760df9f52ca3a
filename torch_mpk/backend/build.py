"""A build of a graph for inputs like those at hand: shared, left by an earlier process, or made now."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torch_mpk import _C, registry
from torch_mpk.backend import pipeline
from torch_mpk.builds import timing
from torch_mpk.builds.dry_run import will_write
from torch_mpk.builds.garbage import few_collections
from torch_mpk.capture.graph import Captured, capture, input_sources
from torch_mpk.config import Options
from torch_mpk.dispatch import build_cache
from torch_mpk.dispatch.admission import check_graph, is_prompt
from torch_mpk.dispatch.buckets import Prompt
from torch_mpk.dispatch.build_cache import Stored, build_key
from torch_mpk.dispatch.compiled_graph import CompiledGraph
from torch_mpk.dispatch.fallback import decline_call
from torch_mpk.ranks.agreement import agreed, decline_together, group_of
from torch_mpk.runtime.backend import backend_of
from torch_mpk.runtime.overlaps import Memory, check_apart, memory_of
from torch_mpk.verify.comparison import verified


class Built(NamedTuple):
    """A graph that is built, the positions of the inputs that it writes, and its inputs' memory."""

    compiled: CompiledGraph
    mutated: Sequence[int]
    memory: Sequence[Memory]


_compiled_graphs: weakref.WeakValueDictionary[tuple[Any, ...], CompiledGraph] = weakref.WeakValueDictionary()


def forget() -> None:
    """Nothing that was built is shared with later calls."""
    _compiled_graphs.clear()


def meanwhile(gm: torch.fx.GraphModule, options: Options, for_prompt: bool) -> Callable[..., Any] | None:
    """What runs calls whose build is made in the background; None where they wait for it."""
    is_eager = for_prompt if options.while_building is None else options.while_building == "eager"
    return gm.forward if is_eager else None


def compile_graph(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    device: torch.device,
    options: Options,
    captured: Captured | Callable[[], Captured] | None = None,
    *,
    needs_graph: bool = False,
    prompt: Prompt | None = None,
    later: Callable[[Captured], Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """What runs a graph of Dynamo's on inputs like these, whose memory is not looked at where they are fake.

    Args:
        captured: what there is to build, where that is known, or what captures it.
        needs_graph: the result must have the graph it was made from, which an earlier process's build has not.
        prompt: what ``captured`` is a bucket's graph of.
        later: what runs a prompt that is still to be built, if the options have it built in the background.
    """
    request = _Request(gm, inputs, device, options, captured, needs_graph or bool(options.verify), later)
    group = group_of(gm)
    num_numbers = sum(not isinstance(value, torch.Tensor) for value in inputs)
    built = request.built() if group is None else agreed(gm, group, options, request.built, num_numbers)
    if callable(built):
        return built
    compiled, mutated, memory = built
    will_write(inputs[i] for i in mutated)
    decline = functools.partial(decline_call if group is None else functools.partial(decline_together, group), options)
    call = compiled.callable(gm.forward, options.freeze, memory, decline)
    call = prompt.callable(call) if prompt is not None else call
    return verified(call, compiled, gm.forward, mutated, device, options) if options.verify else call


@dataclasses.dataclass(frozen=True)
class _Request:
    """The arguments of ``compile_graph`` that a build depends on."""

    gm: torch.fx.GraphModule
    inputs: Sequence[Any]
    device: torch.device
    options: Options
    captured: Captured | Callable[[], Captured] | None
    needs_graph: bool
    later: Callable[[Captured], Callable[..., Any]] | None

    @functools.cached_property
    def built_with(self) -> Options:
        """The options without those that are matters of calls."""
        return dataclasses.replace(self.options, freeze=False, while_building=None)

    @functools.cached_property
    def _target(self) -> _C.Target:
        return backend_of(self.device).target(self.device, self.built_with)

    def built(self) -> Built | Callable[..., Any]:
        """A build, or what runs a prompt that is still to be built."""
        with timing.stage("look-up"):
            key = None if self.needs_graph else build_key(self.gm, self.inputs, self.device, self.built_with)
            stored = build_cache.get(key, self._target) if key else None
        if stored is not None:
            return self._loaded(stored)
        with few_collections():
            return self._made(key)

    def _loaded(self, stored: Stored) -> Built:
        memory = self._memory(input_sources(self.gm), self.inputs, stored.mutated)
        make = functools.partial(CompiledGraph.of_plan, stored.plan, self.device, self.built_with)
        return Built(_shared((stored.graph, self.device, self.built_with), make), stored.mutated, memory)

    def _made(self, key: str | None) -> Built | Callable[..., Any]:
        """``key``: under which later processes find it; None where they may not."""
        captured = self._captured()
        check_graph(captured, self.options.max_positions, self._target)
        sources = [graph_input.source for graph_input in captured.inputs]
        values = [0 if graph_input.is_foreign else graph_input.value for graph_input in captured.inputs]
        memory = self._memory(sources, values, captured.mutated)
        graph = captured.key()
        shared = graph, self.device, self.built_with
        if self.later is not None and _key(shared) not in _compiled_graphs and self._is_built_later(captured):
            return self.later(captured)
        make = functools.partial(pipeline.build, captured, self.device, self.built_with)
        compiled = _shared(shared, make, self.needs_graph)
        if key and compiled.plan is not None:
            build_cache.put(key, Stored(compiled.plan, graph, captured.mutated), sum(compiled.seconds.values()))
        return Built(compiled, captured.mutated, memory)

    def _is_built_later(self, captured: Captured) -> bool:
        return meanwhile(self.gm, self.options, is_prompt(captured)) is not None

    def _captured(self) -> Captured:
        if isinstance(self.captured, Captured):
            return self.captured
        with timing.stage("capture"):
            return capture(self.gm, self.inputs) if self.captured is None else self.captured()

    def _memory(self, sources: Sequence[Any], values: Sequence[Any], mutated: Sequence[int]) -> Sequence[Memory]:
        """The inputs' memory, which is looked at where there is any."""
        memory = memory_of(sources, values, mutated)
        if not any(isinstance(each, FakeTensor) for each in self.inputs):
            check_apart(self.inputs, memory)
        return memory


def _shared(key: tuple[Any, ...], make: Callable[[], CompiledGraph], needs_graph: bool = False) -> CompiledGraph:
    """A graph that was built before and is still in use is not built again, unless there are other patterns now."""
    key = _key(key)
    compiled = _compiled_graphs.get(key)
    if compiled is None or needs_graph and compiled.partitioned is None:
        compiled = _compiled_graphs[key] = make()
        compiled.seconds = timing.stages()
    return compiled


def _key(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return key + tuple(task.name for task in registry.tasks() if task.pattern)
