"""Attention over cached latents, of which a model computes keys and values of every position at every step.

A step of one position per row does not need them: the product of a query and a key is that of the query's latent and
the cached one, and the weighted sum of values is that of the latents, multiplied once (DeepSeek-V2, arXiv:2405.04434,
section 2.1.2). So each head's part of the projection is multiplied by a query and by a result, in place of all that
was cached.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from torch_mpk.capture.aliasing import storages, value, written_storages
from torch_mpk.patterns.masks import lift_mask
from torch_mpk.patterns.positions import as_rows, from_rows
from torch_mpk.patterns.rewriter import Rewriter, argument, aten, dtype, is_call, reshape_source, shape
from torch_mpk.patterns.table import pattern

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_EMPTY = (aten.new_empty.default, aten.empty.memory_format, aten.empty_like.default)


class _Part(NamedTuple):
    """Elements ``begin`` to ``end`` of the last dimension of ``whole``; ``nodes`` are what takes them."""

    whole: fx.Node
    begin: int
    end: int
    nodes: tuple[fx.Node, ...] = ()


class _Expansion(NamedTuple):
    """Keys and values [B, H, L, ...]: a projection of ``latent``, [B, 1, L, C], by ``weight``, [H * (K + V), C].

    A head's key is the projection's first K elements and ``rope``, [B, 1, L, R]; its value the other V.
    """

    latent: fx.Node
    rope: fx.Node
    weight: fx.Node
    key_size: int


@pattern(aten.scaled_dot_product_attention.default, first=True)
def latent_attention(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    q, k, v, mask = (argument(node, name) for name in ("query", "key", "value", "attn_mask"))
    if argument(node, "dropout_p") != 0 or argument(node, "is_causal"):
        return None
    if any(len(shape(t)) != 4 or None in shape(t) or dtype(t) != dtype(q) for t in (q, k, v)):
        return None
    batch, heads, positions, size = shape(q)
    if positions != 1 or dtype(q) not in _DTYPES or shape(k)[:3] != shape(v)[:3] or shape(k)[:2] != (batch, heads):
        return None
    rw.see(node)
    found = _expansion(rw, k, v)
    if found is None:
        return None
    length, latent_size = shape(found.latent)[2:]
    visible: tuple[fx.Node | None, fx.Node | None] | None = (None, None)
    if mask is not None:
        visible = lift_mask(rw, mask, shape(q), length, dtype(q))
    if visible is None:
        return None
    mask, limit = visible
    if mask is not None:
        mask = rw.call(aten.expand.default, as_rows(rw, mask), [batch, heads, length])
    if limit is not None:
        limit = rw.call(aten.expand.default, rw.reshape(limit, (math.prod(shape(limit)),)), [batch])

    matrices = rw.reshape(found.weight, (heads, shape(found.weight)[0] // heads, latent_size))
    ids = rw.call(aten.arange.default, heads, device=value(q).device)
    ids = rw.call(aten.expand.default, ids, [batch, heads])
    split = found.key_size
    plain, rotated = (as_rows(rw, part) for part in _parts_of_query(rw, q, split))
    absorbed = rw.task("expert_linear", plain, ids, None, rw.call(aten.slice.Tensor, matrices, 1, 0, split))
    scale = argument(node, "scale")
    scale = 1 / math.sqrt(size) if scale is None else scale
    y = rw.task("latent_attention", absorbed, rotated, found.latent, found.rope, mask, limit, scale=scale)
    y = rw.task("expert_linear", y, ids, rw.call(aten.slice.Tensor, matrices, 1, split, shape(matrices)[1]))
    return from_rows(rw, y, node)


def _expansion(rw: Rewriter, k: fx.Node, v: fx.Node) -> _Expansion | None:
    parts = _parts_of_keys(rw, k)
    if parts is None:
        return None
    key, rope, val = _part(parts[0]), parts[1], _part(v)
    whole, (batch, heads, length, both) = key.whole, shape(key.whole)
    if not rw.is_same_argument(whole, val.whole) or (key.begin, key.end, val.end) != (0, val.begin, both):
        return None
    if not is_call(whole, aten.transpose.int) or {d % 4 for d in whole.args[1:]} != {1, 2}:
        return None
    chain = [whole, whole.args[0]]
    while not is_call(chain[-1], aten.linear.default):
        source = reshape_source(chain[-1])
        if source is None:
            return None
        chain.append(source)
    latent, weight, bias = (argument(chain[-1], name) for name in ("input", "weight", "bias"))
    if bias is not None or weight.op not in ("placeholder", "get_attr") or not value(weight).is_contiguous():
        return None
    if len(shape(latent)) != 4 or shape(latent)[:3] != (batch, 1, length) or shape(weight)[0] != heads * both:
        return None
    if not is_call(rope, aten.expand.default) or shape(rope.args[0]) != (batch, 1, length, shape(rope)[3]):
        return None
    rw.see(rope, *key.nodes, *val.nodes, *chain)
    return _Expansion(latent, rope.args[0], weight, key.end)


def _parts_of_keys(rw: Rewriter, k: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two tensors that ``k`` has side by side, joined by ``cat`` or copied into it; the copies are absorbed."""
    if is_call(k, aten.cat.default):
        rw.see(k)
        tensors = argument(k, "tensors")
        return tuple(tensors) if len(tensors) == 2 and argument(k, "dim") in (-1, 3) else None
    if not is_call(k, *_EMPTY):
        return None
    copies = [writer for writer in rw.writers if storages(k) & written_storages(writer)]
    if len(copies) != 2 or any(not is_call(copy, aten.copy_.default) or copy.users for copy in copies):
        return None
    copies.sort(key=lambda copy: _part(copy.args[0]).begin)
    (first, rest), sources = (_part(copy.args[0]) for copy in copies), [copy.args[1] for copy in copies]
    if (first.whole, rest.whole, first.begin, first.end, rest.end) != (k, k, 0, rest.begin, shape(k)[3]):
        return None
    # Nothing but the attention sees it, whole.
    if max(copies) > rw.anchor or not set(k.users) <= {rw.anchor, *first.nodes, *rest.nodes}:
        return None
    if any((shape(copy.args[0]), dtype(k)) != (shape(copy.args[1]), dtype(copy.args[1])) for copy in copies):
        return None
    rw.absorb(*copies)
    return sources[0], sources[1]


def _parts_of_query(rw: Rewriter, q: fx.Node, split: int) -> tuple[fx.Node, fx.Node]:
    if is_call(q, aten.cat.default) and [shape(t)[3] for t in argument(q, "tensors")] == [split, shape(q)[3] - split]:
        rw.see(q)
        return tuple(argument(q, "tensors"))
    return tuple(rw.call(aten.slice.Tensor, q, 3, *part) for part in ((0, split), (split, shape(q)[3])))


def _part(node: Any) -> _Part:
    """Which elements of the last dimension ``node`` is; all of its own where it is no such part."""
    size = shape(node)[-1]
    if is_call(node, operator.getitem) and is_call(node.args[0], aten.split_with_sizes.default):
        split, index = node.args
        whole, sizes = split.args[:2]
        if argument(split, "dim") % len(shape(whole)) == len(shape(whole)) - 1:
            begin = sum(sizes[:index])
            return _Part(whole, begin, begin + size, (node, split))
    if is_call(node, aten.slice.Tensor) and argument(node, "step") == 1:
        whole = node.args[0]
        if argument(node, "dim") % len(shape(whole)) == len(shape(whole)) - 1:
            begin = argument(node, "start") or 0
            if begin >= 0:
                return _Part(whole, begin, begin + size, (node,))
    return _Part(node, 0, size)
