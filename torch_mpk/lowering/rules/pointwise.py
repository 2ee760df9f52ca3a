"""Element by element operations, casts and tensors made from nothing."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from torch_mpk.capture.aliasing import storages, written_storages
from torch_mpk.errors import UnsupportedError
from torch_mpk.lowering import expr as E
from torch_mpk.lowering.expr import BOOL, FLOATS, INT64, Expr
from torch_mpk.lowering.lowerer import Lowerer
from torch_mpk.lowering.rules.common import aten, check_is_integer, element, named, out_meta, scalar, wide
from torch_mpk.lowering.table import rule
from torch_mpk.lowering.values import Lazy, Value, is_static

Number = bool | int | float


def common_dtype(*pair: Value | Number | Expr) -> torch.dtype:
    """PyTorch's promoted dtype of two tensors or Python numbers, among them sizes."""

    def like(x: Value | Number | Expr) -> Any:
        if isinstance(x, Value):
            return torch.empty((1,) * min(len(x.shape), 1), dtype=x.dtype)
        return 0 if isinstance(x, Expr) else x

    a, b = map(like, pair)
    return torch.result_type(a, b)


def elementwise(
    lx: Lowerer, node: fx.Node, fn, args: list[Value | Number], dtype: torch.dtype | None = None, compute=None, cost=1
):
    """fn of the arguments, each cast to ``compute`` (numbers kept in fp32 for half types), with the node's shape."""
    meta = out_meta(lx, node)
    compute = compute or meta.dtype
    values = [a for a in args if isinstance(a, Value)]

    def combine(*elements: Expr) -> Expr:
        rest = iter(elements)
        return fn(*(E.cast(next(rest), compute) if isinstance(a, Value) else scalar(a, compute) for a in args))

    return lx.pointwise(dtype or meta.dtype, meta.shape, combine, values, cost)


def _binary(op: str):
    def lower(lx: Lowerer, node: fx.Node, a, b, **kwargs):
        dtype = out_meta(lx, node).dtype
        return elementwise(lx, node, lambda x, y: E.apply(op, dtype, x, y), [a, b])

    return lower


def _unary(op: str):
    def lower(lx: Lowerer, node: fx.Node, a, **kwargs):
        dtype = out_meta(lx, node).dtype
        return elementwise(lx, node, lambda x: E.apply(op, dtype, x), [a])

    return lower


def rounded(dtype: torch.dtype, *args: Value | Number) -> list[Value | Number]:
    """The arguments, numbers first rounded to dtype, as some kernels of eager do."""
    return [E.const(x, dtype).attr if isinstance(x, (int, float)) else x for x in args]


@rule(aten.add.Tensor, aten.add.Scalar)
def _add(lx, node, a, b, alpha: Number = 1):
    return _add_or_sub(lx, node, "add", a, b, alpha)


@rule(aten.sub.Tensor, aten.sub.Scalar)
def _sub(lx, node, a, b, alpha: Number = 1):
    return _add_or_sub(lx, node, "sub", a, b, alpha)


def _add_or_sub(lx, node, op: str, a, b, alpha: Number):
    meta = out_meta(lx, node)
    if meta.device.type == "cpu" and meta.dtype in FLOATS:  # the GPU's kernel does not
        a, b = rounded(meta.dtype, a, b)
    return elementwise(lx, node, add_with_alpha(meta.dtype, op, alpha), [a, b])


@rule(aten.rsub.Tensor, aten.rsub.Scalar)
def _rsub(lx, node, a, b, alpha: Number = 1):
    return _sub(lx, node, b, a, alpha)


def add_with_alpha(dtype: torch.dtype, op: str, alpha: Number):
    op = "logical_or" if dtype == BOOL and op == "add" else op
    if dtype not in FLOATS:
        element(alpha, dtype)

    def fn(x: Expr, y: Expr) -> Expr:
        if alpha != 1:
            y = E.apply("mul", wide(dtype), y, scalar(alpha, dtype))
        return E.apply(op, dtype, x, y)

    return fn


@rule(aten.mul.Tensor, aten.mul.Scalar)
def _mul(lx, node, a, b):
    dtype = out_meta(lx, node).dtype
    return elementwise(lx, node, lambda x, y: E.apply("logical_and" if dtype == BOOL else "mul", dtype, x, y), [a, b])


