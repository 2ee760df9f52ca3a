"""Complex numbers, in which some models write rotary embeddings, become pairs of real ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torch_mpk.capture.aliasing import storages, value, written_storages
from torch_mpk.errors import UnsupportedError
from torch_mpk.patterns.rewriter import Rewriter, argument, aten

Pair = tuple[fx.Node, fx.Node]

_EACH = (
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.slice.Tensor,
    aten.select.int,
    aten.transpose.int,
    aten.expand.default,
    aten.index.Tensor,
    aten.to.device,
    aten.clone.default,
    aten.neg.default,
)


def expand(rw: Rewriter) -> None:
    """Compute real and imaginary parts by themselves; a graph with another use of complex tensors stays as it is."""
    nodes = [node for node in rw.graph.nodes if _is_complex(node)]
    written = frozenset().union(*map(written_storages, rw.graph.nodes))
    if not nodes or any(storages(node) & written for node in nodes):
        return
    ends = list(dict.fromkeys(user for node in nodes for user in node.users if not _is_complex(user)))
    if any(end.target is not aten.view_as_real.default for end in ends):
        return
    parts: dict[fx.Node, Pair] = {}
    made: list[fx.Node] = []
    try:
        for node in nodes:
            rw.begin(node)
            parts[node] = _parts(rw, node, parts)
            made += rw.made
    except UnsupportedError:
        rw.made = made + rw.made
        rw.rollback()
        return
    for end in ends:
        rw.begin(end)
        rw.commit(rw.call(aten.stack.default, list(parts[end.args[0]]), -1))


def _is_complex(node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.op == "output":
        return False
    return any(isinstance(t, torch.Tensor) and t.is_complex() for t in torch.utils._pytree.tree_leaves(value(node)))


def _parts(rw: Rewriter, node: fx.Node, parts: dict[fx.Node, Pair]) -> Pair:
    if node.target is aten.view_as_complex.default:
        return rw.call(aten.select.int, node.args[0], -1, 0), rw.call(aten.select.int, node.args[0], -1, 1)
    if node.target is aten.polar.default:
        length, angle = node.args
        cos, sin = (rw.call(aten.mul.Tensor, length, rw.call(f, angle)) for f in (aten.cos.default, aten.sin.default))
        return cos, sin
    if node.target is aten.mul.Tensor:
        return _product(rw, node.args[0], node.args[1], parts)
    if node.target in (aten.add.Tensor, aten.sub.Tensor) and argument(node, "alpha") == 1:
        a, b = node.args
        if a in parts and b in parts:
            real, imaginary = (rw.call(node.target, x, y) for x, y in zip(parts[a], parts[b]))
            return real, imaginary
    if node.target in _EACH and node.args[0] in parts and not any(_is_complex(arg) for arg in node.args[1:]):
        rest, kwargs = node.args[1:], node.kwargs
        real, imaginary = (rw.call(node.target, part, *rest, **kwargs) for part in parts[node.args[0]])
        return real, imaginary
    if node.target is aten._conj.default and node.args[0] in parts:
        real, imaginary = parts[node.args[0]]
        return real, rw.call(aten.neg.default, imaginary)
    raise UnsupportedError(f"{node.target} of complex numbers")


def _product(rw: Rewriter, a: Any, b: Any, parts: dict[fx.Node, Pair]) -> Pair:
    def mul(x: Any, y: Any) -> fx.Node:
        return rw.call(aten.mul.Tensor, x, y)

    if a not in parts:
        a, b = b, a
    if a not in parts or isinstance(b, complex):
        raise UnsupportedError("a product of other complex numbers")
    real, imaginary = parts[a]
    if b not in parts:
        return mul(real, b), mul(imaginary, b)
    other, other_imaginary = parts[b]
    return (
        rw.call(aten.sub.Tensor, mul(real, other), mul(imaginary, other_imaginary)),
        rw.call(aten.add.Tensor, mul(real, other_imaginary), mul(imaginary, other)),
    )
