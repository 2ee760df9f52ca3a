"""Inputs that share memory, in the call that a graph is built for or in a later one.

In a graph that writes an input in place, an overlap changes what other reads see, and Dynamo's guards say nothing of
addresses. So every call is checked: the first before anything is built, later ones within the one pass over their
arguments where the graph is one segment, before it where the graph is several.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

from torch_mpk import _C
from torch_mpk.errors import MpkError, SharedMemoryError

UNKNOWN_BYTES = -1

Memory = tuple[str, int, bool]  # an input's name, its extent in bytes, and whether the graph writes it in place


def memory_of(names: Sequence[str], values: Sequence[Any], written: Container[int]) -> list[Memory]:
    """The memory of a graph's inputs, given the values that it was captured with. Numbers have none."""
    return [(name, _extent(value), i in written) for i, (name, value) in enumerate(zip(names, values, strict=True))]


def _extent(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    if not all(isinstance(n, int) for n in (*value.size(), *value.stride())):
        return UNKNOWN_BYTES
    if value.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(value.size(), value.stride(), strict=True))
    return (last + 1) * value.element_size()


def check_apart(args: Sequence[Any], memory: Sequence[Memory]) -> None:
    """Raises SharedMemoryError where an input that is written overlaps another."""
    _check_of(memory)(tuple(args))


def guarded(
    run: Callable[..., Any], eager: Callable[..., Any], memory: Sequence[Memory], decline: Callable[[MpkError], None]
) -> Callable[..., Any]:
    """``run`` for calls whose inputs lie apart; others are announced with ``decline``, and ``eager``'s."""
    if not any(is_written for _, _, is_written in memory):
        return run
    check = _check_of(memory)

    def call(*args: Any) -> Any:
        try:
            check(args)
        except SharedMemoryError as error:
            decline(error)
            return eager(*args)
        return run(*args)

    return call


def _check_of(memory: Sequence[Memory]) -> Callable[[tuple[Any, ...]], None]:
    tensors = [position for position, (_, extent, _) in enumerate(memory) if extent]
    return _C.Arguments(tensors, [], memory=[memory[position] for position in tensors]).check
