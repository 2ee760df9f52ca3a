"""Attention of sequences with any number of new tokens each, one behind the other, over what a cache has of each."""

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from torch_mpk.errors import TaskError
from torch_mpk.registry import task
from torch_mpk.registry.stream_traits import StreamTraits
from torch_mpk.tasks.attention import check_softcap, weights_of

MOST_SCORES = 1 << 25  # of the reference, at once: 128 MiB in fp32


@task(
    "q[T, H, D], k_new[T, G, D], v_new[T, G, V], k_cache[N, G, D], v_cache[N, G, V], read_index[K]: int64 < N, "
    "cu_seq_lens_q[E]: int32, cu_seq_lens_k[E]: int32, sinks[H]? -> y[T, H, V]",
    role="stream",
    traits=StreamTraits(
        loaded=("k_new", "v_new", "k_cache", "v_cache", "read_index", "cu_seq_lens_q", "cu_seq_lens_k"),
        paged_by="read_index",
    ),
    samples=[
        {"T": 9, "H": 4, "G": 2, "D": 16, "V": 16, "N": 20, "K": 12, "E": 2, "scale": 0.25, "sinks": None},
        {"T": 8, "H": 6, "G": 1, "D": 24, "V": 16, "N": 10, "K": 9, "E": 3, "scale": 0.2, "window": 3, "softcap": 2.0},
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
    sinks: torch.Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """``softmax(scale * q @ k.T) @ v`` in fp32 or wider, of each new token over its sequence up to itself.

    Sequence i has the tokens from ``cu_seq_lens_q[i]`` to ``cu_seq_lens_q[i + 1]``, and as many keys as
    ``cu_seq_lens_k`` says in the same way: its tokens' own are the last of them, and of those before, the j-th is row
    ``read_index[cu_seq_lens_k[i] + j]`` of the caches. Neither is written. With ``window`` a token sees that many keys
    at most, itself among them. H / G neighbouring query heads share a key head. Lengths and places are read in the
    launch, so one build serves sequences that come, go and grow. A token of no sequence, as behind the last, gives
    zeros. What ``read_index`` has elsewhere may be anything. Values may have another size, V, than keys. ``sinks`` and
    ``softcap`` change the softmax as in ``attention``.

    Raises TaskError when H is not a multiple of G, or ``window`` or ``softcap`` is negative.
    """
    heads, groups = q.shape[1], k_cache.shape[1]
    if heads % groups:
        raise TaskError(f"varlen_attention: q has H={heads}, expected a multiple of k_cache's G={groups}")
    if window < 0:
        raise TaskError(f"varlen_attention: window={window}, expected a number of keys, or 0 for all of them")
    check_softcap("varlen_attention", softcap)
    y = torch.empty((*q.shape[:2], v_cache.shape[2]), dtype=q.dtype, device=q.device)
    if isinstance(q, FakeTensor):  # which has no values, and its sizes may be symbols
        return y
    bounds_q, bounds_k = cu_seq_lens_q.to(torch.int64), cu_seq_lens_k.to(torch.int64)
    num_cached = F.pad((bounds_k.diff() - bounds_q.diff()).clamp_min(0), (0, 1))  # of no sequence, the last: none
    token, key = (torch.arange(n, device=q.device) for n in (q.shape[0], read_index.shape[0]))
    sequence, has_one = _sequences(token, bounds_q)
    cached_sequence, is_in_one = _sequences(key, bounds_k)
    place = token - bounds_q[sequence] + num_cached[sequence]  # in the sequence
    cached_place = key - bounds_k[cached_sequence]
    is_seen = is_in_one & (cached_place < num_cached[cached_sequence])
    is_seen &= bounds_q.diff(append=bounds_q[-1:])[cached_sequence] > 0
    if window:  # the first token's, which reaches back furthest
        is_seen &= num_cached[cached_sequence] - cached_place < window
    key_sequence, key_place = torch.cat((cached_sequence, sequence)), torch.cat((cached_place, place))
    is_seen = torch.cat((is_seen, has_one))

    wide = torch.promote_types(q.dtype, torch.float32)
    rows = read_index.clamp(0, k_cache.shape[0] - 1)
    seen = is_seen[:, None, None]
    k, v = (torch.cat((c[rows], n)).to(wide).where(seen, 0.0) for c, n in ((k_cache, k_new), (v_cache, v_new)))
    in_block = max(1, MOST_SCORES // max(1, heads * len(is_seen)))
    for begin in range(0, len(q), in_block):
        tokens = slice(begin, begin + in_block)
        behind = place[tokens, None] - key_place
        live = is_seen & (behind >= 0) & (sequence[tokens, None] == key_sequence)
        if window:
            live &= behind < window
        scores = scale * torch.einsum("tghd,lgd->tghl", q[tokens].to(wide).unflatten(1, (groups, -1)), k)
        weights = weights_of(scores, live[:, None, None], softcap, sinks)
        of_block = torch.einsum("tghl,lgd->tghd", weights, v).flatten(1, 2)
        y[tokens] = of_block.where(has_one[tokens, None, None], 0.0).to(q.dtype)
    return y


def _sequences(place: torch.Tensor, bounds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each place its sequence's number, and whether it is in one at all; the numbers of others are in range."""
    number = torch.searchsorted(bounds, place, right=True) - 1
    return number.clamp(0, len(bounds) - 1), (number >= 0) & (number < len(bounds) - 1)