@rule(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor)
def _div(lx, node, a, b):
    dtype = out_meta(lx, node).dtype
    return elementwise(lx, node, lambda x, y: E.apply("div", dtype, x, y), [a, b], cost=2)


_INTEGER_DIVISIONS = {"floor": "floordiv", "trunc": "truncdiv"}


@rule(aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default, aten.floor_divide.Scalar)
def _rounded_div(lx, node, a, b, rounding_mode: str | None = "floor"):
    dtype = out_meta(lx, node).dtype
    if rounding_mode is None:
        return _div(lx, node, a, b)
    check_is_integer(dtype, f"a division with rounding_mode={rounding_mode!r}")
    op = _INTEGER_DIVISIONS[rounding_mode]
    return _divided(lx, node, lambda x, y: E.apply(op, dtype, x, y), a, b)


def _divided(lx: Lowerer, node: fx.Node, fn, a, b) -> Lazy:
    """fn of integers divided by b.

    On the CPU eager raises where a divisor is 0, whether or not anybody reads that quotient. So quotients by what may
    be 0 are computed for themselves: all of them, and none at a point that is no element. A GPU's give 0.
    """
    meta = out_meta(lx, node)
    out = elementwise(lx, node, fn, [a, b])
    if meta.device.type == "cpu":
        divisor = None if isinstance(b, Value) else scalar(b, meta.dtype)
        if divisor is not None and E.is_const(divisor, 0):
            raise UnsupportedError("an integer division by zero")
        low, high = (0, 0) if divisor is None else E.bounds(divisor)
        if low <= 0 <= high and not (is_static(meta.shape) and 0 in meta.shape):
            out.eager_strides = meta.strides
            lx.realise(out)
    return out


