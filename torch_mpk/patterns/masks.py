"""What an attention mask says about the positions that must be read.

A static cache is mostly empty, and reading it is what decode attention costs, so every lifted attention with a mask
gets a ``limit``: no position at or beyond it is attended to. It comes from the comparison that made the mask, where the
graph shows one, and otherwise from the mask's own values. Where the comparison is all there is to the mask, the mask
itself goes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from torch_mpk.capture.aliasing import value
from torch_mpk.patterns.rewriter import (
    Rewriter,
    aten,
    dtype,
    is_call,
    is_tensor,
    numel,
    reshape_source,
    shape,
)

_ANDS = (aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default)
_TRUES = (aten.ones.default, aten.new_ones.default, aten.ones_like.default)
_WHERES = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
_LARGEST = torch.iinfo(torch.int64).max

# op -> (argument that counts positions, argument with the bound, what to add to the bound to get the limit)
_COMPARISONS = {
    aten.le.Tensor: (0, 1, 1),
    aten.lt.Tensor: (0, 1, 0),
    aten.ge.Tensor: (1, 0, 1),
    aten.gt.Tensor: (1, 0, 0),
}


class _Causal(NamedTuple):
    """``positions < bound + offset``, computed by ``node``."""

    node: fx.Node
    bound: fx.Node
    offset: int


def lift_mask(
    rw: Rewriter, mask: fx.Node, q: tuple[int, ...], length: int, like: torch.dtype
) -> tuple[fx.Node | None, fx.Node] | None:
    """For a query of shape ``q``, [B, H, S, D]: the mask [B, H, S, L] (None: not needed) and each position's limit,
    [B, S], both with sizes of 1 where all are alike; None for a mask of another form."""
    batch, heads, positions, _ = q
    sizes = (1,) * (4 - len(shape(mask))) + shape(mask)
    if len(sizes) != 4 or sizes[0] not in (1, batch) or sizes[1] not in (1, heads) or sizes[2:] != (positions, length):
        return None
    if dtype(mask) not in (torch.bool, like):
        return None

    rw.trust(mask)
    condition = mask if dtype(mask) == torch.bool else _where_condition(rw, mask)
    causal, is_all = _find_causal(rw, condition, (batch, positions), length) if condition is not None else (None, False)
    # An all-masked row averages every position where the mask is added, so the comparison alone is not enough.
    is_enough = dtype(mask) == torch.bool or (is_all and causal and causal.offset == 1 and _is_checked(rw, causal))
    causal = causal if is_enough else None
    limit = _limit_of_values(rw, mask, length) if causal is None else _limit_of_comparison(rw, causal)
    return None if causal is not None and is_all else rw.reshape(mask, sizes), limit


def _is_checked(rw: Rewriter, causal: _Causal) -> bool:
    """Whether the bound is where a cache is written, inside of it."""
    return any(rw.is_same_value(causal.bound, index) for index in rw.checked_indices)


def causal_limit(rw: Rewriter, q: fx.Node) -> fx.Node:
    """The limit of each position of q[B, H, S, D], as [1, S], where the i-th sees i keys: what ``is_causal`` means."""
    positions, device = shape(q)[2], value(q).device
    key = ("is_causal", positions, device)
    if key not in rw.limits:  # in front of all that may share it
        inputs = next(node for node in rw.graph.nodes if node.op == "placeholder")
        limit = rw.call(aten.arange.start, 1, positions + 1, device=device, after=inputs)
        rw.limits[key] = rw.call(aten.view.default, limit, [1, positions], after=limit)
    return rw.limits[key]


def _find_causal(rw: Rewriter, condition: fx.Node, rows: tuple[int, int], length: int) -> tuple[_Causal | None, bool]:
    """A comparison with the position that ``condition`` implies, and whether it is all of the condition."""
    rank = len(shape(condition))
    causal, num_others, pending = None, 0, [condition]
    while pending:
        node = pending.pop()
        rw.trust(node)
        if is_call(node, *_ANDS):
            pending += node.args
        elif (source := _broadcast_source(node, rank, length)) is not None:
            pending.append(source)
        elif not is_call(node, *_TRUES):
            found = _causal(node, rows, rank, length) if causal is None else None
            causal, num_others = (found, num_others) if found is not None else (causal, num_others + 1)
    return causal, num_others == 0


def _broadcast_source(node: fx.Node, rank: int, length: int) -> fx.Node | None:
    """What ``node`` repeats, where the last dimension stays the position and the others stay in place."""
    if is_call(node, aten.expand.default):
        return node.args[0]
    source = reshape_source(node)
    if source is None or dtype(source) != torch.bool:
        return None
    if not shape(source) or shape(source)[-1] != length or numel(source) != length or shape(node)[-1] != length:
        return source if numel(source) == 1 else None
    return source


def _causal(node: fx.Node, rows: tuple[int, int], rank: int, length: int) -> _Causal | None:
    """``node`` as a comparison of positions along the last dimension with one bound, or one for each sequence, or each
    position, or both."""
    if not isinstance(node, fx.Node) or node.target not in _COMPARISONS:
        return None
    position_idx, bound_idx, offset = _COMPARISONS[node.target]
    positions, bound = node.args[position_idx], node.args[bound_idx]
    if not is_tensor(bound) or dtype(bound) not in (torch.int64, torch.int32) or not _counts(positions, length):
        return None
    batch, positions = rows
    per_row = rank == 4 and shape(bound) in ((b, 1, s, 1) for b in (1, batch) for s in (1, positions))
    return _Causal(node, bound, offset) if shape(node)[-1:] == (length,) and (numel(bound) == 1 or per_row) else None


def _counts(node: fx.Node, length: int) -> bool:
    """Whether ``node`` holds 0 .. length-1 along its last dimension and nothing else."""
    while is_tensor(node) and shape(node)[-1:] == (length,) and numel(node) == length:
        if is_call(node, aten.arange.default):
            return node.args[0] == length and dtype(node) in (torch.int64, torch.int32)
        if is_call(node, aten.arange.start):
            return node.args[:2] == (0, length) and dtype(node) in (torch.int64, torch.int32)
        if is_call(node, aten.add.Tensor) and isinstance(node.args[1], int) and node.args[1] == 0:
            node = node.args[0]
        else:
            node = reshape_source(node)
    return False


def _where_condition(rw: Rewriter, mask: fx.Node) -> fx.Node | None:
    """The condition of ``where(condition, 0, finfo.min or less)``."""
    chain = [mask]
    while is_call(chain[-1], aten.expand.default) or (reshape_source(chain[-1]) is not None):
        chain.append(chain[-1].args[0])
    where = chain[-1]
    if any(len(shape(node)) != len(shape(mask)) for node in chain) or not is_call(where, *_WHERES):
        return None
    condition, live, dead = where.args
    live, dead = _constant(live), _constant(dead)
    if live != 0 or dead is None or dead > torch.finfo(dtype(mask)).min or shape(condition) != shape(where):
        return None
    rw.trust(*chain)
    return condition


def _constant(node: Any) -> float | None:
    """The number that a scalar argument, or a constant tensor of one element, stands for."""
    if isinstance(node, (int, float)):
        return float(node)
    if is_call(node, aten.scalar_tensor.default):
        return float(node.args[0])
    if is_call(node, aten.full.default):
        return _constant(node.args[1])
    if is_call(node, aten.zeros.default):
        return 0.0
    if isinstance(node, fx.Node) and node.op == "get_attr":
        tensor = value(node)
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.numel() == 1:
            return float(tensor)
    return None


def _limit_of_comparison(rw: Rewriter, causal: _Causal) -> fx.Node:
    key = (causal.node, "comparison")
    if key not in rw.limits:
        # At the comparison, because the bound may be a view of a counter that the graph advances later.
        limit, after = causal.bound, causal.node
        if dtype(limit) != torch.int64:
            limit = after = rw.call(aten.to.dtype, limit, torch.int64, after=after)
        elif causal.offset and not _is_checked(rw, causal):  # what the largest number is behind is everything
            limit = after = rw.call(aten.clamp_max.default, limit, _LARGEST - causal.offset, after=after)
        limit = rw.call(aten.add.Tensor, limit, causal.offset, after=after)
        sizes = [shape(limit)[0], shape(limit)[2]] if numel(limit) != 1 else [1, 1]
        rw.limits[key] = rw.call(aten.view.default, limit, sizes, after=limit)
    return rw.limits[key]


def _limit_of_values(rw: Rewriter, mask: fx.Node, length: int) -> fx.Node:
    """1 + the last position that any head attends to, as [B, S].

    A head without one counts as ``length`` where the mask is added, since eager then averages every position.
    """
    while is_call(mask, aten.expand.default) and len(shape(mask.args[0])) == len(shape(mask)):
        if shape(mask.args[0])[-1] != length:
            break
        mask = mask.args[0]
        rw.trust(mask)
    key = (mask, "values")
    if key in rw.limits:
        return rw.limits[key]

    last = mask

    def then(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        nonlocal last
        last = rw.call(target, *args, after=last, **kwargs)
        return last

    batch, heads, queries, _ = (1,) * (4 - len(shape(mask))) + shape(mask)
    positions = then(aten.arange.start, 1, length + 1, device=value(mask).device)
    if dtype(mask) == torch.bool:
        ends = then(aten.where.ScalarOther, mask, positions, 0)
    else:  # NaN counts as attended to: it makes its row NaN
        ends = then(aten.where.ScalarSelf, then(aten.le.Scalar, mask, torch.finfo(dtype(mask)).min), 0, positions)
    limits = then(aten.amax.default, ends, [-1])
    limits = then(aten.view.default, limits, [batch, heads, queries])
    if dtype(mask) != torch.bool:
        limits = then(aten.where.ScalarOther, then(aten.ne.Scalar, limits, 0), limits, length)
    limits = then(aten.amax.default, limits, [1]) if heads > 1 else limits
    rw.limits[key] = then(aten.view.default, limits, [batch, queries])
    return rw.limits[key]
