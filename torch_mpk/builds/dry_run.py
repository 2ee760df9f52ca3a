"""Calls of a model that leave everything as it was: for what has to run it, but not for its effects."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from torch_mpk.builds.snapshot import Snapshot

# By id: tensors, and copies of what they were; None where it is of no interest.
Written = dict[int, tuple[torch.Tensor, torch.Tensor | None]]
_written: contextvars.ContextVar[Written | None] = contextvars.ContextVar("torch_mpk dry run", default=None)
_parameters = WeakIdKeyDictionary()  # that some graph writes


@contextlib.contextmanager
def dry_run(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], is_compiled: bool
) -> Iterator[tuple[Sequence[Any], Mapping[str, Any]]]:
    """Gives deep copies of a call's arguments, but for modules and what cannot be copied, and afterwards restores
    random state, the tensors that ``will_write`` was told of inside, and what the objects hold that ``fn`` leads to.

    ``is_compiled``: graphs of the call may be there already, which tell nobody what they write.
    """
    modules = {id(value): value for value in (*args, *kwargs.values()) if isinstance(value, torch.nn.Module)}
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    written: Written = {}
    with torch.random.fork_rng(cuda), _random_state():
        # Tensors with a history and handles of the system cannot be copied.
        with contextlib.suppress(RuntimeError, TypeError), _Copying(written):
            args, kwargs = copy.deepcopy((args, kwargs), modules)
        snapshot = Snapshot((fn, args, kwargs))
        token = _written.set(written)
        if is_compiled:
            will_write(t for t in snapshot.tensors if not isinstance(t, torch.nn.Parameter) or t in _parameters)
        try:
            yield args, kwargs
        finally:
            _written.reset(token)
            with torch.inference_mode():
                for tensor, before in reversed(written.values()):  # later ones may be views of earlier ones
                    if before is not None:
                        tensor.copy_(before)
            snapshot.restore()


@contextlib.contextmanager
def _random_state() -> Iterator[None]:
    """Restores the state of Python's random numbers and of NumPy's."""
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    python_state, numpy_state = random.getstate(), numpy and numpy.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.set_state(numpy_state)


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
    """Notes tensors that a graph may write, before it runs. Without a dry run only parameters count, for later ones."""
    written = _written.get()
    for value in values:
        if isinstance(value, torch.nn.Parameter):
            _parameters[value] = True
        if written is not None and isinstance(value, torch.Tensor) and id(value) not in written:
            written[id(value)] = (value, None if _is_expanded(value) else value.clone())


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, so that nothing can write them in place."""
    return any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
