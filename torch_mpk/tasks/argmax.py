"""The position of the largest value, as in greedy sampling."""

import torch

from torch_mpk.registry import task


@task("x[..., N] -> y[...]", role="reduce", samples=[{"...": (1,), "N": 100}, {"...": (2, 3), "N": 17}])
def argmax(x: torch.Tensor) -> torch.Tensor:
    """int64; the first position where several values are largest."""
    return torch.argmax(x, -1)
