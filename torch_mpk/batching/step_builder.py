"""Builds steps of an engine in the background, while the engine goes on without them.

One thread of the process makes one after the other, and leaves each to a compiler as it begins the next.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import heapq
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

from torch_mpk.builds import background
from torch_mpk.builds.background import Job
from torch_mpk.builds.garbage import few_collections
from torch_mpk.builds.turns import turns_of
from torch_mpk.runtime.segment import CompiledSegment, compiling_ahead

logger = logging.getLogger(__name__)

SHORT_TURNS = 5.0  # seconds of an engine's eager steps, which is for its first answers

# Seconds of a turn of Python's, usually 5 ms. An eager step waits for one at each of its operations.
_TURN = 0.0005  # while a step is built
_SHORT_TURN = 0.0001  # for an engine's first eager steps; with all of them builds take a third longer

NOW = 0.0  # the rank of what a request asks for
_BEGUN = -1.0


class _Order(NamedTuple):
    rank: float
    number: int  # of those of a rank the first comes first
    key: Hashable
    name: str
    build: Callable[[], None]


class StepBuilder:
    """The steps that one engine asks for. What waits for its turn, or for a compiler, is kept in the order of ranks."""

    def __init__(self) -> None:
        self._state = threading.Condition()  # of all that follows; held for moments only
        self._waiting: list[_Order] = []  # a heap
        self._ranks: dict[Hashable, float] = {}  # of those that were asked for and are not built
        self._built: set[Hashable] = set()
        self._failed: dict[Hashable, Exception] = {}
        self._job: Job[None] | None = None
        self._is_building = False
        self._numbers = itertools.count()
        self._begin = 0.0
        self._eager_seconds = 0.0
        self._process = os.getpid()

    def ask(self, key: Hashable, name: str, build: Callable[[], None], rank: float = NOW) -> None:
        """Has ``build`` called, in the modes and the context of this thread, unless it was asked to before.

        Raises what the build has raised: a step that cannot be built is no other's to run.
        """
        with self._state:
            if key in self._failed:
                raise self._failed[key]
            self._built.discard(key)
            if key not in self._ranks:
                logger.info("building %s in the background; %d steps wait for that", name, len(self._ranks))
                self._begin = self._begin if self._ranks else time.perf_counter()
            if rank < self._ranks.get(key, float("inf")):
                self._ranks[key] = rank
                in_context = functools.partial(contextvars.copy_context().run, build)
                heapq.heappush(self._waiting, _Order(rank, next(self._numbers), key, name, in_context))
            self._go_on()

    def is_asked(self, key: Hashable) -> bool:
        """Whether it waits, or is being built."""
        return key in self._ranks

    def is_built(self, key: Hashable) -> bool:
        return key in self._built

    @property
    def num_waiting(self) -> int:
        """How many are not built yet."""
        return len(self._ranks)

    @contextlib.contextmanager
    def eager_step(self) -> Iterator[None]:
        """Runs one beside the builds. An engine's first ones have more of the time."""
        begin = time.perf_counter()
        with turns_of(_SHORT_TURN if self._eager_seconds < SHORT_TURNS else _TURN):
            yield
        self._eager_seconds += time.perf_counter() - begin

    def close(self) -> None:
        """Forgets what waits, and waits for the step that is being made, but not for compilers."""
        if self._process != os.getpid():  # where nobody builds
            return
        with self._state:
            for order in self._waiting:
                self._ranks.pop(order.key, None)
            self._waiting.clear()
            self._state.wait_for(lambda: not self._is_building)

    def _go_on(self) -> None:
        if self._waiting and (self._job is None or self._job.is_done or self._job.is_lost):
            self._job = background.submit(self._build_next, owner=self)  # none where too many wait: the next one asks

    def _build_next(self) -> None:
        order = self._next()
        try:
            if order is not None:
                self._build(order)
        finally:
            with self._state:
                self._is_building = False
                self._state.notify_all()
                self._job = None
                self._go_on()

    def _build(self, order: _Order) -> None:
        try:
            with turns_of(_TURN), few_collections(), compiling_ahead(waits=False) as segments:
                order.build()
        except Exception as error:
            self._finish(order, error)
        except BaseException:  # it was dropped
            with self._state:
                del self._ranks[order.key]
            raise
        else:
            self._finish_behind(order, segments)

    def _next(self) -> _Order | None:
        with self._state:
            while self._waiting:
                order = heapq.heappop(self._waiting)
                if self._ranks.get(order.key) == order.rank:  # else it has begun with a rank before this
                    self._ranks[order.key] = _BEGUN
                    self._is_building = True
                    return order
            return None

    def _finish_behind(self, order: _Order, segments: Sequence[CompiledSegment]) -> None:
        """Once these are compiled."""
        done, most = itertools.count(1), len(segments)

        def follow() -> None:
            if next(done) == most:
                self._finish(order)

        for segment in segments:
            segment.when_compiled(follow)
        if not segments:
            self._finish(order)

    def _finish(self, order: _Order, error: Exception | None = None) -> None:
        with self._state:
            self._ranks.pop(order.key, None)
            if error is None:
                self._built.add(order.key)
            else:
                self._failed[order.key] = error
            rest, seconds = len(self._ranks), time.perf_counter() - self._begin
        what = "built" if error is None else "could not build"
        logger.info("%s %s; %d are left, after %.0f s", what, order.name, rest, seconds)
        self._show(rest, seconds)

    def _show(self, rest: int, seconds: float) -> None:
        """A line that changes in a terminal, and goes with the last build."""
        if sys.stderr.isatty():
            text = f"torch_mpk: {len(self._built)} steps built, {rest} to go, {seconds:.0f} s"
            sys.stderr.write(f"\r{text}" if rest else f"\r{' ' * len(text)}\r")
            sys.stderr.flush()
