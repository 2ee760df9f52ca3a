"""Softmax over the last dimension."""

import torch

from torch_mpk.registry import task


@task("x[..., N] -> y[..., N]", role="reduce", samples=[{"...": (1,), "N": 100}, {"...": (2, 3), "N": 17}])
def softmax(x: torch.Tensor) -> torch.Tensor:
    """Computed in fp32, or in fp64 where x has it, rounded once to x's dtype."""
    return torch.softmax(x, -1)
