"""A graph, or a part of one, that torch_mpk does not take runs as the user chose, announced once."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torch_mpk.capture.graph import Captured, capture, input_sources
from torch_mpk.config import Options, env
from torch_mpk.errors import InternalError, MpkError, PartsDeclined, PrefillDeclined, UnsupportedError, first_line
from torch_mpk.partition.costs import COSTS, Estimate, estimate
from torch_mpk.partition.segments import Partitioned
from torch_mpk.runtime.overlaps import guarded, memory_of
from torch_mpk.warn_once import warn

logger = logging.getLogger(__name__)


def choice(options: Options, inputs: Sequence[Any]) -> str:
    """The fallback for these inputs: the option, or where it is left open what suits their device."""
    if options.fallback is not None:
        return options.fallback
    is_on_cuda = any(isinstance(value, Tensor) and value.is_cuda for value in inputs)
    return "inductor" if is_on_cuda and not env.forbid_compile else "eager"


def check_coverage(
    partitioned: Partitioned, captured: Captured, options: Options, device: torch.device
) -> Estimate | None:
    """Raises UnsupportedError unless everything is ours, or what is not may run between our segments.

    Returns:
        what made the parts worth it; None where nobody asked.
    """
    if not partitioned.fallbacks:
        return None
    how = choice_for_parts(captured, options)
    parts = [(segment.gm.graph, segment.ours) for segment in partitioned.segments]
    count = sum(is_ours for _, is_ours in parts)
    if how == "error" or not count:
        raise _first_reason(partitioned)
    whole = choice(options, [graph_input.value for graph_input in captured.inputs])
    estimated = estimate(COSTS[device.type], parts, captured.graph_module.graph, whole, how)
    if not estimated.pays and options.min_segment_nodes is None:
        raise PartsDeclined(count=count, estimate=estimated, first=_first_reason(partitioned))
    return estimated


def announce_break(gm: fx.GraphModule) -> None:
    """Says where Dynamo ends the graph before the call does, and what to set, if that is known."""
    why = getattr(gm, "compile_subgraph_reason", None)
    if why is None or not why.graph_break or not why.user_stack:
        return
    where = why.user_stack[-1]
    lines = [line.strip() for line in why.reason.split("Developer debug context")[0].splitlines() if line.strip()]
    told = [line.removeprefix("Explanation: ") for line in lines if not line.startswith("Hint: ")]
    hints = [line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: ")]
    if "aten.nonzero" in why.reason and "transformers/models/" in where.filename:
        hints = [
            "If these are experts, call model.set_experts_implementation('grouped_mm'), which has no loop over them."
        ]
    what = f"Dynamo ends a graph at {where.filename}:{where.lineno}, in {where.name}: {' '.join(told[:2])}"
    warn(f"{what} What follows is another launch. {' '.join(hints[:1])}".strip())


def announce_fallbacks(partitioned: Partitioned, captured: Captured, options: Options) -> None:
    """Warns of the parts that are not ours, once the others are built: an attempt that fails says nothing of them."""
    if not partitioned.fallbacks:
        return
    others = len(partitioned.fallbacks) - 1
    more = f" (and {others} more nodes)" if others else ""
    how = choice_for_parts(captured, options)
    warn(_notice("a part of this graph", how, f"{_first_reason(partitioned)}{more}"))


def _first_reason(partitioned: Partitioned) -> UnsupportedError:
    node, source, why = partitioned.fallbacks[0]
    return UnsupportedError(why, str(node), source)


def compile_others(partitioned: Partitioned, captured: Captured, options: Options) -> dict[str, Callable[..., Any]]:
    """What runs the segments that are not ours, where that is more than PyTorch running their nodes one by one."""
    if choice_for_parts(captured, options) != "inductor":
        return {}
    compiled: dict[str, Callable[..., Any]] = {}
    for segment in partitioned.segments:
        if segment.ours or not segment.num_operations:
            continue
        placeholders = segment.gm.graph.find_nodes(op="placeholder")
        gm = fx.GraphModule(segment.gm, copy.deepcopy(segment.gm.graph))  # Inductor changes what it is given
        run = _inductor(gm, [node.meta["val"] for node in placeholders])
        if run is not None:
            compiled[segment.name] = run
    return compiled


def fall_back(gm: fx.GraphModule, inputs: Sequence[Any], options: Options, error: Exception) -> Callable[..., Any]:
    """What runs a graph that we do not: Inductor or eager PyTorch."""
    how = choice(options, inputs)
    if how == "error":
        if isinstance(error, (MpkError, MemoryError)):
            raise error
        raise InternalError(reason(error)) from error
    if isinstance(error, PrefillDeclined):
        logger.info("torch_mpk leaves this graph to others: %s", error)
        how = options.fallback or "eager"  # no reason to keep a user waiting for Inductor who has not asked for it
        if how == "eager" and not all(isinstance(value, Tensor) for value in inputs):
            warn(f"torch_mpk runs prompts of several lengths eagerly, so compiling them brings nothing: {error.remedy}")
    else:
        warn(_notice("this graph", how, reason(error)))
        logger.info("the error behind the warning", exc_info=error)
    return (_inductor(gm, inputs) if how == "inductor" else None) or gm.forward


def leave_to_others(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options, error: Exception
) -> Callable[..., Any]:
    """What runs a graph for numbers for which it is not ours.

    What Inductor assumes of overlaps becomes a guard of Dynamo's while that compiles; at a call it is too late for one.
    """
    run = fall_back(gm, inputs, options, error)
    if run == gm.forward:
        return run
    try:
        written = capture(gm, inputs, specialize=True).mutated
    except UnsupportedError:  # so any may be
        written = tuple(range(len(inputs)))
    # As Dynamo knows them: what is made for these numbers may run for others.
    known = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    memory = memory_of(input_sources(gm), known, written)
    return guarded(run, gm.forward, memory, functools.partial(decline_call, options))


def decline_call(options: Options, error: MpkError) -> None:
    """Announces that one call runs eagerly, though its graph is ours: its tensors are not where a launch can take them.

    Raises the error instead with ``options.fallback == "error"``.
    """
    if options.fallback == "error":
        raise error
    announce_eager_call(error)


def announce_eager_call(error: MpkError) -> None:
    warn(_notice("a call", "eager", str(error)))


def reason(error: Exception) -> str:
    """Why a graph is not ours, in a line."""
    return str(error) if isinstance(error, MpkError) else first_line(error)


def choice_for_parts(captured: Captured, options: Options) -> str:
    """The fallback between segments of ours."""
    how = choice(options, [graph_input.value for graph_input in captured.inputs])
    # Inductor compiles whole graphs with sizes in them, but not the parts that are cut out of one.
    return "eager" if how == "inductor" and captured.is_symbolic else how


def _notice(what: str, how: str, why: str) -> str:
    return (
        f"torch_mpk leaves {what} to inductor: {why}" if how == "inductor" else f"torch_mpk runs {what} eagerly: {why}"
    )


def _inductor(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any] | None:
    """The graph compiled by Inductor, before anything of a call has run; None where it fails."""
    try:
        with torch._dynamo.convert_frame.compile_lock:
            return torch._dynamo.lookup_backend("inductor")(gm, list(inputs))
    except Exception as error:
        warn(f"inductor cannot compile what torch_mpk leaves to it, so that runs eagerly: {reason(error)}")
        logger.info("inductor's error", exc_info=error)
        return None
