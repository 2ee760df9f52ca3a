"""A row of sums, with optional operands and attributes."""

import torch
import torch.nn.functional as F

from torch_mpk import task


@task(
    "x[..., H], weight[H]?, bias[H]? -> y[..., H]",
    cpu="layer_norm.cuh",
    samples=[
        {"...": (1,), "H": 96},
        {"...": (3, 2), "H": 64, "bias": None, "eps": 1e-3},
        {"...": (2,), "H": 1030, "weight": None, "bias": None, "style": "rms"},
    ],
)
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    style: str = "mean",
) -> torch.Tensor:
    """``F.layer_norm`` over the last dimension, or, of style "rms", without subtracting the mean; computed in fp32."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    if style == "mean":
        wide = wide - wide.mean(-1, keepdim=True)
    y = F.rms_norm(wide, wide.shape[-1:], None, eps)
    if weight is not None:
        y = y * weight
    return (y if bias is None else y + bias).to(x.dtype)
