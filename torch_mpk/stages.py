"""How long the stages of a build take: in the log, and added up for whoever asks."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from contextvars import ContextVar

logger = logging.getLogger(__name__)

_seconds: ContextVar[dict[str, float] | None] = ContextVar("_seconds", default=None)


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """A stage that runs inside; the names are those of docs/architecture.md."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds, total = time.perf_counter() - start, _seconds.get()
        logger.debug("%s took %.3f s", name, seconds)
        if total is not None:
            total[name] = total.get(name, 0.0) + seconds


@contextlib.contextmanager
def timed() -> Iterator[dict[str, float]]:
    """Collects the seconds of the stages that run inside, by name."""
    seconds: dict[str, float] = {}
    token = _seconds.set(seconds)
    try:
        yield seconds
    finally:
        _seconds.reset(token)
