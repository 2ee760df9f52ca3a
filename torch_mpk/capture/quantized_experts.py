"""Experts whose weights are torchao's tensors, as calls of ``quantized_expert_linear``.

These tensors know few of the products that Transformers' implementations of experts call: those of int8 only what the
loop over experts needs, which ends graphs. What is traced for this backend has one form in the place of all
implementations. It reads the tensors' parts where they lie. Calls outside of ``torch.compile`` stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_mpk.capture import quantized_inputs, quantized_modules
from torch_mpk.errors import UnsupportedError

# Rows and columns of a scale, and whether there are zero points, and these and scales are stored by column.
Blocks = tuple[int, int, bool, bool]


def replace_products(moe: Any) -> None:
    """Takes the implementations' place in what is traced from now on. ``moe``: Transformers' module of experts."""
    if not hasattr(moe, "ExpertsInterface"):
        return
    known = moe.ExpertsInterface.get_interface
    is_ours, tell = quantized_modules.constants()
    # Dynamo calls these itself, with the weights as they are.
    reason = torch.compiler.assume_constant_result(lambda weight: _reason(weight))
    blocks = torch.compiler.assume_constant_result(lambda weight: blocks_of(weight))

    def get_interface(self: Any, experts_implementation: str, default: Callable[..., Tensor]) -> Callable[..., Tensor]:
        forward = known(self, experts_implementation, default)
        if type(self) is not moe.ExpertsInterface or not torch.compiler.is_compiling() or not is_ours():
            return forward
        of_package = default if experts_implementation == "eager" else forward

        def products(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            if not any(_is_in_parts(getattr(experts, name)) for name in _names(experts)):
                return forward(experts, x, ids, weights)
            why = _refuses(experts, reason)
            if why:
                tell(f"{type(experts).__name__} in torchao's tensors", why)
                return of_package(experts, x, ids, weights)
            return experts_forward(experts, x, ids, weights, blocks)

        return products

    moe.ExpertsInterface.get_interface = get_interface


def experts_forward(
    experts: Any, x: Tensor, ids: Tensor, weights: Tensor, blocks: Callable[[Tensor], Blocks]
) -> Tensor:
    """The products and sums of Transformers' ``grouped_mm``, of x[R, H], ids[R, C] and weights[R, C]."""
    first, second = _names(experts)
    y = _product(getattr(experts, first), x.unsqueeze(1).expand(-1, ids.shape[1], -1), ids, blocks)
    y = experts._apply_gate(y) if experts.has_gate else experts.act_fn(y)
    y = _product(getattr(experts, second), y, ids, blocks)
    return (y * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def blocks_of(weight: Tensor) -> Blocks:
    parts = quantized_inputs.parts_of(weight, 3)
    assert parts is not None
    are_by_column, has_zeros = "scales_by_column" in parts.operands, "zero_point" in parts.operands.values()
    return parts.attrs["block_rows"], parts.attrs["block_columns"], has_zeros, are_by_column


def _product(weight: Any, x: Tensor, ids: Tensor, blocks: Callable[[Tensor], Blocks]) -> Tensor:
    if not _is_in_parts(weight):
        return torch.ops.mpk.expert_linear(x, ids, weight)
    rows, columns, has_zeros, are_by_column = blocks(weight)
    scale, zero = weight.scale, weight.zero_point if has_zeros else None
    if are_by_column:
        scale, zero = scale.mT, None if zero is None else zero.mT
    attrs = {"block_rows": rows, "block_columns": columns}
    return torch.ops.mpk.quantized_expert_linear(x, ids, weight.qdata, scale, zero, **attrs)


def _names(experts: Any) -> tuple[str, str]:
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def _is_in_parts(weight: Tensor) -> bool:
    return hasattr(weight, "qdata")  # which Dynamo knows of a tensor, unlike its class


def _refuses(experts: Any, reason: Callable[[Tensor], str]) -> str:
    """Why experts are left to their package."""
    if experts.is_transposed:
        return "its rows are columns of the product"
    if experts.has_bias or experts.has_post_expert_norm or experts._is_expert_parallel:
        return "it has biases, norms behind experts, or a share of the experts"
    for name in _names(experts):
        weight = getattr(experts, name)
        if _is_in_parts(weight):
            why = reason(weight)
            if why:
                return why
    return ""


def _reason(weight: Tensor) -> str:
    try:
        return "" if quantized_inputs.parts_of(weight, 3) is not None else "its class is not known"
    except UnsupportedError as error:
        return error.reason
