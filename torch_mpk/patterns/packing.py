"""Masks without what Transformers asks about packed sequences, where the graph itself shows the answer.

Without a cache and a mask, ``transformers.masking_utils`` looks in the numbers of positions for places where a new
sequence begins. Where the graph counts the positions, there is none, and the question goes. So do look-ups of every
position by its own place, which are another shape of the same tensor.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from torch_mpk.capture.aliasing import eliminate_dead_code, evaluate, value
from torch_mpk.capture.graph import Captured
from torch_mpk.capture.tracing import graph_module
from torch_mpk.patterns.rewriter import CASTS, RESHAPES, arguments, aten, is_call

_COUNTING = (aten.unsqueeze.default, aten.expand.default)
_SPREADS = (*RESHAPES, *CASTS, aten.expand.default, aten.slice.Tensor, aten.index.Tensor)


def without_packing(captured: Captured) -> Captured:
    """The same graph, with what is known of its positions put in."""
    graph = copy.deepcopy(captured.graph_module.graph)
    gm = graph_module(captured.graph_module, graph)
    fakes = [each.value for each in captured.inputs if isinstance(each.value, torch.Tensor)]
    fake_mode: Any = next(fake.fake_mode for fake in fakes if hasattr(fake, "fake_mode"))
    with fake_mode, torch.no_grad(), enable_python_dispatcher():
        _Fold(gm.graph).run()
    eliminate_dead_code(gm.graph)
    return dataclasses.replace(captured, graph_module=gm)


class _Fold:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.starts: dict[fx.Node, int | None] = {}  # of nodes that count along the last dimension; None: not known
        self.known: dict[fx.Node, int | bool] = {}  # nodes that hold one number everywhere

    def run(self) -> None:
        for node in self.graph.nodes:
            if node.op == "call_function":
                self._note(node)
        for node in list(self.graph.nodes):
            self._replace(node)

    def _note(self, node: fx.Node) -> None:
        source = node.args[0] if node.args else None
        if is_call(node, aten.arange.default):
            self.starts[node] = 0
        elif is_call(node, aten.add.Tensor) and source in self.starts and isinstance(node.args[1], int):
            start = self.starts[source]
            self.starts[node] = None if start is None else start + node.args[1]
        elif is_call(node, *_COUNTING) and source in self.starts and _size(node, -1) == _size(source, -1):
            self.starts[node] = self.starts[source]
        number = self._number(node)
        if number is not None:
            self.known[node] = number

    def _number(self, node: fx.Node) -> int | bool | None:
        args = arguments(node) if isinstance(node.target, torch._ops.OpOverload) else {}
        source = self.known.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if is_call(node, aten.diff.default):
            return 1 if self._is_step_of_one(args) else None
        if is_call(node, aten.ones.default, aten.new_ones.default):
            return True
        if source is None:
            return None
        if is_call(node, aten.ne.Scalar):
            return bool(source != args["other"])
        if is_call(node, aten.cumsum.default):
            return 0 if source == 0 else None
        if is_call(node, aten.eq.Tensor):
            other = self.known.get(args["other"])
            return None if other is None else bool(source == other)
        return source if is_call(node, *_SPREADS) else None

    def _is_step_of_one(self, args: dict[str, Any]) -> bool:
        """The difference of positions with those before them, the first with one less."""
        counted, first = args["self"], args["prepend"]
        is_last = args["dim"] in (-1, value(counted).dim() - 1) and args["n"] == 1 and args["append"] is None
        if counted not in self.starts or not is_last or not is_call(first, aten.sub.Tensor) or first.args[1] != 1:
            return False
        taken = first.args[0]
        if not is_call(taken, aten.slice.Tensor) or taken.args[0] is not counted:
            return False
        which = arguments(taken)
        along = which["dim"] in (-1, value(counted).dim() - 1)
        return bool(along and (which["start"] or 0, which["end"], which["step"]) == (0, 1, 1))

    def _replace(self, node: fx.Node) -> None:
        if is_call(node, aten.__and__.Tensor):
            for true, other in (node.args, node.args[::-1]):
                is_true = isinstance(true, fx.Node) and self.known.get(true) is True
                if is_true and isinstance(other, fx.Node) and _is_alike(node, other):
                    node.replace_all_uses_with(other)
                    return
        elif is_call(node, aten.index.Tensor):
            dims = self._places(node)
            if dims is not None:
                node.replace_all_uses_with(self._spread(node, dims))

    def _places(self, node: fx.Node) -> list[int] | None:
        """To which dimensions of the result ``source[indices]`` spreads those of the source; None if it does else."""
        source, indices = node.args
        rank = value(node).dim()
        if len(indices) != value(source).dim():
            return None
        dims: list[int] = []
        for d, index in enumerate(indices):
            if not isinstance(index, fx.Node) or value(index).dim() == 0:
                return None
            long = [i for i in range(-value(index).dim(), 0) if _size(index, i) != 1]
            if len(long) > 1 or not self._counts_all(index, _size(source, d)):
                return None
            dims.append(rank + long[0] if long else d)
        return dims if dims == sorted(set(dims)) else None

    def _counts_all(self, index: fx.Node, size: Any) -> bool:
        """Whether an index holds 0 .. size - 1, in any shape."""
        node: Any = index
        while is_call(node, *RESHAPES, aten.slice.Tensor):
            node = node.args[0]
        is_whole = value(index).numel() == 1 if size == 1 else _longest(index) == _longest(node) == size
        return self.starts.get(node) == 0 and is_whole

    def _spread(self, node: fx.Node, dims: list[int]) -> fx.Node:
        spread = node.args[0]
        for d in range(value(node).dim()):
            if d not in dims:
                with self.graph.inserting_before(node):
                    spread = self.graph.call_function(aten.unsqueeze.default, (spread, d))
                spread.meta = dict(node.meta)
                spread.meta["val"] = evaluate(spread.target, spread.args, {})
        return spread


def _size(node: Any, dim: int) -> Any:
    """So that comparing it makes no guard."""
    size = value(node).shape[dim]
    return size if isinstance(size, int) else size.node.expr


def _longest(node: fx.Node) -> Any:
    """The one size that is not 1."""
    return next((_size(node, d) for d in range(value(node).dim()) if _size(node, d) != 1), 1)


def _is_alike(a: fx.Node, b: fx.Node) -> bool:
    x, y = value(a), value(b)
    return x.dtype == y.dtype and x.dim() == y.dim() and all(_size(a, d) == _size(b, d) for d in range(x.dim()))
