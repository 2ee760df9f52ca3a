"""Ranks take the same way: all run what they have built, or none does. One that ran something else would leave the
others waiting."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from torch_mpk.config import Options
from torch_mpk.dispatch.build_cache import fingerprint
from torch_mpk.dispatch.compiled_graph import CompiledGraph
from torch_mpk.dispatch.fallback import decline_call
from torch_mpk.dispatch.recompile_limit import being_compiled
from torch_mpk.errors import MpkError, RankLostError, UnsupportedError, first_line
from torch_mpk.ranks.sharding import function_of_graph, group_of_graph
from torch_mpk.runtime.ranks import RankedExecutable
from torch_mpk.runtime.team import Build, Team, stay_away, team_of, tell_limit
from torch_mpk.runtime.watchdog import DEFAULT_WATCHDOG_SECONDS, meeting_seconds, watchdog_seconds

_COMPARE = "compare builds"
_EXCHANGES = "a number or size of exchanges"
_OWN = {"num_threads", "watchdog_seconds", "freeze", "profile"}  # options that are each rank's own matter


def group_of(gm: fx.GraphModule) -> str | None:
    """The process group within which a graph exchanges; None where it does not.

    Raises UnsupportedError where there are several.
    """
    groups = {node.kwargs["group"] for node in gm.graph.nodes if {"ranks", "group"} <= node.kwargs.keys()}
    if len(groups) > 1:
        raise UnsupportedError(f"it exchanges within several groups of ranks: {', '.join(sorted(groups))}")
    return next(iter(groups), None)


def agreed(gm: fx.GraphModule, group: str, options: Options, build: Callable[[], Any], num_numbers: int) -> Any:
    """``build()``, a ``backend.Built``, where all ranks of the group have built the same. Collective.

    Args:
        gm: the graph that is built, of Dynamo's or ``localise``'s.
        num_numbers: how many inputs of Dynamo's graph are numbers. One that has some is built in other ways where it
            cannot be built in this one, while others would not try again.

    Raises:
        UnsupportedError: on all ranks, where one could not build, or where they differ.
        LeftError: on those that build, where another one runs the graph eagerly, since Dynamo compiles it no more.
        RankLostError: one does not come, or comes for something else, or what they exchange differs, so that eager's
            exchanges would not fit either.
        Exception: what ``build`` raises.
    """
    team = team_of(group)
    team.come()
    built = error = None
    try:
        built = build()
        executables = _exchanging(built.compiled)
    except Exception as reason:  # which the others have to know of, whatever it is
        error, executables = reason, []
    key = _key(options, executables)
    why = None if error is None else first_line(error)
    own = key, [each.is_joined for each in executables], why, num_numbers
    said = team.gather(_COMPARE, own, build=_build_of(gm, options.fallback, watchdog_seconds(options)))
    has_failed = any(why is not None for _, _, why, _ in said)
    for rank, (*_, other) in enumerate(said):
        if has_failed and other not in (num_numbers, None):
            raise RankLostError(
                f"Dynamo has traced the graph of rank {rank} of group {group} for other sizes than rank {team.rank}'s"
                f"{team.note}: all ranks must make the same calls, and torch.compiler.reset() on all of them has them "
                "begin anew"
            )
    if error is not None:
        raise error
    for rank, (other, _, why, _) in enumerate(said):
        if why is not None:
            raise UnsupportedError(
                f"rank {rank} of group {group} could not build its part, so no rank runs its own{team.note}: {why}"
            )
        for name in key:
            if other[name] != key[name]:
                kind = RankLostError if name == _EXCHANGES else UnsupportedError
                raise kind(
                    f"rank {rank} of group {group} has {name} that differs from rank {team.rank}'s{team.note}: all "
                    "must have the same versions of torch and torch_mpk, options, model, inputs and kind of device"
                )
    for number, executable in enumerate(executables):
        if not all(joined[number] for _, joined, *_ in said):
            executable.join()
    return built


@contextlib.contextmanager
def telling(gm: fx.GraphModule, inputs: Sequence[Any], fallback: str | None) -> Iterator[None]:
    """Where a rank gives a graph up before it has compared builds, the others, which wait for that, are told why.
    Collective then."""
    before = Team.num_come
    try:
        yield
    except RankLostError:
        raise
    except Exception as error:
        group = group_of_graph(gm, inputs) if dist.is_initialized() else None
        if group is not None and Team.num_come == before:
            with contextlib.suppress(UnsupportedError):  # one that has come to the same end
                build = _build_of(gm, fallback, DEFAULT_WATCHDOG_SECONDS)
                team_of(group).gather(_COMPARE, ({}, [], first_line(error), None), build=build)
        raise


def leave(gm: fx.GraphModule, inputs: Sequence[Any], why: str) -> None:
    """Has no other rank wait for this one where a graph exchanges."""
    if dist.is_initialized() and group_of_graph(gm, inputs) is not None:
        stay_away(why)


def tell_of_last_compile() -> None:
    """Has no other rank wait long for this one to build for a function that Dynamo compiles no more here."""
    function = being_compiled()
    if function is not None:
        tell_limit(function.name)


def decline_together(group: str, options: Options, error: MpkError) -> None:
    """``decline_call``, where all ranks decline the call. Collective.

    Raises RankLostError where another one makes it.
    """
    decline_call(options, error)
    purpose = "run a call eagerly that torch_mpk cannot take, as a warning says"
    team_of(group).gather(purpose, seconds=meeting_seconds(watchdog_seconds(options)))


def _build_of(gm: fx.GraphModule, fallback: str | None, watchdog: float) -> Build | None:
    function = function_of_graph(gm)
    if function is None:
        return None
    return Build(function.name, watchdog, runs_eagerly=fallback != "error" and not function.is_whole)


def _key(options: Options, executables: list[RankedExecutable]) -> dict[str, Any]:
    """What all ranks must have in common, by what users call it."""
    chosen = {f"option {name!r}": value for name, value in dataclasses.asdict(options).items() if name not in _OWN}
    versions = {"a version of torch_mpk": fingerprint(), "a version of torch": torch.__version__}
    keys = [each.exchange_key for each in executables]
    isas = [getattr(each, "isa", None) for each in executables]
    exchanges = {_EXCHANGES: [key.partition("/")[0] for key in keys]}
    return exchanges | versions | chosen | {"an instruction set": isas, "a schedule": keys}


def _exchanging(compiled: CompiledGraph) -> list[RankedExecutable]:
    """The executables of a graph that exchange, in program order."""
    executables = [segment.executable for segment in compiled.segments.values()]
    return [each for each in executables if isinstance(each, RankedExecutable)]
