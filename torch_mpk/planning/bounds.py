"""Indices that a call brings with it and that must lie inside a tensor, for a runtime whose host can look at them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from torch_mpk import _C
from torch_mpk.capture.aliasing import storages, value, written_storages
from torch_mpk.capture.provenance import module_path
from torch_mpk.lowering import Lowered
from torch_mpk.patterns.rewriter import argument, aten, is_call, reshape_source, shape, swapped
from torch_mpk.plan import IndexBound
from torch_mpk.registry import tasks
from torch_mpk.tasks.embedding import embedding


def index_bounds(gm: fx.GraphModule, lowered: Lowered) -> Iterator[IndexBound]:
    """The token ids and cache positions of a segment that are inputs of it, not computed or advanced within it."""
    yield from _cache_positions(lowered.graph)
    yield from _following_positions(gm, lowered)
    yield from _token_ids(gm, lowered)


def _cache_positions(graph: _C.TBGraph) -> Iterator[IndexBound]:
    with_cursor = {task.name: task for task in tasks() if task.traits.cursor}
    written: set[int] = set()
    for node in graph.nodes:
        if (task := with_cursor.get(node.task)) is not None:
            operands = {operand.name: operand.tensor for operand in node.operands}
            slot = operands.get(task.traits.cursor)
            if slot and graph.buffers[slot.buffer].kind == "input" and slot.offset == 0 and slot.buffer not in written:
                shapes = [operands[o.name].shape if o.name in operands else None for o in task.inputs]
                [dim] = [o.bound for o in task.inputs if o.name == task.traits.cursor]
                length = task.check(shapes, [None] * len(shapes))[dim or ""][0]
                yield _first_position(graph.buffers[slot.buffer].index, 8, length, 1, node.label)
        written.update(operand.tensor.buffer for operand in node.operands if operand.is_write)


def _following_positions(gm: fx.GraphModule, lowered: Lowered) -> Iterator[IndexBound]:
    """Of writes of several positions of a cache, one behind the other from one that a call brings."""
    written: set[object] = set()
    first_of: dict[fx.Node, tuple[fx.Node, int | torch.SymInt]] = {}
    for node in gm.graph.nodes:
        if is_call(node, aten.add.Tensor) and argument(node, "alpha") == 1:
            for counted, first in swapped(node.args):
                count = _count(counted)
                if count is not None and first in lowered.inputs and not storages(first) & written:
                    first_of[node] = first, count
        elif is_call(node, aten.index_copy_.default) and node.args[2] in first_of:
            first, count = first_of[node.args[2]]
            if value(first).numel() == 1:
                length, place = shape(node.args[0])[node.args[1]], lowered.inputs.index(first)
                bound = _first_position(place, value(first).dtype.itemsize, length, count, module_path(node))
                yield bound if isinstance(count, int) else bound._replace(less=_scalars(lowered)[count.node.expr])
        written |= written_storages(node)


def _count(node: Any) -> int | torch.SymInt | None:
    """How many positions a node numbers, from 0 on, or of a bucket the last, as ``padding.py`` numbers them."""
    if is_call(node, aten.arange.default) and isinstance(node.args[0], int):
        return node.args[0]
    if not is_call(node, aten.where.ScalarOther) or node.args[2] >= 0:
        return None
    is_last, number, _ = node.args
    if not is_call(is_last, aten.ge.Scalar) or not is_call(number, aten.sub.Tensor) or is_last.args != number.args:
        return None
    places, front = number.args
    return (
        _count(places) - value(front) if isinstance(front, fx.Node) and is_call(places, aten.arange.default) else None
    )


def _scalars(lowered: Lowered) -> dict[object, int]:
    """The symbols of a call's sizes, and which scalar of a launch each is."""
    return {value(node).node.expr: number for number, node in enumerate(lowered.scalars)}


def _first_position(
    place: int, element_bytes: int, length: int, count: int | torch.SymInt, where: str | None
) -> IndexBound:
    if not isinstance(count, int):
        what, known = f"the first of a call's positions from 0 to {length}, less how many there are", 0
    else:
        what = f"{'a position' if count == 1 else f'the first of {count} positions'} from 0 to {length - count}"
        known = count
    message = (
        f"{where or 'index_copy_'}: the key/value cache is full: make the StaticCache longer (max_cache_len); expected "
        f"{what}"
    )
    return IndexBound(place, 1, 1, element_bytes, length - known + 1, message)


def _token_ids(gm: fx.GraphModule, lowered: Lowered) -> Iterator[IndexBound]:
    written: set[object] = set()
    for node in gm.graph.nodes:
        if node.target in (embedding, aten.embedding.default):
            ids, weight = node.args[:2] if node.target is embedding else (node.args[1], node.args[0])
            rows = value(weight).shape[0]
            source = _brought(ids)
            if (
                source in lowered.inputs
                and (stride := _only_stride(value(source))) is not None
                and (count := _elements(value(source), lowered)) is not None
                and not storages(source) & written
            ):
                num_elements, times = count
                message = f"{module_path(node) or 'embedding'}: expected token ids from 0 to {rows - 1}"
                place = lowered.inputs.index(source)
                yield IndexBound(place, num_elements, stride, value(source).dtype.itemsize, rows, message, times)
        written |= written_storages(node)


def _brought(ids: fx.Node) -> fx.Node:
    """The tensor that has all of ``ids``, but for zeros in front of a bucket's."""
    while True:
        source = reshape_source(ids)
        if source is None and is_call(ids, aten.constant_pad_nd.default):
            is_in_front = all(n == 0 for n in ids.args[1][1::2]) and argument(ids, "value") == 0
            source = ids.args[0] if is_in_front else None
        if source is None:
            return ids
        ids = source


def _elements(tensor: torch.Tensor, lowered: Lowered) -> tuple[int, int] | None:
    """How many elements there are, and times which scalar of a launch, or -1; None where that is not the form."""
    count = tensor.numel()
    if isinstance(count, int):
        return count, -1
    factor, symbol = count.node.expr.as_coeff_Mul()
    number = _scalars(lowered).get(symbol)
    return None if number is None else (int(factor), number)


def _only_stride(tensor: torch.Tensor) -> int | None:
    """The distance between neighbours of a tensor whose elements are evenly spaced, else None."""
    if tensor.is_contiguous():
        return 1
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    return strides[0] if len(strides) == 1 and isinstance(strides[0], int) else None
