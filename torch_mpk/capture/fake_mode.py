"""PyTorch's mode of fake tensors, made quick for graphs whose layers repeat each other.

A capture runs thousands of operators on fake tensors, and most of them are like one before: the same operator, and
tensors of the same metadata. PyTorch keeps results of such calls itself, but to find one takes 100 µs and more, and it
keeps none of operators that it decomposes in Python.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

_VALUES = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
_UNKNOWN_RESULTS = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Result(NamedTuple):
    """The result of a call: a tensor of its own, or a view of one of its arguments."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    viewed: int | None  # the argument's number among the call's tensors


class _NotKept(Exception):
    """The call has an argument by whose description its result is not known."""


def repeated_fakes(**options: Any) -> FakeTensorMode:
    """A ``FakeTensorMode`` that gives a call the like of what an equal call gave before, in memory of its own."""
    mode = FakeTensorMode(**options)  # not a class of its own: PyTorch asks for this one
    mode.dispatch = _Repeats(mode).dispatch  # type: ignore[method-assign]
    return mode


class _Repeats:
    """The results of the calls in a mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode, self._dispatch = mode, mode.dispatch
        self._results: dict[Any, _Result | int] = {}  # int: the argument itself, by its number among the tensors

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _may_repeat(func):
            return self._dispatch(func, types, args, kwargs)
        tensors: list[FakeTensor] = []
        try:
            key = func, self._described((*args, *kwargs.values()), tensors), tuple(kwargs)
        except _NotKept:
            return self._dispatch(func, types, args, kwargs)
        known = self._results.get(key)
        if known is not None:
            return tensors[known] if isinstance(known, int) else self._like(known, tensors)
        result = self._dispatch(func, types, args, kwargs)
        same = [i for i, tensor in enumerate(tensors) if tensor is result]
        if len(same) == 1:
            self._results[key] = same[0]
        elif not same and isinstance(result, FakeTensor) and _is_described(result):
            storages = [tensor.untyped_storage()._cdata for tensor in tensors]
            own = result.untyped_storage()._cdata
            viewed = storages.index(own) if own in storages else None
            offset = int(result.storage_offset())
            # Not where two arguments share the memory that is viewed, nor where a copy has an offset, as few have.
            if storages.count(own) == 1 or (viewed is None and offset == 0):
                described = result.size(), result.stride(), offset, result.dtype, result.fake_device
                self._results[key] = _Result(*described, viewed)
        return result

    def _described(self, values: Sequence[Any], tensors: list[FakeTensor]) -> tuple[Any, ...]:
        """Describes arguments as far as a result depends on them, and adds the tensors among them to ``tensors``."""
        return (*[self._describe(value, tensors) for value in values],)

    def _describe(self, value: Any, tensors: list[FakeTensor]) -> Any:
        if isinstance(value, FakeTensor):
            if value.fake_mode is not self._mode or value.constant is not None or value._has_symbolic_sizes_strides:
                raise _NotKept
            tensors.append(value)
            kind = torch._C._dispatch_keys(value).raw_repr()  # conjugated, sparse, of a gradient
            layout = value.size(), value.stride(), value.storage_offset()
            return kind, value.dtype, value.fake_device, *layout
        if isinstance(value, (list, tuple)):
            return type(value), self._described(value, tensors)
        if isinstance(value, _VALUES):
            return type(value), value
        raise _NotKept

    def _like(self, known: _Result, tensors: Sequence[FakeTensor]) -> FakeTensor:
        viewed = None if known.viewed is None else tensors[known.viewed]
        # A view is an inference tensor where its base is one.
        is_inference = torch.is_inference_mode_enabled() if viewed is None else viewed.is_inference()
        # PyTorch's own code makes it on the device "meta": neither this mode nor what stands for that code in Python.
        with no_dispatch(), no_python_dispatcher(), torch.inference_mode(is_inference):
            meta = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")
            if viewed is not None:
                meta.set_(viewed.untyped_storage(), known.offset, known.shape, known.stride)
        return FakeTensor(self._mode, meta, known.device)


@functools.cache
def _may_repeat(func: Any) -> bool:
    """Whether an operator gives a tensor whose metadata follows from its arguments', and writes nothing."""
    if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable or _UNKNOWN_RESULTS & set(func.tags):
        return False
    returns = func._schema.returns
    return len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)


def _is_described(tensor: FakeTensor) -> bool:
    """Whether a ``_Result`` says all that a fake tensor is."""
    return tensor.layout is torch.strided and not (
        tensor.requires_grad
        or tensor.constant is not None
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._has_symbolic_sizes_strides
    )
