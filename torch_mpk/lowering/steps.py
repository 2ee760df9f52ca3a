"""Nodes of the task graph before they are built: programs still as expressions, so that equal domains can be merged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch_mpk import _C
from torch_mpk.errors import UnsupportedError
from torch_mpk.lowering.expr import INT64, Expr, const, dtype_name, from_terms, terms
from torch_mpk.lowering.values import Buffer, View, is_static

POINTWISE, REDUCE = "pointwise", "reduce"  # the task names of nodes that are nothing but a program
MAX_MERGED_OPERANDS = 32  # of a step that others were merged into: a kernel's ring has room for what its jobs leave


@dataclass(eq=False)
class Store:
    buffer: Buffer
    address: Expr
    predicate: Expr | None
    value: Expr


@dataclass(eq=False)
class Step:
    task: str
    labels: list[str]  # of the nodes of the captured graph that it computes
    reads: set[Buffer]
    writes: set[Buffer]


@dataclass(eq=False)
class TaskStep(Step):
    operands: list[tuple[str, View, bool, bool]]
    attrs: dict[str, int | float | str]


@dataclass(eq=False)
class PointwiseStep(Step):
    domain: tuple[int, ...]
    stores: list[Store]


@dataclass(eq=False)
class ReduceStep(Step):
    domain: tuple[int, ...]
    value: Expr
    op: str
    out: View


def loads(roots: list[Expr]) -> Iterator[Expr]:
    """Every load below the expressions, once."""
    seen: set[Expr] = set()
    stack = list(roots)
    while stack:
        e = stack.pop()
        if e in seen:
            continue
        seen.add(e)
        stack.extend(e.args)
        if e.op == "load":
            yield e


def store_roots(stores: list[Store]) -> list[Expr]:
    return [e for s in stores for e in (s.address, s.predicate, s.value) if e is not None]


def pointwise_step(domain: tuple[int, ...], stores: list[Store], labels: list[str]) -> PointwiseStep:
    reads = {e.attr.buffer for e in loads(store_roots(stores))}
    return PointwiseStep(POINTWISE, labels, reads, {s.buffer for s in stores}, domain, stores)


def _conflict(a: Step, b: Step) -> bool:
    return not (a.writes.isdisjoint(b.reads) and a.writes.isdisjoint(b.writes) and a.reads.isdisjoint(b.writes))


def merge(steps: list[Step]) -> list[Step]:
    """Join each pointwise step with an earlier one of its domain that nothing forces it to follow.

    Steps that read the results of different tasks stay apart: each may be computed as its task's results are made.
    """
    merged: list[Step] = []
    made: set[Buffer] = set()  # by tasks
    for step in steps:
        found = _mergeable(merged, step, made) if isinstance(step, PointwiseStep) else None
        if isinstance(step, TaskStep):
            made |= step.writes
        if found is None:
            merged.append(step)
        else:
            position, joined = found
            merged[position] = joined
    return merged


def _mergeable(earlier: list[Step], step: PointwiseStep, made: set[Buffer]) -> tuple[int, PointwiseStep] | None:
    """The last step that can take this one in, as its position and what both become: none from there on conflicts."""
    own = step.reads & made
    for position in range(len(earlier) - 1, -1, -1):
        other = earlier[position]
        if _conflict(other, step):
            return None
        num_operands = len(other.reads | step.reads) + len(other.writes | step.writes)
        if not isinstance(other, PointwiseStep) or other.domain != step.domain or num_operands > MAX_MERGED_OPERANDS:
            continue
        others = other.reads & made
        if not (own and others and own.isdisjoint(others)):
            return position, pointwise_step(step.domain, other.stores + step.stores, other.labels + step.labels)
    return None


class ProgramBuilder:
    """Emits expressions into a ``_C.Program`` and collects the buffers it touches as operands."""

    def __init__(self, domain: tuple[int, ...], outputs: list[Buffer], roots: list[Expr]) -> None:
        self.domain = domain
        self.program = _C.Program(list(domain))
        read = {e.attr.buffer for e in loads(roots)}
        inputs = sorted(read - set(outputs), key=lambda b: (b.kind, b.index, b.name))
        self.in_place = read & set(outputs)
        self.operands = inputs + outputs
        self.position = {buffer: i for i, buffer in enumerate(self.operands)}
        self.num_inputs = len(inputs)
        self.emitted: dict[Expr, int] = {}

    def operand_tuples(self, ids: dict[Buffer, int]) -> list[tuple]:
        out = []
        for i, buffer in enumerate(self.operands):
            is_output = i >= self.num_inputs
            name = f"out{i - self.num_inputs}" if is_output else f"in{i}"
            out.append((name, whole(buffer, ids), not is_output or buffer in self.in_place, is_output))
        return out

    def value(self, e: Expr) -> int:
        """The instruction that computes e, emitted once. Iterative: expressions may be deep."""
        stack = [e]
        while stack:
            top = stack[-1]
            if top in self.emitted:
                stack.pop()
                continue
            missing = [a for a in self._needs(top) if a not in self.emitted]
            if missing:
                stack.extend(missing)
                continue
            self.emitted[top] = self._emit(top)
            stack.pop()
        return self.emitted[e]

    def store(self, store: Store) -> None:
        value = self.value(store.value)
        strides, offset = self._split_address(store.address)
        args = [value, *self._access(offset, store.predicate)]
        self.program.emit("store", dtype_name(store.value.dtype), args, self.position[store.buffer], strides)

    def _access(self, offset: Expr, predicate: Expr | None) -> list[int]:
        if predicate is not None:
            return [self.value(offset), self.value(predicate)]
        return [] if offset.op == "const" and offset.attr == 0 else [self.value(offset)]

    def _split_address(self, address: Expr) -> tuple[list[int], Expr]:
        """The strides of the domain's dimensions and the rest."""
        coefficients, constant = terms(address)
        strides = [0] * len(self.domain)
        rest = {}
        for atom, c in coefficients.items():
            if atom.op == "index":
                strides[atom.attr[0]] = c
            else:
                rest[atom] = c
        return strides, from_terms(rest, constant)

    def _needs(self, e: Expr) -> tuple[Expr, ...]:
        if e.op != "load":
            return e.args
        _, offset = self._split_address(e.args[0])
        if len(e.args) == 1 and offset.op == "const" and offset.attr == 0:
            return ()
        return (offset, *e.args[1:])

    def _emit(self, e: Expr) -> int:
        emit, dtype = self.program.emit, dtype_name(e.dtype)
        args = [self.emitted[a] for a in self._needs(e)]
        if e.op == "const":
            return emit("const", dtype, [], -1, [], e.attr)
        if e.op == "index":
            return emit("index", dtype, [], e.attr[0])
        if e.op == "size":
            return emit("size", dtype, [], e.attr[0])
        if e.op == "load":
            strides, _ = self._split_address(e.args[0])
            return emit("load", dtype, args, self.position[e.attr.buffer], strides)
        if e.op == "affine":
            coefficients, constant = e.attr
            total: Any = None
            for arg, c in zip(args, coefficients, strict=False):
                term = arg if c == 1 else emit("mul", dtype, [arg, self._constant(c)])
                total = term if total is None else emit("add", dtype, [total, term])
            return total if constant == 0 else emit("add", dtype, [total, self._constant(constant)])
        return emit(e.op, dtype, args)

    def _constant(self, value: int) -> int:
        e = const(value, INT64)
        if e not in self.emitted:
            self.emitted[e] = self._emit(e)
        return self.emitted[e]


