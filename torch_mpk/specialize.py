"""Graphs whose number inputs cannot stay symbolic: one build for each combination of values, at its first call."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

MAX_BUILDS = 16


def per_call_numbers(
    positions: Sequence[int],
    build: Callable[[tuple[Any, ...]], Callable[..., Any]],
    give_up: Callable[[tuple[Any, ...], Exception], Callable[..., Any]],
    limit: int = MAX_BUILDS,
) -> Callable[..., Any]:
    """A callable that hands each call to a build for the values of its numbers.

    Args:
        positions: of the numbers among the arguments: sizes, or tensors of one element that hold a Python float.
        build: makes the callable for the numbers among a first call's arguments.
        give_up: makes the callable for numbers without a build, once ``build`` has raised the error it is given.
        limit: builds that are kept; the one not used for the longest time is dropped.
    """
    built: OrderedDict[tuple[float, ...], Callable[..., Any]] = OrderedDict()
    other: Callable[..., Any] | None = None
    lock = threading.Lock()

    def call(*args: Any) -> Any:
        nonlocal other
        values = (args[position] for position in positions)
        key = tuple(value if isinstance(value, int) else value.item() for value in values)
        with lock:
            run = built.get(key)
            if run is None:
                try:
                    run = other or build(args)
                except Exception as error:
                    run = other = give_up(args, error)
                built[key] = run
                if len(built) > limit:
                    built.popitem(last=False)
            else:
                built.move_to_end(key)
        return run(*args)

    return call
