"""A matrix product over one element, as in the angles of rotary embeddings, is a multiplication."""

from __future__ import annotations

from torch import fx

from torch_mpk.patterns.rewriter import Rewriter, aten, shape
from torch_mpk.patterns.table import pattern


@pattern(aten.matmul.default, aten.bmm.default, aten.mm.default)
def outer(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    a, b = node.args
    if len(shape(a)) < 2 or len(shape(b)) < 2 or shape(a)[-1] != 1 or shape(b)[-2] != 1 or None in shape(node):
        return None
    rw.see(node)
    return rw.call(aten.mul.Tensor, a, b)
