"""Attention of one query position per batch row over a static cache, which it can extend first."""

import torch
import torch.nn.functional as F

from torch_mpk.errors import TaskError
from torch_mpk.registry import task
from torch_mpk.streaming import Streaming
from torch_mpk.tasks.kv_write import kv_write

STYLES = ("sdpa", "eager")


@task(
    "q[B, H, D], k_new[B, G, D]?, v_new[B, G, D]?, slot[1]?: int64 < L, k_cache[B, G, L, D]!, v_cache[B, G, L, D]!, "
    "mask[B, H, L]?, limit[B]?: int64 < L -> y[B, H, D]",
    role="stream",
    streaming=Streaming(
        loaded=("k_cache", "v_cache", "limit"),
        staged=("q", "k_new", "v_new"),
        takes_rows=("q", "k_new"),
        hands_over=True,
        cursor="slot",
    ),
    samples=[
        {"B": 1, "H": 4, "G": 2, "L": 24, "D": 16, "scale": 0.25, "mask": None},
        {"B": 3, "H": 4, "G": 4, "L": 40, "D": 32, "scale": 0.2, "mask": torch.bool},
        {"B": 2, "H": 8, "G": 2, "L": 33, "D": 64, "scale": 0.125, "limit": None, "style": "eager"},
        {"B": 2, "H": 6, "G": 1, "L": 16, "D": 16, "scale": 0.3, "k_new": None, "v_new": None, "slot": None},
    ],
)
def attention(
    q: torch.Tensor,
    k_new: torch.Tensor | None,
    v_new: torch.Tensor | None,
    slot: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    mask: torch.Tensor | None = None,
    limit: torch.Tensor | None = None,
    *,
    scale: float,
    style: str = "sdpa",
) -> torch.Tensor:
    """``softmax(scale * q @ k_cache.T + mask) @ v_cache`` per head; H / G neighbouring query heads share a cache head.

    With ``k_new``, ``v_new`` and ``slot`` it first writes row ``slot`` of both caches (see ``kv_write``). ``mask`` is
    bool (True: attend) or a float to add. Positions at or beyond ``limit`` are ignored; a limit beyond L means L.
    ``style`` is the form this stands for: "sdpa" is ``F.scaled_dot_product_attention``, "eager" a matmul, a softmax in
    fp32 and a matmul. A head without a key, because the limit is below 1 or the mask False or -inf everywhere below it,
    gives zeros in the first and NaN in the second; otherwise ``style`` only matters to the bits of this reference.
    Raises ValueError for another style, when H is not a multiple of G, or part of ``k_new``, ``v_new``, ``slot`` is
    missing.
    """
    if len({k_new is None, v_new is None, slot is None}) != 1:
        raise TaskError("attention: k_new, v_new and slot belong together: give all of them or none")
    if k_new is not None:
        kv_write(k_cache, k_new, slot)
        kv_write(v_cache, v_new, slot)
    mask = None if mask is None else mask.unsqueeze(2)
    limit = None if limit is None else limit.unsqueeze(1)
    return attend("attention: k_cache", q.unsqueeze(2), k_cache, v_cache, mask, limit, scale, style).squeeze(2)


def attend(
    keys: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    limit: torch.Tensor | None,
    scale: float,
    style: str,
) -> torch.Tensor:
    """The same for q[B, H, S, D], mask[B, H, S, L] and limit[B, S]; nothing is written. ``keys`` names task and k."""
    task, operand = keys.split(": ")
    heads, (groups, length) = q.shape[1], k.shape[1:3]
    if heads % groups:
        raise TaskError(f"{task}: q has H={heads}, expected a multiple of {operand}'s G={groups}")
    if style not in STYLES:
        raise TaskError(f"{task}: style is {style!r}, expected one of {', '.join(STYLES)}")
    k, v = (cache.unsqueeze(2).expand(-1, -1, heads // groups, -1, -1).flatten(1, 2) for cache in (k, v))
    if limit is not None:
        below = torch.arange(length, device=q.device) < limit[:, None, :, None]
        if mask is None:
            mask = below
        else:
            mask = mask & below if mask.dtype == torch.bool else mask.masked_fill(~below, -torch.inf)

    if style == "sdpa":
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        if mask is not None:  # one of PyTorch's kernels averages where nothing is attended to
            live = mask if mask.dtype == torch.bool else mask != -torch.inf
            y = y.masked_fill(~live.any(-1, keepdim=True), 0)
        return y
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype), v)
