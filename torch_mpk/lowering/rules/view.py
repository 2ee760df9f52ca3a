"""View operations: index maps, applied to strides where a value has memory and to its function where it has none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from torch_mpk.errors import UnsupportedError
from torch_mpk.lowering import expr as E
from torch_mpk.lowering.expr import INT64, Expr
from torch_mpk.lowering.lowerer import Lowerer, broadcast
from torch_mpk.lowering.rules.common import aten, normalise_dim, out_meta
from torch_mpk.lowering.rules.pointwise import copy_of
from torch_mpk.lowering.table import rule
from torch_mpk.lowering.values import Index, Size, Value, is_static


@rule(aten.alias.default, aten.detach.default, aten.detach_.default, aten.lift_fresh.default, aten.positive.default)
def _alias(lx, node, a):
    return a


def reshaped(lx: Lowerer, a: Value, shape: Sequence[Size]) -> Value:
    """a with another shape of as many elements."""
    if tuple(a.shape) == tuple(shape):
        return a
    # Sizes that are equal from either end need no index arithmetic; this also carries sizes known only at run time.
    front = 0
    while front < min(len(a.shape), len(shape)) and a.shape[front] == shape[front]:
        front += 1
    back = 0
    while (
        back < min(len(a.shape), len(shape)) - front
        and a.shape[len(a.shape) - 1 - back] == shape[len(shape) - 1 - back]
    ):
        back += 1
    old, new = a.shape[front : len(a.shape) - back], shape[front : len(shape) - back]

    def index_map(idx: Index) -> Index:
        idx = list(idx)
        return [*idx[:front], *E.unravel(E.ravel(idx[front : len(idx) - back], new), old), *idx[len(idx) - back :]]

    return lx.mapped(a, shape, index_map)


def _eager_aliases(node: fx.Node) -> bool:
    """Whether eager's reshape of the node's first argument is a view and not a copy."""
    before, after = node.args[0].meta["val"], node.meta["val"]
    if not all(isinstance(n, int) for n in (*before.shape, *before.stride(), *after.shape)):
        return False
    stand_in = torch.empty_strided(tuple(before.shape), before.stride(), device="meta")
    try:
        stand_in.view(tuple(after.shape))
    except RuntimeError:
        return False
    return True


@rule(aten.view.default, aten._unsafe_view.default, aten.view_as.default)
@rule(aten.reshape.default, aten.reshape_as.default, aten.flatten.using_ints, aten.unflatten.int)
@rule(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _reshape(lx, node, a, *args, **kwargs):
    out = reshaped(lx, a, out_meta(lx, node).shape)
    return out if _eager_aliases(node) else copy_of(lx, out)


@rule(aten.contiguous.default)
def _contiguous(lx, node, a, memory_format=torch.contiguous_format):
    if memory_format != torch.contiguous_format:
        raise UnsupportedError(f"memory format {memory_format}")
    strides = node.args[0].meta["val"].stride()
    same = all(isinstance(s, int) for s in strides) and node.meta["val"].stride() == strides
    return a if same else copy_of(lx, a)


def permuted(lx: Lowerer, a: Value, order: Sequence[int]) -> Value:
    """Dimension d of the result is dimension order[d] of a."""

    def index_map(idx: Index) -> Index:
        out: list[Expr] = [E.const(0, INT64)] * len(order)
        for i, d in zip(idx, order, strict=False):
            out[d] = i
        return out

    return lx.mapped(a, [a.shape[d] for d in order], index_map)


@rule(aten.permute.default)
def _permute(lx, node, a, dims):
    return permuted(lx, a, [normalise_dim(d, len(a.shape)) for d in dims])


@rule(aten.transpose.int, aten.swapaxes.default, aten.swapdims.default)
def _transpose(lx, node, a, dim0, dim1):
    order = list(range(len(a.shape)))
    if order:
        d0, d1 = normalise_dim(dim0, len(order)), normalise_dim(dim1, len(order))
        order[d0], order[d1] = order[d1], order[d0]
    return permuted(lx, a, order)


@rule(aten.t.default, aten.mT.default)
def _t(lx, node, a):
    order = list(range(len(a.shape)))
    order[-2:] = order[-2:][::-1]
    return permuted(lx, a, order)


@rule(aten.numpy_T.default)
def _numpy_t(lx, node, a):
    return permuted(lx, a, list(reversed(range(len(a.shape)))))


@rule(aten.movedim.int)
def _movedim(lx, node, a, source, destination):
    rank = len(a.shape)
    order = [d for d in range(rank) if d != normalise_dim(source, rank)]
    order.insert(normalise_dim(destination, rank), normalise_dim(source, rank))
    return permuted(lx, a, order)


@rule(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
def _expand(lx, node, a, *args, **kwargs):
    return lx.mapped(a, out_meta(lx, node).shape, lambda idx: broadcast(idx, a.shape))


def shifted(lx: Lowerer, a: Value, dim: int, start: Size, step: int, shape: Sequence[Size]) -> Value:
    def index_map(idx: Index) -> Index:
        return [E.iadd(E.imul(i, step), start) if d == dim else i for d, i in enumerate(idx)]

    return lx.mapped(a, shape, index_map)


def sliced(lx: Lowerer, a: Value, dim: int, start: int, length: int) -> Value:
    return shifted(lx, a, dim, start, 1, [length if d == dim else n for d, n in enumerate(a.shape)])


@rule(aten.slice.Tensor)
def _slice(lx, node, a, dim=0, start=None, end=None, step=1):
    dim = normalise_dim(dim, len(a.shape))
    extent = a.shape[dim]
    start = 0 if start is None else start
    if isinstance(start, int) and isinstance(extent, int):
        start = min(max(start + extent if start < 0 else start, 0), extent)
    elif not (isinstance(start, int) and start == 0):
        raise UnsupportedError("a slice whose start is known only at run time")
    return shifted(lx, a, dim, start, step, out_meta(lx, node).shape)


@rule(aten.narrow.default)
def _narrow(lx, node, a, dim, start, length):
    dim = normalise_dim(dim, len(a.shape))
    if not all(isinstance(n, int) for n in (start, length, a.shape[dim])):
        raise UnsupportedError("a slice whose start is known only at run time")
    return sliced(lx, a, dim, start + a.shape[dim] if start < 0 else start, length)


def selected(lx: Lowerer, a: Value, dim: int, position: Size) -> Value:
    shape = [n for d, n in enumerate(a.shape) if d != dim]
    return lx.mapped(a, shape, lambda idx: [*idx[:dim], E.as_index(position), *idx[dim:]])


@rule(aten.select.int)
def _select(lx, node, a, dim, index):
    dim = normalise_dim(dim, len(a.shape))
    if not isinstance(index, int):
        raise UnsupportedError("a select whose index is a size")
    return selected(lx, a, dim, E.iadd(index, a.shape[dim]) if index < 0 else index)


@rule(aten.unbind.int)
def _unbind(lx, node, a, dim=0):
    dim = normalise_dim(dim, len(a.shape))
    return [selected(lx, a, dim, i) for i in range(len(node.meta["val"]))]


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.chunk.default)
def _split(lx, node, a, sizes, dim=0):
    dim = normalise_dim(dim, len(a.shape))
    if not is_static(a.shape):
        raise UnsupportedError("a split of a tensor whose size is known only at run time")
    parts, start = [], 0
    for val in node.meta["val"]:
        length = val.shape[dim]
        parts.append(sliced(lx, a, dim, start, length))
        start += length
    return parts


@rule(aten.flip.default)
def _flip(lx, node, a, dims):
    dims = [normalise_dim(d, len(a.shape)) for d in dims]

    def index_map(idx: Index) -> Index:
        return [E.iadd(E.iadd(a.shape[d], -1), i, -1) if d in dims else i for d, i in enumerate(idx)]

    return copy_of(lx, lx.mapped(a, a.shape, index_map))


@rule(aten.repeat.default, aten.tile.default)
def _repeat(lx, node, a, repeats):
    shape = out_meta(lx, node).shape
    if not is_static(a.shape) or not is_static(shape):
        raise UnsupportedError("a repeat of a tensor whose size is known only at run time")
    lead = len(shape) - len(a.shape)
    return copy_of(
        lx, lx.mapped(a, shape, lambda idx: [E.remainder(i, n) for i, n in zip(idx[lead:], a.shape, strict=False)])
    )


@rule(aten.roll.default)
def _roll(lx, node, a, shifts, dims=()):
    if not is_static(a.shape):
        raise UnsupportedError("a roll of a tensor whose size is known only at run time")
    if not dims:
        flat = reshaped(lx, a, [a.numel])
        rolled = lx.mapped(flat, flat.shape, lambda idx: [E.remainder(E.iadd(idx[0], -shifts[0]), a.numel)])
        return copy_of(lx, reshaped(lx, rolled, a.shape))
    by = {normalise_dim(d, len(a.shape)): s for d, s in zip(dims, shifts, strict=False)}

    def index_map(idx: Index) -> Index:
        return [E.remainder(E.iadd(i, -by[d]), a.shape[d]) if d in by else i for d, i in enumerate(idx)]

    return copy_of(lx, lx.mapped(a, a.shape, index_map))


@rule(aten.repeat_interleave.self_int)
def _repeat_interleave(lx, node, a, repeats, dim=None, output_size=None):
    if not isinstance(repeats, int) or not is_static(a.shape):
        raise UnsupportedError("repeat_interleave of a size known only at run time")
    if dim is None:
        a, dim = reshaped(lx, a, [a.numel]), 0
    dim = normalise_dim(dim, len(a.shape))

    def index_map(idx: Index) -> Index:
        return [E.floordiv(i, repeats) if d == dim else i for d, i in enumerate(idx)]

    return copy_of(lx, lx.mapped(a, out_meta(lx, node).shape, index_map))
