"""The value at a rank, as in top-k sampling."""

import torch

from torch_mpk.registry import task


@task(
    "x[..., N], n[...]: int64 < N, peaks[..., C]? -> y[...]",
    header="ranks.cuh",
    samples=[
        {"...": (1,), "N": 100, "peaks": None},
        {"...": (2, 3), "N": 1000, "peaks": None},
        {"...": (2,), "N": 4099, "peaks": None},
    ],
)
def nth_largest(x: torch.Tensor, n: torch.Tensor, peaks: torch.Tensor | None = None) -> torch.Tensor:
    """``x.sort(descending=True).values[n]`` of each row; ``n`` counts from 0.

    ``peaks``, the largest of each of C equal parts of a row, adds nothing but speed: many workers may find them, where
    one has the whole row to look at.
    """
    if not x.is_floating_point():
        raise TypeError(f"nth_largest: x must be floating point, got {x.dtype}")
    return x.sort(-1, descending=True).values.gather(-1, n.unsqueeze(-1)).squeeze(-1)
