"""The value at a rank, as in top-k sampling."""

import torch

from torch_mpk.registry import task


@task(
    "x[..., N], n[...]: int64 < N -> y[...]",
    header="ranks.cuh",
    samples=[{"...": (1,), "N": 100}, {"...": (2, 3), "N": 1000}, {"...": (2,), "N": 4099}],
)
def nth_largest(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """``x.sort(descending=True).values[n]`` of each row; ``n`` counts from 0."""
    return x.sort(-1, descending=True).values.gather(-1, n.unsqueeze(-1)).squeeze(-1)
