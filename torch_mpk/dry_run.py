"""Calls of a model that leave everything as it was: for what has to run it, but not for its effects."""

from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# By id: tensors, and copies of what they were; None where it is of no interest.
Written = dict[int, tuple[torch.Tensor, torch.Tensor | None]]
_written: contextvars.ContextVar[Written | None] = contextvars.ContextVar("torch_mpk dry run", default=None)


@contextlib.contextmanager
def dry_run(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Sequence[Any], Mapping[str, Any]]]:
    """Gives deep copies of a call's arguments, but for modules and what cannot be copied, and restores random state
    and the tensors that ``will_write`` was told of inside."""
    modules = {id(value): value for value in (*args, *kwargs.values()) if isinstance(value, torch.nn.Module)}
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    written: Written = {}
    with torch.random.fork_rng(cuda):
        # Tensors with a history and handles of the system cannot be copied.
        with contextlib.suppress(RuntimeError, TypeError), _Copying(written):
            args, kwargs = copy.deepcopy((args, kwargs), modules)
        token = _written.set(written)
        try:
            yield args, kwargs
        finally:
            _written.reset(token)
            with torch.inference_mode():
                for tensor, before in reversed(written.values()):  # later ones may be views of earlier ones
                    if before is not None:
                        tensor.copy_(before)


class _Copying(TorchFunctionMode):
    """Copies of tensors need not be restored, and are inference tensors where these are: Dynamo tells them apart."""

    def __init__(self, written: Written) -> None:
        super().__init__()
        self._written = written

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **kwargs or {})
        with torch.inference_mode(args[0].is_inference()):
            made = func(*args, **kwargs or {})
        self._written[id(made)] = (made, None)
        return made


def is_dry_run() -> bool:
    return _written.get() is not None


def will_write(values: Iterable[Any]) -> None:
    """Notes the tensors that a graph may write, before it runs: all of its inputs but parameters and what is expanded.

    Without a dry run it does nothing.
    """
    written = _written.get()
    if written is None:
        return
    for value in values:
        if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter) or 0 in value.stride():
            continue
        if id(value) not in written:
            written[id(value)] = (value, value.clone())
