"""Attention over a static cache, with the write of one position that precedes it, or of a prompt's positions.

Two forms are lifted: ``scaled_dot_product_attention``, and the matmuls and softmax of eager attention, whose scores a
hyperbolic tangent may cap, and whose heads may have a sink, a score beside those of the keys, or a factor of the result
that does the same. Grouped heads may be repeated in the graph (``unsqueeze``, ``expand``, ``reshape``) or left to
``enable_gqa``, and a single one to broadcasting. Values may have another size than keys.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from torch_mpk.capture.aliasing import is_same_tensor, is_view, storages, value, written_args, written_storages
from torch_mpk.config import MAX_ROWS
from torch_mpk.patterns.masks import causal_limit, lift_mask
from torch_mpk.patterns.positions import as_rows, from_rows, in_layout
from torch_mpk.patterns.rewriter import (
    Rewriter,
    argument,
    aten,
    cast_source,
    dtype,
    is_call,
    is_tensor,
    reshape_source,
    shape,
    swapped,
)
from torch_mpk.patterns.table import pattern

LARGEST_HEAD = 256  # of kernels on a GPU


@pattern(aten.scaled_dot_product_attention.default)
def sdpa(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    q, k, v, mask = (argument(node, name) for name in ("query", "key", "value", "attn_mask"))
    if argument(node, "dropout_p") != 0 or (mask is not None and argument(node, "is_causal")):
        return None
    scale = argument(node, "scale")
    if scale is None:
        scale = 1 / math.sqrt(shape(q)[-1])
    return _attention(rw, node, q, k, v, mask, None, scale, "sdpa", 0.0)


@pattern(aten.matmul.default)
def eager_attention(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    softmax = _softmax(node.args[0])
    return None if softmax is None else _eager(rw, node, node, softmax, [])


@pattern(aten.mul.Tensor)
def scaled_by_sinks(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    """Eager attention whose results are scaled by ``sigmoid(logsumexp(scores) - sink)``, as Granite's with windows.
    A sink beside the scores does the same to their softmax, and leaves zeros where a row sees nothing."""
    for product, factor in swapped(node.args):
        if not is_call(product, aten.matmul.default) or not is_tensor(factor):
            continue
        softmax, gate = _softmax(product.args[0]), _sink_gate(factor)
        if softmax is None or softmax.sinks is not None or gate is None:
            continue
        scores, sinks, nodes = gate
        _, heads, *_ = sizes = shape(softmax.scores)
        if scores is softmax.scores and shape(factor) == (*sizes[:3], 1) and shape(sinks) == (1, heads, 1):
            return _eager(rw, node, product, softmax._replace(sinks=sinks), [product, *nodes])
    return None


def _sink_gate(factor: fx.Node) -> tuple[fx.Node, fx.Node, list[fx.Node]] | None:
    """The scores, the sinks [1, H, 1], and what lies between them and ``sigmoid(logsumexp(scores) - sinks)``."""
    nodes = [factor]

    def step(*ops: torch._ops.OpOverload) -> bool:
        while (source := cast_source(nodes[-1]) or reshape_source(nodes[-1])) is not None:
            nodes.append(source)
        return is_call(nodes[-1], *ops)

    if not step(aten.sigmoid.default):
        return None
    nodes.append(nodes[-1].args[0])
    if not step(aten.sub.Tensor) or argument(nodes[-1], "alpha") != 1:
        return None
    sums, sinks = nodes[-1].args
    if not is_call(sums, aten.logsumexp.default) or not is_tensor(sinks) or len(shape(sums)) != 3:
        return None
    scores, dims = sums.args[:2]
    return (scores, sinks, [*nodes, sums]) if dims in ([-1], [3]) else None


def _eager(rw: Rewriter, node: fx.Node, product: fx.Node, softmax: _Softmax, between: list[fx.Node]) -> fx.Node | None:
    """``node`` becomes attention, of which ``product`` adds up the values; ``between`` lies behind that."""
    v = product.args[1]
    masked, sinks, nodes = softmax
    rw.see(node, *between, *nodes)
    for whole, mask in [(masked, None), *(swapped(masked.args) if is_call(masked, aten.add.Tensor) else [])]:
        if mask is not None and (not is_tensor(mask) or dtype(mask) != dtype(node) or argument(masked, "alpha") != 1):
            continue
        scaled, softcap, capped = _uncapped(whole)
        factors = _scaled_product(scaled, dtype(node))
        if factors is None or dtype(masked) != dtype(scaled):
            continue
        rw.see(masked, *capped, scaled, *factors.nodes)
        return _attention(rw, node, factors.q, factors.k, v, mask, sinks, factors.scale, "eager", softcap)
    return None


class _Factors(NamedTuple):
    q: fx.Node
    k: fx.Node
    scale: float
    nodes: list[fx.Node]  # between these and the scores


def _scaled_product(scaled: Any, dtype_of_q: torch.dtype) -> _Factors | None:
    """``q @ k.mT * scale``, or GPT-J's ``q @ k.mT / divisor``, which converts q and k to float32 first."""
    if not is_call(scaled, aten.mul.Tensor, aten.div.Tensor) or not isinstance(scaled.args[1], (int, float)):
        return None
    product, number = scaled.args
    is_quotient = is_call(scaled, aten.div.Tensor)
    if not is_call(product, aten.matmul.default) or (is_quotient and number == 0):
        return None
    q, transposed = product.args
    if not is_call(transposed, aten.transpose.int) or {d % 4 for d in transposed.args[1:]} != {2, 3}:
        return None
    k, nodes = transposed.args[0], [product, transposed]
    if dtype(scaled) == torch.float32 != dtype_of_q:
        nodes += [q, k]
        q, k = cast_source(q), cast_source(k)
    if q is None or k is None or not dtype(q) == dtype(k) == dtype_of_q:
        return None
    return _Factors(q, k, 1 / number if is_quotient else float(number), nodes)


