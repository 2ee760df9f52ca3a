"""Ranks take the same way: all run what they have built, or none does. One that ran something else would leave the
others waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torch_mpk.dispatch.build_cache import fingerprint
from torch_mpk.dispatch.compiled_graph import CompiledGraph
from torch_mpk.errors import UnsupportedError, first_line
from torch_mpk.runtime.ranks import RankedExecutable, team_of


def group_of(gm: fx.GraphModule) -> str | None:
    """The process group within which a graph exchanges; None where it does not.

    Raises UnsupportedError where there are several.
    """
    groups = {node.kwargs["group"] for node in gm.graph.nodes if {"ranks", "group"} <= node.kwargs.keys()}
    if len(groups) > 1:
        raise UnsupportedError(f"it exchanges within several groups of ranks: {', '.join(sorted(groups))}")
    return next(iter(groups), None)


def agreed(group: str, build: Callable[[], Any]) -> Any:
    """``build()``, a ``backend.Built``, where all ranks of the group have built the same. Collective.

    Raises UnsupportedError, on all of them, where one could not, or where they differ; and what ``build`` raises.
    """
    team = team_of(group)
    built = error = None
    try:
        built = build()
        executables = _exchanging(built.compiled)
    except Exception as reason:  # which the others have to know of, whatever it is
        error, executables = reason, []
    key = (fingerprint(), torch.__version__, [each.exchange_key for each in executables])
    said = team.gather((key, [each.is_joined for each in executables], None if error is None else first_line(error)))
    if error is not None:
        raise error
    for rank, (other, _, why) in enumerate(said):
        if why is not None:
            raise UnsupportedError(
                f"rank {rank} of group {group} could not build its part, so no rank runs its own: {why}"
            )
        if other != key:
            raise UnsupportedError(
                f"rank {rank} of group {group} has built something else than rank {team.rank}: all must have the same "
                "versions of torch and torch_mpk, the same options and the same kind of device"
            )
    for number, executable in enumerate(executables):
        if not all(joined[number] for _, joined, _ in said):
            executable.join()
    return built


def _exchanging(compiled: CompiledGraph) -> list[RankedExecutable]:
    """The executables of a graph that exchange, in program order."""
    executables = [segment.executable for segment in compiled.segments.values()]
    return [each for each in executables if isinstance(each, RankedExecutable)]
