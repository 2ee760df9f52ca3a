"""Calls of tasks as a graph of their own, whose results are all that they make."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_mpk.registry import Task


@dataclass
class Call:
    task: Task
    operands: Sequence[torch.Tensor | None]
    attrs: dict[str, Any]


def graph_of(calls: Sequence[Call]) -> fx.GraphModule:
    """The calls, independent of each other, as a captured graph would have them. Its inputs are the operands that are
    there; they are not changed. Raises what a task raises for operands that it does not take."""
    graph = fx.Graph()
    results: list[fx.Node] = []
    for call in calls:
        nodes = [None if t is None else _placeholder(graph, t) for t in call.operands]
        node = graph.call_function(call.task, tuple(nodes), dict(call.attrs))
        node.meta["val"] = _made_by(call)
        results += _results(graph, node)
    graph.output(tuple(results))
    return fx.GraphModule({}, graph)


def _made_by(call: Call) -> Any:
    """Results without values: operands may be as large as caches."""
    with FakeTensorMode() as mode:
        operands = [None if t is None else mode.from_tensor(t) for t in call.operands]
        return call.task(*operands, **call.attrs)


def _placeholder(graph: fx.Graph, t: torch.Tensor) -> fx.Node:
    node = graph.placeholder(f"operand{len(graph.nodes)}")
    node.meta["val"] = t
    return node


def _results(graph: fx.Graph, call: fx.Node) -> Iterator[fx.Node]:
    value = call.meta["val"]
    if not isinstance(value, tuple):
        yield from () if value is None else (call,)
        return
    for i, val in enumerate(value):
        item = graph.call_function(operator.getitem, (call, i))
        item.meta["val"] = val
        yield item
