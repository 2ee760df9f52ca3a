"""Rotary position embedding: ``x * cos + cat(-x[D/2:], x[:D/2]) * sin``."""

from __future__ import annotations

from typing import Any

from torch import fx

from torch_mpk.patterns.positions import as_rows, from_rows
from torch_mpk.patterns.rewriter import Rewriter, argument, aten, dtype, is_call, is_tensor, shape, swapped
from torch_mpk.patterns.table import pattern


@pattern(aten.add.Tensor)
def rope(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    if argument(node, "alpha") != 1 or None in shape(node) or len(shape(node)) != 4:
        return None
    for straight, turned in swapped(node.args):
        if not is_call(straight, aten.mul.Tensor) or not is_call(turned, aten.mul.Tensor):
            continue
        for rotated, sin in swapped(turned.args):
            x, interior = _rotated_half(rotated)
            if x is None:
                continue
            for other, cos in swapped(straight.args):
                if other is x and _is_table(cos, x) and _is_table(sin, x):
                    rw.see(node, straight, turned, *interior)
                    return _rope(rw, node, x, cos, sin)
    return None


def _rope(rw: Rewriter, node: fx.Node, x: fx.Node, cos: fx.Node, sin: fx.Node) -> fx.Node:
    batch, _, positions, size = shape(x)
    num_rows, tables = batch * positions, []
    for table in (cos, sin):
        if batch > 1 and shape(table)[0] == 1 and shape(table)[2] > 1:  # one for all sequences
            table = rw.call(aten.expand.default, table, [batch, 1, positions, size])
        rows = rw.reshape(table, (shape(table)[0] * shape(table)[2], size))
        tables.append(rows if shape(rows)[0] == num_rows else rw.call(aten.expand.default, rows, [num_rows, size]))
    return from_rows(rw, rw.task("rope", as_rows(rw, x), *tables), node)


def _rotated_half(node: Any) -> tuple[fx.Node | None, list[fx.Node]]:
    """x and the interior nodes, where ``node`` is ``cat(-x[..., D/2:], x[..., :D/2])``."""
    if not is_call(node, aten.cat.default) or len(node.args[0]) != 2 or not is_tensor(node):
        return None, []
    rank = len(shape(node))
    negated, first = node.args[0]
    if argument(node, "dim") % rank != rank - 1 or not is_call(negated, aten.neg.default):
        return None, []
    (second,) = negated.args
    if not is_call(first, aten.slice.Tensor) or not is_call(second, aten.slice.Tensor):
        return None, []
    x = first.args[0]
    size = shape(x)[-1]
    if size is None or second.args[0] is not x or shape(node) != shape(x):
        return None, []
    halves = [(0, size // 2), (size // 2, size)]
    if [_last_dim_range(part) for part in (first, second)] != halves:
        return None, []
    return x, [node, negated, first, second]


def _last_dim_range(node: fx.Node) -> tuple[int, int] | None:
    rank, size = len(shape(node)), shape(node.args[0])[-1]
    dim, start, end, step = (argument(node, name) for name in ("dim", "start", "end", "step"))
    if dim % rank != rank - 1 or step != 1 or not all(isinstance(bound, (int, type(None))) for bound in (start, end)):
        return None
    start, end, _ = slice(start, end).indices(size)
    return start, end


def _is_table(node: Any, x: fx.Node) -> bool:
    """[B or 1, 1, S or 1, D]: the same for all heads."""
    if not is_tensor(node) or dtype(node) != dtype(x):
        return False
    batch, _, positions, size = shape(x)
    return shape(node) in ((1, 1, 1, size), (1, 1, positions, size), (batch, 1, positions, size))