def whole(buffer: Buffer, ids: dict[Buffer, int]) -> _C.Tensor:
    """All of a buffer. One whose size is known only at run time is described by its first element."""
    shape, strides = buffer.shape, buffer.strides
    if not (is_static(shape) and is_static(strides)):
        shape, strides = (1,), (1,)
    return _C.Tensor(ids[buffer], dtype_name(buffer.dtype), shape, strides, 0)


def tensor(view: View, ids: dict[Buffer, int]) -> _C.Tensor:
    shape, strides, offset = view.shape, view.strides, view.offset
    if not (is_static(shape) and is_static(strides) and isinstance(offset, int)):
        raise UnsupportedError("an operand whose size or place is known only at run time")
    return _C.Tensor(ids[view.buffer], dtype_name(view.dtype), shape, strides, offset)


def build(steps: list[Step], buffers: list[Buffer]) -> _C.TBGraph:
    graph = _C.TBGraph()
    ids = {}
    for buffer in buffers:
        extent = buffer.extent
        nbytes = 0 if extent is None else extent * buffer.dtype.itemsize
        ids[buffer] = graph.add_buffer(buffer.name, buffer.kind, buffer.index, nbytes)
    for step in steps:
        label = ", ".join(dict.fromkeys(filter(None, step.labels)))
        if isinstance(step, TaskStep):
            operands = [(name, tensor(view, ids), is_read, is_write) for name, view, is_read, is_write in step.operands]
            graph.add_node(step.task, operands, step.attrs, None, label)
        elif isinstance(step, PointwiseStep):
            outputs = list(dict.fromkeys(s.buffer for s in step.stores))
            builder = ProgramBuilder(step.domain, outputs, store_roots(step.stores))
            for store in step.stores:
                builder.store(store)
            graph.add_node(step.task, builder.operand_tuples(ids), {}, builder.program, label)
        elif isinstance(step, ReduceStep):
            builder = ProgramBuilder(step.domain, [step.out.buffer], [step.value])
            builder.value(step.value)
            operands = builder.operand_tuples(ids)
            operands[-1] = ("out0", tensor(step.out, ids), False, True)
            graph.add_node(step.task, operands, {"op": step.op}, builder.program, label)
    return graph
