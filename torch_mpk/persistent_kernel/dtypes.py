"""Which dtypes the operands of a layer may have together, checked where the layer is called."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torch_mpk.errors import LayerError
from torch_mpk.persistent_kernel.tensor import GlobalTensor
from torch_mpk.registry import Task

Operands = Mapping[str, GlobalTensor | None]


def check_dtypes(layer: str, task: Task, operands: Operands) -> None:
    """Raises LayerError where operands have dtypes that hand-written code of the task does not take together.

    Those that neither its signature nor one of its samples gives a dtype of their own have one. Code that is generated
    from programs promotes as PyTorch does, and of a task without samples nothing is known.
    """
    if task.role in ("pointwise", "reduce") or not task.samples:
        return
    free = [
        spec.name
        for spec in task.inputs
        if spec.dtype is None and not any(isinstance(sample.get(spec.name), torch.dtype) for sample in task.samples)
    ]
    present = {name: tensor for name in free if (tensor := operands.get(name)) is not None}
    check_alike(layer, present)
    for name, tensor in present.items():
        if task.role != "tile" and not tensor.dtype.is_floating_point:
            what = f"{_named(name, tensor)} is {tensor.dtype}, expected a floating dtype"
            raise LayerError(layer=layer, what=f"{what}: attach {tensor.name}.to({torch.get_default_dtype()})")


def check_alike(layer: str, tensors: Mapping[str, GlobalTensor]) -> None:
    """Raises LayerError unless all have the dtype of the first."""
    if not tensors:
        return
    first, like = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.dtype != like.dtype:
            what = f"{_named(first, like)} is {like.dtype} and {_named(name, tensor)} is {tensor.dtype}"
            remedy = f"attach {tensor.name}.to({like.dtype}), or {like.name}.to({tensor.dtype})"
            raise LayerError(layer=layer, what=f"{what}, expected one dtype: {remedy}")


def _named(operand: str, tensor: GlobalTensor) -> str:
    return operand if operand == tensor.name else f"{operand}={tensor.name}"
