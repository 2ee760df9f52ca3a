"""Walks a segment in program order, keeps every value virtual as long as that is sound, and emits steps."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import fx

from torch_mpk.capture.graph import source_line
from torch_mpk.capture.node_keys import NodeKey
from torch_mpk.capture.provenance import module_path
from torch_mpk.errors import UnsupportedError, first_line
from torch_mpk.lowering import expr as E
from torch_mpk.lowering.constants import constant
from torch_mpk.lowering.expr import Expr
from torch_mpk.lowering.inline import decompose
from torch_mpk.lowering.steps import (
    REDUCE,
    PointwiseStep,
    ReduceStep,
    Step,
    Store,
    TaskStep,
    loads,
    pointwise_step,
    store_roots,
)
from torch_mpk.lowering.table import RULES
from torch_mpk.lowering.tasks import lower_task
from torch_mpk.lowering.values import (
    Buffer,
    Index,
    Inner,
    Lazy,
    Load,
    Mapped,
    Size,
    Value,
    View,
    contiguous_strides,
    is_dense,
    is_injective,
    is_static,
    strided,
)
from torch_mpk.registry import Task

MAX_COST = 64  # instructions of one virtual tensor's expression before its operands get memory of their own
MORE_COST = 8  # what may stand behind one such operand, as a cast does, before it takes a step of its own
SHARED_COST = 32  # the same for a value that several nodes consume, and that would be computed by each


@dataclass(frozen=True)
class Meta:
    """What the fake tensor of a node says."""

    dtype: torch.dtype
    shape: tuple[Size, ...]
    strides: tuple[int, ...] | None  # None when known only at run time
    device: torch.device


@dataclass(eq=False)
class Write:
    """A write to a buffer that has been issued but not emitted: reads of the old contents may still come before it."""

    buffer: Buffer
    version: int
    shape: tuple[int, ...]
    sources: tuple[Lazy, ...]
    place: Callable[[Index], tuple[Expr, Expr | None]]  # index -> (address, predicate)
    value: Callable[[Index], Expr]
    label: str


class Lowerer:
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.buffers: list[Buffer] = []
        self.symbols: dict[object, Expr] = {}  # sympy expression of a SymInt placeholder -> the scalar
        self.frames: list[dict[fx.Node, object]] = []
        self.traced: dict[NodeKey, fx.GraphModule] = {}  # what nodes became other nodes by, for others with their key
        self.label = ""
        self.node: fx.Node | None = None

    # ---- values of nodes ----

    @property
    def env(self) -> dict[fx.Node, object]:
        return self.frames[-1]

    def size(self, value: int | torch.SymInt) -> Size:
        if isinstance(value, int):
            return int(value)
        return self._symbolic(value.node.expr)

    def add_symbol(self, number: int, value: torch.SymInt, e: Any, is_dimension: bool) -> None:
        """A call's scalar ``number`` is what ``e`` stands for, an expression of the tracing that ``value`` is from, and
        maybe known to be a dimension of a tensor."""
        if e not in self.symbols:
            known = value.node.shape_env.bound_sympy(e)
            low, high = (int(n) if n.is_Integer else None for n in (known.lower, known.upper))
            self.symbols[e] = E.size(number, E.scalar_bounds(low, high, is_dimension))

    def _symbolic(self, e: Any) -> Size:
        if e in self.symbols:
            return self.symbols[e]
        if getattr(e, "is_Integer", False):
            return int(e)
        kind = type(e).__name__
        if kind in ("Add", "Mul"):
            fold, total = (E.iadd, E.const(0, E.INT64)) if kind == "Add" else (E.imul, E.const(1, E.INT64))
            for arg in e.args:
                total = fold(total, self._symbolic(arg))
            return int(total.attr) if E.is_const(total) else total
        if kind in ("Max", "Min"):
            order = "ge" if kind == "Max" else "le"
            chosen, *rest = (E.as_index(self._symbolic(arg)) for arg in e.args)
            for other in rest:
                chosen = E.where(E.compare(order, chosen, other), chosen, other)
            return chosen
        raise UnsupportedError(f"the size {e} is known only at run time and is not a scalar input of the graph")

    def meta(self, val: torch.Tensor) -> Meta:
        if val.dtype not in E.DTYPES + E.STORED:
            raise UnsupportedError(f"dtype {E.dtype_name(val.dtype)} is not supported")
        if val.layout != torch.strided:
            raise UnsupportedError(f"layout {val.layout} is not supported")
        shape = tuple(self.size(n) for n in val.shape)
        strides = tuple(self.size(n) for n in val.stride()) if is_static(shape) else None
        return Meta(val.dtype, shape, strides if strides is not None and is_static(strides) else None, val.device)

    def add_input(self, name: str, index: int, val: torch.Tensor) -> View:
        meta = self.meta(val)
        strides = tuple(self.size(n) for n in val.stride())
        buffer = Buffer(name, "input", index, meta.dtype, meta.shape, strides)
        self.buffers.append(buffer)
        return View(buffer, meta.shape, strides)

    def resolve(self, value: Value) -> View | Lazy:
        """The view that the value stands for, or the value itself while it is virtual."""
        if isinstance(value, Lazy) and value.view is not None:
            return value.view
        if isinstance(value, Mapped):
            base = self.resolve(value.base)
            if isinstance(base, View):
                return base.mapped(value.shape, value.index_map) or value
        assert isinstance(value, (View, Lazy))
        return value

    def read(self, value: Value) -> Lazy:
        """The value's present contents, unaffected by later writes."""
        resolved = self.resolve(value)
        if not isinstance(resolved, View):
            return resolved
        if isinstance(value, Lazy) and value.view is resolved and value.version == resolved.buffer.issued:
            return value
        return Load(resolved)

    def mapped(self, value: Value, shape: Sequence[Size], index_map: Callable[[Index], Index]) -> Value:
        """A view operation: an alias where the value has memory, a virtual tensor where it has none."""
        resolved = self.resolve(value)
        if isinstance(resolved, View):
            view = resolved.mapped(shape, index_map)
            if view is not None:
                return view
            return Mapped(self.read(resolved), shape, index_map)
        return Mapped(resolved, shape, index_map)

    def lazy(
        self, dtype: torch.dtype, shape: Sequence[Size], sources: Sequence[Lazy], inner: Inner, cost: int = 1
    ) -> Lazy:
        """A virtual tensor over sources that ``read`` returned; large ones get memory first."""
        is_chain = sum(s.cost > 1 for s in sources) < 2
        if cost + sum(s.cost for s in sources) > MAX_COST + (MORE_COST if is_chain else 0):
            for source in sorted(sources, key=lambda s: -s.cost):
                if source.cost > 1 and is_static(source.shape):
                    self.realise(source)
        return Lazy(dtype, shape, sources, inner, cost)

    def pointwise(
        self, dtype: torch.dtype, shape: Sequence[Size], fn: Callable[..., Expr], values: Sequence[Value], cost: int = 1
    ) -> Lazy:
        """fn of the broadcast values, element by element."""
        sources = [self.read(v) for v in values]

        def inner(idx: Index, predicate: Expr | None) -> Expr:
            return fn(*(s.at(broadcast(idx, s.shape), predicate) for s in sources))

        return self.lazy(dtype, shape, sources, inner, cost)

    # ---- giving memory to virtual tensors ----

    def new_buffer(self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None = None) -> View:
        strides = tuple(strides) if strides is not None and is_dense(shape, strides) else contiguous_strides(shape)
        strides = tuple(c if n == 1 else s for n, s, c in zip(shape, strides, contiguous_strides(shape), strict=False))
        number = sum(b.kind == "workspace" for b in self.buffers)
        buffer = Buffer(f"t{number}", "workspace", -1, dtype, tuple(shape), strides)
        self.buffers.append(buffer)
        return View(buffer, shape, strides)

    def realise(self, value: Value) -> View:
        """Give the value memory; a virtual view gets its base's where that is no larger and leaves it strided."""
        resolved = self.resolve(value)
        if isinstance(resolved, View):
            return resolved
        assert isinstance(value, Lazy)
        if _prefers_base(value):
            self.realise(value.base)
            resolved = self.resolve(value)
            if isinstance(resolved, View):
                return resolved
        return self._materialise(value)

    def _materialise(self, value: Lazy) -> View:
        self.flush(value.refs())
        if value.view is None:  # else flushing a write has made a copy of what it overwrites
            value.realised_as(self._copied(value))
        assert value.view is not None
        return value.view

    def _copied(self, value: Lazy) -> View:
        """New memory with the value's elements."""
        if value.numel == 0:
            raise UnsupportedError("a tensor without elements needs memory")
        self.flush(value.refs())
        assert is_static(value.shape)
        view = self.new_buffer(value.dtype, value.shape, value.eager_strides)
        assert is_static(view.strides)
        labels = value.labels() or [self.label]  # a mere copy is its consumer's
        step = self._pointwise_step(
            value.shape,
            view.strides,
            view.buffer,
            lambda i: (view.address(i), None),
            lambda i: value.at(i, None),
            labels,
        )
        self.steps.append(step)
        return view

    def _pointwise_step(
        self,
        shape: Sequence[int],
        strides: Sequence[int],
        buffer: Buffer,
        place: Callable[[Index], tuple[Expr, Expr | None]],
        value: Callable[[Index], Expr],
        labels: list[str],
    ) -> PointwiseStep:
        domain, idx = domain_of(shape, strides)
        address, predicate = place(idx)
        store = Store(buffer, address, predicate, E.cast(value(idx), buffer.dtype))
        return pointwise_step(domain, [store], labels)

    def owned_view(self, value: Value) -> View:
        """The memory of a value that is about to be written in place."""
        resolved = self.resolve(value)
        if isinstance(resolved, View):
            return resolved
        root = resolved.root if isinstance(resolved, Mapped) else resolved
        assert isinstance(root, Lazy)
        if isinstance(root, Load):
            raise UnsupportedError("an in-place write to a view that has no strides")
        self._materialise(root)
        resolved = self.resolve(value)
        if not isinstance(resolved, View):
            raise UnsupportedError("an in-place write to a view that has no strides")
        return resolved

    # ---- order of reads and writes ----

    def flush(self, refs: set) -> None:
        """Emit the pending writes whose results are about to be read."""
        for ref in sorted(refs, key=lambda r: (r.buffer.kind, r.buffer.index, r.buffer.name, r.version)):
            self._commit(ref.buffer, ref.version)

    def flush_all(self) -> None:
        for buffer in self.buffers:
            self._commit(buffer, buffer.issued)

    def _commit(self, buffer: Buffer, version: int) -> None:
        while buffer.pending and buffer.committed < version:
            write: Write = buffer.pending[0]
            for source in write.sources:
                self.flush(source.refs())
            if buffer.pending and buffer.pending[0] is write:
                self._emit_write(write)

    def _emit_write(self, write: Write) -> None:
        buffer = write.buffer
        self._keep_old(buffer, write.version, write)

        def make() -> PointwiseStep:
            labels = [*(label for source in write.sources for label in source.labels()), write.label]
            order = contiguous_strides(write.shape)
            return self._pointwise_step(write.shape, order, buffer, write.place, write.value, labels)

        step = make()
        (store,) = step.stores
        if any(e.attr.buffer is buffer and not _same_element(e, store) for e in loads(store_roots([store]))):
            for source in write.sources:  # a point would read what another point writes
                self._keep(source, buffer, write.version)
            step = make()
        self.steps.append(step)
        buffer.pending.remove(write)
        buffer.committed = write.version

    def _node_values(self) -> Iterator[Lazy]:
        for frame in self.frames:
            for value in list(frame.values()):
                for v in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(v, Lazy):
                        yield v

    def _live(self, exclude: Write | None) -> Iterator[Lazy]:
        """What will still be read. A node's value that has memory is no snapshot: it sees writes."""
        yield from (v for v in self._node_values() if not isinstance(self.resolve(v), View))
        for buffer in self.buffers:
            for write in buffer.pending:
                if write is not exclude:
                    yield from write.sources

    def _keep_old(self, buffer: Buffer, version: int, write: Write | None = None) -> None:
        """Copy what live values still read of the buffer before it is written for the ``version``-th time."""
        if not buffer.is_loaded:
            return
        for lazy in list(self._live(write)):
            self._keep(lazy, buffer, version)

    def _keep(self, lazy: Lazy, buffer: Buffer, version: int) -> None:
        refs = lazy.refs()
        if not any(r.buffer is buffer and r.version < version for r in refs):
            return
        if is_static(lazy.shape) and all(r.version <= r.buffer.committed for r in refs):
            if _prefers_base(lazy):
                self._keep(lazy.base, buffer, version)
            elif isinstance(self.resolve(lazy), View):
                lazy.kept_as(self._copied(lazy))
            else:
                self._materialise(lazy)
        elif lazy.sources and lazy.view is None:
            for source in lazy.sources:
                self._keep(source, buffer, version)
        else:
            raise UnsupportedError(
                "a tensor whose size is known only at run time is overwritten while it is still needed"
            )

    def write(
        self,
        target: View,
        shape: Sequence[int],
        sources: Sequence[Lazy],
        place: Callable[[Index], tuple[Expr, Expr | None]],
        value: Callable[[Index], Expr],
    ) -> None:
        """Issue an in-place write of ``value`` at ``place``, for every index of ``shape``."""
        buffer = target.buffer
        if buffer.extent is None:
            raise UnsupportedError("an in-place write to a tensor whose size is known only at run time")
        if math.prod(shape) == 0:
            return
        buffer.issued += 1
        buffer.pending.append(Write(buffer, buffer.issued, tuple(shape), tuple(sources), place, value, self.label))

    def write_elements(self, target: View, value: Lazy) -> None:
        """target[...] = value, broadcast."""
        if not (is_static(target.shape) and is_static(target.strides)):
            raise UnsupportedError("an in-place write to a tensor whose size is known only at run time")
        if 0 in target.shape:
            return
        if not is_injective(target.shape, target.strides):
            raise UnsupportedError("an in-place write to an expanded tensor")
        self.write(
            target,
            target.shape,
            [value],
            lambda idx: (target.address(idx), None),
            lambda idx: value.at(broadcast(idx, value.shape), None),
        )

    def has_views(self, lazy: Lazy) -> bool:
        """Whether a later node may use a view of this virtual tensor."""
        return any(isinstance(v, Mapped) and v.root is lazy for v in self._node_values())

    def rebind(self, old: Lazy, new: Lazy) -> None:
        """Every node that stood for ``old`` stands for ``new``."""
        for frame in self.frames:
            for node, value in frame.items():
                if value is old:
                    frame[node] = new

    # ---- reductions ----

    def reduce(self, op: str, out_dtype: torch.dtype, value: Lazy, dims: Sequence[int], keepdim: bool) -> Value:
        """Reduce over dims; the result has memory. ``op`` is one of the reduce task's."""
        if not is_static(value.shape):
            raise UnsupportedError("a reduction of a tensor whose size is known only at run time")
        kept = [d for d in range(len(value.shape)) if d not in dims]
        kept_shape = [value.shape[d] for d in kept]
        reduced_shape = [value.shape[d] for d in sorted(dims)]
        count = math.prod(reduced_shape)
        if count == 0 or math.prod(kept_shape) == 0:
            raise UnsupportedError("a reduction over no elements")
        self.flush(value.refs())
        domain, idx = domain_of(kept_shape, contiguous_strides(kept_shape))
        inner = E.unravel(E.index(len(domain), count), reduced_shape)
        full = dict(zip(kept, idx, strict=False)) | dict(zip(sorted(dims), inner, strict=False))
        element = value.at([full[d] for d in range(len(value.shape))], None)
        view = self.new_buffer(out_dtype, kept_shape)
        reads = {e.attr.buffer for e in loads([element])}
        out = View(view.buffer, domain, contiguous_strides(domain))
        labels = [*value.labels(), self.label]
        self.steps.append(ReduceStep(REDUCE, labels, reads, {view.buffer}, (*domain, count), element, op, out))
        if not keepdim:
            return view
        shape = [1 if d in dims else n for d, n in enumerate(value.shape)]
        return self.mapped(view, shape, lambda i: [i[d] for d in kept])

    # ---- operands of tasks ----

    def operand(self, value: Value) -> View:
        """A view for reading: the value's own memory, what it is a plain copy of, or new memory."""
        resolved = self.resolve(value)
        if isinstance(resolved, View):
            self._commit(resolved.buffer, resolved.buffer.issued)
            return resolved
        assert isinstance(resolved, Lazy)
        if is_static(resolved.shape):
            refs = resolved.refs()
            self.flush(refs)
            if resolved.view is None and len(refs) == 1:
                element = resolved.at([E.index(d, n) for d, n in enumerate(resolved.shape)], None)
                if element.op == "load" and len(element.args) == 1:
                    view = strided(element.attr.buffer, resolved.shape, element.args[0])
                    if view is not None and element.attr.version == view.buffer.committed:
                        return view
        return self.realise(resolved)

    def copy(self, view: View, eager_strides: Sequence[int] | None = None, version: int | None = None) -> View:
        """Memory of its own with the view's contents, after ``version`` writes to its buffer or all that are issued."""
        source = Load(view, version)
        source.eager_strides = None if eager_strides is None else tuple(eager_strides)
        return self._copied(source)

    def task(
        self,
        name: str,
        operands: Sequence[tuple[str, View, bool, bool]],
        attrs: dict[str, int | float | str],
    ) -> None:
        """Emit a row or stream task; its reads have been committed by ``operand``."""
        reads = {v.buffer for _, v, is_read, _ in operands if is_read}
        # A set's order would differ from process to process, and so what is built: ranks would not agree.
        writes = dict.fromkeys(v.buffer for _, v, _, is_write in operands if is_write)
        for buffer in writes:
            self._commit(buffer, buffer.issued)
        for buffer in writes:
            self._keep_old(buffer, buffer.issued + 1)
        self.steps.append(TaskStep(name, [self.label], reads, set(writes), list(operands), attrs))
        for buffer in writes:
            buffer.issued += 1
            buffer.committed = buffer.issued

    # ---- walking a graph ----

    def run(self, graph: fx.Graph, module: torch.nn.Module, args: Sequence[object]) -> list[object]:
        """Lower every node; returns the graph's outputs. ``args`` are the placeholders' values."""
        remaining = {n: len(n.users) for n in graph.nodes}
        frame: dict[fx.Node, object] = {}
        self.frames.append(frame)
        inputs = iter(args)
        result: list[object] = []
        for node in graph.nodes:
            if node.op == "placeholder":
                frame[node] = next(inputs)
            elif node.op == "output":
                out = node.args[0]
                result = [self.value_of(a) for a in (out if isinstance(out, (tuple, list)) else (out,))]
            else:
                frame[node] = self.call(node, module)
            for used in node.all_input_nodes:
                remaining[used] -= 1
                if remaining[used] == 0 and node.op != "output":
                    frame.pop(used, None)
        self.frames.pop()
        return result

    def value_of(self, arg: object) -> Any:
        return fx.node.map_arg(arg, lambda n: self.env[n])

    def call(self, node: fx.Node, module: torch.nn.Module) -> object:
        outer, outer_label = self.node, self.label
        self.node, self.label = node, module_path(node) or self.label
        try:
            if node.op == "get_attr":
                return constant(operator.attrgetter(node.target)(module))
            if node.op != "call_function":
                raise UnsupportedError(f"a graph node of kind {node.op} is not supported")
            val = node.meta.get("val")
            if val is None or isinstance(val, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)):
                if isinstance(val, (int, torch.SymInt)):
                    return self.size(val)
                if isinstance(val, float):
                    return val
                is_effect = isinstance(node.target, Task) and not node.target.outputs
                if node.target is not operator.getitem and not is_effect:
                    raise UnsupportedError(f"{node.target} does not make a tensor")
            args = [self.value_of(a) for a in node.args]
            kwargs = {k: self.value_of(a) for k, a in node.kwargs.items()}
            if node.target is operator.getitem:
                return args[0][args[1]]
            check_devices(node)
            if isinstance(node.target, torch._ops.OpOverload):
                rule = RULES.get(node.target)
                out = rule(self, node, *args, **kwargs) if rule else decompose(self, node)
            elif isinstance(node.target, Task):
                out = lower_task(self, node, args, kwargs)
            else:
                raise UnsupportedError(
                    f"{getattr(node.target, '__name__', node.target)} is not an operation torch_mpk lowers"
                )
            return self._finish(node, out)
        except UnsupportedError as error:
            if error.node is not None:
                raise
            raise UnsupportedError(error.reason, node.name, source_line(node)) from error
        except Exception as error:  # a form of the operation that its rule does not know
            reason = f"{node.target} cannot be lowered in this form ({first_line(error)})"
            raise UnsupportedError(reason, node.name, source_line(node)) from error
        finally:
            self.node, self.label = outer, outer_label

    def _finish(self, node: fx.Node, out: object) -> object:
        """Remember eager's strides, and give memory now to a value too costly to be computed by each consumer."""
        if isinstance(out, Lazy) and out.view is None:
            if not isinstance(out, (Mapped, Load)):
                out.label = out.label or self.label
            if node.target is torch.ops.aten.select_scatter.default:  # eager copies its input, gaps and all
                shape, strides = out.shape, self.meta(node.meta["val"]).strides
                if strides and is_static(shape) and not is_dense(shape, strides) and is_injective(shape, strides):
                    raise UnsupportedError("its result has gaps between the elements, as its input")
            if out.eager_strides is None:
                out.eager_strides = self.meta(node.meta["val"]).strides
            if (
                len(node.users) > 1
                and out.cost > SHARED_COST
                and is_static(out.shape)
                and not isinstance(out, (Mapped, Load))
            ):
                self.realise(out)
        return out


