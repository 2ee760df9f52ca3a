"""Calls that one stops waiting for when they take too long. A thread cannot be ended: the call itself goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from torch_mpk import _C


class OverdueError(Exception):
    """The call has not returned in time."""


def call_within(seconds: float, call: Callable[[], Any]) -> Any:
    """What ``call()`` returns, in inference mode; it runs on a thread of its own unless ``seconds`` is 0, for ever.

    Raises OverdueError, and whatever the call raises.
    """
    thread = _Call(call)
    if seconds == 0:
        thread.run()
    else:
        thread.start()
        try:
            thread.join(seconds)
        finally:  # an interrupt also leaves the call alone
            _overdue.thread = thread if thread.is_alive() else None
        if _overdue.thread is not None:
            raise OverdueError
    if thread.error is not None:
        raise thread.error
    return thread.result


def keep(*objects: object) -> None:
    """Keeps the memory that the call which this thread has left alone may still read, for as long as it runs."""
    thread = getattr(_overdue, "thread", None)
    if thread is not None:
        thread.kept, _overdue.thread = objects, None


class _Call(threading.Thread):
    result: Any = None
    error: BaseException | None = None
    kept: tuple[object, ...] = ()

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call

    def run(self) -> None:
        try:
            if self.is_alive():
                _C.cpu_enter_run()
            with torch.inference_mode():
                self.result = self._call()
        except BaseException as error:  # raised where it is waited for
            self.error = error
        finally:
            del self._call


_overdue = threading.local()  # thread: the call that this one has left alone last, until it is told what to keep
