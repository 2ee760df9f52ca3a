"""Convolutions of each channel by itself, as recurrent layers have them, as the products and sums that they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

MAX_TAPS = 16  # a product each, in one program; recurrent layers have 3 or 4


def depthwise(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """``aten.convolution`` of ``x[B, C, L]`` by ``weight[C, 1, K]``: y[b, c, t] is the sum of weight[c, 0, k] times
    x[b, c, t + k * dilation], in at least float32 and rounded once. ``NotImplemented`` for any other."""
    is_one = x.dim() == 3 and groups == x.shape[1] == weight.shape[0] and weight.shape[2] <= MAX_TAPS
    if not is_one or transposed or tuple(stride) != (1,):
        return NotImplemented
    dtype = torch.promote_types(x.dtype, torch.float32)
    step, taps = dilation[0], weight.shape[2]
    x = F.pad(x, (padding[0], padding[0]))
    length = x.shape[2] - step * (taps - 1)
    y: Any = 0 if bias is None else bias.to(dtype)[:, None]
    for k in range(taps):
        y = y + x[:, :, k * step : k * step + length].to(dtype) * weight[:, 0, k, None].to(dtype)
    return y.to(x.dtype)
