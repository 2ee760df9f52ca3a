"""One thread builds kernels in the background, one after the other, while calls run without them.

It begins with the first job and ends with the last. Few jobs wait at a time, and one whose owner is gone is dropped, so
that what they hold is bounded. It takes no lock that a call needs, and a call learns of a result by reading it.

Nothing of it outlives the process: at its end waiting jobs are dropped, the compiler that runs is ended, and the thread
is awaited; it goes on to the end of its stage at most. A forked child has no such thread, and asks for its builds anew.
While this process forks, the thread traces nothing: what PyTorch traces with stands on a stack of the process, of which
the child would have a copy.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

MAX_WAITING = 16  # jobs beside the one that runs
_FORK_SECONDS = 60  # that a fork waits for traces at most


class Dropped(BaseException):
    """Ends a build that nobody waits for any more. Not an ``Exception``: no stage may take it for a failure."""


class Job(Generic[T]):
    """What a thread has asked for. Reading it takes no lock."""

    def __init__(self, make: Callable[[], T], owner: object) -> None:
        self._make: Callable[[], T] | None = make
        self._owner, self._process = weakref.ref(owner), os.getpid()
        self._outcome: Callable[[], T] | None = None
        self._is_dropped = False
        self._enders: list[Callable[[], None]] = []

    @property
    def is_done(self) -> bool:
        return self._outcome is not None

    @property
    def is_lost(self) -> bool:
        """Whether nobody will do it: it was dropped, or is of the process that this one was forked from."""
        return not self.is_done and (self._is_dropped or self._process != os.getpid())

    @property
    def is_unwanted(self) -> bool:
        return self._is_dropped or self._owner() is None

    def result(self) -> T:
        """What was made, where that is done; raises what making it raised."""
        assert self._outcome is not None
        return self._outcome()

    def run(self) -> None:
        assert self._make is not None
        try:
            made = self._make()
            self._outcome = lambda: made
        except Dropped:
            self._is_dropped = True
        except BaseException as error:
            reason = error  # which outlives the clause

            def fail() -> T:
                raise reason

            self._outcome = fail
        finally:
            self._make = None  # and with it what it holds

    def drop(self) -> None:
        self._is_dropped = True
        for end in list(self._enders):
            end()


class _Thread(threading.local):
    job: Job[Any] | None = None  # that this thread is at


_thread = _Thread()


class _Builder:
    def __init__(self) -> None:
        self._state = threading.Condition()
        self._waiting: deque[Job[Any]] = deque()
        self._current: Job[Any] | None = None
        self._thread: threading.Thread | None = None
        self._is_closed, self._is_registered = False, False
        self._is_compile_lock_held = False  # by a thread that forks

    def submit(self, make: Callable[[], T], owner: object) -> Job[T] | None:
        job = Job(make, owner)
        with self._state:
            if self._is_closed or len(self._waiting) >= MAX_WAITING:
                return None
            if not self._is_registered:
                atexit.register(self.close)
                self._is_registered = True
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="torch_mpk build", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # there are too many threads, or the interpreter ends
                    return None
                self._thread = thread
            self._waiting.append(job)
        return job

    def _work(self) -> None:
        while (job := self._next()) is not None:
            _thread.job = job
            job.run()
            _thread.job = None
            del job  # what it has made may go with its owner

    def _next(self) -> Job[Any] | None:
        with self._state:
            while self._waiting and self._waiting[0].is_unwanted:
                self._waiting.popleft().drop()
            self._current = self._waiting.popleft() if self._waiting else None
            if self._current is None:
                self._thread = None
                self._state.notify_all()
            return self._current

    def drop(self) -> None:
        with self._state:
            jobs = [*self._waiting, *([self._current] if self._current is not None else [])]
            self._waiting.clear()
        for job in jobs:
            job.drop()

    def wait(self, seconds: float | None) -> bool:
        with self._state:
            return self._state.wait_for(lambda: self._thread is None, seconds)

    def close(self) -> None:
        with self._state:
            self._is_closed = True
            thread = self._thread
        self.drop()
        if thread is not None:
            thread.join()

    def before_fork(self) -> None:
        if self._thread is not None:  # in this order, as in a thread that submits while Dynamo compiles
            lock = torch._dynamo.convert_frame.compile_lock
            self._is_compile_lock_held = lock.acquire(timeout=_FORK_SECONDS)
        self._state.acquire()

    def after_fork(self) -> None:
        self._state.release()
        if self._is_compile_lock_held:
            self._is_compile_lock_held = False
            torch._dynamo.convert_frame.compile_lock.release()

    def after_fork_in_child(self) -> None:
        self._waiting.clear()
        self._current = self._thread = None
        self.after_fork()
        self._state = threading.Condition()  # the thread may have been waiting for the other


_builder = _Builder()
os.register_at_fork(
    before=_builder.before_fork,
    after_in_parent=_builder.after_fork,
    after_in_child=_builder.after_fork_in_child,
)


def submit(make: Callable[[], T], owner: object) -> Job[T] | None:
    """Has ``make`` called on the thread that builds, in this thread's modes and on its device.

    Not under Dynamo's compile lock, which other functions' compilations would wait for: what must not meet them takes
    it for itself.

    Args:
        make: should hold little memory. What it raises is the job's outcome.
        owner: when it is gone, nobody wants the result, and the job is dropped unless it has begun.

    Returns:
        None where too many jobs wait, or the process ends: ask again later.
    """
    inference_mode = torch.is_inference_mode_enabled()
    grad_mode = torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1  # none

    def in_modes() -> T:
        with torch.inference_mode(inference_mode), torch.set_grad_enabled(grad_mode), torch.cuda.device(device):
            return make()

    return _builder.submit(in_modes, owner)


def drop() -> None:
    """Drops all jobs; the one that runs ends with its stage."""
    _builder.drop()


def wait(seconds: float | None = None) -> bool:
    """Waits until there is no job, at most so long; whether that is so."""
    return _builder.wait(seconds)


def is_building() -> bool:
    """Whether this thread builds in the background."""
    return _thread.job is not None


def go_on() -> None:
    """Raises Dropped where this thread builds what nobody waits for any more."""
    if _thread.job is not None and _thread.job.is_unwanted:
        raise Dropped


@contextlib.contextmanager
def ended_by(end: Callable[[], None]) -> Iterator[None]:
    """``end`` is called, by whatever thread, where a job of this thread's is dropped inside; Dropped is raised then."""
    job = _thread.job
    if job is None:
        yield
        return
    job._enders.append(end)
    try:
        go_on()
        yield
    finally:
        job._enders.remove(end)
    go_on()
