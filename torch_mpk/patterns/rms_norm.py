"""RMS normalisation as models write it: ``weight * (x32 * rsqrt(mean(x32 ** 2) + eps)).to(dtype)`` and its variants.

The order of casts and multiplications is part of the meaning, so each order that a style of ``rms_norm`` stands for is
matched exactly and no other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from torch_mpk.patterns.rewriter import (
    Rewriter,
    argument,
    aten,
    cast_source,
    dtype,
    is_call,
    is_tensor,
    numel,
    shape,
    swapped,
)
from torch_mpk.patterns.table import pattern

_CASTS = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten.type_as.default)


class _Normalised(NamedTuple):
    """``x32 * rsqrt(mean(x32 ** 2) + eps)``."""

    x32: fx.Node
    eps: float
    interior: list[fx.Node]


@pattern(aten.rms_norm.default)
def torch_rms_norm(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    x, normalized_shape, weight, eps = (argument(node, name) for name in ("input", "normalized_shape", "weight", "eps"))
    if len(normalized_shape) != 1 or dtype(x) == torch.float64:
        return None
    rw.see(node)
    if eps is None:
        eps = torch.finfo(torch.float32).eps  # what ATen takes for half types too
    return _rms_norm(rw, node, x, weight, eps, "torch")


@pattern(aten.mul.Tensor, *_CASTS)
def gemma_rms_norm(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    scaled = cast_source(node) or node
    if not is_call(scaled, aten.mul.Tensor):
        return None
    for left, right in swapped(scaled.args):
        found = _normalised(left)
        if found is None or not is_call(right, aten.add.Tensor):
            continue
        for weight32, one in swapped(right.args):
            if not isinstance(one, (int, float)) or one != 1 or argument(right, "alpha") != 1:
                continue
            x = cast_source(found.x32) if scaled is not node else found.x32
            weight = cast_source(weight32) if scaled is not node else weight32
            if x is None or weight is None or dtype(x) != dtype(node):
                continue
            rw.see(node, scaled, right, *found.interior)
            if scaled is not node:
                rw.see(found.x32, weight32)
            return _rms_norm(rw, node, x, weight, found.eps, "gemma")
    return None


@pattern(*_CASTS)
def once_rounded_rms_norm(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    """In 16 bits, as gpt-oss's and OLMo 2's, which compute what ``F.rms_norm`` does."""
    scaled = cast_source(node)
    if scaled is None or not is_call(scaled, aten.mul.Tensor) or dtype(node) == torch.float64:
        return None
    for left, weight in swapped(scaled.args):
        found = _normalised(left)
        x = None if found is None else cast_source(found.x32)
        if found is None or x is None or not is_tensor(weight) or dtype(x) != dtype(node):
            continue
        rw.see(node, scaled, found.x32, *found.interior)
        return _rms_norm(rw, node, x, weight, found.eps, "torch")
    return None


@pattern(aten.mul.Tensor)
def llama_rms_norm(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    for weight, rounded in swapped(node.args):
        if is_tensor(weight) and is_tensor(rounded) and len(shape(weight)) == 1 and weight is not rounded:
            found = _rounded(rounded)
            if found is not None:
                x, eps, interior = found
                rw.see(node, *interior)
                return _rms_norm(rw, node, x, weight, eps, "llama")
    return None


@pattern(aten.mul.Tensor, *_CASTS)
def unweighted_rms_norm(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    found = _rounded(node)
    if found is None:
        return None
    x, eps, interior = found
    rw.see(*interior)
    return _rms_norm(rw, node, x, None, eps, "llama")


def _rms_norm(
    rw: Rewriter, node: fx.Node, x: fx.Node, weight: fx.Node | None, eps: float, style: str
) -> fx.Node | None:
    if None in shape(x) or shape(node) != shape(x) or not dtype(x).is_floating_point:
        return None
    width = shape(x)[-1]
    if weight is not None and (shape(weight) != (width,) or dtype(weight) != dtype(x)):
        return None
    rows = rw.reshape(x, (numel(x) // width, width))
    return rw.reshape(rw.task("rms_norm", rows, weight, eps=eps, style=style), shape(node))


def _rounded(node: fx.Node) -> tuple[fx.Node, float, list[fx.Node]] | None:
    """A normalised value rounded to the dtype of ``x``: (x, eps, interior nodes)."""
    narrow = cast_source(node)
    found = _normalised(node if narrow is None else narrow)
    if found is None:
        return None
    x = cast_source(found.x32)
    if narrow is None:  # fp32 throughout; a cast of x that is not undone makes it another computation
        return (found.x32, found.eps, found.interior) if x is None else None
    if x is None or dtype(x) != dtype(node):
        return None
    return x, found.eps, [node, found.x32, *found.interior]


def _normalised(node: fx.Node) -> _Normalised | None:
    if not is_call(node, aten.mul.Tensor) or dtype(node) != torch.float32:
        return None
    for x32, inverse in swapped(node.args):
        if not is_call(inverse, aten.rsqrt.default) or not is_tensor(x32):
            continue
        (shifted,) = inverse.args
        if not is_call(shifted, aten.add.Tensor) or argument(shifted, "alpha") != 1:
            continue
        mean, eps = shifted.args
        if not isinstance(eps, (int, float)) or not is_call(mean, aten.mean.dim):
            continue
        square, dims, keepdim = (argument(mean, name) for name in ("self", "dim", "keepdim"))
        rank = len(shape(x32))
        if (
            [d % rank for d in dims] != [rank - 1]
            or not keepdim
            or argument(mean, "dtype") not in (None, torch.float32)
        ):
            continue
        if _is_square_of(square, x32) and dtype(x32) == torch.float32:
            return _Normalised(x32, float(eps), [node, inverse, shifted, mean, square])
    return None


def _is_square_of(node: fx.Node, x: fx.Node) -> bool:
    if is_call(node, aten.pow.Tensor_Scalar):
        return node.args[0] is x and node.args[1] == 2
    if is_call(node, aten.mul.Tensor):
        return node.args[0] is x and node.args[1] is x
    return is_call(node, aten.square.default) and node.args[0] is x
