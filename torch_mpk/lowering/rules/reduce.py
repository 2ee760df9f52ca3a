"""Reductions, softmax, and matrix products small enough to be reductions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from torch_mpk.errors import UnsupportedError
from torch_mpk.lowering import expr as E
from torch_mpk.lowering.expr import BOOL, FLOATS, INT64, Expr
from torch_mpk.lowering.lowerer import Lowerer, broadcast
from torch_mpk.lowering.rules.common import aten, named, normalise_dim, out_meta, wide
from torch_mpk.lowering.rules.pointwise import cast
from torch_mpk.lowering.rules.view import permuted, reshaped
from torch_mpk.lowering.table import rule
from torch_mpk.lowering.values import Index, Lazy, Size, Value, is_static

MAX_PRODUCTS = 1 << 22  # multiply-adds of a matrix product that becomes a plain reduction
# Matrices times vectors, as the states of Mamba, are bound by reading the matrices, which a reduction does as well.
MAX_READ_PRODUCTS, MAX_USES = 1 << 26, 8  # of each element of the factors


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


@rule(named("sum", "mean"))
def _sum_all(lx, node, op: str, a, dtype=None):
    return _sum(lx, node, op, a, None, False, dtype)


@rule({aten.sum.dim_IntList: "sum", aten.mean.dim: "mean"})
def _sum(lx, node, op: str, a, dim=None, keepdim=False, dtype=None):
    out = out_meta(lx, node).dtype
    if dtype is not None and dtype != a.dtype:
        a = cast(lx, a, dtype)
    return reduced(lx, op, a, dim, keepdim, out)


@rule(aten.cumsum.default)
def _cumsum(lx, node, a, dim, dtype=None):
    """Each result a sum of its own."""
    out, rank = out_meta(lx, node).dtype, len(a.shape)
    source = lx.read(cast(lx, a, out))
    if out not in FLOATS:
        source = cast(lx, source, INT64)
    if rank == 0:
        return cast(lx, source, out)
    if not is_static(a.shape) or math.prod(a.shape) * a.shape[dim] > MAX_PRODUCTS:
        raise UnsupportedError("a cumulative sum over many elements")
    if source.cost > 4:
        lx.realise(source)  # each element is used many times
    dim = normalise_dim(dim, rank)
    shape = [*a.shape, a.shape[dim]]

    def inner(idx: Index, predicate: Expr | None) -> Expr:
        element = source.at([*idx[:dim], idx[-1], *idx[dim + 1 : -1]], predicate)
        return E.where(E.compare("le", idx[-1], idx[dim]), element, E.const(0, source.dtype))

    return lx.reduce("sum", out, lx.lazy(source.dtype, shape, [source], inner, cost=2), [rank], False)


@rule(aten.prod.default)
def _prod(lx, node, a, dtype=None):
    out = out_meta(lx, node).dtype
    return reduced(lx, "prod", cast(lx, a, out), None, False, out)


@rule(aten.prod.dim_int)
def _prod_dim(lx, node, a, dim, keepdim=False, dtype=None):
    out = out_meta(lx, node).dtype
    return reduced(lx, "prod", cast(lx, a, out), [dim], keepdim, out)


@rule(named("amax", "amin"))
def _amax(lx, node, op: str, a, dim=(), keepdim=False):
    return reduced(lx, op, a, list(dim), keepdim, a.dtype)


@rule({aten.max.default: "amax", aten.min.default: "amin"})
def _max_all(lx, node, op: str, a):
    return reduced(lx, op, a, None, False, a.dtype)


@rule(named("max", "min", overload="dim"))
def _max_dim(lx, node, name: str, a, dim, keepdim=False):
    """The values and the indices; each only where it is used."""
    used = {user.args[1] for user in node.users} or {0, 1}
    values = reduced(lx, f"a{name}", a, [dim], keepdim, a.dtype) if 0 in used else None
    indices = reduced(lx, f"arg{name}", a, [dim], keepdim, INT64) if 1 in used else None
    return values, indices


@rule(aten.topk.default)
def _topk(lx, node, a, k, dim=-1, largest=True, sorted=True):  # noqa: A002  (ATen's names)
    if k != 1:
        raise UnsupportedError("aten.topk.default is not supported for more than the first")
    return _max_dim(lx, node, "max" if largest else "min", a, dim, True)


@rule(named("argmax", "argmin"))
def _argmax(lx, node, op: str, a, dim=None, keepdim=False):
    return reduced(lx, op, a, None if dim is None else [dim], keepdim, INT64)


@rule(named("any", "all"))
def _any_all(lx, node, op: str, a):
    return _any(lx, node, op, a, None)


@rule(named("any", "all", overload="dim"), named("any", "all", overload="dims"))
def _any(lx, node, op: str, a, dim=None, keepdim=False):
    dims = [dim] if isinstance(dim, int) else dim
    return reduced(lx, op, a, dims, keepdim, out_meta(lx, node).dtype)


@rule(aten.softmax.int, aten._softmax.default)
def _softmax(lx, node, a, dim, dtype=None):
    out = out_meta(lx, node).dtype
    is_sorted = a.has_falling_rows and normalise_dim(dim, len(a.shape)) == len(a.shape) - 1
    x, _, exps, total = _exponentials(lx, _as(lx, a, dtype), dim, out, is_sorted)
    return lx.pointwise(out, x.shape, lambda e, s: E.apply("div", out, e, s), [exps, total], cost=2)


@rule(aten.log_softmax.int, aten._log_softmax.default)
def _log_softmax(lx, node, a, dim, dtype=None):
    out = out_meta(lx, node).dtype
    x, highest, _, total = _exponentials(lx, _as(lx, a, dtype), dim, out)
    compute = x.dtype

    def log(e: Expr, top: Expr, s: Expr) -> Expr:
        return E.apply("sub", out, E.apply("sub", compute, e, top), E.apply("log", compute, s))

    return lx.pointwise(out, x.shape, log, [x, highest, total], cost=4)


@rule(aten._safe_softmax.default)
def _safe_softmax(lx, node, a, dim, dtype=None):
    return safe_softmax(lx, _as(lx, a, dtype), dim, out_meta(lx, node).dtype)


def _as(lx: Lowerer, a: Value, dtype: torch.dtype | bool | None) -> Value:
    """``a`` in a dtype, if one is given: where ``softmax.int`` takes it, ``_softmax`` takes a bool."""
    return cast(lx, a, dtype) if isinstance(dtype, torch.dtype) and dtype != a.dtype else a


def _exponentials(
    lx: Lowerer, a: Value, dim: int, out: torch.dtype, is_sorted: bool = False
) -> tuple[Lazy, Lazy, Lazy, Lazy]:
    """a in the dtype softmax computes in, its maximum along dim, exp of the difference, and that one's sum.

    ``is_sorted``: dim is the last, along which the first element is the maximum.
    """
    compute = wide(out)
    x = lx.read(cast(lx, a, compute))
    if x.cost > 4 and is_static(x.shape):
        lx.realise(x)  # read three times
    if is_sorted:
        zero = E.const(0, INT64)
        highest = lx.read(lx.mapped(x, (*x.shape[:-1], 1), lambda idx: (*idx[:-1], zero)))
    else:
        highest = lx.read(reduced(lx, "amax", x, [dim], True, compute))
    exps = lx.pointwise(
        compute, x.shape, lambda e, top: E.apply("exp", compute, E.apply("sub", compute, e, top)), [x, highest], cost=4
    )
    return x, highest, exps, lx.read(reduced(lx, "sum", exps, [dim], True, compute))


def safe_softmax(lx: Lowerer, a: Value, dim: int, out: torch.dtype) -> Lazy:
    """Softmax in which a row of nothing but -inf gives zeros."""
    x, highest, exps, total = _exponentials(lx, a, dim, out)
    dead = E.const(-math.inf, x.dtype)

    def fn(e: Expr, top: Expr, s: Expr) -> Expr:
        return E.where(E.compare("eq", top, dead), E.const(0, out), E.apply("div", out, e, s))

    return lx.pointwise(out, x.shape, fn, [exps, highest, total], cost=4)


def _moments(lx: Lowerer, a: Value, dims: list[int], divisor: float | None = None) -> tuple[Value, Value, Value]:
    """a in its compute dtype, its mean over dims, its squared deviations' sum over ``divisor`` (default: the count)."""
    compute = wide(a.dtype)
    x = lx.read(cast(lx, a, compute))
    mean = lx.read(reduced(lx, "mean", x, dims, True, compute))
    squares = lx.pointwise(
        compute, x.shape, lambda e, m: E.apply("square", compute, E.apply("sub", compute, e, m)), [x, mean]
    )
    if divisor is None:
        return x, mean, lx.read(reduced(lx, "mean", squares, dims, True, compute))
    total = lx.read(reduced(lx, "sum", squares, dims, True, compute))
    scaled = lx.pointwise(
        compute, total.shape, lambda e: E.apply("div", compute, e, E.const(divisor, compute)), [total]
    )
    return x, mean, scaled


