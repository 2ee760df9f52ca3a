"""Reductions, softmax, and matrix products small enough to be reductions."""

from __future__ import annotations

import math

import torch
from torch import fx

from torch_mpk.errors import UnsupportedError
from torch_mpk.lowering import expr as E
from torch_mpk.lowering.expr import BOOL, FLOATS, INT64
from torch_mpk.lowering.lowerer import Lowerer
from torch_mpk.lowering.rules import aten, normalise_dim, out_meta, rule
from torch_mpk.lowering.rules_pointwise import cast, wide
from torch_mpk.lowering.rules_view import reshaped
from torch_mpk.lowering.values import Index, Value, is_static

MAX_PRODUCTS = 1 << 22  # multiply-adds of a matrix product that becomes a plain reduction


def reduced(lx: Lowerer, op: str, a: Value, dims: list[int] | None, keepdim: bool, dtype: torch.dtype) -> Value:
    rank = len(a.shape)
    dims = sorted({normalise_dim(d, rank) for d in dims}) if dims else list(range(rank))
    if rank == 0:
        dims = []
    source = lx.read(a)
    if op in ("sum", "prod") and dtype not in FLOATS:
        source = cast(lx, source, INT64)
    if op in ("any", "all"):
        source = cast(lx, source, BOOL)
    return lx.reduce(op, dtype, source, dims, keepdim)


@rule(aten.sum.default, aten.mean.default)
def _sum_all(lx, node, a, dtype=None):
    return _sum(lx, node, a, None, False, dtype)


@rule(aten.sum.dim_IntList, aten.mean.dim)
def _sum(lx, node, a, dim=None, keepdim=False, dtype=None):
    out = out_meta(lx, node).dtype
    if dtype is not None and dtype != a.dtype:
        a = cast(lx, a, dtype)
    return reduced(lx, node.target._schema.name.split("::")[1], a, dim, keepdim, out)


@rule(aten.prod.default)
def _prod(lx, node, a, dtype=None):
    out = out_meta(lx, node).dtype
    return reduced(lx, "prod", cast(lx, a, out), None, False, out)


@rule(aten.prod.dim_int)
def _prod_dim(lx, node, a, dim, keepdim=False, dtype=None):
    out = out_meta(lx, node).dtype
    return reduced(lx, "prod", cast(lx, a, out), [dim], keepdim, out)


@rule(aten.amax.default, aten.amin.default)
def _amax(lx, node, a, dim=(), keepdim=False):
    return reduced(lx, node.target._schema.name.split("::")[1], a, list(dim), keepdim, a.dtype)


@rule(aten.max.default, aten.min.default)
def _max_all(lx, node, a):
    return reduced(lx, "amax" if node.target is aten.max.default else "amin", a, None, False, a.dtype)


@rule(aten.max.dim, aten.min.dim)
def _max_dim(lx, node, a, dim, keepdim=False):
    """The values and the indices; each only where it is used."""
    name = "max" if node.target is aten.max.dim else "min"
    used = {user.args[1] for user in node.users} or {0, 1}
    values = reduced(lx, f"a{name}", a, [dim], keepdim, a.dtype) if 0 in used else None
    indices = reduced(lx, f"arg{name}", a, [dim], keepdim, INT64) if 1 in used else None
    return values, indices


@rule(aten.argmax.default, aten.argmin.default)
def _argmax(lx, node, a, dim=None, keepdim=False):
    return reduced(lx, node.target._schema.name.split("::")[1], a, None if dim is None else [dim], keepdim, INT64)


@rule(aten.any.default, aten.all.default)
def _any_all(lx, node, a):
    return _any(lx, node, a, None)


@rule(aten.any.dim, aten.all.dim, aten.any.dims, aten.all.dims)
def _any(lx, node, a, dim=None, keepdim=False):
    dims = [dim] if isinstance(dim, int) else dim
    return reduced(lx, node.target._schema.name.split("::")[1], a, dims, keepdim, out_meta(lx, node).dtype)


