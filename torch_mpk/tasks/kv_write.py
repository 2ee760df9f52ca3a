"""Writes one position of a static cache."""

import torch

from torch_mpk.registry import task


@task(
    "cache[B, G, L, D]!, new[B, G, D], slot[1]: int64 < L ->",
    role="pointwise",
    samples=[{"B": 1, "G": 2, "L": 8, "D": 16}, {"B": 3, "G": 1, "L": 5, "D": 8}],
)
def kv_write(cache: torch.Tensor, new: torch.Tensor, slot: torch.Tensor) -> None:
    """``cache[:, :, slot] = new``, where ``slot`` is a tensor; a slot outside [0, L) writes nothing."""
    index = slot.clamp(0, cache.shape[2] - 1)
    row = torch.where(index == slot, new.unsqueeze(2), cache.index_select(2, index))
    cache.index_copy_(2, index, row)
