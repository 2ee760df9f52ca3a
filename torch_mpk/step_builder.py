"""Builds steps of an engine in the background, one after the other, while the engine goes on without them."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable

import torch

logger = logging.getLogger(__name__)


class StepBuilder:
    """A thread while there is something to build, and none otherwise.

    It is no daemon, so that a process ends behind a build and the compilers of it, and begins no other then.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Hashable, str, Callable[[], None]]] = deque()
        self._asked: set[Hashable] = set()
        self._failed: dict[Hashable, Exception] = {}
        self._lock = threading.Lock()  # of all these; held for moments only
        self._thread: threading.Thread | None = None
        self._num_built = 0

    def ask(self, key: Hashable, name: str, build: Callable[[], None]) -> None:
        """Has a thread call ``build``, in the modes of this one, unless it was asked to before.

        Raises what the build has raised: a step that cannot be built is no other's to run.
        """
        with self._lock:
            if key in self._failed:
                raise self._failed[key]
            if key in self._asked:
                return
            self._asked.add(key)
            self._waiting.append((key, name, self._kept(key, build)))
            logger.info("building %s in the background; %d steps wait for that", name, len(self._waiting))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="torch_mpk steps")
                self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        """Forgets what waits, and waits for the build that runs."""
        with self._lock:
            for key, _, _ in self._waiting:
                self._asked.discard(key)
            self._waiting.clear()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _kept(self, key: Hashable, build: Callable[[], None]) -> Callable[[], None]:
        inference_mode = torch.is_inference_mode_enabled()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1  # none

        def work() -> None:
            try:
                with torch.inference_mode(inference_mode), torch.no_grad(), torch.cuda.device(device):
                    build()
            except Exception as error:
                with self._lock:
                    self._failed[key] = error

        return work

    def _work(self) -> None:
        begin = time.perf_counter()
        while True:
            with self._lock:
                if not self._waiting or not threading.main_thread().is_alive():
                    self._thread = None
                    break
                _, name, build = self._waiting.popleft()
            build()
            with self._lock:
                self._num_built += 1
                self._show(name, time.perf_counter() - begin)
        self._show("", time.perf_counter() - begin)

    def _show(self, name: str, seconds: float) -> None:
        """A line in the log for each build, and one that changes in a terminal."""
        rest = len(self._waiting)
        if name:
            logger.info("built %s; %d are left, after %.0f s", name, rest, seconds)
        if sys.stderr.isatty():
            text = f"torch_mpk: {self._num_built} steps built, {rest} to go, {seconds:.0f} s"
            sys.stderr.write(f"\r{text}" if name else f"\r{' ' * len(text)}\r")
            sys.stderr.flush()