class _Softmax(NamedTuple):
    scores: fx.Node
    sinks: fx.Node | None  # [1, H, 1, 1] or [1, H, 1]
    nodes: list[fx.Node]  # between the scores and the weights


def _softmax(weights: fx.Node) -> _Softmax | None:
    """The softmax over keys that gave ``weights``, in float32 or in the scores' dtype. The scores may lose their
    maximum first, and may have each head's sink behind them, whose weight is dropped."""
    nodes = [weights]
    if (source := cast_source(weights)) is not None:
        nodes.append(source)
    kept = nodes[-1]
    has_sinks = is_call(kept, aten.slice.Tensor)
    if has_sinks:
        if not _drops_last(kept):
            return None
        nodes.append(kept.args[0])
    softmax = nodes[-1]
    if not is_call(softmax, aten.softmax.int) or len(shape(softmax)) != 4 or softmax.args[1] not in (-1, 3):
        return None
    scores = softmax.args[0]
    if dtype(softmax) not in (torch.float32, dtype(scores)):
        return None
    if is_call(scores, aten.sub.Tensor):
        less_maximum = scores
        scores, maximum = less_maximum.args
        if not is_call(maximum, operator.getitem) or argument(less_maximum, "alpha") != 1:
            return None
        largest, index = maximum.args
        if index != 0 or not is_call(largest, aten.max.dim) or largest.args != (scores, -1, True):
            return None
        nodes += [less_maximum, maximum, largest]
    if not has_sinks:
        return _Softmax(scores, None, nodes)
    if not is_call(scores, aten.cat.default):
        return None
    tensors, dim = scores.args
    if len(tensors) != 2 or dim not in (-1, 3) or any(len(shape(t)) != 4 for t in tensors):
        return None
    nodes.append(scores)
    scores, beside = tensors
    while is_call(beside, aten.expand.default):
        nodes.append(beside)
        beside = beside.args[0]
    return _Softmax(scores, beside, nodes) if shape(beside) == (1, shape(scores)[1], 1, 1) else None


def _drops_last(node: fx.Node) -> bool:
    """Whether ``node`` is a slice of its input's last dimension without the last element."""
    sizes = shape(node.args[0])
    return argument(node, "start") in (None, 0) and shape(node) == (*sizes[:-1], sizes[-1] - 1)


