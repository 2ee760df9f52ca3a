"""In-place operations: writes to the memory of their first argument."""

from __future__ import annotations

import torch
from torch import fx

from torch_mpk.errors import UnsupportedError
from torch_mpk.lowering import expr as E
from torch_mpk.lowering.expr import Expr
from torch_mpk.lowering.inline import inline
from torch_mpk.lowering.lowerer import Lowerer, broadcast
from torch_mpk.lowering.rules.common import aten, element
from torch_mpk.lowering.rules.index import check_index, index_places, indexed_dim, wrapped
from torch_mpk.lowering.rules.pointwise import cast, copy_of
from torch_mpk.lowering.table import RULES, rule
from torch_mpk.lowering.values import Index, Lazy, Mapped, Value, View


def assign(lx: Lowerer, target: Value, value: Lazy) -> Value:
    """target[...] = value. A virtual target without views becomes the value; others are written in memory."""
    resolved = lx.resolve(target)
    if isinstance(resolved, Lazy) and not isinstance(resolved, Mapped) and not lx.has_views(resolved):
        new = lx.pointwise(target.dtype, target.shape, lambda x: E.cast(x, target.dtype), [value], cost=0)
        new.eager_strides = resolved.eager_strides
        lx.rebind(resolved, new)
        return new
    lx.write_elements(lx.owned_view(target), cast(lx, value, target.dtype))
    return target


def _in_place(functional: torch._ops.OpOverload):
    def lower(lx: Lowerer, node: fx.Node, a: Value, *args, **kwargs):
        examples, named = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
        example = functional(*examples, **named)
        if example.dtype == a.dtype:
            return assign(lx, a, lx.read(RULES[functional](lx, node, a, *args, **kwargs)))
        # Computed in the dtype that the operands promote to, and only then rounded to the target's.
        (written,) = inline(lx, node, lambda a, *args, **kwargs: a.copy_(functional(a, *args, **kwargs)))
        return written

    return lower


# In-place forms that compute what their functional forms do.
for name, overloads in {
    "add": ("Tensor", "Scalar"),
    "sub": ("Tensor", "Scalar"),
    "mul": ("Tensor", "Scalar"),
    "div": ("Tensor", "Scalar", "Tensor_mode", "Scalar_mode"),
    "remainder": ("Tensor", "Scalar"),
    "fmod": ("Tensor", "Scalar"),
    **dict.fromkeys(("neg", "abs", "sqrt", "rsqrt", "reciprocal", "exp", "log", "sin", "cos", "tanh"), ("default",)),
    **dict.fromkeys(("sigmoid", "silu", "relu", "floor", "ceil", "round", "trunc"), ("default",)),
    "clamp": ("default", "Tensor"),
    "clamp_min": ("default", "Tensor"),
    "clamp_max": ("default", "Tensor"),
    "masked_fill": ("Scalar", "Tensor"),
    "logical_not": ("default",),
    "bitwise_not": ("default",),
    "bitwise_and": ("Tensor", "Scalar"),
    "bitwise_or": ("Tensor", "Scalar"),
    "bitwise_xor": ("Tensor", "Scalar"),
    "bitwise_left_shift": ("Tensor", "Tensor_Scalar"),
    "bitwise_right_shift": ("Tensor", "Tensor_Scalar"),
}.items():
    for overload in overloads:
        rule(getattr(getattr(aten, f"{name}_"), overload))(_in_place(getattr(getattr(aten, name), overload)))


for in_place, functional in {  # in-place forms of another name
    aten.floor_divide_.Tensor: aten.floor_divide.default,
    aten.floor_divide_.Scalar: aten.floor_divide.Scalar,
    **{getattr(aten, f"__i{n}__").Tensor: getattr(aten, f"__{n}__").Tensor for n in ("lshift", "rshift")},
    **{getattr(aten, f"__i{n}__").Scalar: getattr(aten, f"__{n}__").Scalar for n in ("lshift", "rshift")},
}.items():
    rule(in_place)(_in_place(functional))


@rule(aten.copy_.default)
def _copy_(lx, node, a, source, non_blocking=False):
    return assign(lx, a, lx.read(source))


def _constant(value: float, dtype: torch.dtype) -> Lazy:
    filling = element(value, dtype)
    return Lazy(dtype, (), (), lambda idx, predicate: filling)


