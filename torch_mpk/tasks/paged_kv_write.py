"""Writes new positions into the pages of a cache."""

import torch

from torch_mpk.registry import task


@task(
    "cache[P, S, G, D]!, new[N, G, D], slot[N]: int64 < P ->",
    tile="G",
    cpu="paged_kv_write.cuh",
    float64=True,
    samples=[{"P": 5, "S": 4, "G": 2, "D": 16, "N": 1}, {"P": 70, "S": 3, "G": 3, "D": 8, "N": 2}],
)
def paged_kv_write(cache: torch.Tensor, new: torch.Tensor, slot: torch.Tensor) -> None:
    """``cache[slot[t] // S, slot[t] % S] = new[t]``. A slot outside [0, P * S) writes nothing; where several tokens
    have one slot, the last counts."""
    num_pages, page_size = cache.shape[:2]
    slots = torch.arange(num_pages * page_size, device=cache.device).view(num_pages, page_size)
    is_mine = slots.unsqueeze(-1) == slot  # [P, S, N]
    last = (is_mine * torch.arange(1, new.shape[0] + 1, device=cache.device)).amax(-1)
    cache.copy_(torch.where((last > 0)[:, :, None, None], new[(last - 1).clamp(min=0)], cache))
