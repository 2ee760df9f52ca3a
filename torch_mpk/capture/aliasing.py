"""Which storages the nodes of a captured graph share, read and write.

The graph keeps in-place ops, so data flow does not say everything: two nodes may be views of one tensor. The example
values of the capture (``node.meta["val"]``) share storage exactly where eager tensors do, so storages are compared, not
schemas.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from torch_mpk.registry import Task


def value(node: fx.Node) -> Any:
    """The node's example value: fake tensors, SymInts, or lists; a ``get_attr`` node's is the attribute itself."""
    if node.op == "get_attr":
        owner = node.graph.owning_module
        for name in str(node.target).split("."):
            owner = getattr(owner, name)
        return owner
    return node.meta.get("val")


def evaluate(target: Any, args: Any, kwargs: Any) -> Any:
    """The example value of a call."""
    with torch.no_grad():
        return target(*fx.node.map_arg(args, value), **fx.node.map_arg(kwargs, value))


def tensors(node: fx.Node) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value(node)) if isinstance(t, torch.Tensor)]


def storages(node: fx.Node) -> frozenset[int]:
    """Identities of the storages behind the node's tensors."""
    val = value(node)
    if isinstance(val, torch.Tensor):
        return frozenset((val.untyped_storage()._cdata,))
    return frozenset(t.untyped_storage()._cdata for t in tensors(node))


def written_args(node: fx.Node) -> list[fx.Node]:
    """The arguments that the node writes in place."""
    if node.op != "call_function":
        return [] if node.op in ("placeholder", "get_attr", "output") else list(node.all_input_nodes)
    if isinstance(node.target, Task):
        named = zip(node.target.inputs, node.args, strict=False)
        in_place = [arg for operand, arg in named if operand.is_write]
        return [arg for arg in (*in_place, node.kwargs.get("out")) if isinstance(arg, fx.Node)]
    if isinstance(node.target, torch._ops.OpOverload):
        if not node.target._schema.is_mutable:
            return []
        written: list[fx.Node] = []
        for position, name in _written_arguments(node.target):
            given = node.args[position] if position < len(node.args) else node.kwargs.get(name)
            if given is not None:
                fx.node.map_arg(given, written.append)
        return written
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return list(node.all_input_nodes)  # its body may write any of them
    return []


@functools.cache
def _written_arguments(target: torch._ops.OpOverload) -> list[tuple[int, str]]:
    """Positions and names."""
    arguments = enumerate(target._schema.arguments)
    return [(i, each.name) for i, each in arguments if each.alias_info is not None and each.alias_info.is_write]


def written_storages(node: fx.Node) -> frozenset[int]:
    return frozenset().union(*map(storages, written_args(node)))


def is_impure(node: fx.Node) -> bool:
    """Must stay even if nothing uses its result."""
    if node.op in ("placeholder", "output") or written_args(node):
        return True
    return not isinstance(node.target, Task) and node.is_impure()


def is_scalar(node: fx.Node) -> bool:
    """Computes Python numbers from Python numbers and shapes: no device work, no effect."""
    return (
        node.op == "call_function"
        and node.target not in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
        and isinstance(value(node), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))
    )


def is_view(node: fx.Node) -> bool:
    """Only looks at its arguments' storage in another way: no device work, no effect."""
    if node.op != "call_function" or written_args(node):
        return False
    if any(_is_list(arg) and not is_view(arg) for arg in node.all_input_nodes):
        return False  # an element of a computed tuple belongs to what computed it
    own = storages(node)
    return bool(own) and own <= frozenset().union(*map(storages, node.all_input_nodes))


def _is_list(node: fx.Node) -> bool:
    return isinstance(value(node), (list, tuple))


def is_same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same elements at the same place: one could stand for the other."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # which importing torch_mpk should not need

    return (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.dtype == b.dtype
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
        and a.ndim == b.ndim
        and statically_known_true(a.storage_offset() == b.storage_offset())
        and all(statically_known_true(x == y) for x, y in zip(a.shape, b.shape, strict=True))
        and all(statically_known_true(x == y) for x, y in zip(a.stride(), b.stride(), strict=True))
    )


def read_through_inplace(graph: fx.Graph) -> None:
    """Let every use of an in-place op's result read the tensor it updated: they are one, and order is program order."""
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(value(node), torch.Tensor):
            for arg in written_args(node):
                if is_same_tensor(value(node), value(arg)):
                    node.replace_all_uses_with(arg)
                    break


def eliminate_dead_code(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if not node.users and not is_impure(node):
            graph.erase_node(node)
