"""bitsandbytes' linears of 4 bits, whose numbers are looked up in a table, by blocks of a flat weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_mpk.capture.quantized_modules import leave, product, take


def take_linears(module: Any) -> None:
    """``Linear4bit``, and that of 8 bits with a reason."""
    leave(module, ["Linear8bitLt"], "which columns it multiplies in 8 bits depends on the data")
    if hasattr(module, "Linear4bit"):
        take(module.Linear4bit, _refuses, _multiply)


def keep_words(model: Any) -> None:
    """Leaves weights as they are in eager calls on processors for which the package would write them anew."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _refuses(module: Any) -> str:
    state = getattr(module.weight, "quant_state", None)
    if state is None:
        return "it is not quantised yet"
    if getattr(state, "packing_format_for_cpu", False):
        return "an eager call on this processor has written its words anew; compile before the first call"
    if module.weight.dtype != torch.uint8:
        return f"it stores {module.weight.dtype}, expected torch.uint8"
    if tuple(state.shape) != (module.out_features, module.in_features):
        return f"its weight was {list(state.shape)}, expected {[module.out_features, module.in_features]}"
    if module.in_features % state.blocksize:
        return f"its blocks of {state.blocksize} are not whole in rows of {module.in_features} columns"
    if module.training:
        return "it is being trained"
    return ""


def _multiply(self: Any, x: Tensor) -> Tensor:
    state = self.weight.quant_state
    dtype = self.compute_dtype
    if dtype is None or (not self.compute_type_is_set and x.dtype != torch.float16):
        dtype = x.dtype
    rows, blocks = self.out_features, self.in_features // state.blocksize
    weight, scale = self.weight.data.view(rows, -1), state.absmax.view(rows, blocks)
    bias = None if self.bias is None else self.bias.to(dtype)
    operands: list[Tensor | None] = [weight, scale, bias, None, None, None, state.code]
    attrs = {"block_rows": 1, "block_columns": state.blocksize}
    if state.nested:
        operands += [state.state2.code, state.state2.absmax, state.offset.reshape(1)]
        attrs["scale_block"] = state.state2.blocksize
    return product(x.to(dtype), rows, *operands, **attrs).to(x.dtype)