def _prefers_base(value: Lazy) -> TypeGuard[Mapped]:
    """Whether to give memory to what a virtual view is of: other views of it then share that memory."""
    return (
        isinstance(value, Mapped)
        and value.base.view is None
        and not isinstance(value.base, Load)
        and is_static(value.base.shape)
        and value.base.numel <= value.numel
        and not value.repeats_innermost()  # tasks want their innermost dimension in memory
    )


def broadcast(idx: Index, shape: Sequence[Size]) -> Index:
    """The index into a tensor that broadcasts to where idx points."""
    tail = idx[len(idx) - len(shape) :] if shape else ()
    return [E.const(0, E.INT64) if n == 1 and isinstance(n, int) else i for i, n in zip(tail, shape, strict=False)]


def domain_of(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], list[Expr]]:
    """A tensor's points as a domain, outermost stride first, without sizes of 1, and the tensor's index at a point."""
    order = sorted((d for d, n in enumerate(shape) if n != 1), key=lambda d: -strides[d])
    idx = [E.const(0, E.INT64)] * len(shape)
    for position, d in enumerate(order):
        idx[d] = E.index(position, shape[d])
    return tuple(shape[d] for d in order) or (1,), idx


def _same_element(e: Expr, store: Store) -> bool:
    return e.args[0] is store.address and (e.args[1] if len(e.args) > 1 else None) is store.predicate


def check_devices(node: fx.Node) -> None:
    vals = [a.meta.get("val") for a in node.all_input_nodes if a.op != "get_attr"]
    out = node.meta.get("val")
    vals += list(out) if isinstance(out, (list, tuple)) else [out]
    devices = {v.device for v in vals if isinstance(v, torch.Tensor)}
    if len(devices) > 1:
        raise UnsupportedError(f"tensors on several devices: {', '.join(sorted(map(str, devices)))}")