@rule(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def _remainder(lx, node, a, b):
    dtype = out_meta(lx, node).dtype
    if dtype not in FLOATS:
        check_is_integer(dtype, "a remainder")
        return _divided(lx, node, lambda x, y: E.apply("remainder", dtype, x, y), a, b)
    a, b = rounded(dtype, a, b)
    compute = wide(dtype)

    def fn(x: Expr, y: Expr) -> Expr:  # fmod has the sign of x, the result that of y
        zero, rest = E.const(0, compute), E.apply("fmod", compute, x, y)
        signs = (E.compare("lt", e, zero) for e in (rest, E.cast(y, compute)))
        is_other = E.apply("logical_and", BOOL, E.compare("ne", rest, zero), E.apply("ne", BOOL, *signs))
        return E.cast(E.where(is_other, E.apply("add", compute, rest, y), rest), dtype)

    return elementwise(lx, node, fn, [a, b], cost=4)


@rule(aten.fmod.Tensor, aten.fmod.Scalar)
def _fmod(lx, node, a, b):
    dtype = out_meta(lx, node).dtype
    if dtype in FLOATS:
        return _binary("fmod")(lx, node, *rounded(dtype, a, b))
    check_is_integer(dtype, "a remainder")

    def fn(x: Expr, y: Expr) -> Expr:  # the quotient is computed also where it is multiplied by 0
        return E.apply("sub", dtype, x, Expr.make("mul", dtype, (E.apply("truncdiv", dtype, x, y), y)))

    return _divided(lx, node, fn, a, b)


@rule(aten.pow.Tensor_Scalar)
def _pow(lx, node, a, exponent: Number):
    dtype = out_meta(lx, node).dtype
    if exponent == 2 or exponent == 3:
        square = "square" if dtype in FLOATS else "mul"

        def power(x: Expr) -> Expr:
            if exponent == 2:
                return E.apply(square, dtype, *([x] if square == "square" else [x, x]))
            return E.apply("mul", dtype, E.apply("mul", wide(dtype), x, x), x)

        return elementwise(lx, node, power, [a])
    if dtype not in FLOATS:
        raise UnsupportedError(f"{E.dtype_name(dtype)} to the power {exponent}")
    special = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(exponent)
    if special:
        return elementwise(lx, node, lambda x: E.apply(special, dtype, x), [a])
    return elementwise(lx, node, lambda x: E.apply("pow", dtype, x, scalar(exponent, dtype)), [a], cost=4)


@rule(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def _pow_tensor(lx, node, a, b):
    dtype = out_meta(lx, node).dtype
    if dtype not in FLOATS:
        raise UnsupportedError(f"{E.dtype_name(dtype)} to a power given by a tensor")
    return elementwise(lx, node, lambda x, y: E.apply("pow", dtype, x, y), [a, b], cost=4)


for name in (
    *("rsqrt", "sqrt", "reciprocal", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "erf", "sigmoid", "silu"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
):
    rule(getattr(aten, name).default)(_unary(name))


@rule(aten.atan2.default)
def _atan2(lx, node, a, b):
    return _binary("atan2")(lx, node, a, b)


@rule(aten.sign.default)
def _sign(lx, node, a):
    if a.dtype == BOOL:
        return lx.read(a)

    def fn(x: Expr) -> Expr:
        above, below = (E.cast(E.compare(op, x, E.const(0, a.dtype)), a.dtype) for op in ("gt", "lt"))
        return E.apply("sub", a.dtype, above, below)

    return elementwise(lx, node, fn, [a], cost=3)


@rule(aten.neg.default)
def _neg(lx, node, a):
    return _unary("neg")(lx, node, a)


@rule(aten.abs.default)
def _abs(lx, node, a):
    if a.dtype == BOOL:
        raise UnsupportedError("an absolute value of bool")  # eager raises
    return _unary("abs")(lx, node, a)


@rule(aten.relu.default)
def _relu(lx, node, a):
    dtype = out_meta(lx, node).dtype
    if dtype not in FLOATS:
        return elementwise(lx, node, lambda x: E.apply("maximum", dtype, x, scalar(0, dtype)), [a])
    return _unary("relu")(lx, node, a)


@rule(named("floor", "ceil", "trunc", "round"))
def _floor(lx, node, op: str, a):
    if a.dtype not in FLOATS:
        return lx.read(a)
    return _unary(op)(lx, node, a)


@rule(aten.gelu.default)
def _gelu(lx, node, a, approximate: str = "none"):
    return _unary("gelu_tanh" if approximate == "tanh" else "gelu")(lx, node, a)


@rule(aten.softplus.default)
def _softplus(lx, node, a, beta: Number = 1, threshold: Number = 20):
    if beta != 1 or threshold != 20:
        raise UnsupportedError(f"softplus with beta={beta}, threshold={threshold}")
    return _unary("softplus")(lx, node, a)


@rule(named("maximum", "minimum"), {aten.max.other: "maximum", aten.min.other: "minimum"})
def _maximum(lx, node, op: str, a, b):
    return _binary(op)(lx, node, a, b)


@rule(aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_min.Tensor)
def _clamp(lx, node, a, min=None, max=None):  # noqa: A002  (ATen's names)
    dtype = out_meta(lx, node).dtype
    limits = [(op, x) for op, x in (("maximum", min), ("minimum", max)) if x is not None]
    for _, x in limits:
        if isinstance(x, (int, float)) and dtype not in FLOATS:
            element(x, dtype)

    def fn(x: Expr, *rest: Expr) -> Expr:
        for (op, _), y in zip(limits, rest, strict=False):
            x = E.apply(op, dtype, x, E.cast(y, dtype))
        return x

    return elementwise(lx, node, fn, [a, *(x for _, x in limits)], cost=len(limits))


@rule(aten.clamp_max.default, aten.clamp_max.Tensor)
def _clamp_max(lx, node, a, max):  # noqa: A002
    return _clamp(lx, node, a, None, max)


def _compare(op: str):
    def lower(lx: Lowerer, node: fx.Node, a, b):
        compute = common_dtype(a, b)

        def fn(x: Expr, y: Expr) -> Expr:
            return E.apply(op, BOOL, E.cast(x, compute), E.cast(y, compute))

        return elementwise(lx, node, fn, [a, b], compute=compute)

    return lower


for name in ("eq", "ne", "lt", "le", "gt", "ge"):
    rule(getattr(aten, name).Tensor, getattr(aten, name).Scalar)(_compare(name))


@rule(named("logical_and", "logical_or"))
def _logical(lx, node, op: str, a, b):
    return elementwise(lx, node, lambda x, y: E.apply(op, BOOL, x, y), [a, b], compute=BOOL)


@rule(aten.logical_xor.default)
def _logical_xor(lx, node, a, b):
    return elementwise(lx, node, lambda x, y: E.apply("ne", BOOL, x, y), [a, b], compute=BOOL)


@rule(aten.logical_not.default)
def _logical_not(lx, node, a):
    return elementwise(lx, node, E.logical_not, [a], compute=BOOL)


@rule(aten.bitwise_not.default)
def _bitwise_not(lx, node, a):
    if a.dtype == BOOL:
        return _logical_not(lx, node, a)
    return elementwise(lx, node, lambda x: E.apply("bit_xor", a.dtype, x, E.const(-1, a.dtype)), [a])


_BITWISE = {"and": ("bit_and", "logical_and"), "or": ("bit_or", "logical_or"), "xor": ("bit_xor", "ne")}
for name, (bits, logical) in _BITWISE.items():

    def _bitwise(lx, node, a, b, bits=bits, logical=logical):
        dtype = out_meta(lx, node).dtype
        return elementwise(lx, node, lambda x, y: E.apply(logical if dtype == BOOL else bits, dtype, x, y), [a, b])

    for packet in (getattr(aten, f"__{name}__"), getattr(aten, f"bitwise_{name}")):
        rule(packet.Tensor, packet.Scalar)(_bitwise)


_SHIFTS = {
    getattr(packet, overload): op
    for op, operator, function in (
        ("shl", aten.__lshift__, aten.bitwise_left_shift),
        ("shr", aten.__rshift__, aten.bitwise_right_shift),
    )
    for packet, overloads in (
        (operator, ("Tensor", "Scalar")),
        (function, ("Tensor", "Tensor_Scalar", "Scalar_Tensor")),
    )
    for overload in overloads
}


@rule(_SHIFTS)
def _shift(lx, node, op: str, a, b):
    dtype = out_meta(lx, node).dtype
    check_is_integer(dtype, "a shift")
    return elementwise(lx, node, lambda x, y: E.apply(op, dtype, x, y), [a, b])


@rule(aten.view.dtype)
def _bits(lx, node, a, dtype: torch.dtype):
    if dtype == a.dtype:
        return a
    if {a.dtype, dtype} != {torch.int32, torch.float32}:
        raise UnsupportedError(f"a view of {E.dtype_name(a.dtype)} as {E.dtype_name(dtype)}")
    if any(written_storages(other) & storages(node) for other in node.graph.nodes):
        raise UnsupportedError("a view as another dtype of what is written in place")
    return elementwise(lx, node, lambda x: Expr.make("bit_cast", dtype, (x,)), [a], compute=a.dtype)


@rule(aten.isnan.default)
def _isnan(lx, node, a):
    if a.dtype not in FLOATS:
        return elementwise(lx, node, lambda x: E.const(False, BOOL), [a], compute=a.dtype)
    return elementwise(lx, node, lambda x: E.apply("isnan", BOOL, x), [a], compute=a.dtype)


@rule(aten.isinf.default)
def _isinf(lx, node, a):
    if a.dtype not in FLOATS:
        return elementwise(lx, node, lambda x: E.const(False, BOOL), [a], compute=a.dtype)
    infinity = E.const(math.inf, a.dtype)
    return elementwise(lx, node, lambda x: E.compare("eq", E.apply("abs", a.dtype, x), infinity), [a], compute=a.dtype)


@rule(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def _where(lx, node, condition, a, b):
    meta = out_meta(lx, node)
    values = [condition, *(v for v in (a, b) if isinstance(v, Value))]

    def fn(c: Expr, *rest: Expr) -> Expr:
        it = iter(rest)
        x, y = (E.cast(next(it), meta.dtype) if isinstance(v, Value) else element(v, meta.dtype) for v in (a, b))
        return E.where(E.cast(c, BOOL), x, y)

    return lx.pointwise(meta.dtype, meta.shape, fn, values)


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(lx, node, a, mask, value):
    return _where(lx, node, mask, value, a)


@rule(aten.addcmul.default)
def _addcmul(lx, node, a, b, c, value: Number = 1):
    dtype = out_meta(lx, node).dtype
    if dtype not in FLOATS:
        element(value, dtype)

    def fn(x: Expr, y: Expr, z: Expr) -> Expr:
        scaled = y if value == 1 else E.apply("mul", wide(dtype), scalar(value, dtype), y)
        return E.apply("add", dtype, x, E.apply("mul", wide(dtype), scaled, z))

    return elementwise(lx, node, fn, [a, b, c], cost=3)


@rule(aten.dropout.default)
def _dropout(lx, node, a, p: float, train: bool):
    if train and p != 0:
        raise UnsupportedError(f"dropout in training mode with p={p}")
    return a


# ---- casts ----


def cast(lx: Lowerer, a: Value, dtype: torch.dtype) -> Lazy:
    return lx.pointwise(dtype, a.shape, lambda x: E.cast(x, dtype), [a])


def copy_of(lx: Lowerer, a: Value) -> Lazy:
    """A value of its own with a's present contents."""
    source = lx.read(a)
    return Lazy(source.dtype, source.shape, [source], source.at, cost=0)


_COPY_POSITION = {aten.to.dtype: 2, aten.to.other: 2, aten.to.device: 3}  # of the argument `copy`, behind the tensor


@rule(_COPY_POSITION, {aten.to.dtype_layout: None, aten.type_as.default: None})
def _to(lx, node, copy_position: int | None, a, *args, copy: bool = False, **kwargs):
    dtype = out_meta(lx, node).dtype
    if dtype != a.dtype:
        return cast(lx, a, dtype)
    is_copy = copy or (copy_position is not None and len(args) > copy_position and args[copy_position])
    return copy_of(lx, a) if is_copy else a


@rule(aten._to_copy.default, aten.clone.default, aten.lift_fresh_copy.default, torch.ops.prims.copy_strided.default)
def _copy(lx, node, a, *_, **kwargs):  # strides are those of the node's result, as of any
    dtype = out_meta(lx, node).dtype
    return cast(lx, a, dtype) if dtype != a.dtype else copy_of(lx, a)


# ---- tensors made from nothing ----


def filled(lx: Lowerer, node: fx.Node, value: Number) -> Lazy:
    meta = out_meta(lx, node)
    filling = element(value, meta.dtype)
    return Lazy(meta.dtype, meta.shape, (), lambda idx, predicate: filling)


@rule(aten.full.default, aten.full_like.default, aten.new_full.default)
def _full(lx, node, a, *args, **kwargs):
    value = args[0] if args else kwargs["fill_value"]
    if not isinstance(value, (bool, int, float)):
        raise UnsupportedError("a tensor filled with a value that is known only at run time")
    return filled(lx, node, value)


@rule(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
@rule(aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)
def _zeros(lx, node, *args, **kwargs):
    return filled(lx, node, 0)


@rule(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(lx, node, *args, **kwargs):
    return filled(lx, node, 1)


@rule(aten.scalar_tensor.default)
def _scalar_tensor(lx, node, value, **kwargs):
    if isinstance(value, Expr):
        return Lazy(out_meta(lx, node).dtype, (), (), lambda idx, p: E.cast(value, out_meta(lx, node).dtype))
    return filled(lx, node, value)


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(lx, node, *args, **kwargs):
    meta = out_meta(lx, node)
    start, step = (args[0], args[2] if len(args) > 2 else 1) if len(args) > 1 else (0, 1)
    if meta.dtype in FLOATS and not all(
        isinstance(x, int) or (isinstance(x, float) and x.is_integer()) for x in (start, step)
    ):
        raise UnsupportedError("arange with a fractional start or step")
    start, step = (int(x) if isinstance(x, float) else x for x in (start, step))
    return Lazy(meta.dtype, meta.shape, (), lambda idx, p: E.cast(E.iadd(E.imul(idx[0], step), start), meta.dtype))


@rule(torch.ops.prims.iota.default)
def _iota(lx, node, length, *, start, step, dtype, **kwargs):
    return Lazy(dtype, (length,), (), lambda idx, p: E.cast(E.iadd(E.imul(idx[0], step), start), dtype), cost=2)


@rule({aten.tril.default: "le", aten.triu.default: "ge"})
def _tril(lx, node, kept: str, a, diagonal: int = 0):
    """Of an element's column less its row, what compares so with the diagonal is kept."""
    source = lx.read(a)

    def inner(idx, predicate):
        keep = E.compare(kept, E.iadd(idx[-1], idx[-2], -1), E.const(diagonal, INT64))
        return E.where(keep, source.at(idx, predicate), E.const(0, source.dtype))

    return lx.lazy(source.dtype, source.shape, [source], inner, cost=3)
