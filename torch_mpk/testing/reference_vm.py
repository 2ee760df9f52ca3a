"""Executes task graphs and schedules in Python, with the tasks' references and a vectorised interpreter for programs.

It is the oracle of lowering and scheduling: with a seed it runs a schedule in a random order that its events allow, as
the workers of a device might, after poisoning the workspace, so that a missing dependency shows as a wrong result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torch_mpk import _C, registry

_POISON = 0x5A  # workspace bytes of integers before anything is written; floating dtypes get NaN


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


class Memory:
    """The buffers of a graph as flat tensors: inputs and outputs alias the caller's, workspace is poisoned."""

    def __init__(self, graph: _C.TBGraph, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        given = {"input": inputs, "output": outputs}
        self.graph = graph
        self.flat: list[torch.Tensor | None] = []
        for buffer in graph.buffers:
            self.flat.append(None if buffer.kind == "workspace" else flat(given[buffer.kind][buffer.index]))

    def tensor(self, buffer: int, dtype: str) -> torch.Tensor:
        """The buffer's elements, flat."""
        found = self.flat[buffer]
        if found is None:
            found = self.flat[buffer] = poisoned(self.graph.buffers[buffer].bytes, dtype_of(dtype))
        if found.dtype != dtype_of(dtype):
            raise ValueError(
                f"buffer '{self.graph.buffers[buffer].name}' holds {found.dtype}, an operand reads {dtype}"
            )
        return found

    def view(self, t: _C.Tensor) -> torch.Tensor:
        base = self.tensor(t.buffer, t.dtype)
        return torch.as_strided(base, t.shape, t.strides, base.storage_offset() + t.offset)


def flat(t: torch.Tensor) -> torch.Tensor:
    """Every element from t's first to its last, in memory order."""
    extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=False)) if t.numel() else 0
    return torch.as_strided(t, (extent,), (1,), t.storage_offset())


