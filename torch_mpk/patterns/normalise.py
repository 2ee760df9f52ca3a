"""One spelling for what captured graphs spell in several ways, before patterns are matched."""

from __future__ import annotations

from torch import fx

from torch_mpk import registry
from torch_mpk.capture.aliasing import (
    eliminate_dead_code,
    evaluate,
    is_same_tensor,
    read_through_inplace,
    storages,
    value,
    written_args,
    written_storages,
)
from torch_mpk.patterns.rewriter import argument, aten, is_call, is_tensor


def normalise(graph: fx.Graph) -> None:
    """Drop ops that change nothing, read in-place results from the tensor updated, and call tasks by ``Task``."""
    read_through_inplace(graph)
    for node in list(graph.nodes):
        if is_call(node, aten.detach_.default):  # without autograd it has no effect
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    written = frozenset().union(*map(written_storages, graph.nodes))
    moved: frozenset[int] = frozenset()  # storages of dropped copies: views of them are views of the original now
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if storages(node) & moved:
            node.meta["val"] = evaluate(node.target, node.args, node.kwargs)
        if (task := registry.of_operator(node.target)) is not None:
            _call_task(node, task)
        elif (same := _unchanged(node, written)) is not None:
            moved |= storages(node) - storages(same)
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    eliminate_dead_code(graph)


def _unchanged(node: fx.Node, written: frozenset[int]) -> fx.Node | None:
    """The argument that ``node`` returns as it is, or as a copy where nobody writes to either."""
    if not is_tensor(node) or written_args(node):
        return None
    is_idle = is_call(node, aten.dropout.default) and (argument(node, "p") == 0 or not argument(node, "train"))
    if is_idle or is_call(node, aten.lift_fresh_copy.default):
        source = node.args[0]
        return None if (storages(node) | storages(source)) & written else source
    return next((a for a in node.all_input_nodes if is_tensor(a) and is_same_tensor(value(node), value(a))), None)


def _call_task(node: fx.Node, task: registry.Task) -> None:
    args = tuple(argument(node, operand.name) for operand in task.inputs)
    kwargs = {name: argument(node, name) for name in task.attrs}
    if not node.target._schema.name.endswith("_"):
        node.target, node.args, node.kwargs = task, args, kwargs
        return
    with node.graph.inserting_before(node):
        result = node.graph.call_function(task, args, kwargs)
    result.meta = node.meta | {"val": evaluate(task, args, kwargs)}
    node.target, node.args, node.kwargs = aten.copy_.default, (args[0], result), {}
    node.meta["val"] = value(args[0])
