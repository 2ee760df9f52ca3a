"""Ranks take the same way: all run what they have built, or none does. One that ran something else would leave the
others waiting."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torch_mpk.config import Options
from torch_mpk.dispatch.build_cache import fingerprint
from torch_mpk.dispatch.compiled_graph import CompiledGraph
from torch_mpk.errors import UnsupportedError, first_line
from torch_mpk.runtime.ranks import RankedExecutable, team_of

_OWN = {"num_threads", "watchdog_seconds", "freeze", "profile"}  # options that are each rank's own matter


def group_of(gm: fx.GraphModule) -> str | None:
    """The process group within which a graph exchanges; None where it does not.

    Raises UnsupportedError where there are several.
    """
    groups = {node.kwargs["group"] for node in gm.graph.nodes if {"ranks", "group"} <= node.kwargs.keys()}
    if len(groups) > 1:
        raise UnsupportedError(f"it exchanges within several groups of ranks: {', '.join(sorted(groups))}")
    return next(iter(groups), None)


def agreed(group: str, options: Options, build: Callable[[], Any]) -> Any:
    """``build()``, a ``backend.Built``, where all ranks of the group have built the same. Collective.

    Raises:
        UnsupportedError: on all ranks, where one could not build, or where they differ.
        RankLostError: one does not come, or comes for something else.
        Exception: what ``build`` raises.
    """
    team = team_of(group)
    built = error = None
    try:
        built = build()
        executables = _exchanging(built.compiled)
    except Exception as reason:  # which the others have to know of, whatever it is
        error, executables = reason, []
    key = _key(options, executables)
    why = None if error is None else first_line(error)
    said = team.gather("compare builds", (key, [each.is_joined for each in executables], why))
    if error is not None:
        raise error
    for rank, (other, _, why) in enumerate(said):
        if why is not None:
            raise UnsupportedError(
                f"rank {rank} of group {group} could not build its part, so no rank runs its own: {why}"
            )
        for name in key:
            if other[name] != key[name]:
                raise UnsupportedError(
                    f"rank {rank} of group {group} has {name} that differs from rank {team.rank}'s: all must have the "
                    "same versions of torch and torch_mpk, options, model, inputs and kind of device"
                )
    for number, executable in enumerate(executables):
        if not all(joined[number] for _, joined, _ in said):
            executable.join()
    return built


def _key(options: Options, executables: list[RankedExecutable]) -> dict[str, Any]:
    """What all ranks must have in common, by what users call it."""
    chosen = {f"option {name!r}": value for name, value in dataclasses.asdict(options).items() if name not in _OWN}
    versions = {"a version of torch_mpk": fingerprint(), "a version of torch": torch.__version__}
    return versions | chosen | {"a schedule": [each.exchange_key for each in executables]}


def _exchanging(compiled: CompiledGraph) -> list[RankedExecutable]:
    """The executables of a graph that exchange, in program order."""
    executables = [segment.executable for segment in compiled.segments.values()]
    return [each for each in executables if isinstance(each, RankedExecutable)]
