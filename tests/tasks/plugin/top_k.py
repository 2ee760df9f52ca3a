"""Two outputs, and shared memory."""

import torch

from torch_mpk import task


@task(
    "x[R, N] -> values[R, K], indices[R, K]",
    tile="R",
    cpu="top_k.cuh",
    samples=[{"R": 1, "N": 50, "count": 1}, {"R": 3, "N": 1500, "count": 5}, {"R": 6, "N": 64, "count": 8}],
)
def top_k(x: torch.Tensor, *, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest values of each row, the largest first, and their positions: of equal ones the first."""
    values, indices = torch.sort(x, dim=-1, descending=True, stable=True)
    return values[:, :count].contiguous(), indices[:, :count].contiguous()
