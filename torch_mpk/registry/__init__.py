"""Task declarations: ``@task`` on an eager reference function gives a ``Task`` and registers it with the C++ core."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch_mpk import _C
from torch_mpk.errors import TaskError, UnknownTaskError
from torch_mpk.registry.attributes import Attr
from torch_mpk.registry.code_files import code_of
from torch_mpk.registry.declaration import Task, is_ours
from torch_mpk.registry.stream_traits import StreamTraits
from torch_mpk.signature import Operand, bind_dims

__all__ = [
    "Attr",
    "Operand",
    "Task",
    "bind_dims",
    "get",
    "hidden",
    "is_ours",
    "of_operator",
    "subscribe",
    "task",
    "tasks",
]

_tasks: dict[str, Task] = {}
_hidden: frozenset[str] = frozenset()
_subscribers: list[Callable[[Task], None]] = []


def task(
    signature: str,
    *,
    role: str = "tile",
    tile: str | Mapping[str, int] | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
    header: str | None = None,
    stream: str | None = None,
    cpu: str | None = None,
    pattern: bool = False,
    float64: bool = False,
    traits: StreamTraits | None = None,
    scales_rows: bool = False,
    behind_rows: bool = False,
    alone: str = "reference",
) -> Callable[[Callable[..., Any]], Task]:
    """Declare a task: ``@task("x[R, H], weight[H]? -> y[R, H]", tile="R")`` on its eager reference.

    The reference takes the inputs in order and the attributes keyword-only, and returns a new tensor (a tuple where
    there are several outputs, None where there is none). Operands marked "?" may be None, those marked "!" are read and
    updated in place.

    Args:
        signature: operands with named dimensions; see ``Operand``.
        role: "tile", or one of those that torch_mpk's own tasks have: see docs/internals/tasks.md.
        tile: the dimensions along which the work is cut into tiles that need nothing of each other: "R" or "B, H" for
            one index each, {"R": 1, "N": 64} for more. The reference of a slice must be the slice of the reference. By
            default all but the last dimension of the (last) output; "..." is always cut.
        samples: what tests and benchmarks run: see ``Task.sample``.
        header: device code, relative to the declaring file; by default ``<name>.cuh`` beside it. Without one the task
            runs on the CPU alone. A file of that name in a folder ``sm90`` beside it takes its place on that
            architecture. See ``torch_mpk/device/tile.cuh`` for what is in it.
        stream: an operand, usually the largest, whose slices a megakernel brings to shared memory ahead of time: a
            vector or a matrix whose last dimension is not cut. Slices of 8 to 64 KiB serve best.
        cpu: C++ code for the CPU, by default ``<name>.cpp``, in the same form; ``header`` itself where it keeps to what
            tile.cuh lists. Without one, or without a compiler, the reference runs there.
        pattern: in models, the task takes the place of the operations that its reference is made of. ``explain`` says
            where it nearly did, and what keeps a reference from being found.
        float64: the code computes in double where operands are float64. By default it is taken to compute in float, and
            is left out where that would be less than the operands promise: the reference runs there on the CPU, and
            the call is not taken on CUDA.
        traits: of role "stream", what the scheduler may do with it; by default as little as possible.
        scales_rows: of role "row", an element of the result is the input's times one factor a column and one a row,
            which follows from the sum of the row's squares: so what makes the rows may apply the one, and what
            multiplies them with a matrix the other.
        behind_rows: of role "tile", a warp can compute any tile, to the same bits as more threads, and its code has no
            shared memory: so tiles of what a norm or attention makes may be computed behind each of its rows.
        alone: what ``torch.ops.mpk.<task>`` runs where no compiled model is around it: the "reference", or the
            "kernel" of ``kernel_of``, for tasks that PyTorch has no kernel for. It is built when operands of such
            shapes first come; those that no code takes run the reference, with a warning.

    Declared again as it was, as by ``importlib.reload`` or a notebook's cell, it is the task there is.

    Raises:
        TaskError: the signature does not fit the reference, a sample does not fit the signature, tiles would write the
            same memory, or another task has the name.
    """

    def declare(reference: Callable[..., Any]) -> Task:
        declared = Task(
            *(reference, signature, role, samples, header, tile, stream, cpu, pattern, float64, traits),
            *(scales_rows, behind_rows, alone),
        )
        earlier = _tasks.get(declared.name)
        if earlier is not None and _is_same(earlier, declared):
            return earlier
        if earlier is not None:
            raise TaskError(
                f"task {declared.name!r} is already declared at {earlier.place}, otherwise than at {declared.place}: "
                "operators and compiled graphs keep what came first. Give this one another name, or restart the "
                "process (in a notebook the kernel) to have it instead"
            )
        _register(declared)
        _tasks[declared.name] = declared
        for subscriber in _subscribers:
            subscriber(declared)
        return declared

    return declare


def _register(declared: Task) -> None:
    try:
        _C.register_task(
            declared.name,
            str(declared.role),
            [(o.name, list(o.dims), o.optional, o.is_read, o.is_write) for o in declared.inputs + declared.outputs],
            [a.name for a in declared.attrs.values() if a.required],
            declared.header,
            declared.headers,
            list(declared.tile.items()),
            declared.stream,
            declared.cpu_body,
            declared.traits.of_operands(),
            declared.traits.joined_by,
            declared.traits.tiled_by,
            declared.traits.hands_over,
            declared.scales_rows,
            declared.behind_rows,
        )
    except ValueError as error:
        raise TaskError(f"{declared.name}: {error}") from None


def _is_same(earlier: Task, declared: Task) -> bool:
    """Whether one module has declared a task a second time and nothing that decides what it does has changed."""

    def described(task: Task) -> list[Any]:
        code, fields = code_of(task.reference), vars(task).copy()
        for name in ("reference", "_known_calls", "__doc__"):
            del fields[name]
        return [fields, code.co_code, code.co_consts, code.co_names]

    is_plain = all(  # what decorators and closures hold may differ
        inspect.unwrap(task.reference) is task.reference and task.reference.__closure__ is None
        for task in (earlier, declared)
    )
    return is_plain and described(earlier) == described(declared)


def tasks() -> tuple[Task, ...]:
    """Every declared task that is not hidden."""
    return tuple(task for name, task in _tasks.items() if name not in _hidden)


@contextlib.contextmanager
def hidden(names: Iterable[str]) -> Iterator[None]:
    """Inside, the tasks of these names are not among ``tasks()``, nor their patterns among those that are tried.

    A name cannot be declared twice in a process, so what a test has declared stays; this keeps it from the others.
    """
    global _hidden
    before = _hidden
    _hidden = before | set(names)
    try:
        yield
    finally:
        _hidden = before


def get(name: str) -> Task:
    """The task of that name. Raises UnknownTaskError listing the known ones."""
    if name not in _tasks:
        raise UnknownTaskError(name=name, known=", ".join(_tasks))
    return _tasks[name]


def of_operator(target: Any) -> Task | None:
    """The task whose operator ``torch.ops.mpk.<name>``, or its in-place form, a node of a graph calls."""
    if getattr(target, "namespace", None) != "mpk":
        return None
    return get(target._schema.name.removeprefix("mpk::").removesuffix("_"))


def subscribe(subscriber: Callable[[Task], None]) -> None:
    """Call ``subscriber`` with every task declared so far and with every later one."""
    for declared in tasks():
        subscriber(declared)
    _subscribers.append(subscriber)
