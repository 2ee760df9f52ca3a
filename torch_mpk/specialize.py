"""Graphs with SymInt inputs that cannot be built symbolically: one build for each concrete shape, at its first call."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

MAX_SHAPES = 16


def per_shape(
    symbols: Sequence[int], build: Callable[[tuple[Any, ...]], Callable[..., Any]], limit: int = MAX_SHAPES
) -> Callable[..., Any]:
    """A callable that hands each call to a build for the values of its integer arguments.

    Args:
        symbols: positions of the integer arguments.
        build: makes the callable for the arguments of a first call. It must not fail.
        limit: builds that are kept; the one not used for the longest time is dropped.
    """
    built: OrderedDict[tuple[int, ...], Callable[..., Any]] = OrderedDict()
    lock = threading.Lock()

    def call(*args: Any) -> Any:
        key = tuple(int(args[position]) for position in symbols)
        with lock:
            run = built.get(key)
            if run is None:
                run = built[key] = build(args)
                if len(built) > limit:
                    built.popitem(last=False)
            else:
                built.move_to_end(key)
        return run(*args)

    return call
