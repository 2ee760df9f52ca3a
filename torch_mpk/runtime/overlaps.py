"""Inputs that share memory, in the call that a graph is built for or in a later one.

In a graph that writes an input in place, an overlap changes what other reads see, and Dynamo's guards say nothing of
addresses. So every call is checked: the first before anything is built, later ones within the one pass over their
arguments where the graph is one segment, before it where the graph is several.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch

from torch_mpk import _C
from torch_mpk.errors import MpkError, SharedMemoryError

UNKNOWN_BYTES = -1


class Memory(NamedTuple):
    """Of an input, in bytes."""

    name: str
    extent: int  # from its first to behind its last, 0 of a number, UNKNOWN_BYTES where calls differ
    is_written: bool  # in place, by the graph
    turn: int  # from one of its blocks to the next, as pages of keys have those of values between them; 0: it has none
    block: int


def memory_of(names: Sequence[str], values: Sequence[Any], written: Container[int]) -> list[Memory]:
    """The memory of a graph's inputs, given the values that it was captured with. Numbers have none."""
    return [
        Memory(name, _extent(value), i in written, *_turns(value))
        for i, (name, value) in enumerate(zip(names, values, strict=True))
    ]


def _extent(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    return _bytes(value, 0) if _is_known(value) else UNKNOWN_BYTES


def _turns(value: Any) -> tuple[int, int]:
    """How far the blocks of a tensor's first index are apart, and the extent of one."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or not _is_known(value):
        return 0, 0
    turn, block = value.stride(0) * value.element_size(), _bytes(value, 1)
    return (turn, block) if block <= turn else (0, 0)


def _bytes(value: torch.Tensor, first: int) -> int:
    """From the first to behind the last element of the dimensions from ``first`` on."""
    if value.numel() == 0:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(value.size()[first:], value.stride()[first:], strict=True))
    return (last + 1) * value.element_size()


def _is_known(value: torch.Tensor) -> bool:
    return all(isinstance(n, int) for n in (*value.size(), *value.stride()))


def check_apart(args: Sequence[Any], memory: Sequence[Memory]) -> None:
    """Raises SharedMemoryError where an input that is written overlaps another."""
    _check_of(memory)(tuple(args))


def guarded(
    run: Callable[..., Any], eager: Callable[..., Any], memory: Sequence[Memory], decline: Callable[[MpkError], None]
) -> Callable[..., Any]:
    """``run`` for calls whose inputs lie apart; others are announced with ``decline``, and ``eager``'s."""
    if not any(each.is_written for each in memory):
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
    tensors = [position for position, each in enumerate(memory) if each.extent]
    return _C.Arguments(tensors, [], memory=[memory[position] for position in tensors]).check