def _uncapped(scores: Any) -> tuple[Any, float, list[fx.Node]]:
    """``x``, of which ``scores`` is ``tanh(x / cap) * cap``, the cap, and what lies between; else itself and 0."""
    if is_call(scores, aten.mul.Tensor) and is_call(scores.args[0], aten.tanh.default):
        tanh, cap = scores.args
        quotient = tanh.args[0]
        if is_call(quotient, aten.div.Tensor) and isinstance(cap, (int, float)) and quotient.args[1] == cap > 0:
            return quotient.args[0], float(cap), [scores, tanh, quotient]
    return scores, 0.0, []


def _attention(
    rw: Rewriter,
    node: fx.Node,
    q: fx.Node,
    k: fx.Node,
    v: fx.Node,
    mask: fx.Node | None,
    sinks: fx.Node | None,
    scale: float,
    style: str,
    softcap: float,
) -> fx.Node | None:
    if any(len(shape(t)) != 4 or None in shape(t) for t in (q, k, v)) or len({dtype(q), dtype(k), dtype(v)}) != 1:
        return None
    batch, heads, positions, size = shape(q)
    length = shape(k)[2]
    if shape(k)[:3] != shape(v)[:3] or shape(k)[0] != batch or shape(k)[3] != size:
        return None
    if not dtype(q).is_floating_point or length == 0:
        return None
    sizes = size, shape(v)[3]
    if sizes[0] != sizes[1] and any(each % 8 or each > LARGEST_HEAD for each in sizes):  # left to plain operations
        return None

    rw.see(node)
    k_cache, v_cache = _ungrouped(rw, k), _ungrouped(rw, v)
    if shape(k_cache)[:3] != shape(v_cache)[:3] or heads % shape(k_cache)[1]:
        return None
    is_grouped_by_op = style == "sdpa" and argument(node, "enable_gqa")
    if shape(k)[1] not in (1, heads) and not is_grouped_by_op:  # one is that of all
        return None
    visible: tuple[fx.Node | None, fx.Node | None] | None = (None, None)
    if style == "sdpa" and argument(node, "is_causal"):
        visible = None, causal_limit(rw, q)
    if mask is not None:
        visible = lift_mask(rw, mask, shape(q), length, dtype(q))
    if visible is None:
        return None
    if sinks is not None:
        sinks = rw.reshape(sinks, (heads,))
    if positions > 1 and (batch > 1 or positions > MAX_ROWS):
        return _prompt(rw, node, q, k_cache, v_cache, visible, sinks, scale=scale, style=style, softcap=softcap)
    visible = _as_rows(rw, visible, shape(q), length)
    new: tuple[fx.Node | None, ...] = (None, None, None)
    others = [t for t in (q, *visible, sinks) if t is not None]
    writes = _cache_writes(rw, k_cache, v_cache, others) if positions == 1 else None
    if writes is not None:
        k_write, v_write = writes
        rw.absorb(k_write.node, v_write.node)
        k_new, v_new = (rw.reshape(w.new, (batch, shape(k_cache)[1], shape(w.new)[3])) for w in writes)
        new = k_new, v_new, k_write.slot
        k_cache, v_cache = k_write.cache, v_write.cache
    if positions > 1:  # of one sequence: its cache is that of all rows
        k_cache, v_cache = (rw.call(aten.expand.default, t, [positions, -1, -1, -1]) for t in (k_cache, v_cache))
    attrs = {"scale": scale, "style": style, "softcap": softcap}
    y = rw.task("attention", as_rows(rw, q), *new, k_cache, v_cache, *visible, sinks, **attrs)
    return from_rows(rw, y, node)


def _prompt(
    rw: Rewriter,
    node: fx.Node,
    q: fx.Node,
    k_cache: fx.Node,
    v_cache: fx.Node,
    visible: tuple[fx.Node | None, fx.Node | None],
    sinks: fx.Node | None,
    **attrs: float | str,
) -> fx.Node:
    batch, heads, positions, _ = shape(q)
    mask, limit = visible
    if mask is not None:
        mask = _expanded(rw, mask, (batch, heads, positions, shape(k_cache)[2]))
    if limit is not None:
        limit = _expanded(rw, limit, (batch, positions))
    query = rw.call(aten.transpose.int, q, 1, 2)
    y = rw.task("prefill_attention", query, k_cache, v_cache, mask, limit, sinks, **attrs)
    return in_layout(rw, rw.call(aten.transpose.int, y, 1, 2), node)


