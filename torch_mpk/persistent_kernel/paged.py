"""Attention of a batch of requests over paged caches, as Mirage's layer has it: normalise, rotate, write, attend."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from torch_mpk.errors import IndexRangeError, LayerError
from torch_mpk.persistent_kernel.builder import Builder, aten
from torch_mpk.persistent_kernel.dtypes import check_alike
from torch_mpk.persistent_kernel.grid import check_grid
from torch_mpk.persistent_kernel.tensor import Dim3, GlobalTensor, Interleaved
from torch_mpk.registry import get

META_TENSORS = (
    "qo_indptr_buffer",
    "paged_kv_indptr_buffer",
    "paged_kv_indices_buffer",
    "paged_kv_last_page_len_buffer",
)


def places(
    num_tokens: int,
    page_size: int,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    last_page_len: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Where each token stands, int64: the first of its request's pages among ``kv_indices``, its position, how many
    positions it attends to, and the row of the flat cache that it is written to.

    Request r has tokens ``qo_indptr[r] .. qo_indptr[r + 1]``, the last of what its pages
    ``kv_indptr[r] .. kv_indptr[r + 1]`` hold: all full but for the last one, which has ``last_page_len[r]``. A token of
    no request, or of one whose last page holds more than a page or nothing, attends to nothing and is written nowhere
    (row -1).
    """
    token = torch.arange(num_tokens, device=qo_indptr.device)
    ends, num_entries = qo_indptr[1:].long(), kv_indices.shape[0]
    number = (token.unsqueeze(1) >= ends).sum(1)
    is_live = number < ends.shape[0]
    request = number.clamp(max=ends.shape[0] - 1)
    first, last, end, tail = (
        t.long().index_select(0, request) for t in (kv_indptr[:-1], kv_indptr[1:], ends, last_page_len)
    )
    position = (last - first - 1) * page_size + tail - end + token
    entry = first + position // page_size
    is_live = is_live & (position >= 0) & (entry >= 0) & (entry < num_entries) & (entry < last)
    is_live = is_live & (tail > 0) & (tail <= page_size)
    page = kv_indices.long().index_select(0, entry.clamp(0, num_entries - 1))
    row = torch.where(is_live & (page >= 0), page * page_size + position % page_size, -1)
    return first, position.clamp(min=0), torch.where(is_live, position + 1, 0), row


def check_requests(
    layer: str, tokens: int, num_positions: int, cache: Sequence[int], meta: Mapping[str, torch.Tensor]
) -> None:
    """Raises IndexRangeError where what the meta tensors hold is not what ``places`` takes it for.

    Requests without new tokens read and write nothing, so their pages and lengths may be anything.
    """
    num_pages, page_size, *_ = cache
    (name_q, q), (name_kv, kv), (name_pages, pages), (name_tail, tail) = (
        (name, tensor.tolist()) for name, tensor in meta.items()
    )

    def expect(ok: bool, name: str, value: object, expected: str) -> None:
        if not ok:
            raise IndexRangeError(f"{layer}: {name} is {value}, expected {expected}: nothing was run")

    for name, bounds, most, what in ((name_q, q, tokens, "tokens"), (name_kv, kv, len(pages), "pages")):
        expect(
            sorted([0, *bounds, most]) == [0, *bounds, most],
            name,
            bounds,
            f"numbers in ascending order from 0 to {most}, the {what} there are",
        )
    for r, (begin, end) in enumerate(itertools.pairwise(q)):
        if begin == end:
            continue
        own = pages[kv[r] : kv[r + 1]]
        expect(0 < tail[r] <= page_size, f"{name_tail}[{r}]", tail[r], f"1 to {page_size}, the positions of a page")
        for i, page in enumerate(own, kv[r]):
            expect(0 <= page < num_pages, f"{name_pages}[{i}]", page, f"0 to {num_pages - 1}, the pages of the caches")
        length = (len(own) - 1) * page_size + tail[r] if own else 0
        expected = f"{end - begin}, its new tokens, to {num_positions}, the positions of cos_pos_embed"
        expect(end - begin <= length <= num_positions, f"the length of request {r}", length, expected)


