"""Experts of FP8 checkpoints, which Transformers loads as ``FP8Experts``, as calls of ``quantized_expert_linear``.

Transformers has several implementations, for each of which it fetches kernels, but for a loop over experts that ends
graphs. What is traced for this backend has one form in the place of all of them. It also is what eager calls run where
there is no package with Transformers' kernels, but for the loop, whose linears are substituted themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_mpk.capture import quantized_modules
from torch_mpk.tasks.quantized_linear import LARGEST_E4M3

_KERNELS = ("batched_mm", "grouped_mm")  # implementations that fetch kernels


def replace_products(module: Any) -> None:
    """Takes the implementations' place in what is traced from now on. ``module``: Transformers' module of FP8."""
    interface = module.FP8ExpertsInterface
    known = interface.get_interface
    is_ours, tell = quantized_modules.constants()

    def get_interface(self: Any, experts_implementation: str, default: Callable[..., Tensor]) -> Callable[..., Tensor]:
        forward = known(self, experts_implementation, default)
        if not torch.compiler.is_compiling() or not is_ours():
            return forward

        def products(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            why = _refuses(experts)
            if why:
                tell("transformers.FP8Experts", why)
            return (forward if why else experts_forward)(experts, x, ids, weights)

        return products

    interface.get_interface = get_interface
    if not module.is_kernels_available():
        interface._global_mapping.update(dict.fromkeys(_KERNELS, experts_forward))


def _refuses(experts: Any) -> str:
    """Why experts are left to Transformers."""
    return "" if experts.down_proj.is_floating_point() else "they store FP4"


def experts_forward(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """``FP8Experts.forward``, of x[R, H], ids[R, C] and weights[R, C]. Activations are quantised as ``fp8_linear`` does
    it."""
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    y = _product(experts, first, "gate_up_proj", x.unsqueeze(1).expand(-1, ids.shape[1], -1), ids, x.dtype)
    y = experts._apply_gate(y) if experts.has_gate else experts.act_fn(y)
    y = _product(experts, "down_proj", "down_proj", y, ids, x.dtype)
    return (y * weights.to(y.dtype).unsqueeze(-1)).sum(1).to(x.dtype)


def _product(experts: Any, name: str, name_of_x: str, x: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """In ``dtype``; in float32 where the scale of x is given."""
    weight, scale = getattr(experts, name), getattr(experts, f"{name}_scale_inv")
    if weight.element_size() > 1:  # what blocks do not divide is not quantised
        return torch.ops.mpk.expert_linear(x.to(dtype), ids, weight)
    rows, columns = _block(experts.block_size, weight.shape[1], scale.shape[1])
    attrs = {"block_rows": rows, "block_columns": columns}
    if experts.activation_scheme == "dynamic":
        return torch.ops.mpk.quantized_expert_linear(x, ids, weight, scale, **attrs, x_columns=columns or -1)
    given = getattr(experts, f"{name_of_x}_activation_scale")
    scales = given.float()[ids.clamp_max(len(given) - 1)].unsqueeze(-1)  # ids beyond the experts are those of none
    power = scales.log2().floor().exp2()  # leaves the result its size, which float16 has room for
    numbers = (_e4m3(x.float() / scales) * power).to(dtype)
    return torch.ops.mpk.quantized_expert_linear(numbers, ids, weight, scale, **attrs) * (scales / power)


def _e4m3(x: Tensor) -> Tensor:
    """The float8_e4m3fn numbers next to x, in float32: programs compute nothing in that dtype.

    They are multiples of a step that is a power of two, and an eighth of x's own.
    """
    x = x.clamp(-LARGEST_E4M3, LARGEST_E4M3)
    step = (x.abs().log2().floor().clamp_min(-6) - 3).exp2()
    return (x / step).round() * step


def _block(size: Sequence[int] | None, num_rows: int, num_blocks: int) -> tuple[int, int]:
    """Rows and columns of a scale. Gate and up have at least one each, however small a block they are."""
    rows, columns = (num_rows, 0) if size is None else (size[0], size[1])
    return (rows if -(-num_rows // rows) == num_blocks else num_rows // num_blocks), columns