@rule(aten.fill_.Scalar, aten.fill_.Tensor)
def _fill_(lx, node, a, value):
    if not isinstance(value, Value):
        value = _constant(value, a.dtype)
    return assign(lx, a, lx.read(value))


@rule(aten.zero_.default)
def _zero_(lx, node, a):
    return _fill_(lx, node, a, 0)


def _scatter(lx: Lowerer, target: View, shape, value: Lazy, tensors: list[Lazy], place) -> None:
    """Write value[i] at the target's index place(i), for every i of shape, where it lies inside."""

    def address(idx: Index) -> tuple[Expr, Expr | None]:
        local, inside = place(idx)
        return target.address(local), inside

    lx.write(target, shape, [value, *tensors], address, lambda idx: value.at(broadcast(idx, value.shape), None))


@rule(aten.index_copy_.default)
def _index_copy_(lx, node, a, dim, index, source):
    check_index(index)
    target = lx.owned_view(a)
    dim = indexed_dim(dim, a)
    positions, value = lx.read(index), lx.read(source)

    def place(idx: Index):
        i = E.cast(positions.at([idx[dim]] if index.shape else [], None), E.INT64)
        return [i if d == dim else x for d, x in enumerate(idx)], E.in_range(i, a.shape[dim])

    _scatter(lx, target, source.shape, value, [positions], place)
    return a


@rule(aten.index_put_.default)
def _index_put_(lx, node, a, indices, values, accumulate=False):
    if accumulate:
        raise UnsupportedError("index_put_ with accumulate=True")
    target = lx.owned_view(a)
    joint, start, place = index_places(indices, a.shape)
    tensors = [lx.read(i) for i in indices if i is not None]
    used = [d for d, i in enumerate(indices) if i is not None]
    kept = [n for d, n in enumerate(a.shape) if d not in used]

    def where(idx: Index):
        joint_idx = idx[start : start + len(joint)]
        return place(idx, [t.at(broadcast(joint_idx, t.shape), None) for t in tensors])

    _scatter(lx, target, [*kept[:start], *joint, *kept[start:]], lx.read(values), tensors, where)
    return a


@rule(aten.index_fill_.int_Scalar)
def _index_fill_(lx, node, a, dim, index, value):
    check_index(index)
    target = lx.owned_view(a)
    dim = indexed_dim(dim, a)
    positions = lx.read(index)
    constant = _constant(value, a.dtype)

    def place(idx: Index):
        i = wrapped(positions.at([idx[dim]] if index.shape else [], None), a.shape[dim])
        return [i if d == dim else x for d, x in enumerate(idx)], E.in_range(i, a.shape[dim])

    shape = [(index.shape[0] if index.shape else 1) if d == dim else n for d, n in enumerate(a.shape)]
    _scatter(lx, target, shape, constant, [positions], place)
    return a


@rule(aten.scatter_.value)
def _scatter_value_(lx, node, a, dim, index, value):
    return _scatter_along(lx, a, dim, index, _constant(value, a.dtype))


@rule(aten.scatter_.src)
def _scatter_src_(lx, node, a, dim, index, src):
    return _scatter_along(lx, a, dim, index, lx.read(src))


def _scatter_along(lx: Lowerer, a: Value, dim: int, index: Value, value: Lazy) -> Value:
    """Write ``value``, which is as large as the index or larger, where the index says along one dimension."""
    if len(index.shape) != len(a.shape):  # of none, or of one element without a dimension
        raise UnsupportedError("a scatter by an index with other dimensions")
    target = lx.owned_view(a)
    dim = indexed_dim(dim, a)
    positions = lx.read(index)

    def place(idx: Index):
        i = E.cast(positions.at(idx, None), E.INT64)
        return [i if d == dim else x for d, x in enumerate(idx)], E.in_range(i, a.shape[dim])

    _scatter(lx, target, index.shape, value, [positions], place)
    return a


def _on_a_copy(in_place: torch._ops.OpOverload):
    def lower(lx: Lowerer, node: fx.Node, a: Value, *args, **kwargs):
        return RULES[in_place](lx, node, copy_of(lx, a), *args, **kwargs)

    return lower


for functional, in_place in (
    (aten.index_copy.default, aten.index_copy_.default),
    (aten.index_put.default, aten.index_put_.default),
    (aten.index_fill.int_Scalar, aten.index_fill_.int_Scalar),
    (aten.scatter.value, aten.scatter_.value),
    (aten.scatter.src, aten.scatter_.src),
):
    rule(functional)(_on_a_copy(in_place))
