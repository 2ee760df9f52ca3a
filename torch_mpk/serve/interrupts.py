"""Ctrl-C while a server starts and ends. It imports little, to be there before what takes seconds to import."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

INTERRUPTED = 130  # what a shell says of a command that SIGINT ended


def _end(*signal_and_frame: Any) -> None:
    sys.stderr.flush()
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def end_the_process() -> Iterator[None]:
    """Inside, an interrupt ends the process at once, and says nothing: there is nothing that would be lost."""
    before = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def are_exceptions() -> Iterator[None]:
    """Inside, one is KeyboardInterrupt, as ever; it goes no further."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGINT, before)
