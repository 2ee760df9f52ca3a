"""The files beside a task's declaration that have its code."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_mpk.errors import TaskError


def find_headers(name: str, reference: Callable[..., Any], header: str | None) -> tuple[str, dict[int, str]]:
    """The device code beside the Python file, and in folders sm80, sm90, ... beside it that for one architecture."""
    general = find_file(name, reference, header, f"{name}.cuh")
    path = Path(general or _beside(reference, f"{name}.cuh"))
    variants = path.parent.glob(f"sm[0-9][0-9]*/{path.name}")
    return general, {int(variant.parent.name[2:]): str(variant) for variant in variants}


def find_file(name: str, reference: Callable[..., Any], given: str | None, default: str) -> str:
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