def poisoned(nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.full((nbytes // dtype.itemsize,), torch.nan, dtype=dtype)
    raw = torch.full((nbytes,), 1 if dtype == torch.bool else _POISON, dtype=torch.uint8)
    return raw.view(dtype)


# ---- programs ----

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return _WIDE.get(dtype, dtype)


def _select(keep_first: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable:
    return lambda a, b: torch.where((a != a) | keep_first(a, b), a, b)


def _truncdiv(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    special = (b == 0) | ((b < 0) & (b == -1))  # PyTorch raises, and dies of the smallest number by -1
    return torch.where(special, a * b, torch.div(a, torch.where(special, 1, b), rounding_mode="trunc"))


_AS_IN_TORCH = (
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "erf", "floor", "ceil", "round", "trunc", "fmod"),
)
_OPS: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "neg": torch.neg,
    "abs": torch.abs,
    "maximum": _select(torch.gt),
    "minimum": _select(torch.lt),
    "div": torch.div,
    "pow": torch.pow,
    "square": lambda a: a * a,
    "reciprocal": torch.reciprocal,
    "sqrt": torch.sqrt,
    "rsqrt": lambda a: 1 / torch.sqrt(a),
    "sigmoid": torch.sigmoid,
    "silu": lambda a: a / (1 + torch.exp(-a)),
    "gelu": lambda a: a * 0.5 * (1 + torch.erf(a * 0.70710678118654752440)),
    "gelu_tanh": lambda a: a * 0.5 * (1 + torch.tanh(0.79788456080286535588 * (a + 0.044715 * a * a * a))),
    "relu": torch.relu,
    "softplus": lambda a: torch.where(a > 20, a, torch.log1p(torch.exp(a))),
    **{name: getattr(torch, name) for name in _AS_IN_TORCH},
    "floordiv": lambda a, b: torch.where(b == 0, 0, torch.floor_divide(a, torch.where(b == 0, 1, b))),
    "remainder": lambda a, b: torch.where(b == 0, 0, torch.remainder(a, torch.where(b == 0, 1, b))),
    "truncdiv": _truncdiv,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "bit_and": torch.bitwise_and,
    "bit_or": torch.bitwise_or,
    "bit_xor": torch.bitwise_xor,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_not": torch.logical_not,
    "isnan": torch.isnan,
}
_COMPARES = {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isnan"}


def evaluate(
    program: _C.Program, bases: Sequence[tuple[torch.Tensor, int]], scalars: Sequence[int], points: torch.Tensor
) -> torch.Tensor | None:
    """Run a program at the points, given as row-major numbers of its domain; ``bases`` are operands as (flat, offset).

    Returns the last instruction's value, None for a store. Raises IndexError where an access leaves its buffer.
    """
    evaluation = _Evaluation(program.domain, bases, scalars, points)
    for instr in program.instrs:
        evaluation.values.append(evaluation.run(instr))
    return evaluation.values[-1]


class _Evaluation:
    """The values of a program's instructions at some points."""

    def __init__(
        self,
        domain: Sequence[int],
        bases: Sequence[tuple[torch.Tensor, int]],
        scalars: Sequence[int],
        points: torch.Tensor,
    ) -> None:
        self.bases, self.scalars, self.points = bases, scalars, points
        self.coordinates: list[torch.Tensor] = []
        rest = points
        for n in reversed(domain):
            self.coordinates.insert(0, rest % n)
            rest = rest // n
        self.values: list[Any] = []  # a tensor each; None for a store

    def run(self, instr: _C.Instr) -> torch.Tensor | None:
        dtype = dtype_of(instr.dtype)
        if instr.op == "const":
            assert instr.imm is not None
            return torch.full(self.points.shape, instr.imm, dtype=dtype)
        if instr.op == "index":
            return self.coordinates[instr.operand]
        if instr.op == "size":
            return torch.full(self.points.shape, self.scalars[instr.operand], dtype=torch.int64)
        if instr.op == "load":
            return self.load(instr, dtype)
        args = [self.values[a] for a in instr.args]
        if instr.op == "store":
            self.store(instr, args[0])
            return None
        if instr.op == "cast":
            return args[0].to(dtype)
        if instr.op == "where":
            return torch.where(args[0], args[1].to(dtype), args[2].to(dtype))
        if instr.op == "bit_cast":
            return args[0].view(dtype)
        compute = torch.promote_types(args[0].dtype, args[-1].dtype) if instr.op in _COMPARES else dtype
        return _OPS[instr.op](*(a.to(_compute_dtype(compute)) for a in args)).to(dtype)

    def load(self, instr: _C.Instr, dtype: torch.dtype) -> torch.Tensor | None:
        base, at, keep = self.address(instr, instr.args)
        if base.dtype != dtype:
            raise ValueError(f"load of {dtype} from an operand of {base.dtype}")
        if not base.numel():
            return None
        return torch.where(keep, base[torch.where(keep, at, 0)], torch.zeros((), dtype=dtype))

    def store(self, instr: _C.Instr, value: torch.Tensor) -> None:
        base, at, keep = self.address(instr, instr.args[1:])
        if value.dtype != base.dtype:
            raise ValueError(f"store of {value.dtype} to an operand of {base.dtype}")
        base[at[keep]] = value[keep]

    def address(self, instr: _C.Instr, args: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The operand, the element that each point accesses, and whether it does; ``args``: offset and predicate."""
        base, offset = self.bases[instr.operand]
        at = torch.full_like(self.points, offset)
        for i, stride in zip(self.coordinates, instr.strides, strict=False):
            at = at + i * stride
        if args:
            at = at + self.values[args[0]]
        shape = self.points.shape
        keep = self.values[args[1]].expand(shape) if len(args) > 1 else torch.ones(shape, dtype=torch.bool)
        bad = keep & ((at < 0) | (at >= base.numel()))
        if bool(bad.any()):
            raise IndexError(f"{instr.op} reaches element {at[bad][0]} of {base.numel()} in operand {instr.operand}")
        return base, at, keep


_WIDE_SUM = {torch.float64: torch.float64}


def _reduce(op: str, value: torch.Tensor) -> torch.Tensor:
    if value.dtype.is_floating_point:
        value = value.to(_WIDE_SUM.get(value.dtype, torch.float32))
    elif op in ("sum", "prod"):
        value = value.to(torch.int64)
    return getattr(torch, op)(value, dim=-1)


class Machine:
    """Runs single nodes on a memory."""

    def __init__(self, graph: _C.TBGraph, memory: Memory, scalars: Sequence[int]) -> None:
        self.nodes, self.memory, self.scalars = graph.nodes, memory, scalars

    def num_points(self, node_id: int) -> int:
        """Independent parts of a node: points of a pointwise program, a task's tiles, 1 for anything else."""
        node = self.nodes[node_id]
        if node.program is None:
            return len(self._tiles(node))
        return max(1, torch.Size(node.program.domain).numel()) if node.role == "pointwise" else 1

    def run(self, node_id: int, points: torch.Tensor | None = None) -> None:
        """All of a node, or some of its parts."""
        node = self.nodes[node_id]
        if node.program is None:
            tiles = self._tiles(node)
            for number in range(len(tiles)) if points is None else points.tolist():
                self._run_tile(node, tiles[number])
            return
        bases = [(self.memory.tensor(o.tensor.buffer, o.tensor.dtype), o.tensor.offset) for o in node.operands]
        if points is None:
            points = torch.arange(torch.Size(node.program.domain).numel())
        value = evaluate(node.program, bases, self.scalars, points)
        if node.role == "reduce":
            assert value is not None  # its program stores nothing
            out = self.memory.view(node.operands[-1].tensor)
            out.copy_(_reduce(str(node.attrs["op"]), value.reshape(node.program.domain)).reshape(out.shape))

    def _tiles(self, node: _C.Node) -> list[list[torch.Tensor | None]]:
        """The inputs and outputs of each tile."""
        task = registry.get(node.task)
        views = {o.name: self.memory.view(o.tensor) for o in node.operands}
        return list(task.tiles([views.get(o.name) for o in (*task.inputs, *task.outputs)]))

    def _run_tile(self, node: _C.Node, operands: list[torch.Tensor | None]) -> None:
        task = registry.get(node.task)
        attrs = {name: node.attrs[name] for name in task.attrs if name in node.attrs}
        inputs, outputs = operands[: len(task.inputs)], operands[len(task.inputs) :]
        for output, result in zip(outputs, task.results(task.reference(*inputs, **attrs)), strict=True):
            assert output is not None
            output.copy_(result)


def run_graph(
    graph: _C.TBGraph,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    scalars: Sequence[int] = (),
) -> None:
    """Run the nodes in program order: ``inputs`` and ``outputs`` are the buffers' tensors, written in place."""
    machine = Machine(graph, Memory(graph, inputs, outputs), scalars)
    with torch.no_grad():
        for node in graph.nodes:
            machine.run(node.id)


# ---- schedules ----


def run(
    schedule: _C.Schedule,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    scalars: Sequence[int] = (),
    *,
    seed: int | None = None,
) -> None:
    """Run a schedule on CPU tensors; ``inputs`` and ``outputs`` are the buffers' tensors, written in place.

    Without a seed phases and jobs run in order. With one, workers advance through the phases at random speeds, as far
    as the phases' waits allow, each with some of the jobs. Workspace buffers live at the schedule's offsets of one
    poisoned allocation; what a job does not store is visible to that job only.
    """
    order = random.Random(seed) if seed is not None else None
    memory = ScheduledMemory(schedule, inputs, outputs)
    machine = Machine(schedule.graph, memory, scalars)
    with torch.no_grad():
        for phase, job in _interleaving(schedule, order):
            run_job(machine, memory, schedule.phases[phase].jobs[job], order)


class ScheduledMemory(Memory):
    """Workspace at the schedule's offsets; buffers that a job does not store are private to it."""

    def __init__(self, schedule: _C.Schedule, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        super().__init__(schedule.graph, inputs, outputs)
        self.offsets, self.polled = schedule.workspace_offsets, schedule.polled
        # 0xFF bytes are NaN in every floating dtype, -1 in integers; bool is poisoned as True. What is polled has a
        # workspace of its own.
        self.workspaces = [
            torch.full((size,), 0xFF, dtype=torch.uint8) for size in (schedule.workspace_bytes, schedule.polled_bytes)
        ]
        self.private: dict[int, torch.Tensor | None] = {}

    def tensor(self, buffer: int, dtype: str) -> torch.Tensor:
        info = self.graph.buffers[buffer]
        if info.kind != "workspace":
            return super().tensor(buffer, dtype)
        if buffer in self.private:
            private = self.private[buffer]
            if private is None:
                private = self.private[buffer] = poisoned(info.bytes, dtype_of(dtype))
            return private
        start = self.offsets[buffer]
        if start < 0:
            raise ValueError(f"buffer '{info.name}' is used outside the job that keeps it to itself")
        return self.workspaces[self.polled[buffer]][start : start + info.bytes].view(dtype_of(dtype))


def run_job(machine: Machine, memory: ScheduledMemory, job: _C.Job, order: random.Random | None) -> None:
    """All of a job; with an order, its nodes' items in any."""
    memory.private = dict.fromkeys(job.unstored)
    nodes = list(job.body)
    if order and not job.run:
        order.shuffle(nodes)  # several linears of one input: no order among them
    for node in [*job.prologue, *nodes, *job.epilogue]:
        if order is None or machine.num_points(node) == 1:
            machine.run(node)
            continue
        generator = torch.Generator().manual_seed(order.randrange(2**31))
        for points in torch.randperm(machine.num_points(node), generator=generator).chunk(order.randint(1, 4)):
            machine.run(node, points)
    memory.private = {}


def _polled(schedule: _C.Schedule) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """Per job, as (phase, number), the jobs that write what it polls."""
    jobs = {(p, j): job for p, phase in enumerate(schedule.phases) for j, job in enumerate(phase.jobs)}
    writers = {node: place for place, job in jobs.items() for node in [*job.body, *job.epilogue]}
    polled: dict[tuple[int, int], set[tuple[int, int]]] = {place: set() for place in jobs}
    for edge in schedule.graph.dependencies():
        if edge.hazard != "RAW" or not schedule.polled[edge.buffer] or edge.source not in writers:
            continue
        for place, job in jobs.items():
            if edge.target in [*job.prologue, *job.body, *job.epilogue] and place != writers[edge.source]:
                polled[place].add(writers[edge.source])
    return polled


def _interleaving(schedule: _C.Schedule, order: random.Random | None) -> Iterator[tuple[int, int]]:
    """(phase, job) in an order that events and polls allow."""
    if order is None:
        yield from ((p, j) for p, phase in enumerate(schedule.phases) for j in range(len(phase.jobs)))
        return
    workers = Workers(schedule, order, order.randint(2, 4))
    while not workers.are_done:
        item = workers.step(order.choice(workers.ready()))
        if item is not None:
            yield item.phase, item.job


class WorkItem(NamedTuple):
    """What a worker does at once: a job, or a step of one."""

    phase: int
    job: int
    step: Any = None


class Workers:
    """The workers of a launch: each passes the phases in order, owns some of the jobs, and awaits what they read of
    polled buffers."""

    def __init__(self, schedule: _C.Schedule, order: random.Random, count: int) -> None:
        self.phases, self.order = schedule.phases, order
        self.position = [0] * count  # the phase each worker is in
        self.to_do: list[list[list[WorkItem]]] = [[[] for _ in self.phases] for _ in range(count)]  # last ones first
        self.left: dict[tuple[int, int], int] = {}  # items of a job that are still to be done
        for p, phase in enumerate(self.phases):
            for worker, item in self.dealt(p, phase):
                self.to_do[worker][p].insert(0, item)
                self.left[p, item.job] = self.left.get((p, item.job), 0) + 1
        self._polled = _polled(schedule)

    def dealt(self, number: int, phase: _C.Phase) -> Iterator[tuple[int, WorkItem]]:
        """The items of a phase, each with its worker, which does its own in this order."""
        for job in self.order.sample(range(len(phase.jobs)), len(phase.jobs)):
            yield self.order.randrange(len(self.position)), WorkItem(number, job)

    @property
    def are_done(self) -> bool:
        return min(self.position) == len(self.phases)

    def next_item(self, worker: int) -> WorkItem | None:
        """What the worker does next in its phase; None where nothing is left of it."""
        p = self.position[worker]
        return self.to_do[worker][p][-1] if p < len(self.phases) and self.to_do[worker][p] else None

    def may_step(self, worker: int) -> bool:
        p = self.position[worker]
        if p == len(self.phases) or any(min(self.position) <= w for w in self.phases[p].waits):
            return False
        item = self.next_item(worker)
        return item is None or not any(self.left[made] for made in self._polled[p, item.job])

    def ready(self) -> list[int]:
        """Workers that may do something now."""
        return [worker for worker in range(len(self.position)) if self.may_step(worker)]

    def step(self, worker: int) -> WorkItem | None:
        """The worker's next item, which counts as done; None where it went on to the next phase."""
        item = self.next_item(worker)
        if item is None:
            self.position[worker] += 1
        else:
            self.to_do[worker][item.phase].pop()
            self.left[item.phase, item.job] -= 1
        return item
