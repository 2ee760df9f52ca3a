"""Rotary position embedding: ``x * cos + cat(-x[D/2:], x[:D/2]) * sin``, or the same half by half."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from torch_mpk.capture.aliasing import storages
from torch_mpk.patterns.positions import as_rows, from_rows
from torch_mpk.patterns.rewriter import (
    Rewriter,
    argument,
    aten,
    dtype,
    is_call,
    is_tensor,
    reshape_source,
    shape,
    swapped,
)
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


@pattern(aten.cat.default)
def rope_of_halves(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    """``cat(x[:D/2] * cos - x[D/2:] * sin, x[D/2:] * cos + x[:D/2] * sin)``, with tables of D/2 columns."""
    if not is_tensor(node) or len(shape(node)) != 4 or None in shape(node) or not _is_pair_of_last_dim(node):
        return None
    difference, total = node.args[0]
    if not is_call(difference, aten.sub.Tensor) or not is_call(total, aten.add.Tensor):
        return None
    products = [*difference.args, *total.args]
    if any(argument(each, "alpha") != 1 for each in (difference, total)) or not all(
        is_call(product, aten.mul.Tensor) for product in products
    ):
        return None
    for first, cos in swapped(products[0].args):
        for second, sin in swapped(products[1].args):
            halves, interior = _halves(first, second)
            if halves is None or shape(halves) != shape(node) or not all(_is_table(t, first) for t in (cos, sin)):
                continue
            for straight, turned in swapped(products[2:]):
                if (second, cos) in swapped(straight.args) and (first, sin) in swapped(turned.args):
                    rw.see(node, difference, total, *products, *interior)
                    return _rope(rw, node, halves, *(_doubled(rw, table) for table in (cos, sin)))
    return None


def _is_pair_of_last_dim(node: fx.Node) -> bool:
    return len(node.args[0]) == 2 and argument(node, "dim") % len(shape(node)) == len(shape(node)) - 1


def _halves(first: Any, second: Any) -> tuple[fx.Node | None, list[fx.Node]]:
    """The tensor of which the two are the halves along its last dimension, and the interior nodes."""
    sliced = _sliced_in_two(first, second)
    if sliced is not None:
        return (sliced, [first, second]) if shape(sliced)[-1] % 2 == 0 else (None, [])
    if not is_call(first, operator.getitem) or not is_call(second, operator.getitem):
        return None, []
    parts = first.args[0]
    if parts is not second.args[0] or (first.args[1], second.args[1]) != (0, 1):
        return None, []
    if not is_call(parts, aten.chunk.default, aten.split.Tensor) or not is_tensor(parts.args[0]):
        return None, []
    x = parts.args[0]
    sizes = [shape(half)[-1] for half in (first, second)]
    is_last = argument(parts, "dim") % len(shape(x)) == len(shape(x)) - 1
    return (x, [first, second, parts]) if is_last and sizes == [shape(x)[-1] / 2] * 2 else (None, [])


def _doubled(rw: Rewriter, table: fx.Node) -> fx.Node:
    """``cat(table, table)``. All rotations by one table have one of it, behind what the table is a view of."""
    root = table
    while (source := reshape_source(root)) is not None and shape(source)[-1] == shape(table)[-1]:
        root = source
    if rw.is_written_between(storages(root), root, rw.place):
        return rw.call(aten.cat.default, [table, table], -1)
    made = next((user for user in root.users if is_call(user, aten.cat.default) and user.args[0] == [root, root]), None)
    if made is None:
        made = rw.call(aten.cat.default, [root, root], -1)
    elif not made < rw.place:
        root.append(made)
    return rw.reshape(made, (*shape(table)[:-1], 2 * shape(table)[-1]))


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
    if not is_call(node, aten.cat.default) or not is_tensor(node) or not _is_pair_of_last_dim(node):
        return None, []
    negated, first = node.args[0]
    if not is_call(negated, aten.neg.default):
        return None, []
    (second,) = negated.args
    x = _sliced_in_two(first, second)
    return (None, []) if x is None or shape(node) != shape(x) else (x, [node, negated, first, second])


def _sliced_in_two(first: Any, second: Any) -> fx.Node | None:
    """The tensor of whose last dimension the two are the slices up to D/2, and from there on."""
    if not is_call(first, aten.slice.Tensor) or not is_call(second, aten.slice.Tensor):
        return None
    x, size = first.args[0], shape(first.args[0])[-1]
    if size is None or second.args[0] is not x:
        return None
    halves = [(0, size // 2), (size // 2, size)]
    return x if [_last_dim_range(part) for part in (first, second)] == halves else None


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
