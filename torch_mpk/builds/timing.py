"""How long the stages of each build took: logged with ``TORCH_LOGS=torch_mpk``, and kept for whoever asks."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from torch_mpk.builds.background import go_on

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclasses.dataclass
class Build:
    """What the backend did with one graph of Dynamo's."""

    stages: dict[str, float] = dataclasses.field(default_factory=dict)  # seconds, in the order they began
    seconds: float = 0.0  # all of it
    end: float = 0.0  # when it ended, as ``time.perf_counter`` says, or what of it another thread did

    def __str__(self) -> str:
        stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.stages.items())
        return f"{self.seconds:.2f} s ({stages})"


recent: deque[Build] = deque(maxlen=64)  # the last one is the newest
_current: contextvars.ContextVar[Build | None] = contextvars.ContextVar("torch_mpk build", default=None)


@contextlib.contextmanager
def build() -> Iterator[Build]:
    """Times a build, whose stages say when they run."""
    record = Build()
    token = _current.set(record)
    start = time.perf_counter()
    try:
        yield record
    finally:
        record.end = time.perf_counter()
        record.seconds = record.end - start
        _current.reset(token)
        recent.append(record)
        logger.info("a graph took %s", record)


def stages() -> dict[str, float]:
    """The stages of the build that runs, as they are recorded; empty where none runs."""
    record = _current.get()
    return {} if record is None else record.stages


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Times a stage of the build that runs, if one does. Stages of several segments add up.

    Raises Dropped: see ``background.go_on``.
    """
    go_on()
    record = _current.get()
    if record is None:
        yield
        return
    record.stages.setdefault(name, 0.0)
    start = time.perf_counter()
    try:
        yield
    finally:
        now = time.perf_counter()
        record.stages[name] += now - start
        record.end = max(record.end, now)


def later(make: Callable[[], T]) -> Callable[[], T]:
    """The same, for another thread, whose stages are of the build that runs here."""
    return functools.partial(contextvars.copy_context().run, make)
