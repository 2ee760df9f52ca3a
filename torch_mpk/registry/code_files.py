"""The files beside a task's declaration that have its code."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_mpk.config import DEVICE_ARCHS
from torch_mpk.errors import TaskError

_ARCH = re.compile(r"(sm|compute)_?\d", re.IGNORECASE)


def find_headers(name: str, reference: Callable[..., Any], header: str | None) -> tuple[str, dict[int, str]]:
    """The device code beside the Python file, and in folders sm80, sm90, ... beside it that for one architecture.

    Raises TaskError where the code lies in a folder that is meant for an architecture, and names none.
    """
    general = find_file(name, reference, header, f"{name}.cuh")
    path = Path(general or _beside(reference, f"{name}.cuh"))
    folders = {f"sm{arch}": arch for arch in sorted(DEVICE_ARCHS)}
    variants = {}
    for variant in sorted(path.parent.glob(f"*/{path.name}")):
        folder = variant.parent.name
        if folder in folders:
            variants[folders[folder]] = str(variant)
        elif _ARCH.match(folder):
            raise TaskError(
                f"{name}: {variant} is for no architecture that is known: folders of code for one are "
                f"{', '.join(folders)}"
            )
    return general, variants


def find_file(name: str, reference: Callable[..., Any], given: str | None, default: str) -> str:
    if given is not None and not isinstance(given, str):
        raise TaskError(f"{name}: {given!r} is no path of a file, expected a string, relative to the declaring file")
    path = _beside(reference, given or default)
    if path.is_file():
        return str(path)
    if given is not None:
        raise TaskError(f"{name}: {given!r} is not there: expected {path}")
    return ""


def _beside(reference: Callable[..., Any], file: str) -> Path:
    return Path(code_of(reference).co_filename).resolve().parent / file


def code_of(reference: Callable[..., Any]) -> types.CodeType:
    """That of the function itself, under what decorators made of it."""
    return inspect.unwrap(reference).__code__
