"""The gated activations of MLPs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from torch_mpk.capture.aliasing import is_view, value
from torch_mpk.patterns.linear import linear_task
from torch_mpk.patterns.rewriter import (
    Rewriter,
    argument,
    aten,
    dtype,
    has_same_strides,
    is_call,
    is_tensor,
    shape,
    swapped,
)
from torch_mpk.patterns.table import pattern


@pattern(aten.mul.Tensor)
def gated(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    for activated, up in swapped(node.args):
        if not is_call(activated, aten.silu.default, aten.gelu.default) or not is_tensor(up):
            continue
        gate = activated.args[0]
        if shape(gate) != shape(up) or None in shape(up) or dtype(gate) != dtype(up):
            continue
        rw.see(node, activated)
        gate, up = _halves_of_linear(rw, gate, up) or (gate, up)
        if is_call(activated, aten.silu.default):
            return rw.task("silu_mul", gate, up)
        return rw.task("gelu_mul", gate, up, approximate=argument(activated, "approximate"))
    return None


def _halves_of_linear(rw: Rewriter, gate: fx.Node, up: fx.Node) -> Sequence[fx.Node] | None:
    """Two halves of one linear's columns, as linears with half of its weight each; None where they are something else.

    So the activation becomes their epilogue, instead of a phase of its own.
    """
    views: list[fx.Node] = []

    def below(node: fx.Node) -> fx.Node:
        while is_view(node):
            views.append(node)
            node = node.args[0]
        return node

    fused, size = below(gate), shape(gate)[-1]
    if below(up) is not fused or not is_call(fused, aten.linear.default):
        return None
    if shape(fused) != (*shape(gate)[:-1], 2 * size) or not all(has_same_strides(half, fused) for half in (gate, up)):
        return None
    begins = [value(half).storage_offset() - value(fused).storage_offset() for half in (gate, up)]
    if sorted(begins) != [0, size]:
        return None
    product = {fused, *views}
    if any(user not in product and user not in rw.interior for node in product for user in node.users):
        return None  # it is needed as a whole
    rw.see(*product)
    halves = []
    for begin in begins:
        rows = [
            None if operand is None else rw.call(aten.slice.Tensor, operand, 0, begin, begin + size)
            for operand in (argument(fused, "weight"), argument(fused, "bias"))
        ]
        halves.append(linear_task(rw, argument(fused, "input"), *rows))
    return None if None in halves else halves
