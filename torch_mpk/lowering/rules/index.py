"""Concatenation, padding and gathers: loads at computed addresses, guarded by predicates."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_mpk.errors import UnsupportedError
from torch_mpk.lowering import expr as E
from torch_mpk.lowering.expr import INT64, Expr
from torch_mpk.lowering.lowerer import Lowerer, broadcast
from torch_mpk.lowering.rules.common import aten, element, normalise_dim, out_meta
from torch_mpk.lowering.rules.pointwise import cast
from torch_mpk.lowering.table import rule
from torch_mpk.lowering.values import Index, Lazy, Size, Value

INDEX_DTYPES = (INT64, torch.int32)


@rule(aten.cat.default, aten.concat.default, aten.concatenate.default)
def _cat(lx, node, tensors, dim=0):
    meta = out_meta(lx, node)
    dim = normalise_dim(dim, len(meta.shape))
    parts = [
        cast(lx, t, meta.dtype) if t.dtype != meta.dtype else lx.read(t)
        for t in tensors
        if len(t.shape) == len(meta.shape)
    ]
    parts = [p for p in parts if p.shape[dim] != 0]
    return joined(lx, parts, dim, meta.shape)


@rule(aten.stack.default)
def _stack(lx, node, tensors, dim=0):
    meta = out_meta(lx, node)
    dim = normalise_dim(dim, len(meta.shape))
    unit = [1 if d == dim else n for d, n in enumerate(meta.shape)]
    parts = [lx.mapped(cast(lx, t, meta.dtype), unit, lambda idx: [*idx[:dim], *idx[dim + 1 :]]) for t in tensors]
    return joined(lx, [lx.read(p) for p in parts], dim, meta.shape)


def joined(lx: Lowerer, parts: Sequence[Lazy], dim: int, shape: Sequence[Size]) -> Lazy:
    starts: list[Expr] = [E.const(0, INT64)]
    for part in parts:
        starts.append(E.iadd(starts[-1], part.shape[dim]))

    def inner(idx: Index, predicate: Expr | None) -> Expr:
        out: Expr | None = None
        for part, start, end in reversed(list(zip(parts, starts, starts[1:], strict=False))):
            i = idx[dim]
            before_end = E.compare("lt", i, end)
            inside = E.both(E.compare("ge", i, start), before_end)
            local = [E.iadd(i, start, -1) if d == dim else x for d, x in enumerate(idx)]
            value = part.at(local, E.both(predicate, inside))
            out = value if out is None else E.where(before_end, value, out)
        assert out is not None
        return out

    return lx.lazy(parts[0].dtype, shape, parts, inner, cost=4 * len(parts))


@rule(aten.pad.default)
def _pad(lx, node, a, pad, mode="constant", value=None):
    if mode != "constant":
        raise UnsupportedError(f"padding mode {mode!r}")
    return _constant_pad(lx, node, a, pad, 0 if value is None else value)


@rule(aten.constant_pad_nd.default)
def _constant_pad(lx, node, a, pad, value=0):
    meta = out_meta(lx, node)
    source = lx.read(a)
    rank = len(a.shape)
    before = {rank - 1 - i: pad[2 * i] for i in range(len(pad) // 2)}
    after = {rank - 1 - i: pad[2 * i + 1] for i in range(len(pad) // 2)}
    filling = element(value, meta.dtype)

    def inner(idx: Index, predicate: Expr | None) -> Expr:
        inside: Expr | None = None
        local = list(idx)
        for d, start in before.items():
            local[d] = E.iadd(idx[d], start, -1)
            if not _is_zero(start):
                inside = E.both(inside, E.compare("ge", local[d], E.const(0, INT64)))
            if not _is_zero(after[d]):
                inside = E.both(inside, E.compare("lt", local[d], E.as_index(a.shape[d])))
        loaded = source.at(local, E.both(predicate, inside))
        return loaded if inside is None else E.where(inside, loaded, filling)

    return lx.lazy(meta.dtype, meta.shape, [source], inner, cost=4)


def _is_zero(value: Size) -> bool:
    return isinstance(value, int) and value == 0


def wrapped(i: Expr, extent: Size) -> Expr:
    """A PyTorch index: negative ones count from the end."""
    i = E.cast(i, INT64)
    return E.where(E.compare("lt", i, E.const(0, INT64)), E.iadd(i, extent), i)


def indexed_dim(dim: int, a: Value) -> int:
    """The dimension that an index tensor indexes."""
    if not a.shape:
        raise UnsupportedError("indexing a tensor without dimensions")
    return normalise_dim(dim, len(a.shape))


def check_index(value: Value) -> None:
    if value.dtype not in INDEX_DTYPES:
        raise UnsupportedError(
            f"indexing with a tensor of {E.dtype_name(value.dtype)}: only int64 and int32 indices are supported"
        )


def index_places(indices: Sequence[Value | None], shape: Sequence[Size]):
    """How advanced indexing addresses a tensor of ``shape``.

    Returns the shape the indices broadcast to, where it stands in the result, and a function from the result's index
    and the elements of the index tensors to the tensor's index and the predicate that it lies inside.
    """
    tensors = {d: i for d, i in enumerate(indices) if i is not None}
    used = list(tensors)
    joint: list[Size] = []
    for i in tensors.values():
        check_index(i)
        for position, n in enumerate(reversed(i.shape)):
            if position == len(joint):
                joint.append(n)
            elif joint[position] == 1:
                joint[position] = n
    joint.reverse()
    adjacent = used == list(range(used[0], used[-1] + 1))
    start = used[0] if adjacent else 0

    def place(idx: Index, elements: Sequence[Expr]) -> tuple[list[Expr], Expr | None]:
        rest = iter([*idx[:start], *idx[start + len(joint) :]])
        out, inside = [], None
        picked = dict(zip(used, elements, strict=False))
        for d, extent in enumerate(shape):
            if d in picked:
                i = wrapped(picked[d], extent)
                inside = E.both(inside, E.in_range(i, extent))
                out.append(i)
            else:
                out.append(next(rest))
        return out, inside

    return joint, start, place


@rule(aten.index.Tensor)
def _index(lx, node, a, indices):
    meta = out_meta(lx, node)
    joint, start, place = index_places(indices, a.shape)
    source = lx.read(a)
    tensors = [lx.read(i) for i in indices if i is not None]

    def inner(idx: Index, predicate: Expr | None) -> Expr:
        where = idx[start : start + len(joint)]
        local, inside = place(idx, [t.at(broadcast(where, t.shape), predicate) for t in tensors])
        return source.at(local, E.both(predicate, inside))

    return lx.lazy(meta.dtype, meta.shape, [source, *tensors], inner, cost=4 * len(tensors))


def picked(lx: Lowerer, a: Value, dim: int, shape: Sequence[Size], index: Value, pick) -> Lazy:
    """Elements of a whose coordinate ``dim`` comes from an index tensor; negative or too large coordinates give 0."""
    check_index(index)
    source, positions = lx.read(a), lx.read(index)

    def inner(idx: Index, predicate: Expr | None) -> Expr:
        at, local = pick(list(idx))
        i = E.cast(positions.at(at, predicate), INT64)
        local[dim] = i
        return source.at(local, E.both(predicate, E.in_range(i, a.shape[dim])))

    return lx.lazy(a.dtype, shape, [source, positions], inner, cost=4)


@rule(aten.embedding.default)
def _embedding(lx, node, weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    shape = out_meta(lx, node).shape
    return picked(lx, weight, 0, shape, indices, lambda idx: (idx[:-1], [idx[0], idx[-1]]))


@rule(aten.index_select.default)
def _index_select(lx, node, a, dim, index):
    dim = indexed_dim(dim, a)
    shape = out_meta(lx, node).shape
    return picked(lx, a, dim, shape, index, lambda idx: ([idx[dim]] if index.shape else [], idx))


@rule(aten.gather.default)
def _gather(lx, node, a, dim, index, sparse_grad=False):
    dim = indexed_dim(dim, a)
    return picked(lx, a, dim, out_meta(lx, node).shape, index, lambda idx: (list(idx), list(idx)))