@rule(aten.var.dim)
def _var_dim(lx, node, a, dim, unbiased=True, keepdim=False):
    return _var(lx, node, a, dim, correction=1 if unbiased else 0)


@rule(aten.var.correction)
def _var(lx, node, a, dim=None, *, correction=None, keepdim=False):
    meta = out_meta(lx, node)
    variance, _ = _variance_and_mean(lx, a, dim, correction)
    return reshaped(lx, cast(lx, variance, meta.dtype), meta.shape)


@rule(aten.var_mean.correction)
def _var_mean(lx, node, a, dim=None, correction=None, keepdim=False):
    metas = map(lx.meta, node.meta["val"])
    values = _variance_and_mean(lx, a, dim, correction)
    return tuple(reshaped(lx, cast(lx, v, meta.dtype), meta.shape) for v, meta in zip(values, metas, strict=True))


def _variance_and_mean(lx, a, dim, correction):
    """In the compute dtype, with every dimension kept."""
    rank = len(a.shape)
    dims = sorted({normalise_dim(d, rank) for d in dim}) if dim else list(range(rank))
    count = math.prod(a.shape[d] for d in dims) - (1 if correction is None else correction)
    if count <= 0:
        raise UnsupportedError("the variance of too few elements")
    _, mean, variance = _moments(lx, a, dims, float(count))
    return variance, mean


