"""Attention of sequences with any number of new tokens each, one behind the other, over what a cache has of each."""

import torch

from torch_mpk.errors import TaskError
from torch_mpk.registry import task
from torch_mpk.streaming import Streaming


@task(
    "q[T, H, D], k_new[T, G, D], v_new[T, G, D], k_cache[N, G, D], v_cache[N, G, D], read_index[K]: int64 < N, "
    "cu_seq_lens_q[E]: int32, cu_seq_lens_k[E]: int32 -> y[T, H, D]",
    role="stream",
    streaming=Streaming(
        loaded=("k_new", "v_new", "k_cache", "v_cache", "read_index", "cu_seq_lens_q", "cu_seq_lens_k"),
        paged_by="read_index",
    ),
    samples=[
        {"T": 9, "H": 4, "G": 2, "D": 16, "N": 20, "K": 12, "E": 2, "scale": 0.25},
        {"T": 8, "H": 6, "G": 1, "D": 24, "N": 10, "K": 9, "E": 3, "scale": 0.2, "window": 3},
    ],
)
def varlen_attention(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    read_index: torch.Tensor,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """``softmax(scale * q @ k.T) @ v`` in fp32 or wider, of each new token over its sequence up to itself.

    Sequence i has the tokens from ``cu_seq_lens_q[i]`` to ``cu_seq_lens_q[i + 1]``, and as many keys as
    ``cu_seq_lens_k`` says in the same way: its tokens' own are the last of them, and of those before, the j-th is row
    ``read_index[cu_seq_lens_k[i] + j]`` of the caches. Neither is written. With ``window`` a token sees that many keys
    at most, itself among them. H / G neighbouring query heads share a key head. Lengths and places are read in the
    launch, so one build serves sequences that come, go and grow. A token of no sequence, as behind the last, gives
    zeros. What ``read_index`` has elsewhere may be anything.

    Raises TaskError when H is not a multiple of G, or ``window`` is negative.
    """
    heads, groups = q.shape[1], k_cache.shape[1]
    if heads % groups:
        raise TaskError(f"varlen_attention: q has H={heads}, expected a multiple of k_cache's G={groups}")
    if window < 0:
        raise TaskError(f"varlen_attention: window={window}, expected a number of keys, or 0 for all of them")
    begin_q, end_q, begin_k, end_k = (
        t.to(torch.int64).unsqueeze(1) for c in (cu_seq_lens_q, cu_seq_lens_k) for t in (c[:-1], c[1:])
    )
    token, key = (torch.arange(n, device=q.device) for n in (q.shape[0], read_index.shape[0]))
    has = (begin_q <= token) & (token < end_q)  # [sequences, tokens]
    num_cached = (end_k - begin_k - (end_q - begin_q)).clamp_min(0)
    place, cached_place = token - begin_q + num_cached, key - begin_k  # in the sequence
    is_cached = (cached_place >= 0) & (cached_place < num_cached)
    # How far behind a token each key stands: [sequences, tokens, cached and new keys].
    behind = place.unsqueeze(2) - torch.cat((cached_place, place), 1).unsqueeze(1)
    sees = has.unsqueeze(2) & torch.cat((is_cached, has), 1).unsqueeze(1) & (behind >= 0)
    if window:
        sees &= behind < window
    live = sees.any(0)

    wide = torch.promote_types(q.dtype, torch.float32)
    rows = read_index.clamp(0, k_cache.shape[0] - 1)
    is_seen = live.any(0)[:, None, None]
    k, v = (torch.cat((c[rows], n)).to(wide).where(is_seen, 0.0) for c, n in ((k_cache, k_new), (v_cache, v_new)))
    scores = scale * torch.einsum("tghd,lgd->tghl", q.to(wide).unflatten(1, (groups, -1)), k)
    weights = scores.masked_fill(~live[:, None, None], -torch.inf).softmax(-1)
    y = torch.einsum("tghl,lgd->tghd", weights, v).flatten(1, 2)
    return y.where(live.any(1)[:, None, None], 0.0).to(q.dtype)
