"""``linear``, and matrix products with a weight, transposed or, as GPT-2's, as it lies."""

from __future__ import annotations

import math

import torch
from torch import fx

from torch_mpk.capture.aliasing import value
from torch_mpk.patterns.rewriter import Rewriter, argument, aten, dtype, is_call, shape
from torch_mpk.patterns.table import pattern

_EXPERT_DTYPES = {torch.float32, torch.bfloat16, torch.float16}  # of kernels on a GPU
_MOST_ROWS = 64  # of x with a weight [K, N]: with more, as prompts have, libraries are faster


@pattern(aten.linear.default)
def linear(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    return _linear(rw, node, argument(node, "input"), argument(node, "weight"), argument(node, "bias"))


@pattern(aten.mm.default, aten.matmul.default)
def mm(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    x, weight = node.args
    return _transposed_linear(rw, node, x, weight, None) or _product_of_one_expert(rw, node, x, weight, None)


@pattern(aten.addmm.default)
def addmm(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    bias, x, weight = node.args
    if argument(node, "beta") != 1 or argument(node, "alpha") != 1 or len(shape(bias)) != 1:
        return None
    return _transposed_linear(rw, node, x, weight, bias) or _product_of_one_expert(rw, node, x, weight, bias)


def _transposed_linear(
    rw: Rewriter, node: fx.Node, x: fx.Node, transposed: fx.Node, bias: fx.Node | None
) -> fx.Node | None:
    if not is_call(transposed, aten.t.default, aten.numpy_T.default, aten.transpose.int) or len(shape(transposed)) != 2:
        return None
    rw.see(transposed)
    return _linear(rw, node, x, transposed.args[0], bias)


def _product_of_one_expert(
    rw: Rewriter, node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None
) -> fx.Node | None:
    """``x @ weight + bias`` of a weight [K, N], as transformers' Conv1D has it. Kernels of ``linear`` read rows of
    [N, K], so the weight would be copied; those of experts read either. In 16 bits the product is rounded before the
    bias is added, once more than in eager."""
    if weight.op != "placeholder" or len(shape(weight)) != 2 or None in shape(x) + shape(weight):
        return None
    *rows, depth = shape(x)
    num_rows, operands = math.prod(rows), [x, weight] if bias is None else [x, weight, bias]
    if not 0 < num_rows <= _MOST_ROWS or 0 in shape(weight) or value(weight).stride(1) != 1:
        return None
    dtypes = {dtype(operand) for operand in operands}
    if len(dtypes) != 1 or not dtypes <= _EXPERT_DTYPES:
        return None
    rw.see(node)
    ids = rw.call(aten.new_zeros.default, x, [num_rows, 1], dtype=torch.int64)
    matrices = rw.call(aten.unsqueeze.default, weight, 0)
    y = rw.task("expert_linear", rw.reshape(x, (num_rows, 1, depth)), ids, None, matrices)
    y = rw.reshape(y, (*rows, shape(weight)[1]))
    return y if bias is None else rw.call(aten.add.Tensor, y, bias)


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
