"""One spelling for what captured graphs spell in several ways, before patterns are matched."""

from __future__ import annotations

import torch
from torch import fx

from torch_mpk import registry
from torch_mpk.aliasing import (
    eliminate_dead_code,
    is_same_tensor,
    read_through_inplace,
    storages,
    value,
    written_args,
    written_storages,
)
from torch_mpk.patterns.rewriter import argument, aten, is_call, is_tensor


def normalise(graph: fx.Graph) -> None:
    """Drop ops that change nothing, let uses of in-place results read the tensor updated, and call tasks by ``Task``."""
    read_through_inplace(graph)
    for node in list(graph.nodes):
        if is_call(node, aten.detach_.default):  # without autograd it has no effect
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    written = frozenset().union(*map(written_storages, graph.nodes))
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if getattr(node.target, "namespace", None) == "mpk":
            _call_task(node)
        elif (same := _unchanged(node, written)) is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    eliminate_dead_code(graph)


def _unchanged(node: fx.Node, written: frozenset[int]) -> fx.Node | None:
    """The argument that ``node`` returns as it is."""
    if not is_tensor(node) or written_args(node):
        return None
    if is_call(node, aten.dropout.default) and (argument(node, "p") == 0 or not argument(node, "train")):
        is_copy = True
    elif is_call(node, aten.lift_fresh_copy.default, aten.lift_fresh.default):
        is_copy = True
    else:
        tensors = filter(is_tensor, node.all_input_nodes)
        return next((arg for arg in tensors if is_same_tensor(value(node), value(arg))), None)
    source = node.args[0]
    return source if is_copy and not (storages(node) | storages(source)) & written else None


def _call_task(node: fx.Node) -> None:
    task = registry.get(node.target._schema.name.removeprefix("mpk::"))
    node.args = tuple(argument(node, operand.name) for operand in task.inputs)
    node.kwargs = {name: argument(node, name) for name in task.attrs}
    node.target = task
