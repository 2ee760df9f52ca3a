"""Attention of several query positions of each sequence over its keys and values, which are in the cache already."""

import torch

from torch_mpk.registry import task
from torch_mpk.registry.stream_traits import StreamTraits
from torch_mpk.tasks.attention import Scores, attend


@task(
    "q[B, S, H, D], k[B, G, L, D], v[B, G, L, V], mask[B, H, S, L]?, limit[B, S]?: int64 < L, sinks[H]? "
    "-> y[B, S, H, V]",
    role="stream",
    traits=StreamTraits(loaded=("k", "v", "limit")),
    samples=[
        {"B": 1, "S": 20, "H": 4, "G": 2, "L": 24, "D": 16, "V": 16, "scale": 0.25, "mask": None, "sinks": None},
        {"B": 2, "S": 5, "H": 4, "G": 4, "L": 40, "D": 32, "V": 16, "scale": 0.2, "mask": torch.bool},
        {
            "B": 2,
            "S": 3,
            "H": 6,
            "G": 1,
            "L": 33,
            "D": 64,
            "V": 64,
            "scale": 0.125,
            "limit": None,
            "sinks": None,
            "style": "eager",
            "softcap": 2.0,
        },
    ],
)
def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    limit: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    scale: float,
    style: str = "sdpa",
    softcap: float = 0.0,
) -> torch.Tensor:
    """``attention`` of S positions of each of B sequences, which a step has written to the cache before.

    ``mask`` and ``limit`` are each position's own; through them positions are causal among themselves. Otherwise as
    ``attention``: H / G neighbouring query heads share a key head, and ``style`` says what a position without a key
    gives. Raises TaskError for another style, when H is not a multiple of G, and when ``softcap`` is negative.
    """
    y = attend("prefill_attention: k", q.transpose(1, 2), k, v, mask, limit, Scores(scale, softcap, sinks), style)
    return y.transpose(1, 2).contiguous()
