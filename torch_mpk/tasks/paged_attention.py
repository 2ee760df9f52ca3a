"""Attention of one query position per row over a cache in pages, which it can extend first."""

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torch_mpk.errors import TaskError
from torch_mpk.registry import task
from torch_mpk.registry.stream_traits import StreamTraits
from torch_mpk.tasks.attention import check_softcap, weights_of


@task(
    "q[R, H, D], k_new[R, G, D]?, v_new[R, G, V]?, k_pages[P, S, G, D]!, v_pages[P, S, G, V]!, "
    "block_table[R, M]: int32, length[R]: int32, sinks[H]? -> y[R, H, V]",
    role="stream",
    traits=StreamTraits(
        loaded=("k_pages", "v_pages", "block_table", "length"),
        staged=("q", "k_new", "v_new"),
        takes_rows=("q", "k_new"),
        hands_over=True,
        paged_by="block_table",
    ),
    alone="kernel",
    samples=[
        {"R": 1, "H": 4, "G": 2, "D": 16, "V": 16, "P": 6, "S": 3, "M": 4, "scale": 0.25, "sinks": None},
        {
            "R": 3,
            "H": 6,
            "G": 1,
            "D": 24,
            "V": 16,
            "P": 9,
            "S": 4,
            "M": 2,
            "scale": 0.2,
            "k_new": None,
            "v_new": None,
            "softcap": 2.0,
        },
    ],
)
def paged_attention(
    q: torch.Tensor,
    k_new: torch.Tensor | None,
    v_new: torch.Tensor | None,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    length: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
) -> torch.Tensor:
    """``softmax(scale * q @ k.T) @ v`` in fp32 or wider, of each row over the first ``length`` positions of its own.

    Position p of row r is row ``p % S`` of page ``block_table[r, p // S]``; H / G neighbouring query heads share a head
    of the pages. With ``k_new`` and ``v_new``, each row first writes its last position, ``length - 1``: rows must then
    write to pages that no other row of the call has, as engines allot them. What lies beyond the table, or in a page
    that there is not, as -1 says, is neither written nor read; a row with nothing to attend to gives zeros, as one of
    length 0 does, which pads a batch. Values may have another size, V, than keys. ``sinks`` and ``softcap`` change the
    softmax as in ``attention``.

    Raises TaskError when H is not a multiple of G, one of ``k_new`` and ``v_new`` is missing, or ``softcap`` is
    negative.
    """
    heads, (num_pages, page_size, groups) = q.shape[1], k_pages.shape[:3]
    if heads % groups:
        raise TaskError(f"paged_attention: q has H={heads}, expected a multiple of k_pages' G={groups}")
    if (k_new is None) != (v_new is None):
        raise TaskError("paged_attention: k_new and v_new belong together: give both or neither")
    check_softcap("paged_attention", softcap)
    if isinstance(q, FakeTensor):  # which has no values, and its sizes may be symbols
        return torch.empty((*q.shape[:2], v_pages.shape[3]), dtype=q.dtype, device=q.device)
    position = torch.arange(block_table.shape[1] * page_size, device=q.device)
    page = block_table.to(torch.int64).repeat_interleave(page_size, 1)  # [R, positions]
    live = (position < length.unsqueeze(1)) & (page >= 0) & (page < num_pages)
    rows = page.clamp(0, num_pages - 1), (position % page_size).expand_as(page)
    if k_new is not None and v_new is not None:
        is_new = live & (position == length.unsqueeze(1) - 1)
        _write(k_pages, k_new, is_new, rows)
        _write(v_pages, v_new, is_new, rows)

    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (pages[rows].to(wide).where(live[:, :, None, None], 0.0) for pages in (k_pages, v_pages))
    scores = scale * torch.einsum("rghd,rlgd->rghl", q.to(wide).unflatten(1, (groups, -1)), k)
    weights = weights_of(scores, live[:, None, None], softcap, sinks)
    y = torch.einsum("rghl,rlgd->rghd", weights, v).flatten(1, 2)
    return y.where(live.any(1)[:, None, None], 0.0).to(q.dtype)


def _write(
    pages: torch.Tensor, new: torch.Tensor, is_new: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Of each row its ``new``, where one of its positions ``is_new``; ``rows`` says where each position lies.

    How many rows write is not known on the host, so one that does not repeats what the first that does writes, or what
    is there where none does.
    """
    writes = is_new.any(1)
    writer = torch.where(writes, torch.arange(new.shape[0], device=new.device), writes.to(torch.int64).argmax())
    column = is_new.to(torch.int64).argmax(1)[writer]
    place = rows[0][writer, column], rows[1][writer, column]
    pages[place] = torch.where(writes.any(), new[writer], pages[place])
