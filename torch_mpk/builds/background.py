"""One thread builds kernels in the background, one after the other, while calls run without them. Others wait for
compilers, which are processes, as many at a time as there are processors and memory for.

Threads begin with a job and end with the last. Few builds wait at a time, and a job whose owner is gone is dropped, so
that what they hold is bounded. It takes no lock that a call needs, and a call learns of a result by reading it.

Nothing of it outlives the process: at its end waiting jobs are dropped, the compilers that run are ended, and threads
are awaited; they go on to the end of their stages at most. Compilers end with a process that is killed, too. A forked
child has no such thread, and asks for its builds anew. While this process forks, no thread traces: what PyTorch traces
with stands on a stack of the process, of which the child would have a copy.
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

MAX_WAITING = 16  # builds beside the one that runs
MAX_COMPILERS = 16
COMPILER_BYTES = 3 << 29  # that one may take, an estimate for nvcc with a prompt's kernel
_FORK_SECONDS = 60  # that a fork waits for traces at most


class Dropped(BaseException):
    """Ends a build that nobody waits for any more. Not an ``Exception``: no stage may take it for a failure."""


_ending = threading.Lock()  # of what jobs' ends are followed by; held for moments only


class Job(Generic[T]):
    """What a thread has asked for. Reading it takes no lock."""

    def __init__(self, make: Callable[[], T], owner: object) -> None:
        self._make: Callable[[], T] | None = make
        self._owner, self._process = weakref.ref(owner), os.getpid()
        self._outcome: Callable[[], T] | None = None
        self._is_dropped = False
        self._enders: list[Callable[[], None]] = []
        self._ended = threading.Event()
        self._followers: list[Callable[[], None]] = []

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
            self._end()

    def _end(self) -> None:
        self._make = None  # and with it what it holds
        with _ending:
            self._ended.set()
            followers, self._followers = self._followers, []
        for follow in followers:
            follow()

    def then(self, follow: Callable[[], None]) -> None:
        """Has ``follow`` called once it is done or dropped, by whatever thread; now, where it is."""
        with _ending:
            is_ended = self._ended.is_set()
            if not is_ended:
                self._followers.append(follow)
        if is_ended:
            follow()

    def drop(self, has_begun: bool = True) -> None:
        self._is_dropped = True
        for end in list(self._enders):
            end()
        if not has_begun:
            self._end()

    def wait(self) -> None:
        """Until it is done or dropped; not at all where it is another process's."""
        if self._process == os.getpid():
            self._ended.wait()


class _Thread(threading.local):
    job: Job[Any] | None = None  # that this thread is at


_thread = _Thread()


class _Threads:
    """A few, each at one job at a time.

    Args:
        most: how many; asked before one is added.
        max_waiting: jobs beside those that run; None: any number.
        is_tracing: whether jobs trace, so that none may while the process forks.
    """

    def __init__(self, most: Callable[[], int], max_waiting: Callable[[], int] | None, is_tracing: bool) -> None:
        self._most, self._max_waiting, self._is_tracing = most, max_waiting, is_tracing
        self._state = threading.Condition()
        self._waiting: deque[Job[Any]] = deque()
        self._running: dict[threading.Thread, Job[Any] | None] = {}
        self._is_closed, self._is_registered = False, False
        self._is_compile_lock_held = False  # by a thread that forks

    def submit(self, make: Callable[[], T], owner: object) -> Job[T] | None:
        job = Job(make, owner)
        with self._state:
            if self._is_closed or self._max_waiting is not None and len(self._waiting) >= self._max_waiting():
                return None
            if not self._is_registered:
                atexit.register(self.close)
                self._is_registered = True
            if len(self._running) < self._most() and not self._start():
                return None
            self._waiting.append(job)
        return job

    def _start(self) -> bool:
        """Whether there is a thread for one more job."""
        thread = threading.Thread(target=self._work, name="torch_mpk build", daemon=True)
        self._running[thread] = None
        try:
            thread.start()
        except RuntimeError:  # there are too many threads, or the interpreter ends
            del self._running[thread]
        return bool(self._running)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            _thread.job = job
            job.run()
            _thread.job = None
            del job  # what it has made may go with its owner

    def _next(self) -> Job[Any] | None:
        thread = threading.current_thread()
        with self._state:
            while self._waiting and self._waiting[0].is_unwanted:
                self._waiting.popleft().drop(has_begun=False)
            job = self._running[thread] = self._waiting.popleft() if self._waiting else None
            if job is None:
                del self._running[thread]
                self._state.notify_all()
            return job

    def drop(self) -> None:
        with self._state:
            waiting, running = list(self._waiting), [job for job in self._running.values() if job is not None]
            self._waiting.clear()
        for job in waiting:
            job.drop(has_begun=False)
        for job in running:
            job.drop()

    def wait(self, seconds: float | None) -> bool:
        with self._state:
            return self._state.wait_for(lambda: not self._running, seconds)

    def close(self) -> None:
        with self._state:
            self._is_closed = True
            threads = list(self._running)
        self.drop()
        for thread in threads:
            thread.join()

    def before_fork(self) -> None:
        if self._is_tracing and self._running:  # in this order, as in a thread that submits while Dynamo compiles
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
        self._running.clear()
        self.after_fork()
        self._state = threading.Condition()  # a thread may have been waiting for the other


def num_compilers() -> int:
    """That run at a time: a processor is left to what asks for them."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(processors - 1, _free_bytes() // COMPILER_BYTES, MAX_COMPILERS))


def _free_bytes() -> int:
    """Of memory, as the system estimates what programs may take."""
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return MAX_COMPILERS * COMPILER_BYTES


_builder = _Threads(lambda: 1, lambda: MAX_WAITING, is_tracing=True)
_compilers = _Threads(lambda: num_compilers(), None, is_tracing=False)
for _threads in (_compilers, _builder):  # of which a fork takes the last first: see before_fork
    os.register_at_fork(
        before=_threads.before_fork,
        after_in_parent=_threads.after_fork,
        after_in_child=_threads.after_fork_in_child,
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
    return _builder.submit(_in_modes(make), owner)


def compile_beside(make: Callable[[], T], owner: object) -> Job[T] | None:
    """As ``submit``, on one of the threads that wait for compilers. ``make`` traces nothing, and any number may wait.

    Returns:
        None where there can be no thread: make it now.
    """
    return _compilers.submit(_in_modes(make), owner)


def _in_modes(make: Callable[[], T]) -> Callable[[], T]:
    """The same in this thread's modes and on its device."""
    inference_mode = torch.is_inference_mode_enabled()
    grad_mode = torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1  # none

    def in_modes() -> T:
        with torch.inference_mode(inference_mode), torch.set_grad_enabled(grad_mode), torch.cuda.device(device):
            return make()

    return in_modes


def drop() -> None:
    """Drops all builds; the one that runs ends with its stage. Compilers that were begun for others go on."""
    _builder.drop()


def wait(seconds: float | None = None) -> bool:
    """Waits until there is no job, at most so long for each kind; whether that is so."""
    return _builder.wait(seconds) and _compilers.wait(seconds)


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
