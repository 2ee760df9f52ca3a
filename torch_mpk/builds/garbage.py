"""When Python looks for garbage while something is built. These are settings of the process, and so of all threads."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

SELDOM = (50_000, 20, 100)  # thresholds of the collector

_state = threading.Lock()  # of the next two; held for moments only
_num_inside = 0
_thresholds = (0, 0, 0)  # from before the first of those inside
_one_stay = threading.RLock()


@contextlib.contextmanager
def few_collections() -> Iterator[None]:
    """It is looked for seldom: a trace makes many objects and little garbage, and by default a seventh of a build goes
    into looking."""
    global _num_inside, _thresholds
    with _state:
        _num_inside += 1
        if _num_inside == 1:
            _thresholds = gc.get_threshold()
            if _thresholds[0]:  # else it is looked for when the program says so
                gc.set_threshold(*map(max, _thresholds, SELDOM))
    try:
        yield
    finally:
        with _state:
            _num_inside -= 1
            if _num_inside == 0:
                gc.set_threshold(*_thresholds)


@contextlib.contextmanager
def garbage_stays() -> Iterator[None]:
    """Nothing that is there before is collected inside, by whoever asks for it.

    An earlier engine is in a cycle with its memory pool. A pool that is freed empties the allocator's cache, and while
    another pool is in use, or a graph captured, that fails in a destructor, which ends the process (see
    pytorch/pytorch#180395). It is not enough to turn automatic collection off: Dynamo asks for one behind each compile,
    and so does ``stop`` of an engine in another thread. What is frozen all of them pass over. Unfreezing is the whole
    process's, hence one thread at a time; what others had frozen is not any more, which costs them time alone.
    """
    with _one_stay:
        gc.collect()
        gc.freeze()
        try:
            yield
        finally:
            gc.unfreeze()
