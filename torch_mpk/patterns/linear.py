"""``linear``, and matrix products with a transposed weight."""

from __future__ import annotations

import math

from torch import fx

from torch_mpk.patterns.rewriter import Rewriter, argument, aten, dtype, is_call, shape
from torch_mpk.patterns.table import pattern


@pattern(aten.linear.default)
def linear(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    return _linear(rw, node, argument(node, "input"), argument(node, "weight"), argument(node, "bias"))


@pattern(aten.mm.default, aten.matmul.default)
def mm(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    x, weight = node.args
    return _transposed_linear(rw, node, x, weight, None)


@pattern(aten.addmm.default)
def addmm(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    bias, x, weight = node.args
    if argument(node, "beta") != 1 or argument(node, "alpha") != 1 or len(shape(bias)) != 1:
        return None
    return _transposed_linear(rw, node, x, weight, bias)


def _transposed_linear(
    rw: Rewriter, node: fx.Node, x: fx.Node, transposed: fx.Node, bias: fx.Node | None
) -> fx.Node | None:
    if not is_call(transposed, aten.t.default, aten.numpy_T.default, aten.transpose.int) or len(shape(transposed)) != 2:
        return None
    rw.see(transposed)
    return _linear(rw, node, x, transposed.args[0], bias)


def _linear(rw: Rewriter, node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> fx.Node | None:
    rw.see(node)
    return linear_task(rw, x, weight, bias)


def linear_task(rw: Rewriter, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> fx.Node | None:
    """``linear`` of x in any number of dimensions, or None for what the task does not take."""
    operands = [x, weight] if bias is None else [x, weight, bias]
    if None in shape(x) + shape(weight) or len(shape(weight)) != 2 or (bias is not None and len(shape(bias)) != 1):
        return None
    if len({dtype(operand) for operand in operands}) != 1 or not dtype(x).is_floating_point:
        return None
    *rows, depth = shape(x)
    y = rw.task("linear", rw.reshape(x, (math.prod(rows), depth)), weight, bias)
    return rw.reshape(y, (*rows, shape(weight)[0]))
