"""Rewrites graphs and compares them with the captured ones, bit by bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torch_mpk import patterns
from torch_mpk.capture.graph import capture
from torch_mpk.registry import Task


def graph_of(function: Callable[..., Any], *args: torch.Tensor) -> fx.GraphModule:
    """The captured graph of a function that returns a tuple of tensors."""

    def traced(*args: torch.Tensor) -> Any:
        return function(*args)

    graph = fx.Graph()
    graph.output(graph.call_function(traced, tuple(graph.placeholder(f"arg{i}") for i in range(len(args)))))
    return capture(fx.GraphModule({}, graph), args).graph_module


def tasks_of(gm: fx.GraphModule) -> Counter[str]:
    return Counter(node.target.name for node in gm.graph.nodes if isinstance(node.target, Task))


def operands_of(gm: fx.GraphModule, name: str) -> list[dict[str, Any]]:
    """The operands and attributes of every call of a task, by name; absent operands are left out."""
    calls = [node for node in gm.graph.nodes if isinstance(node.target, Task) and node.target.name == name]
    return [
        {operand.name: arg for operand, arg in zip(call.target.inputs, call.args, strict=True) if arg is not None}
        | dict(call.kwargs)
        for call in calls
    ]


def clones(args: Any) -> list[Any]:
    return [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]


@torch.no_grad()
def assert_same(expected: fx.GraphModule, actual: fx.GraphModule, *args: Any, tolerance: float = 0) -> None:
    """Both modules return the same and leave the same in their arguments: the same bits, or a relative error below
    the tolerance."""
    left, right = clones(args), clones(args)
    results = expected(*left), actual(*right)
    for a, b in zip((*results[0], *left), (*results[1], *right), strict=True):
        x, y = torch.as_tensor(a).nan_to_num(7.0), torch.as_tensor(b).nan_to_num(7.0)
        assert torch.equal(x, y) or (x - y).norm() < tolerance * x.norm()


def rewritten(
    function: Callable[..., Any], *args: torch.Tensor, also: Sequence[Any] = (), tolerance: float = 0
) -> fx.GraphModule:
    """The rewritten graph, having checked that it computes the same, for the other arguments in ``also`` too."""
    gm = graph_of(function, *args)
    before = str(gm.graph)
    result = patterns.apply(gm)
    assert str(gm.graph) == before, "apply changed its argument"
    result.graph.lint()
    for values in (args, *also):
        assert_same(gm, result, *values, tolerance=tolerance)
    return result
