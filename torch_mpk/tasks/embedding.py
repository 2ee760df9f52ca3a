"""Rows of a table."""

import torch
import torch.nn.functional as F

from torch_mpk.registry import task


@task(
    "ids[...]: int64 < V, weight[V, H] -> y[..., H]",
    role="pointwise",
    samples=[{"...": (1, 1), "V": 20, "H": 16}, {"...": (3,), "V": 7, "H": 8}],
)
def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.embedding(ids, weight)