def _normalised(
    lx: Lowerer, node: fx.Node, x: Value, mean: Value | None, power: Value, eps: float, weight, bias
) -> Value:
    """(x - mean) / sqrt(power + eps) * weight + bias, rounded once."""
    meta = out_meta(lx, node)
    compute = x.dtype
    extras = [v for v in (mean, weight, bias) if v is not None]

    def fn(e, p, *rest):
        it = iter(rest)
        if mean is not None:
            e = E.apply("sub", compute, e, next(it))
        e = E.apply("mul", compute, e, E.apply("rsqrt", compute, E.apply("add", compute, p, E.const(eps, compute))))
        if weight is not None:
            e = E.apply("mul", compute, e, E.cast(next(it), compute))
        if bias is not None:
            e = E.apply("add", compute, e, E.cast(next(it), compute))
        return E.cast(e, meta.dtype)

    return lx.pointwise(meta.dtype, meta.shape, fn, [x, power, *extras], cost=6)


@rule(aten.layer_norm.default)
def _layer_norm(lx, node, a, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    rank = len(a.shape)
    x, mean, variance = _moments(lx, a, list(range(rank - len(normalized_shape), rank)))
    return _normalised(lx, node, x, mean, variance, eps, weight, bias)


@rule(aten.rms_norm.default)
def _rms_norm(lx, node, a, normalized_shape, weight=None, eps=None):
    compute = wide(a.dtype)
    x = lx.read(cast(lx, a, compute))
    rank = len(a.shape)
    squares = lx.pointwise(compute, x.shape, lambda e: E.apply("square", compute, e), [x])
    power = reduced(lx, "mean", squares, list(range(rank - len(normalized_shape), rank)), True, compute)
    return _normalised(lx, node, x, None, power, torch.finfo(compute).eps if eps is None else eps, weight, None)


@rule(aten.logsumexp.default)
def _logsumexp(lx, node, a, dim, keepdim=False):
    meta = out_meta(lx, node)
    compute = wide(meta.dtype)
    x = lx.read(cast(lx, a, compute))
    highest = reduced(lx, "amax", x, list(dim), True, compute)

    def offset(top):  # an infinite maximum must not make inf - inf
        return E.where(
            E.compare("eq", E.apply("abs", compute, top), E.const(math.inf, compute)), E.const(0, compute), top
        )

    exps = lx.pointwise(
        compute,
        x.shape,
        lambda e, top: E.apply("exp", compute, E.apply("sub", compute, e, offset(top))),
        [x, highest],
        cost=6,
    )
    total = reduced(lx, "sum", exps, list(dim), True, compute)
    out = lx.pointwise(
        meta.dtype,
        total.shape,
        lambda s, top: E.apply("add", meta.dtype, E.apply("log", compute, s), offset(top)),
        [total, highest],
        cost=5,
    )
    return reshaped(lx, out, meta.shape)


def product(lx: Lowerer, a: Value, b: Value, dtype: torch.dtype) -> Value:
    """a[..., M, K] @ b[..., K, N], broadcast over the leading dimensions."""
    lead = max(len(a.shape), len(b.shape)) - 2
    depth = a.shape[-1]
    batch = [_broadcast_size(a.shape, b.shape, position) for position in range(lead + 2, 2, -1)]
    out_shape = [*batch, a.shape[-2], b.shape[-1]]
    if not (is_static(out_shape) and isinstance(depth, int)):
        raise UnsupportedError("a matrix product whose size is known only at run time")
    if dtype not in FLOATS:
        raise UnsupportedError(f"a matrix product of {E.dtype_name(dtype)}")
    products = math.prod(out_shape) * depth
    elements = sum(math.prod(factor.shape) for factor in (a, b) if is_static(factor.shape))
    is_bound_by_reading = products <= MAX_USES * elements
    if products > (MAX_READ_PRODUCTS if is_bound_by_reading else MAX_PRODUCTS):
        raise UnsupportedError("a matrix product that is not a linear layer or attention of a known form")
    compute = wide(dtype) if depth > 1 else dtype
    shape = [*out_shape, depth]

    def at_left(idx: Index) -> Index:
        return [*broadcast(idx[:lead], a.shape[:-2]), idx[lead], idx[-1]]

    def at_right(idx: Index) -> Index:
        return [*broadcast(idx[:lead], b.shape[:-2]), idx[-1], idx[lead + 1]]

    if depth > 1:
        for source in (lx.read(a), lx.read(b)):
            if source.cost > 4:
                lx.realise(source)  # each element is used many times
    left, right = lx.mapped(a, shape, at_left), lx.mapped(b, shape, at_right)
    each = lx.pointwise(compute, shape, lambda x, y: E.apply("mul", compute, x, y), [left, right])
    if depth == 1:
        return reshaped(lx, each, out_shape)
    return lx.reduce("sum", dtype, each, [len(shape) - 1], False)


def _broadcast_size(a: Sequence[Size], b: Sequence[Size], from_end: int) -> Size:
    sizes = [s[-from_end] for s in (a, b) if len(s) >= from_end]
    return next((n for n in sizes if n != 1), 1)


@rule(aten.matmul.default, aten.bmm.default, aten.mm.default)
def _matmul(lx, node, a, b):
    meta = out_meta(lx, node)
    if len(a.shape) >= 2 and len(b.shape) >= 2:
        return product(lx, a, b, meta.dtype)
    row = reshaped(lx, a, [1, *a.shape]) if len(a.shape) == 1 else a
    column = reshaped(lx, b, [*b.shape, 1]) if len(b.shape) == 1 else b
    return reshaped(lx, product(lx, row, column, meta.dtype), meta.shape)


@rule(aten.addmm.default)
def _addmm(lx, node, bias, a, b, *, beta=1, alpha=1):
    """The product is rounded once, with the bias in it."""
    meta = out_meta(lx, node)
    if beta != 1 or alpha != 1:
        raise UnsupportedError(f"addmm with beta={beta}, alpha={alpha}")
    out = product(lx, a, b, wide(meta.dtype))
    return lx.pointwise(meta.dtype, meta.shape, lambda x, y: E.apply("add", meta.dtype, x, y), [out, bias])


@rule(aten.linear.default)
def _linear(lx, node, a, weight, bias=None):
    meta = out_meta(lx, node)
    rows = a if len(a.shape) > 1 else reshaped(lx, a, [1, *a.shape])
    out = product(lx, rows, permuted(lx, weight, [1, 0]), meta.dtype if bias is None else wide(meta.dtype))
    if bias is not None:
        out = lx.pointwise(meta.dtype, out.shape, lambda x, y: E.apply("add", meta.dtype, x, y), [out, bias])
    return reshaped(lx, out, meta.shape)


@rule(aten.scaled_dot_product_attention.default)
def _attention(lx, node, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    meta = out_meta(lx, node)
    if dropout_p:
        raise UnsupportedError(f"attention with dropout_p={dropout_p}")
    if enable_gqa:
        k, v = (_repeat_heads(lx, t, q.shape[-3]) for t in (k, v))
    compute = wide(meta.dtype)
    factor = E.const(1 / math.sqrt(q.shape[-1]) if scale is None else scale, compute)
    scores = lx.read(
        product(lx, q, permuted(lx, k, [*range(len(k.shape) - 2), len(k.shape) - 1, len(k.shape) - 2]), compute)
    )
    dead = E.const(-math.inf, compute)

    def masked(x: Expr, *mask: Expr) -> Expr:
        x = E.apply("mul", compute, x, factor)
        if mask and mask[0].dtype == BOOL:
            return E.where(mask[0], x, dead)
        return E.apply("add", compute, x, E.cast(mask[0], compute)) if mask else x

    masks = [attn_mask] if attn_mask is not None else []
    scores = lx.pointwise(compute, scores.shape, masked, [scores, *masks], cost=2)
    if is_causal:
        inner = scores.at
        scores = lx.lazy(
            compute,
            scores.shape,
            [scores],
            lambda i, p: E.where(E.compare("le", i[-1], i[-2]), inner(i, p), dead),
            cost=3,
        )
    weights = lx.read(safe_softmax(lx, scores, -1, compute))
    return product(lx, weights, v, meta.dtype)


def _repeat_heads(lx: Lowerer, a: Value, heads: int) -> Value:
    """Each of a's heads (third dimension from the end) as often as it takes to have ``heads``."""
    groups = a.shape[-3]
    if not isinstance(groups, int):
        raise UnsupportedError("attention whose number of heads is known only at run time")
    shape = [*a.shape[:-3], heads, *a.shape[-2:]]
    return lx.mapped(a, shape, lambda i: [*i[:-3], E.floordiv(i[-3], heads // groups), *i[-2:]])


@rule(aten.outer.default)
def _outer(lx, node, a, b):
    meta = out_meta(lx, node)
    column, row = lx.mapped(a, meta.shape, lambda i: [i[0]]), lx.mapped(b, meta.shape, lambda i: [i[1]])
    return lx.pointwise(
        meta.dtype,
        meta.shape,
        lambda x, y: E.apply("mul", meta.dtype, E.cast(x, meta.dtype), E.cast(y, meta.dtype)),
        [column, row],
    )
