"""Experts: products with weights that a router chose row by row, and the choice itself.

Models write such a product in two ways. *Batched*: each (row, choice) pair gathers its expert's matrix, for ``bmm``.
*Grouped*: pairs are sorted by expert, multiplied in groups, and put back in order. Both become ``expert_linear``, in
the order that pairs had before. What stands between two of them, activations, biases, clamps, is left as it is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from torch_mpk.capture.aliasing import storages, value, written_args
from torch_mpk.errors import UnsupportedError
from torch_mpk.patterns.rewriter import (
    CASTS,
    RESHAPES,
    Rewriter,
    argument,
    aten,
    dtype,
    has_same_layout,
    is_call,
    is_tensor,
    shape,
)
from torch_mpk.patterns.table import pattern

MAX_SCORES = 1024  # of a row, for the task that compares each with all


@pattern(operator.getitem)
def topk(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    """The largest of short rows; a single one is a reduction."""
    found = node.args[0]
    if not is_call(found, aten.topk.default) or not argument(found, "largest"):
        return None
    x, k = argument(found, "self"), argument(found, "k")
    if None in shape(x) or not dtype(x).is_floating_point or argument(found, "dim") not in (-1, len(shape(x)) - 1):
        return None
    if not isinstance(k, int) or not 1 < k <= shape(x)[-1] <= MAX_SCORES:
        return None
    rw.place = found
    rw.see(node, found)
    best = rw.task("topk", x, num=k)
    results = {user: rw.call(operator.getitem, best, user.args[1]) for user in found.users}
    rw.others = {user: result for user, result in results.items() if user is not node}
    return results[node] if all(has_same_layout(result, user) for user, result in results.items()) else None


@pattern(aten.bmm.default)
def gathered_product(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    """The batched way: ``bmm(weight[ids], x.unsqueeze(-1))``, or ``bmm(x.unsqueeze(1), weight[ids])``."""
    first, second = node.args
    if None in shape(node):
        return None
    for gathered, x, is_transposed in ((first, second, False), (second, first, True)):
        if shape(x)[1 if is_transposed else 2] != 1 or not is_call(gathered, aten.index.Tensor):
            continue
        weight, indices = gathered.args
        if len(shape(weight)) != 3 or None in shape(weight) or len(indices) != 1 or len(shape(indices[0])) != 1:
            continue
        pairs, depth = Pairs(rw, indices[0]), math.prod(shape(x)[1:])
        rw.see(node, gathered)
        rows = rw.below(x, (len(pairs), depth))
        if shape(rows) != (len(pairs), depth):
            rows = rw.reshape(x, (len(pairs), depth))
        if is_call(rows, aten.repeat_interleave.self_int) and rows.args[1:] == (pairs.num_choices, 0):
            rw.see(rows)
            rows = pairs.repeated(rows.args[0])
        y = pairs.product(rows, weight, is_transposed)
        return None if y is None else rw.reshape(y, shape(node))
    return None


class Pairs:
    """(Row, choice) pairs, row by row, and the ids of their experts, int64[rows * choices]."""

    def __init__(self, rw: Rewriter, ids: fx.Node) -> None:
        self.rw, self.ids = rw, ids
        self.num_rows, self.num_choices = len(self), 1
        if is_call(ids, *RESHAPES) and len(shape(ids.args[0])) == 2:
            self.num_rows, self.num_choices = shape(ids.args[0])

    def __len__(self) -> int:
        return shape(self.ids)[0]

    def repeated(self, x: fx.Node) -> fx.Node:
        """``x``, a row for each row, as one for each pair: [rows, choices, ...], which takes no memory."""
        sizes = [self.num_rows, self.num_choices, *shape(x)[1:]]
        return self.rw.call(aten.expand.default, self.rw.call(aten.unsqueeze.default, x, 1), sizes)

    def product(self, x: fx.Node, weight: fx.Node, is_transposed: bool) -> fx.Node | None:
        """``expert_linear``, [rows, choices, N], of x, a row for each pair. ``weight`` is [E, N, K], transposed
        [E, K, N], but may lie in memory as the other; None where the task does not take it."""
        if dtype(x) != dtype(weight) or not dtype(x).is_floating_point or dtype(self.ids) != torch.int64:
            return None
        if value(weight).stride(-1) != 1:
            weight, is_transposed = self._turned(weight), not is_transposed
        if value(weight).stride(-1) != 1:  # it would be copied
            return None
        rw, sizes = self.rw, (self.num_rows, self.num_choices)
        rows = rw.reshape(x, (*sizes, shape(x)[-1]))
        ids = rw.reshape(self.ids, sizes)
        return rw.task("expert_linear", rows, ids, *((None, weight) if is_transposed else (weight, None)))

    def _turned(self, weight: fx.Node) -> fx.Node:
        if is_call(weight, aten.transpose.int) and {dim % 3 for dim in weight.args[1:]} == {1, 2}:
            return weight.args[0]
        return self.rw.call(aten.transpose.int, weight, 1, 2)


def ungroup(rw: Rewriter) -> None:
    """The grouped way: without its sort, everything in between is computed in the order that pairs had before."""
    for sort in list(rw.graph.nodes):
        if sort._erased or not is_call(sort, aten.sort.default, aten.sort.stable):
            continue
        ids = argument(sort, "self")
        if len(shape(ids)) != 1 or None in shape(ids) or dtype(ids) != torch.int64 or argument(sort, "descending"):
            continue
        for restored in _restored(sort):
            rw.begin(restored)
            try:
                replacement = _Unsorted(rw, sort).result(restored)
            except UnsupportedError:
                replacement = None
            if replacement is None or not has_same_layout(replacement, restored) or not rw.is_movable():
                rw.rollback()
            else:
                rw.commit(replacement)


def _restored(sort: fx.Node) -> Iterator[fx.Node]:
    """What is put back in the order before the sort: indexed by the inverse of its permutation."""
    for permutation in [user for user in sort.users if is_call(user, operator.getitem) and user.args[1] == 1]:
        for write in list(permutation.users):
            if not _is_inverse(write, permutation):
                continue
            for user in list(write.args[0].users):
                if is_call(user, aten.index.Tensor) and user.args[1] == [write.args[0]]:
                    yield user


def _is_inverse(write: fx.Node, permutation: fx.Node) -> bool:
    """``empty_like(permutation).index_put_([permutation], arange)``"""
    if not is_call(write, aten.index_put_.default) or write.args[1] != [permutation]:
        return False
    empty, _, numbers = write.args[:3]
    is_empty = is_call(empty, aten.empty_like.default) and shape(empty) == shape(permutation)
    is_plain = is_call(numbers, aten.arange.default) and numbers.args == shape(permutation)
    return is_empty and is_plain and not argument(write, "accumulate")


# Operations along one dimension or several.
_ALONG = (
    *(aten.chunk.default, aten.split.Tensor, aten.slice.Tensor, aten.select.int),
    *(aten.mean.dim, aten.sum.dim_IntList, aten.softmax.int, aten.amax.default),
)


class _Unsorted:
    """What a sort's pairs become, up to where they are put back, computed in the order before the sort.

    Raises UnsupportedError where an operation is not known to compute each row from that row alone.
    """

    def __init__(self, rw: Rewriter, sort: fx.Node) -> None:
        self.rw, self.sort = rw, sort
        self.pairs = Pairs(rw, argument(sort, "self"))
        self.copies: dict[fx.Node, Any] = {}  # of nodes whose rows are sorted
        self.orders: set[fx.Node] = set()  # the permutation, and what is made of it or of sorted ids
        self.ids: set[fx.Node] = set()  # sorted ids
        self.last: Any = None  # id to which those behind it are set

    def result(self, restored: fx.Node) -> fx.Node | None:
        node, seen = self.sort.next, [self.sort]
        while node is not restored:
            if any(each in self.copies or each in self.orders or each is self.sort for each in node.all_input_nodes):
                self._see(node)
                seen.append(node)
            node = node.next
        writers = [each for each in seen if written_args(each)]
        self.rw.see(restored, *(each for each in seen if each not in writers))
        self.rw.absorb(*writers)
        if any(self.rw.survives(each) for each in seen):
            return None  # somebody else wants sorted rows
        return self.copies.get(restored.args[0])

    def _see(self, node: fx.Node) -> None:
        if node.args[0] is self.sort:
            self.orders.add(node)
            if node.args[1] == 0:
                self.ids.add(node)
        elif node.args[0] in self.ids and is_call(node, aten.ge.Scalar):  # whether another rank has the expert
            self.copies[node] = self.rw.call(node.target, self.pairs.ids, *node.args[1:])
        elif node.args[0] in self.ids and is_call(node, aten.clamp_.default):  # one of this rank's in its place
            self.last = argument(node, "max")
            self.pairs.ids = self.rw.call(aten.clamp.default, self.pairs.ids, argument(node, "min"), self.last)
        elif self._is_order(node):
            self.orders.add(node)
        elif is_call(node, aten.index.Tensor) and node.args[0] not in self.copies:
            self.copies[node] = self._gathered(node)
        elif str(node.target) in ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"):
            self.copies[node] = self._product(node)
        else:
            self._copy(node)

    def _is_order(self, node: fx.Node) -> bool:
        """Whether it only says where pairs went: the inverse permutation, rows by pair, and where groups end."""
        if not any(each in self.orders for each in node.all_input_nodes):
            return False
        if any(each in self.copies for each in node.all_input_nodes):
            return False
        known = aten.floor_divide.default, aten.empty_like.default, aten.histc.default, aten.cumsum.default, *CASTS
        return is_call(node, *known, aten.index_put_.default)

    def _gathered(self, node: fx.Node) -> fx.Node:
        """What was gathered by the permutation, by rows in its order, or by sorted ids."""
        source, indices = node.args
        order = indices[0] if len(indices) == 1 else None
        pairs = self.pairs
        if order in self.ids:
            return self.rw.call(aten.index.Tensor, source, [pairs.ids])
        if self._is_permutation(order) and shape(source)[0] == len(pairs):
            return source
        if self._is_row(order) and shape(source)[0] == pairs.num_rows:
            return pairs.repeated(source)
        raise UnsupportedError(f"{node.name} gathers otherwise than experts do")

    def _is_permutation(self, node: Any) -> bool:
        return is_call(node, operator.getitem) and node.args == (self.sort, 1)

    def _is_row(self, node: Any) -> bool:
        """Whether it is the number of each sorted pair's row."""
        return is_call(node, aten.floor_divide.default) and (
            self._is_permutation(node.args[0]) and node.args[1] == self.pairs.num_choices
        )

    def _product(self, node: fx.Node) -> fx.Node:
        x, weight, ends = node.args[:3]
        has_more = any(each is not None for each in (*node.args[3:], *node.kwargs.values()))
        if has_more or x not in self.copies or ends not in self.orders or not self._ends_groups(ends, shape(weight)[0]):
            raise UnsupportedError(f"{node.name} has other groups than those of sorted ids")
        if self.last not in (None, shape(weight)[0] - 1):  # groups may be of the ids before
            raise UnsupportedError(f"{node.name} has other groups than those of the ids that were set to {self.last}")
        y = self.pairs.product(self.copies[x], weight, is_transposed=True)
        if y is None:
            raise UnsupportedError(f"expert_linear does not take the operands of {node.name}")
        return self.rw.reshape(y, shape(node))

    def _ends_groups(self, ends: fx.Node, num_experts: int) -> bool:
        """``cumsum(histc(sorted ids, E, 0, E - 1))``"""
        if not is_call(ends, aten.cumsum.default):
            return False
        counts = ends.args[0]
        if not is_call(counts, aten.histc.default):
            return False
        of = counts.args[0]
        while is_call(of, *CASTS):
            of = of.args[0]
        bins = tuple(argument(counts, name) for name in ("bins", "min", "max"))
        return of in self.ids and bins == (num_experts, 0, num_experts - 1)

    def _copy(self, node: fx.Node) -> None:
        """An operation that computes each row from that row alone."""
        written = written_args(node)
        target = _out_of_place(node.target) if written else node.target
        if not self._is_of_rows(node, target):
            raise UnsupportedError(f"{node.name} ({node.target}) is not known to compute each row by itself")
        if written:
            self._check_views(node, written[0])
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._copy_of)
        self.copies[written[0] if written else node] = self.rw.call(target, *args, **kwargs)

    def _copy_of(self, node: fx.Node) -> fx.Node:
        copy = self.copies.get(node, node)
        return self.rw.reshape(copy, shape(node)) if is_tensor(node) else copy

    def _check_views(self, node: fx.Node, written: fx.Node) -> None:
        for other in self.copies:
            if other is not written and storages(other) & storages(written) and any(u > node for u in other.users):
                raise UnsupportedError(f"{node.name} writes what is seen in another way, too")

    def _is_of_rows(self, node: fx.Node, target: Any) -> bool:
        """``target``: the node's, out of place."""
        size, rank = len(self.pairs), len(shape(node)) if is_tensor(node) else 0
        if not isinstance(node.target, torch._ops.OpOverload):
            return is_call(node, operator.getitem)
        mine = [each for each in node.all_input_nodes if each in self.copies]
        others = [each for each in node.all_input_nodes if each not in self.copies]
        if any(each in self.orders or each is self.sort for each in others):
            return False
        if is_call(node, *RESHAPES, *CASTS):
            return rank > 0 and shape(node)[0] == shape(mine[0])[0] == size
        if node.target in _ALONG:
            dims, rank = argument(node, "dim"), len(shape(mine[0]))
            dims = dims if isinstance(dims, (list, tuple)) else [dims]
            return not others and bool(dims) and all(dim % rank != 0 for dim in dims)
        if torch.Tag.pointwise not in target.tags:
            return False
        return all(len(shape(each)) == rank for each in mine) and all(
            len(shape(each)) < rank or shape(each)[0] == 1 for each in others if is_tensor(each)
        )


def _out_of_place(target: Any) -> Any:
    """The operation that returns what this one writes.

    Raises UnsupportedError where there is none.
    """
    name = target._schema.name.removeprefix("aten::").removesuffix("_")
    found = getattr(getattr(aten, name, None), target._overloadname, None)
    if found is None:
        raise UnsupportedError(f"{target} has no form that writes nothing")
    return found
