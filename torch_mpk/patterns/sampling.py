"""Which tokens sampling chooses from: the most likely, as top-k and top-p have them.

Hugging Face's processors sort whole vocabularies for one value of each row. What they compute with it, masks over the
vocabulary, are pointwise operations.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from torch_mpk.patterns.rewriter import (
    Rewriter,
    argument,
    aten,
    dtype,
    is_call,
    is_tensor,
    reshape_source,
    shape,
    value,
)
from torch_mpk.patterns.table import pattern

PART_SIZES = (128, 64, 32, 16)  # of rows, the largest first that divides them
_LAST = 2**63 - 1  # the end of a slice that has none


def _is_last(dim: int, node: fx.Node) -> bool:
    return dim in (-1, len(shape(node)) - 1)


def _has_numbers(x: fx.Node) -> bool:
    """Whether it is what the tasks take, of sizes that are known."""
    return None not in shape(x) and dtype(x).is_floating_point


def _is_item(node: Any, number: int) -> bool:
    return is_call(node, operator.getitem) and node.args[1] == number


def _sorted_rows(node: Any, item: int, descending: bool) -> tuple[fx.Node, fx.Node] | None:
    """What is sorted, along its last dimension, and the sort whose values (0) or indices (1) ``node`` is."""
    if not _is_item(node, item):
        return None
    sort = node.args[0]
    if not is_call(sort, aten.sort.default, aten.sort.stable) or argument(sort, "descending") != descending:
        return None
    x = sort.args[0]
    return (x, sort) if _is_last(argument(sort, "dim"), x) and _has_numbers(x) else None


def _constant(rw: Rewriter, x: fx.Node, number: float, dtype: torch.dtype) -> fx.Node:
    """One for each row of ``x``."""
    return rw.call(aten.full.default, list(shape(x)[:-1]), number, dtype=dtype, device=value(x).device)


def _in_parts(rw: Rewriter, x: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Equal parts of the rows of ``x``, [..., parts, size], and the largest of each, which all workers find. None where
    rows have none that a thread reads well."""
    *rows, columns = shape(x)
    size = next((size for size in PART_SIZES if columns % size == 0), None)
    if size is None:
        return None
    parts = rw.reshape(x, (*rows, columns // size, size))
    return parts, rw.call(aten.amax.default, parts, [-1])


def _largest(rw: Rewriter, x: fx.Node, rank: fx.Node) -> fx.Node:
    found = _in_parts(rw, x)
    return rw.task("nth_largest", x, rank, found and found[1])


@pattern(aten.gather.default)
def largest_by_rank(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    """A rank of each row's own: ``x.sort(descending=True).values.gather(-1, rank)``."""
    ordered, dim, rank = node.args[:3]
    found = _sorted_rows(ordered, 0, descending=True)
    if found is None or not _is_last(dim, ordered) or shape(rank) != (*shape(ordered)[:-1], 1):
        return None
    x, sort = found
    rw.see(node, ordered, sort)
    return rw.reshape(_largest(rw, x, rw.reshape(rank, shape(x)[:-1])), shape(node))


@pattern(aten.lt.Tensor)
def less_than_largest(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    """The same rank in all rows: ``x < x.topk(k).values[..., -1, None]``."""
    x, least = node.args
    last = least
    while is_tensor(last) and not is_call(last, aten.select.int) and (source := reshape_source(last)) is not None:
        last = source
    if not is_call(last, aten.select.int) or not _is_item(last.args[0], 0):
        return None
    largest, dim, index = last.args
    topk = largest.args[0]
    if not is_call(topk, aten.topk.default) or not argument(topk, "largest") or not argument(topk, "sorted"):
        return None
    logits, k = topk.args[:2]
    is_of_rows = _is_last(argument(topk, "dim"), logits) and _is_last(dim, largest) and index in (-1, k - 1)
    if not is_of_rows or not _has_numbers(logits) or shape(least) != (*shape(logits)[:-1], 1):
        return None
    rw.see(node, last, largest, topk)
    least = rw.reshape(_largest(rw, logits, _constant(rw, logits, k - 1, torch.int64)), shape(least))
    return rw.call(aten.lt.Tensor, x, least)


@pattern(aten.scatter.src)
def outside_of_nucleus(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    """Where those are that go, of ``x.sort()``: all that together have no more than a part of the probability, but for
    the last, which stays whatever it has."""
    gone, dim, order, source = node.args[:4]
    found = _sorted_rows(order, 1, descending=False)
    if found is None or source is not gone or not _is_last(dim, order):
        return None
    x, sort = found
    if not is_call(gone, aten.le.Scalar, aten.le.Tensor):
        return None
    sums, rest = gone.args
    if not is_call(sums, aten.cumsum.default) or not _is_last(argument(sums, "dim"), x):
        return None
    softmax = sums.args[0]
    if not is_call(softmax, aten.softmax.int) or not _is_last(softmax.args[1], x) or dtype(softmax) != torch.float32:
        return None
    ascending = softmax.args[0]
    if not _is_item(ascending, 0) or ascending.args[0] is not sort:
        return None
    kept = [user for user in gone.users if user is not node]
    if len(kept) != 1 or not is_call(kept[0], aten.slice.Tensor) or len(kept[0].users) != 1:
        return None
    [last], [write] = kept, kept[0].users
    begin, end, step = (argument(last, name) for name in ("start", "end", "step"))
    if not _is_last(argument(last, "dim"), gone) or (begin, end, step) != (-1, _LAST, 1) or not _is_false(write, last):
        return None
    if not is_tensor(rest):
        rest = _constant(rw, x, rest, torch.float32)
    elif shape(rest) == (*shape(x)[:-1], 1) and dtype(rest) == torch.float32:
        rest = rw.reshape(rest, shape(x)[:-1])
    else:
        return None
    rw.see(node, order, sort, gone, sums, softmax, ascending, last)
    rw.absorb(write)
    ends = rw.task("nucleus", x, rest, *_peaks_and_sums(rw, x))
    least, first = (rw.reshape(rw.call(operator.getitem, ends, i), (*shape(x)[:-1], 1)) for i in range(2))
    index = rw.call(aten.arange.default, shape(x)[-1], device=value(x).device)
    is_before = rw.call(
        aten.logical_and.default, rw.call(aten.eq.Tensor, x, least), rw.call(aten.lt.Tensor, index, first)
    )
    return rw.call(aten.logical_or.default, rw.call(aten.lt.Tensor, x, least), is_before)


def _peaks_and_sums(rw: Rewriter, x: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """Of the parts of rows: their largest, and the sums of the exponentials of what is less than that by how much."""
    found = _in_parts(rw, x) if dtype(x) == torch.float32 else None
    if found is None:
        return None, None
    parts, peaks = found
    finite = rw.call(aten.clamp_min.default, peaks, torch.finfo(torch.float32).min)  # else less than itself by NaN
    less = rw.call(aten.sub.Tensor, parts, rw.call(aten.unsqueeze.default, finite, -1))
    return peaks, rw.call(aten.sum.dim_IntList, rw.call(aten.exp.default, less), [-1])


def _is_false(write: fx.Node, last: fx.Node) -> bool:
    """Whether it makes all of ``last`` False."""
    if not is_call(write, aten.fill_.Tensor, aten.fill_.Scalar) or write.args[0] is not last or write.users:
        return False
    filler = write.args[1]
    return filler in (False, 0) if not is_tensor(filler) else is_call(filler, aten.full.default) and not filler.args[1]
