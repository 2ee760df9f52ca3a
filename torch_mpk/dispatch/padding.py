"""The graph of a bucket: a checked one over a prompt's positions, with padding in front of them.

In front, because what is read off the end, such as the last position's logits, stays where it is. Caches have no padded
positions: theirs lie far below 0, where nothing is written and no key is seen. What a full window holds comes behind
the padding, in front of the prompt's own positions.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from torch_mpk.capture.aliasing import eliminate_dead_code, evaluate, value
from torch_mpk.capture.graph import lay_out_as_eager
from torch_mpk.dispatch.position_check import PADDED, PositionCheck
from torch_mpk.dispatch.position_sizes import Window
from torch_mpk.patterns.rewriter import arguments, aten, is_call


class _Places(NamedTuple):
    """How many a bucket has along a dimension, those of a window among them, and how many of them are padding."""

    size: int
    front: fx.Node


class Padding:
    """Makes the graph over ``size`` positions. Runs in the graph's fake mode."""

    def __init__(self, check: PositionCheck, gm: fx.GraphModule, number: int, size: int) -> None:
        self.check, self.gm, self.size = check, gm, size
        self.graph = fx.Graph(owning_module=gm)
        self.nodes: dict[fx.Node, Any] = {}  # the captured graph's -> this one's
        self.number = gm.graph.find_nodes(op="placeholder")[number]
        self.fronts: dict[Window, fx.Node] = {}
        self.positions: dict[tuple[torch.device, int, _Places], fx.Node] = {}
        self.visible: dict[tuple[torch.device, bool, int, _Places], fx.Node] = {}
        self.sources: dict[tuple[torch.device, _Places], fx.Node] = {}

    def run(self) -> fx.Graph:
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        for node in placeholders:
            self.nodes[node] = self._copy(node)
        self.front = self._call(operator.sub, self.size, self.nodes[self.number])
        for node in placeholders:
            if (dim := self.check.dim(node)) is not None:
                self.nodes[node] = self._padded(self.nodes[node], dim)
        for node in list(self.gm.graph.nodes)[len(placeholders) :]:
            if node in self.check.counted:
                self.nodes[node] = self._count(node)
            elif node in self.check.tables:
                self.nodes[node] = self._take(node)
            elif node in self.check.first:
                self.nodes[node] = self._first(node)
            elif node in self.check.chosen:
                self.nodes[node] = self._choose(node)
            elif node in self.check.joined:
                self.nodes[node] = self._join(node)
            elif node in self.check.attending:
                self.nodes[node] = self._attend(node)
            else:
                self.nodes[node] = self._copy(node)
        lay_out_as_eager(self.graph)
        eliminate_dead_code(self.graph)
        return self.graph

    def _copy(self, node: fx.Node) -> fx.Node:
        def new(arg: fx.Node) -> Any:
            ahead = self.check.ahead(arg) if node in self.check.sized else None
            return self.nodes[arg] if ahead is None else self.size + ahead

        copy = self.graph.node_copy(node, self.nodes.__getitem__)
        copy.args, copy.kwargs = fx.node.map_arg((node.args, node.kwargs), new)
        is_as_before = node not in self.check.sized and all(
            value(arg) is value(self.nodes[arg]) for arg in node.all_input_nodes
        )
        if node.op == "call_function" and not is_as_before:
            copy.meta["val"] = evaluate(copy.target, copy.args, copy.kwargs)
        return copy

    def _call(self, target: Any, *args: Any, val: Any = None, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = evaluate(target, args, kwargs) if val is None else val
        return node

    def _padded(self, source: fx.Node, dim: int) -> fx.Node:
        shape = list(value(source).shape)
        pad = [0, 0] * (len(shape) - 1 - dim) + [self.front, 0]
        shape[dim] = self.size
        # Made by hand: PyTorch would ask how the length compares with the bucket.
        val = torch.empty(shape, dtype=value(source).dtype, device=value(source).device)
        return self._call(aten.constant_pad_nd.default, source, pad, 0, val=val)

    def _attend(self, node: fx.Node) -> fx.Node:
        """Attention, or softmax of scores, from which padded keys are hidden."""
        device = value(node).device
        args = {name: fx.node.map_arg(arg, self.nodes.__getitem__) for name, arg in arguments(node).items()}
        if node.target is aten.softmax.int:
            visible, scores = self._visible(device, False, value(node).dim(), self._places(node, -1)), args.pop("self")
            if is_call(scores, aten.add.Tensor) and isinstance(scores.args[1], fx.Node):  # a mask, which patterns know
                masked = self._hidden(scores.args[1], visible)
                scores = self._call(aten.add.Tensor, scores.args[0], masked, **scores.kwargs)
            else:
                scores = self._hidden(scores, visible)
            given: tuple[Any, ...] = (scores, args.pop("dim"))
        else:
            keys = self._places(node.args[1], -2)
            visible = self._visible(device, args.pop("is_causal"), value(node).dim(), keys)
            mask = args.pop("attn_mask")
            mask = visible if mask is None else self._hidden(mask, visible)
            given = (*(args.pop(name) for name in ("query", "key", "value")), mask)
        made = self._call(node.target, *given, **args)
        made.meta = node.meta | {"val": made.meta["val"]}
        return made

    def _hidden(self, mask: fx.Node, visible: fx.Node) -> fx.Node:
        if value(mask).dtype == torch.bool:
            return self._call(aten.__and__.Tensor, mask, visible)
        return self._call(aten.where.ScalarOther, visible, mask, -math.inf)

    def _places(self, node: fx.Node, dim: int) -> _Places:
        number = value(node).shape[dim]
        window, front = self.check.window(number), self.front
        if window is not None:
            if window not in self.fronts:
                whole = self._call(operator.add, front, window.size)
                self.fronts[window] = self._call(operator.sub, whole, self.nodes[window.held])
            front = self.fronts[window]
        return _Places(self.size + (self.check.ahead(number) or 0), front)

    def _visible(self, device: torch.device, is_causal: bool, rank: int, places: _Places) -> fx.Node:
        """Which keys a query may see, [1, 1, S, L] for patterns, [S, L] where there are fewer dimensions than four or
        more: those of real positions; padded queries see padded keys, too, since a row that sees none is NaN."""
        outer = [1, 1] if rank == 4 else []
        key = (device, is_causal, len(outer), places)
        if key not in self.visible:
            queries, keys = (
                self._call(aten.view.default, self._call(aten.arange.default, number, device=device), [*outer, *ends])
                for number, ends in ((self.size, (-1, 1)), (places.size, (1, -1)))
            )
            is_real = self._call(aten.ge.Scalar, keys, places.front)
            visible = self._call(aten.__or__.Tensor, is_real, self._call(aten.lt.Scalar, queries, self.front))
            if is_causal:
                visible = self._call(aten.__and__.Tensor, self._call(aten.le.Tensor, keys, queries), visible)
            self.visible[key] = visible
        return self.visible[key]

    def _count(self, node: fx.Node) -> fx.Node:
        like = value(node)
        numbers = self._numbers(like.device, PADDED, self._places(node, 0))
        return numbers if like.dtype == torch.int64 else self._call(aten.to.dtype, numbers, like.dtype)

    def _take(self, node: fx.Node) -> fx.Node:
        """A row for each position; any row there is for padded ones."""
        rows = self._numbers(value(node).device, 0, _Places(self.size, self.front))
        return self._call(aten.index_select.default, self.nodes[node.args[0]], self.check.tables[node], rows)

    def _first(self, node: fx.Node) -> fx.Node:
        source, dim = self.nodes[node.args[0]], arguments(node)["dim"]
        places = self._call(aten.arange.default, 1, device=value(source).device)
        place = self._call(aten.add.Tensor, places, self.front)
        first = self._call(aten.index_select.default, source, dim, place)
        return self._call(aten.select.int, first, dim, 0)

    def _choose(self, node: fx.Node) -> fx.Node:
        """As the graph does; the first there is for padded positions."""
        indices = [None if index is None else self._in_range(index) for index in arguments(node)["indices"]]
        return self._call(aten.index.Tensor, self.nodes[node.args[0]], indices)

    def _in_range(self, index: fx.Node) -> fx.Node:
        dim, new = self.check.dim(index), self.nodes[index]
        if dim is None:
            return new
        number, front = self._places(index, dim)
        places = self._call(aten.arange.default, number, device=value(index).device)
        places = self._call(aten.view.default, places, [-1, *[1] * (value(index).dim() - 1 - dim)])
        return self._call(aten.where.ScalarOther, self._call(aten.ge.Scalar, places, front), new, 0)

    def _join(self, node: fx.Node) -> fx.Node:
        """Joins what a window holds and the prompt's positions, with the padding in front of both."""
        dim = arguments(node)["dim"]
        whole = [self.nodes[self.check.windows.get(each, each)] for each in node.args[0]]
        apart = self._call(aten.cat.default, whole, dim)  # what is free in the window, and padding, are between the two
        sources = self._sources(value(node).device, self._places(node, dim))
        return self._call(aten.index_select.default, apart, dim, sources)

    def _sources(self, device: torch.device, joined: _Places) -> fx.Node:
        """Where each joined position stands while padding is between a window and the prompt's own."""
        key = (device, joined)
        if key not in self.sources:
            places = self._call(aten.arange.default, joined.size, device=device)
            held = self._call(aten.clamp_min.default, self._call(aten.sub.Tensor, places, joined.front), 0)
            is_own = self._call(aten.ge.Scalar, places, self._call(operator.add, self.front, joined.size - self.size))
            self.sources[key] = self._call(aten.where.self, is_own, places, held)
        return self.sources[key]

    def _numbers(self, device: torch.device, padded: int, counted: _Places) -> fx.Node:
        """The number of each position: from 0 on, and ``padded`` at padded ones."""
        key = (device, padded, counted)
        if key not in self.positions:
            places = self._call(aten.arange.default, counted.size, device=device)
            is_real = self._call(aten.ge.Scalar, places, counted.front)
            numbers = self._call(aten.sub.Tensor, places, counted.front)
            self.positions[key] = self._call(aten.where.ScalarOther, is_real, numbers, padded)
        return self.positions[key]
