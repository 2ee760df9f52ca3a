"""A step over several positions of one sequence: for the tasks of a decode step each is a row of the batch.

What has a head's rows as [B, H, S, D] has them as [B * S, H, D] then, where B or S is 1.
"""

from __future__ import annotations

from torch import fx

from torch_mpk.patterns.rewriter import Rewriter, aten, has_same_layout, shape


def has_rows(sizes: tuple[int, ...]) -> bool:
    """Whether [B, H, S, D] is one row of the batch for each position."""
    return len(sizes) == 4 and 1 in (sizes[0], sizes[2])


def as_rows(rw: Rewriter, node: fx.Node) -> fx.Node:
    """[B * S, H, D] of [B, H, S, D]."""
    batch, heads, positions, size = shape(node)
    if positions == 1:
        return rw.reshape(node, (batch, heads, size))
    return rw.call(aten.transpose.int, rw.reshape(node, (heads, positions, size)), 0, 1)


def from_rows(rw: Rewriter, rows: fx.Node, like: fx.Node) -> fx.Node:
    """[B, H, S, D] of [B * S, H, D], in the layout of ``like``, which may take a copy."""
    sizes = shape(like)
    if sizes[2] == 1:
        return rw.reshape(rows, sizes)
    heads = rw.reshape(rw.call(aten.transpose.int, rows, 0, 1), sizes)
    return heads if has_same_layout(heads, like) else rw.call(aten.contiguous.default, heads)
