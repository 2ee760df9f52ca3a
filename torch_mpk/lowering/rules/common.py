"""What the rules share."""

from __future__ import annotations

import torch
from torch import fx

from torch_mpk.errors import UnsupportedError
from torch_mpk.lowering import expr as E
from torch_mpk.lowering.expr import BOOL, FLOATS, Expr
from torch_mpk.lowering.lowerer import Lowerer, Meta

aten = torch.ops.aten


def out_meta(lx: Lowerer, node: fx.Node) -> Meta:
    return lx.meta(node.meta["val"])


def named(*names: str, overload: str = "default") -> dict[torch._ops.OpOverload, str]:
    """For ``rule``: operations that are told apart by their names."""
    return {getattr(getattr(aten, name), overload): name for name in names}


def normalise_dim(dim: int, rank: int) -> int:
    return dim + max(rank, 1) if dim < 0 else dim


def scalar(value: float | Expr, dtype: torch.dtype) -> Expr:
    """A Python number as an argument of an operation computed in ``dtype``: half types compute in fp32."""
    return E.cast(value, dtype) if isinstance(value, Expr) else E.const(value, wide(dtype))


def element(value: float | Expr, dtype: torch.dtype) -> Expr:
    """A Python number as an element of a tensor. An operand of arithmetic wraps; for an element that an integer dtype
    has no room for, eager raises an error. Unsigned dtypes take negative numbers."""
    if isinstance(value, Expr):
        return E.cast(value, dtype)
    if dtype != BOOL and dtype not in FLOATS:
        low, high = E.dtype_bounds(dtype)
        if not (low or -high) <= value <= high:
            raise UnsupportedError(f"the number {value}, for which {E.dtype_name(dtype)} has no room")
    return E.const(value, dtype)


def check_is_integer(dtype: torch.dtype, what: str) -> None:
    """Raises UnsupportedError for floats, and for bool, which eager refuses only when it runs the operation."""
    if dtype == BOOL or dtype in FLOATS:
        raise UnsupportedError(f"{what} of {E.dtype_name(dtype)}")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which operations on ``dtype`` are computed before they are rounded to it."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
