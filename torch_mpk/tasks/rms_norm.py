"""Root-mean-square normalisation over the last dimension, in the three rounding orders that models use."""

import torch
import torch.nn.functional as F

from torch_mpk.errors import TaskError
from torch_mpk.registry import task

STYLES = ("llama", "torch", "gemma")


@task(
    "x[R, H], weight[H]? -> y[R, H]",
    role="row",
    scales_rows=True,
    samples=[
        {"R": 1, "H": 256, "eps": 1e-6, "style": "llama"},
        {"R": 5, "H": 64, "eps": 1e-5, "style": "llama", "weight": None},
        {"R": 3, "H": 128, "eps": 1e-5, "style": "torch"},
        {"R": 3, "H": 128, "eps": 1e-6, "style": "gemma"},
        {"R": 2, "H": 64, "eps": 1e-6, "style": "gemma", "weight": torch.float32},
    ],
)
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float, style: str) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps)``, times the weight.

    ``style`` says where values round to x's dtype: "llama" before and after the weight multiply, "torch"
    (``F.rms_norm``) once at the end, "gemma" once at the end of ``normalised * (1 + weight)``. Raises ValueError for
    another style.
    """
    if style not in STYLES:
        raise TaskError(f"rms_norm: style is {style!r}, expected one of {', '.join(STYLES)}")
    if style == "torch":
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    x32 = x.to(torch.float32)
    normalised = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    if style == "gemma" and weight is not None:
        normalised = normalised * (1.0 + weight.to(torch.float32))
    y = normalised.to(x.dtype)
    return y if weight is None or style == "gemma" else weight * y
