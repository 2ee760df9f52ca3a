"""Attention of one query position per batch row over a static cache, which it can extend first."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from torch_mpk.errors import TaskError
from torch_mpk.registry import task
from torch_mpk.registry.stream_traits import StreamTraits
from torch_mpk.tasks.kv_write import kv_write

STYLES = ("sdpa", "eager")


@task(
    "q[B, H, D], k_new[B, G, D]?, v_new[B, G, V]?, slot[1]?: int64 < L, k_cache[B, G, L, D]!, v_cache[B, G, L, V]!, "
    "mask[B, H, L]?, limit[B]?: int64 < L, sinks[H]? -> y[B, H, V]",
    role="stream",
    traits=StreamTraits(
        loaded=("k_cache", "v_cache", "limit"),
        staged=("q", "k_new", "v_new"),
        takes_rows=("q", "k_new"),
        hands_over=True,
        cursor="slot",
    ),
    samples=[
        {"B": 1, "H": 4, "G": 2, "L": 24, "D": 16, "V": 16, "scale": 0.25, "mask": None, "sinks": None},
        {"B": 3, "H": 4, "G": 4, "L": 40, "D": 32, "V": 16, "scale": 0.2, "mask": torch.bool},
        {
            "B": 2,
            "H": 8,
            "G": 2,
            "L": 33,
            "D": 64,
            "V": 64,
            "scale": 0.125,
            "limit": None,
            "sinks": None,
            "style": "eager",
            "softcap": 2.0,
        },
        {
            "B": 2,
            "H": 6,
            "G": 1,
            "L": 16,
            "D": 16,
            "V": 16,
            "scale": 0.3,
            "k_new": None,
            "v_new": None,
            "slot": None,
            "style": "eager",
        },
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
    sinks: torch.Tensor | None = None,
    *,
    scale: float,
    style: str = "sdpa",
    softcap: float = 0.0,
) -> torch.Tensor:
    """``softmax(scale * q @ k_cache.T + mask) @ v_cache`` per head; H / G neighbouring query heads share a cache head.

    With ``k_new``, ``v_new`` and ``slot`` it first writes row ``slot`` of both caches (see ``kv_write``). ``mask`` is
    bool (True: attend) or a float to add. Positions at or beyond ``limit`` are ignored; a limit beyond L means L.
    ``style`` is the form this stands for: "sdpa" is ``F.scaled_dot_product_attention``, "eager" a matmul, a softmax in
    fp32 and a matmul; with ``sinks`` scores lose their maximum first, and the softmax is in their dtype. A head without
    a key, because the limit is below 1 or the mask False or -inf everywhere below it, gives zeros in the first, or with
    a sink, and NaN in the second without one; otherwise ``style`` only matters to the bits of this reference.

    With ``softcap`` a score is ``softcap * tanh(score / softcap)`` before the mask is added. ``sinks`` are each head's
    score of a key that there is not, which takes its share of the weights. Values may have another size, V, than keys.

    Raises TaskError for another style, when H is not a multiple of G, ``softcap`` is negative, or part of ``k_new``,
    ``v_new``, ``slot`` is missing.
    """
    if len({k_new is None, v_new is None, slot is None}) != 1:
        raise TaskError("attention: k_new, v_new and slot belong together: give all of them or none")
    if k_new is not None:
        kv_write(k_cache, k_new, slot)
        kv_write(v_cache, v_new, slot)
    mask = None if mask is None else mask.unsqueeze(2)
    limit = None if limit is None else limit.unsqueeze(1)
    scores = Scores(scale, softcap, sinks)
    return attend("attention: k_cache", q.unsqueeze(2), k_cache, v_cache, mask, limit, scores, style).squeeze(2)


class Scores(NamedTuple):
    """What becomes of products of queries and keys."""

    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None

    @property
    def are_plain(self) -> bool:
        return not self.softcap and self.sinks is None


def check_softcap(task: str, softcap: float) -> None:
    if not softcap >= 0:
        raise TaskError(f"{task}: softcap={softcap}, expected a bound of scores, or 0 for none")


def capped(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    return torch.tanh(scores / softcap) * softcap if softcap else scores


def softmax_beside(scores: torch.Tensor, sinks: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Over the last dimension; ``sinks``, which can be broadcast to all others, have the rest of the weights."""
    if sinks is None:
        return scores.softmax(-1, dtype)
    return with_sinks(scores, sinks).softmax(-1, dtype)[..., :-1]


def with_sinks(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    return torch.cat((scores, sinks.expand(*scores.shape[:-1]).unsqueeze(-1)), -1)


def weights_of(
    scores: torch.Tensor, live: torch.Tensor, softcap: float = 0.0, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Of [rows, groups, heads of a group, keys], those that are ``live``."""
    scores = capped(scores, softcap).masked_fill(~live, -torch.inf)
    return softmax_beside(scores, None if sinks is None else sinks.view(*scores.shape[1:3]), scores.dtype)


def attend(
    keys: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    limit: torch.Tensor | None,
    scores_of: Scores,
    style: str,
) -> torch.Tensor:
    """The same for q[B, H, S, D], mask[B, H, S, L] and limit[B, S]; nothing is written. ``keys`` names task and k."""
    task, operand = keys.split(": ")
    heads, (groups, length) = q.shape[1], k.shape[1:3]
    if heads % groups:
        raise TaskError(f"{task}: q has H={heads}, expected a multiple of {operand}'s G={groups}")
    if style not in STYLES:
        raise TaskError(f"{task}: style is {style!r}, expected one of {', '.join(STYLES)}")
    scale, softcap, sinks = scores_of
    check_softcap(task, softcap)
    k, v = (cache.unsqueeze(2).expand(-1, -1, heads // groups, -1, -1).flatten(1, 2) for cache in (k, v))
    if limit is not None:
        below = torch.arange(length, device=q.device) < limit[:, None, :, None]
        if mask is None:
            mask = below
        else:
            mask = mask & below if mask.dtype == torch.bool else mask.masked_fill(~below, -torch.inf)

    if style == "sdpa" and scores_of.are_plain:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        scores = capped(torch.matmul(q, k.transpose(2, 3)) * scale, softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        beside = None if sinks is None else sinks[:, None]
        if style == "eager" and beside is not None:
            both = with_sinks(scores, beside)
            weights = (both - both.amax(-1, keepdim=True)).softmax(-1)[..., :-1]
        else:
            wide = torch.float32 if style == "eager" else torch.promote_types(q.dtype, torch.float32)
            weights = softmax_beside(scores, beside, wide)
        y = torch.matmul(weights.to(q.dtype), v)
    if mask is not None and style == "sdpa":  # one of PyTorch's kernels averages where nothing is attended to
        live = mask if mask.dtype == torch.bool else mask != -torch.inf
        y = y.masked_fill(~live.any(-1, keepdim=True), 0)
    return y
