"""Tensors that the captured graph holds itself."""

from __future__ import annotations

import torch

from torch_mpk.errors import UnsupportedError
from torch_mpk.lowering import expr as E
from torch_mpk.lowering.expr import Expr
from torch_mpk.lowering.values import Index, Lazy

MAX_CONSTANT = 16  # elements of a tensor that becomes part of the programs that use it


def constant(value: object) -> Lazy:
    """A tensor the graph holds, as part of the programs that use it."""
    if not isinstance(value, torch.Tensor):
        raise UnsupportedError(f"a graph attribute of type {type(value).__name__}")
    if isinstance(value, torch._subclasses.FakeTensor) or value.numel() > MAX_CONSTANT:
        raise UnsupportedError(
            f"the graph holds a tensor constant of {value.numel()} elements; at most {MAX_CONSTANT} are supported"
        )
    dtype = value.dtype
    shape = [int(n) for n in value.shape]
    elements = value.detach().cpu().reshape(-1).tolist()

    def inner(idx: Index, predicate: Expr | None) -> Expr:
        linear = E.ravel(idx, shape)
        out = E.const(elements[-1] if elements else 0, dtype)  # of an empty one nobody reads
        for i in range(len(elements) - 2, -1, -1):
            out = E.where(E.compare("eq", linear, E.const(i, E.INT64)), E.const(elements[i], dtype), out)
        return out

    return Lazy(dtype, shape, (), inner, cost=2 * len(elements))
