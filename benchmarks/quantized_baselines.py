"""The baselines of decode.py for quantised linears: PyTorch itself offers them, and no package fetches kernels."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from torch_mpk.tasks.quantized_linear import LARGEST_E4M3, LEAST_SCALE, dequantised
from torch_mpk.testing.quantized import IntegerLinear


def scaled_product(x: Tensor, weight: Tensor, scale: Tensor, block: Sequence[int]) -> Tensor:
    """W8A8 by cuBLASLt: activations quantised by row and 128 columns."""
    blocks = x.float().unflatten(-1, (-1, block[1]))
    scales = (blocks.abs().amax(-1) / LARGEST_E4M3).clamp_min(LEAST_SCALE)
    numbers = (blocks / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2)
    recipes = [ScalingType.BlockWise1x128], [ScalingType.BlockWise128x128]
    return F.scaled_mm(
        numbers, weight.t(), scales.t().contiguous().t(), recipes[0], scale.t(), recipes[1],
        swizzle_a=SwizzleType.NO_SWIZZLE, swizzle_b=SwizzleType.NO_SWIZZLE, output_dtype=x.dtype,
    )  # fmt: skip


def dequantised_product(x: Tensor, weight: Tensor, scale: Tensor, block: Sequence[int]) -> Tensor:
    """The graph makes the weight in x's dtype, which Inductor may fuse. x is not quantised."""
    return F.linear(x, dequantised(weight, scale, *block, x.dtype))


def use(model: torch.nn.Module, weights: str, device: str) -> None:
    """Has a model of ``quantize_linears`` compute so from here on."""
    if weights == "int4":
        for module in model.modules():
            if isinstance(module, IntegerLinear):
                _pack(module)
        IntegerLinear.forward = _int4_linear  # type: ignore[method-assign]
        return
    if weights == "int8":
        IntegerLinear.forward = _int8_linear  # type: ignore[method-assign]
        return
    from transformers.integrations import finegrained_fp8

    product = _quickest(device)
    print(f"the baseline's products: {product.__name__}", file=sys.stderr)

    def fp8_linear(
        input: Tensor,  # noqa: A002 - transformers' name
        weight: Tensor,
        weight_scale_inv: Tensor,
        block_size: Sequence[int],
        bias: Tensor | None = None,
        *_: Any,
    ) -> Tensor:
        y = product(input.reshape(-1, input.shape[-1]), weight, weight_scale_inv, block_size)
        return (y if bias is None else y + bias).reshape(*input.shape[:-1], -1)

    finegrained_fp8.fp8_linear = fp8_linear


def _int8_linear(self: IntegerLinear, x: Tensor) -> Tensor:
    y = F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype).squeeze(1)
    return y if self.bias is None else y + self.bias


def _pack(module: IntegerLinear) -> None:
    """Rewrites 4-bit weights, and scales with zero points, as PyTorch's own kernel of 4-bit weights reads them."""
    low, high = (module.weight & 15) ^ 8, (module.weight >> 4 & 15) ^ 8  # 8 above the numbers
    module.packed = torch._convert_weight_to_int4pack((low << 4 | high).to(torch.uint8), 8)
    module.factors = torch.stack([module.scale, module.zero], -1).transpose(0, 1).contiguous()


def _int4_linear(self: IntegerLinear, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    y = torch._weight_int4pack_mm(rows, self.packed, self.block_columns, self.factors)
    return (y if self.bias is None else y + self.bias).reshape(*x.shape[:-1], -1)


def _quickest(device: str) -> Any:
    x, weight = torch.zeros(1, 512, dtype=torch.bfloat16, device=device), torch.zeros(512, 512, device=device)
    try:
        scaled_product(x, weight.to(torch.float8_e4m3fn), torch.ones(4, 4, device=device), (128, 128))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        print(f"no scaled product in blocks: {error}", file=sys.stderr)
        return dequantised_product
    return scaled_product
