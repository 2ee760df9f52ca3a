"""Indices that a call brings with it and that must lie inside a tensor, for a runtime whose host can look at them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from torch_mpk import _C
from torch_mpk.aliasing import storages, value, written_storages
from torch_mpk.lowering import Lowered
from torch_mpk.patterns.rewriter import argument, aten, is_call, reshape_source, shape, swapped
from torch_mpk.plan import IndexBound
from torch_mpk.provenance import module_path
from torch_mpk.registry import tasks
from torch_mpk.tasks.embedding import embedding


def index_bounds(gm: fx.GraphModule, lowered: Lowered) -> Iterator[IndexBound]:
    """The token ids and cache positions of a segment that are inputs of it, not computed or advanced within it."""
    yield from _cache_positions(lowered.graph)
    yield from _following_positions(gm, lowered)
    yield from _token_ids(gm, lowered)


def _cache_positions(graph: _C.TBGraph) -> Iterator[IndexBound]:
    with_cursor = {task.name: task for task in tasks() if task.streaming.cursor}
    written: set[int] = set()
    for node in graph.nodes:
        if (task := with_cursor.get(node.task)) is not None:
            operands = {operand.name: operand.tensor for operand in node.operands}
            slot = operands.get(task.streaming.cursor)
            if slot and graph.buffers[slot.buffer].kind == "input" and slot.offset == 0 and slot.buffer not in written:
                shapes = [operands[o.name].shape if o.name in operands else None for o in task.inputs]
                [dim] = [o.bound for o in task.inputs if o.name == task.streaming.cursor]
                length = task.check(shapes, [None] * len(shapes))[dim or ""][0]
                yield _first_position(graph.buffers[slot.buffer].index, 8, length, 1, node.label)
        written.update(operand.tensor.buffer for operand in node.operands if operand.is_write)


def _following_positions(gm: fx.GraphModule, lowered: Lowered) -> Iterator[IndexBound]:
    """Of writes of several positions of a cache, one behind the other from one that a call brings."""
    written: set[object] = set()
    first_of: dict[fx.Node, tuple[fx.Node, int]] = {}
    for node in gm.graph.nodes:
        if is_call(node, aten.add.Tensor) and argument(node, "alpha") == 1:
            for counted, first in swapped(node.args):
                is_counted = is_call(counted, aten.arange.default) and isinstance(counted.args[0], int)
                if is_counted and first in lowered.inputs and not storages(first) & written:
                    first_of[node] = first, counted.args[0]
        elif is_call(node, aten.index_copy_.default) and node.args[2] in first_of:
            first, count = first_of[node.args[2]]
            if value(first).numel() == 1:
                length, place = shape(node.args[0])[node.args[1]], lowered.inputs.index(first)
                yield _first_position(place, value(first).dtype.itemsize, length, count, module_path(node))
        written |= written_storages(node)


def _first_position(place: int, element_bytes: int, length: int, count: int, where: str | None) -> IndexBound:
    what = "a position" if count == 1 else f"the first of {count} positions"
    message = (
        f"{where or 'index_copy_'}: the key/value cache is full: make the StaticCache longer (max_cache_len); expected "
        f"{what} from 0 to {length - count}"
    )
    return IndexBound(place, 1, 1, element_bytes, length - count + 1, message)


def _token_ids(gm: fx.GraphModule, lowered: Lowered) -> Iterator[IndexBound]:
    written: set[object] = set()
    for node in gm.graph.nodes:
        if node.target in (embedding, aten.embedding.default):
            ids, weight = node.args[:2] if node.target is embedding else (node.args[1], node.args[0])
            tensor, rows = value(ids), value(weight).shape[0]
            source = ids
            while (reshaped := reshape_source(source)) is not None:
                source = reshaped
            if (
                source in lowered.inputs
                and (stride := _only_stride(value(source))) is not None
                and isinstance(tensor.numel(), int)
                and tensor.numel() == value(source).numel()
                and not storages(source) & written
            ):
                yield IndexBound(
                    lowered.inputs.index(source),
                    tensor.numel(),
                    stride,
                    tensor.dtype.itemsize,
                    rows,
                    f"{module_path(node) or 'embedding'}: expected token ids from 0 to {rows - 1}",
                )
        written |= written_storages(node)


def _only_stride(tensor: torch.Tensor) -> int | None:
    """The distance between neighbours of a tensor whose elements are evenly spaced, else None."""
    if tensor.is_contiguous():
        return 1
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    return strides[0] if len(strides) == 1 and isinstance(strides[0], int) else None
