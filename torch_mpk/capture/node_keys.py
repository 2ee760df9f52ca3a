"""Keys of nodes. Layers of a model repeat each other, and what was found out about one node holds for all nodes with an
equal key."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import fx

from torch_mpk.capture.aliasing import is_view

NodeKey = Hashable


def node_key(node: fx.Node) -> NodeKey | None:
    """What decides whether a node can be lowered by itself: its operation, its arguments, where they lie in what they
    are views of, and whether one is another. None where that is more than metadata: sizes and constants."""
    numbers: dict[fx.Node, int] = {}
    parts: list[Hashable] = []

    def add(each: fx.Node, with_arguments: bool) -> bool:
        if each in numbers:
            return True
        if each.op == "get_attr" or (
            with_arguments and not all(add(arg, is_view(arg)) for arg in each.all_input_nodes)
        ):
            return False
        described = describe(each.meta.get("val"))
        numbers[each] = len(numbers)
        call = (each.target, call_text(each, numbers)) if with_arguments else each.op == "placeholder"
        parts.append((call, described, len(each.users) > 1))
        return described is not None

    return tuple(parts) if add(node, True) else None


def call_text(node: fx.Node, numbers: Mapping[fx.Node, int]) -> str:
    """A call's arguments in words, with numbers for nodes. Unlike the arguments themselves it tells 1 from True."""
    return repr(fx.node.map_arg((node.args, dict(node.kwargs)), lambda arg: _Number(numbers[arg])))


def describe(val: object) -> Hashable | None:
    """What an example value says but for its memory; None where it has sizes that are known only at run time."""
    if isinstance(val, torch.Tensor):
        sizes = (*val.shape, *val.stride())
        is_static = all(isinstance(n, int) for n in sizes) and val.layout == torch.strided
        return (val.dtype, val.device, val.dim(), sizes) if is_static else None
    if isinstance(val, (list, tuple)):
        parts = tuple(map(describe, val))
        return None if None in parts else parts
    return None if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)) else repr(val)


class _Number:
    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"%{self.number}"
