"""Attention of single positions over caches whose pages lie anywhere."""

import torch

from torch_mpk.registry import task


@task(
    "q[N, G, R, D], k_cache[P, S, G, D], v_cache[P, S, G, D], pages[M]: int32 < P, first[N]: int64 < M, "
    "limit[N]: int64 -> y[N, G, R, D]",
    tile="N, G",
    cpu="paged_decode.cuh",
    samples=[
        {"N": 1, "G": 2, "R": 2, "D": 16, "P": 5, "S": 16, "M": 3, "scale": 0.25},
        {"N": 3, "G": 1, "R": 3, "D": 24, "P": 40, "S": 3, "M": 50, "scale": 0.2},
    ],
)
def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pages: torch.Tensor,
    first: torch.Tensor,
    limit: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """``softmax(scale * q @ k.T) @ v`` in fp32 or wider, for N tokens with R query heads to each of G cache heads.

    Position p of token t is row ``p % S`` of page ``pages[first[t] + p // S]``, for p below ``limit[t]``. What lies
    beyond ``pages``, or in a page that the caches do not have, is passed over; a token with nothing to attend to gives
    zeros.
    """
    num_pages, page_size = k_cache.shape[:2]
    position = torch.arange(pages.shape[0] * page_size, device=q.device)
    entry = first.unsqueeze(1) + position // page_size
    page = pages[entry.clamp(0, pages.shape[0] - 1)].to(torch.int64)
    inside = (entry >= 0) & (entry < pages.shape[0]) & (page >= 0) & (page < num_pages)
    live = inside & (position < limit.unsqueeze(1))
    row = page.clamp(0, num_pages - 1), position % page_size
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (cache[row].to(wide).where(live[:, :, None, None], 0.0) for cache in (k_cache, v_cache))
    scores = scale * torch.einsum("tgrd,tlgd->tgrl", q.to(wide), k)
    weights = scores.masked_fill(~live[:, None, None], -torch.inf).softmax(-1)
    y = torch.einsum("tgrl,tlgd->tgrd", weights, v)
    return y.where(live.any(1)[:, None, None, None], 0.0).to(q.dtype)
