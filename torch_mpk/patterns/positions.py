"""Steps over several positions of each sequence: for the tasks of a decode step each position is a row of the batch.

What has a head's rows as [B, H, S, D] has them as [B * S, H, D] then.
"""

from __future__ import annotations

from torch import fx

from torch_mpk.patterns.rewriter import Rewriter, aten, has_same_layout, shape


def as_rows(rw: Rewriter, node: fx.Node) -> fx.Node:
    """[B * S, H, D] of [B, H, S, D]."""
    batch, heads, positions, size = shape(node)
    if positions == 1:
        return rw.reshape(node, (batch, heads, size))
    if batch == 1:
        return rw.call(aten.transpose.int, rw.reshape(node, (heads, positions, size)), 0, 1)
    return rw.reshape(rw.call(aten.transpose.int, node, 1, 2), (batch * positions, heads, size))


def from_rows(rw: Rewriter, rows: fx.Node, like: fx.Node) -> fx.Node:
    """[B, H, S, D] of [B * S, H, D], in the layout of ``like``, which may take a copy."""
    batch, heads, positions, size = shape(like)
    if positions == 1:
        return rw.reshape(rows, shape(like))
    if batch == 1:
        return in_layout(rw, rw.reshape(rw.call(aten.transpose.int, rows, 0, 1), shape(like)), like)
    return in_layout(rw, rw.call(aten.transpose.int, rw.reshape(rows, (batch, positions, heads, size)), 1, 2), like)


def in_layout(rw: Rewriter, node: fx.Node, like: fx.Node) -> fx.Node:
    """``node`` in the layout of ``like``, which is its own or contiguous."""
    return node if has_same_layout(node, like) else rw.call(aten.contiguous.default, node)