def attend(
    builder: Builder,
    tensors: Mapping[str, GlobalTensor | None],
    meta: Mapping[str, GlobalTensor],
    output: GlobalTensor | None,
    grid_dim: Dim3,
    eps: float,
    style: str,
    scale: float | None,
) -> GlobalTensor:
    """Append all of the layer; returns its output, [tokens, heads * head size]."""
    for cache in ("k_cache", "v_cache"):
        if (tensor := tensors[cache]) is not None:
            builder.check_writable(cache, tensor)
    nodes = {name: None if t is None else builder.read(name, t) for name, t in tensors.items()}
    shapes = {name: tuple(node.meta["val"].shape) for name, node in nodes.items() if node is not None}
    tokens, heads, groups, size = _sizes(builder, shapes)
    page_size = shapes["k_cache"][1]
    packed = tensors["input"]
    assert packed is not None
    check_alike(builder.layer, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    axes = {"requests": _num_requests(builder, meta), "cache heads": groups}
    check_grid(builder.layer, grid_dim, axes, list(axes))
    builder.check_output(output, (tokens, heads * size), packed.dtype)
    requests = [builder.read(name, tensor) for name, tensor in meta.items()]
    first, position, limit, row = builder.trace(lambda *t: places(tokens, page_size, *t), *requests)
    cos, sin = (
        builder.trace(lambda table, at: table.index_select(0, at), nodes[name], position)
        for name in ("cos_pos_embed", "sin_pos_embed")
    )

    layout = Interleaved(1, groups, (heads * size, groups * size, groups * size))
    if packed.layout:
        if packed.layout.sizes != layout.sizes:
            what = f"input holds {packed.layout.sizes} columns of its parts, expected {layout.sizes} of q, k and v"
            raise LayerError(layer=builder.layer, what=what)
        layout = packed.layout

    def part(index: int, norm: str | None) -> fx.Node:
        count = heads if index == 0 else groups
        columns = builder.part(nodes["input"], layout, index)
        if norm is not None and nodes[norm] is not None:
            flat = builder.call(aten.reshape.default, columns, [tokens * count, size])
            columns = builder.call(get("rms_norm"), flat, nodes[norm], eps=eps, style=style)
        columns = builder.call(aten.reshape.default, columns, [tokens, count, size])
        return columns if norm is None else builder.call(get("rope"), columns, cos, sin)

    q, k, v = part(0, "q_norm"), part(1, "k_norm"), part(2, None)
    for cache, new in (("k_cache", k), ("v_cache", v)):
        builder.call(get("paged_kv_write"), nodes[cache], new, row)
    q = builder.call(aten.reshape.default, q, [tokens, groups, heads // groups, size])
    pages = requests[META_TENSORS.index("paged_kv_indices_buffer")]
    y = builder.call(
        get("paged_decode"), q, nodes["k_cache"], nodes["v_cache"], pages, first, limit, scale=scale or size**-0.5
    )
    made = builder.store(output, builder.call(aten.reshape.default, y, [tokens, heads * size]))
    values = {name: tensor.attached for name, tensor in meta.items() if tensor.attached is not None}
    positions = min(shapes["cos_pos_embed"][0], shapes["sin_pos_embed"][0])
    builder.kernel.before_run(
        functools.partial(check_requests, builder.layer, tokens, positions, shapes["k_cache"], values)
    )
    return made


def _num_requests(builder: Builder, meta: Mapping[str, GlobalTensor]) -> int:
    """Raises LayerError unless the meta tensors are of one number of requests."""
    shapes = {name: tensor.shape for name, tensor in meta.items()}
    pages, lengths = shapes["paged_kv_indices_buffer"], shapes["paged_kv_last_page_len_buffer"]
    bounds = (lengths[0] + 1,) if len(lengths) == 1 else None
    if shapes["qo_indptr_buffer"] != bounds or shapes["paged_kv_indptr_buffer"] != bounds or not math.prod(pages):
        what = (
            f"meta tensors have shapes {shapes}, expected [requests + 1] of both indptr, [requests] of the lengths, and"
        )
        raise LayerError(layer=builder.layer, what=f"{what} at least one page")
    return lengths[0]


def _sizes(builder: Builder, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int, int, int]:
    """(tokens, query heads, cache heads, head size). Raises LayerError where shapes do not fit each other."""
    packed, cache = shapes["input"], shapes["k_cache"]
    if len(cache) != 4 or shapes["v_cache"] != cache:
        what = f"k_cache and v_cache have shapes {cache} and {shapes['v_cache']}, expected one: [pages, page size, "
        raise LayerError(layer=builder.layer, what=f"{what}cache heads, head size]")
    groups, size = cache[2:]
    heads = packed[-1] // size - 2 * groups
    if len(packed) != 2 or packed[1] % size or heads <= 0 or heads % groups:
        what = f"input has shape {packed}, expected [tokens, (n + 2) * {groups} * {size}]: n query heads for each of"
        raise LayerError(layer=builder.layer, what=f"{what} k_cache's {groups}, and k and v")
    for name, shape in shapes.items():
        if name.endswith("_norm") and shape != (size,) or name.endswith("_embed") and shape[1:] != (size,):
            expected = f"[{size}]" if name.endswith("_norm") else f"[positions, {size}]"
            raise LayerError(layer=builder.layer, what=f"{name} has shape {shape}, expected {expected}")
    return packed[0], heads, groups, size