def _as_rows(
    rw: Rewriter, visible: tuple[fx.Node | None, fx.Node | None], q: tuple[int, ...], length: int
) -> tuple[fx.Node | None, fx.Node | None]:
    """Mask and limit of the positions as rows of the batch: [B * S, H, L] and [B * S]."""
    batch, heads, positions, _ = q
    num_rows = batch * positions
    mask, limit = visible
    if limit is not None:
        limit = _expanded(rw, rw.reshape(limit, (math.prod(shape(limit)),)), (num_rows,))
    if mask is not None:
        mask = _expanded(rw, as_rows(rw, mask), (num_rows, heads, length))
    return mask, limit


def _expanded(rw: Rewriter, node: fx.Node, sizes: tuple[int, ...]) -> fx.Node:
    return node if shape(node) == sizes else rw.call(aten.expand.default, node, list(sizes))


def _ungrouped(rw: Rewriter, node: fx.Node) -> fx.Node:
    """[B, G, L, D], of which ``node`` [B, H, L, D] repeats each head H / G times; ``node`` itself where it does not."""
    batch, heads, length, size = shape(node)
    chain = [node]
    while not is_call(chain[-1], aten.expand.default):
        source = reshape_source(chain[-1])
        if source is None:
            return node
        chain.append(source)
    expand = chain[-1]
    base = expand.args[0]
    if len(shape(base)) != 5 or not shape(base)[1]:
        return node
    groups = shape(base)[1]
    repeated = (batch, groups, heads // groups, length, size)
    if shape(base) != (batch, groups, 1, length, size) or shape(expand) != repeated:
        return node
    chain.append(base)
    while shape(base) != (batch, groups, length, size):
        base = reshape_source(base)
        if base is None:
            return node
        chain.append(base)
    rw.see(*chain[:-1])
    return base


class _CacheWrite(NamedTuple):
    """``cache[:, :, slot] = new``, with ``new`` [B, G, 1, D] and ``slot`` [1]."""

    node: fx.Node
    cache: fx.Node
    new: fx.Node
    slot: fx.Node


def _cache_writes(
    rw: Rewriter, k_cache: fx.Node, v_cache: fx.Node, others: list[fx.Node]
) -> tuple[_CacheWrite, _CacheWrite] | None:
    """The last writes of both caches, where the attention can do them without anybody noticing."""
    k, v = _last_write(rw, k_cache), _last_write(rw, v_cache)
    if k is None or v is None or not rw.is_same_value(k.slot, v.slot):
        return None
    k_storage, v_storage = storages(k.cache), storages(v.cache)
    caches = k_storage | v_storage
    if k_storage & v_storage or any(caches & storages(node) for node in (k.new, v.new, k.slot, *others)):
        return None
    for write in (k, v):
        if rw.is_written_between(storages(write.new) | storages(write.slot), write.node, rw.anchor):
            return None
    absorbed = (k.node, v.node)
    node = min(absorbed)
    while (node := node.next) is not rw.anchor:
        touches = caches & (written_storages(node).union(*map(storages, node.all_input_nodes)))
        if not touches or node in absorbed or is_view(node):
            continue
        if written_args(node) or node not in rw.interior or rw.survives(node):
            return None
    return k, v


def _last_write(rw: Rewriter, cache: fx.Node) -> _CacheWrite | None:
    touched = storages(cache)
    writers = [node for node in rw.writers if node < rw.anchor and touched & written_storages(node)]
    if not writers:
        return None
    node = max(writers)
    if not is_call(node, aten.index_copy_.default):
        return None
    target, dim, slot, new = node.args
    batch, groups, _, size = shape(cache)
    if not is_same_tensor(value(target), value(cache)) or dim not in (2, -2):
        return None
    if shape(slot) != (1,) or dtype(slot) != torch.int64 or shape(new) != (batch, groups, 1, size):
        return None
    return _CacheWrite(node, target, new, slot)
