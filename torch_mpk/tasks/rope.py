"""Rotary position embedding of one position per batch row, on halves (the Llama convention)."""

import torch

from torch_mpk.registry import task


@task(
    "x[B, H, D], cos[B, D], sin[B, D] -> y[B, H, D]",
    role="row",
    samples=[{"B": 1, "H": 4, "D": 16}, {"B": 3, "H": 2, "D": 64}],
)
def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x * cos + cat(-x[D/2:], x[:D/2]) * sin``; each product and the sum round to x's dtype."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.unsqueeze(1) + rotated * sin.unsqueeze(1)
