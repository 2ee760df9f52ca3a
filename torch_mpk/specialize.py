"""Shapes and numbers that change from call to call.

Graphs whose number inputs cannot stay symbolic get one build for each combination of values, at its first call, or for
each bucket of them (``buckets.py``).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch._guards import CompileContext

from torch_mpk.announcements import warn
from torch_mpk.capture import source_line

MAX_BUILDS = 16
MAX_FAILURES = 4  # after as many, a graph is taken to be none of ours whatever its numbers are


Args = tuple[Any, ...]


def per_call_numbers(
    positions: Sequence[int],
    build: Callable[[Args], Callable[..., Any]],
    give_up: Callable[[Args, Exception], Callable[..., Any]],
    limit: int = MAX_BUILDS,
) -> Callable[..., Any]:
    """``per_call`` with a build for the values of a call's numbers.

    Args:
        positions: of the numbers among the arguments: sizes, or tensors of one element that hold a Python float.
    """

    def numbers(args: Args) -> Hashable:
        values = (args[position] for position in positions)
        return tuple(value if isinstance(value, int) else value.item() for value in values)

    return per_call(numbers, build, give_up, limit)


def per_call(
    key_of: Callable[[Args], Hashable],
    build: Callable[[Args], Callable[..., Any]],
    give_up: Callable[[Args, Exception], Callable[..., Any]],
    limit: int = MAX_BUILDS,
) -> Callable[..., Any]:
    """A callable that hands each call to a build of its own.

    Threads may call it at once: they build one after the other, as Dynamo compiles, and calls with a build go on.

    Args:
        key_of: calls with equal keys share a build.
        build: makes the callable for a first call's arguments and all that share its key.
        give_up: makes the callable where there is no build, once ``build`` has raised the error it is given.
        limit: builds that are kept; the one not used for the longest time is dropped.
    """
    built: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()
    given_up: list[Callable[..., Any]] = []
    lock = threading.Lock()  # of `built`; held for moments only

    def find(key: Hashable) -> Callable[..., Any] | None:
        with lock:
            if key in built:
                built.move_to_end(key)
            return built.get(key)

    def make(key: Hashable, args: Args) -> Callable[..., Any]:
        if len(given_up) >= MAX_FAILURES:
            return given_up[-1]
        try:
            run = build(args)
        except Exception as error:
            run = give_up(args, error)
            given_up.append(run)
        with lock:
            built[key] = run
            if len(built) > limit:
                built.popitem(last=False)
        return run

    def call(*args: Any) -> Any:
        key = key_of(args)
        run = find(key)
        if run is None:
            with torch._dynamo.convert_frame.compile_lock:
                run = find(key) or make(key, args)  # another thread may have made it meanwhile
        return run(*args)

    return call


def warn_at_recompile_limit(gm: torch.fx.GraphModule) -> None:
    """Announces the last compile of a function that Dynamo allows: it calls no backend after it, and says nothing."""
    limit = torch._dynamo.config.recompile_limit
    compile_id = CompileContext.current_compile_id()
    if compile_id is None or compile_id.frame_compile_id != limit - 1:
        return
    place = next(filter(None, map(source_line, gm.graph.nodes)), "a function")
    warn(
        f"{place} has been compiled {limit} times, all that Dynamo allows: calls with yet other shapes or arguments "
        "will run eagerly, or raise with fullgraph=True. TORCH_LOGS=recompiles says what differs from call to call. "
        "Keep max_cache_len and the batch the same, do not pass dynamic=False, or allow more compiles: "
        f"torch._dynamo.config.recompile_limit = {8 * limit}"
    )
