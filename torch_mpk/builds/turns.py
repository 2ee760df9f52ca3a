"""How often Python's threads take turns while something is built. This is a setting of the process."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

_state = threading.Lock()  # of the next two; held for moments only
_wished: list[float] = []
_interval = 0.0  # from before the first of those inside


@contextlib.contextmanager
def turns_of(seconds: float) -> Iterator[None]:
    """Turns of at most so many. The shortest that is wished for is the one that holds."""
    global _interval
    with _state:
        if not _wished:
            _interval = sys.getswitchinterval()
        _wished.append(seconds)
        sys.setswitchinterval(min(_interval, *_wished))
    try:
        yield
    finally:
        with _state:
            _wished.remove(seconds)
            sys.setswitchinterval(min([_interval, *_wished]))