@rule(aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default, aten._safe_softmax.default)
def _softmax(lx, node, a, dim, dtype=None):
    meta = out_meta(lx, node)
    compute = wide(meta.dtype)
    name = node.target._schema.name.split("::")[1]
    if isinstance(dtype, torch.dtype) and dtype != a.dtype:
        a = cast(lx, a, dtype)
    x = lx.read(cast(lx, a, compute))
    if x.cost > 4 and is_static(x.shape):
        lx.realise(x)  # read three times
    highest = lx.read(reduced(lx, "amax", x, [dim], True, compute))

    def shifted(e, top):
        return E.apply("sub", compute, e, top)

    exps = lx.pointwise(compute, x.shape, lambda e, top: E.apply("exp", compute, shifted(e, top)), [x, highest], cost=4)
    total = lx.read(reduced(lx, "sum", exps, [dim], True, compute))
    if "log" in name:
        return lx.pointwise(
            meta.dtype,
            meta.shape,
            lambda e, top, s: E.apply("sub", meta.dtype, shifted(e, top), E.apply("log", compute, s)),
            [x, highest, total],
            cost=4,
        )
    if name == "_safe_softmax":
        dead = E.const(-math.inf, compute)

        def safe(e, top, s):
            value = E.apply("div", meta.dtype, E.apply("exp", compute, shifted(e, top)), s)
            return E.where(E.compare("eq", top, dead), E.const(0, meta.dtype), value)

        return lx.pointwise(meta.dtype, meta.shape, safe, [x, highest, total], cost=6)
    return lx.pointwise(meta.dtype, meta.shape, lambda e, s: E.apply("div", meta.dtype, e, s), [exps, total], cost=2)


def product(lx: Lowerer, node: fx.Node, a: Value, b: Value) -> Value:
    """a[..., M, K] @ b[..., K, N], broadcast over the leading dimensions."""
    meta = out_meta(lx, node)
    lead = len(meta.shape) - 2
    depth = a.shape[-1]
    if not is_static((*meta.shape, depth)):
        raise UnsupportedError("a matrix product whose size is known only at run time")
    if meta.dtype not in FLOATS:
        raise UnsupportedError(f"a matrix product of {E.dtype_name(meta.dtype)}")
    if math.prod(meta.shape) * depth > MAX_PRODUCTS:
        raise UnsupportedError("a matrix product that is not a linear layer or attention of a known form")
    compute = wide(meta.dtype) if depth > 1 else meta.dtype
    shape = [*meta.shape, depth]

    def at_left(idx: Index) -> Index:
        return [*_batch(idx[:lead], a), idx[lead], idx[-1]]

    def at_right(idx: Index) -> Index:
        return [*_batch(idx[:lead], b), idx[-1], idx[lead + 1]]

    left, right = lx.mapped(a, shape, at_left), lx.mapped(b, shape, at_right)
    elements = lx.pointwise(compute, shape, lambda x, y: E.apply("mul", compute, x, y), [left, right])
    if depth == 1:
        return reshaped(lx, elements, meta.shape)
    return lx.reduce("sum", meta.dtype, elements, [len(shape) - 1], False)


def _batch(idx: Index, a: Value) -> Index:
    shape = a.shape[:-2]
    tail = idx[len(idx) - len(shape) :] if shape else []
    return [E.const(0, INT64) if n == 1 else i for i, n in zip(tail, shape)]


@rule(aten.matmul.default, aten.bmm.default, aten.mm.default)
def _matmul(lx, node, a, b):
    if len(a.shape) < 2 or len(b.shape) < 2:
        raise UnsupportedError("a matrix product with a vector")
    return product(lx, node, a, b)


@rule(aten.outer.default)
def _outer(lx, node, a, b):
    meta = out_meta(lx, node)
    column, row = lx.mapped(a, meta.shape, lambda i: [i[0]]), lx.mapped(b, meta.shape, lambda i: [i[1]])
    return lx.pointwise(
        meta.dtype, meta.shape, lambda x, y: E.apply("mul", meta.dtype, E.cast(x, meta.dtype), E.cast(y, meta.dtype)), [column, row]
    )
