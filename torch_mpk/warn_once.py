"""What users are told about how their calls run, once each: an ``MpkWarning`` at the line of theirs that led to it."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

from torch_mpk.errors import MpkWarning

# No line in these is the user's: ours, PyTorch's and the code it generates, what decorators and imports go through.
_SKIPPED = (
    *(f"{Path(str(module.__file__)).parent}/" for module in (sys.modules[__package__], torch)),
    *(str(module.__file__) for module in (contextlib, functools)),
    "<eval_with_key>",
    "<frozen ",
)

_warned: set[str] = set()


def warn(message: str, key: str = "") -> None:
    """Say it, unless it has been said; or whatever has the same key, if one is given."""
    if (key or message) in _warned:
        return
    _warned.add(key or message)
    frame = _users_frame()
    warnings.warn_explicit(
        message,
        MpkWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _users_frame() -> FrameType:
    """As ``skip_file_prefixes`` of ``warnings.warn`` does from Python 3.12 on; a thread's first frame where all are
    skipped."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    return frame


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing is announced inside, so that it still can be afterwards."""
    before = set(_warned)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MpkWarning)
        try:
            yield
        finally:
            _warned.intersection_update(before)


def forget() -> None:
    """What has been announced will be again."""
    _warned.clear()
