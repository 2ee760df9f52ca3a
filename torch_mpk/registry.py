"""Task declarations: ``@task`` on an eager reference function gives a ``Task`` and registers it with the C++ core."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch

from torch_mpk import _C
from torch_mpk.errors import TaskAttributeError, TaskError, UnknownTaskError

_ROLES_WITH_DEVICE_CODE = ("row", "stream")
_ATTR_TYPES = (float, int, bool, str)
_OPERAND = re.compile(
    r"(?P<name>[A-Za-z_]\w*)\s*\[(?P<dims>[^\]]*)\](?P<marks>[?!]*)(\s*:\s*(?P<dtype>\w+)(\s*<\s*(?P<bound>\w+))?)?"
)


@dataclass(frozen=True)
class Operand:
    """One operand of a task's signature, as in ``k_cache[B, G, L, D]!`` or ``ids[...]: int64 < V``."""

    name: str
    dims: tuple[str, ...]  # named ("B"), literal ("1"), or "...": any number of leading dimensions
    optional: bool  # "?": may be None
    is_read: bool
    is_write: bool  # an output, or "!": updated in place
    dtype: torch.dtype | None  # None: any
    bound: str | None  # integers below this dimension's size are meaningful

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(self.dims)}]{'?' if self.optional else ''}"


@dataclass(frozen=True)
class Attr:
    """A compile-time constant of a task: a keyword-only parameter of its reference."""

    name: str
    type: type
    default: Any = inspect.Parameter.empty

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty


class Task:
    """A node kind of the task graph. Calling it checks the operands against the signature and runs the reference.

    With ``out``, a tensor of the result's shape and dtype, the result is written there instead of to new memory.
    """

    def __init__(
        self,
        reference: Callable[..., Any],
        signature: str,
        role: str,
        samples: Sequence[Mapping[str, Any]],
        header: str | None,
    ):
        self.reference = reference
        self.name = self.__name__ = self.__qualname__ = reference.__name__
        self.__module__ = reference.__module__
        self.__doc__ = reference.__doc__
        self.signature = " ".join(signature.split())
        self.role = role
        self.inputs, self.outputs = _parse_signature(self.name, self.signature)
        self.attrs = _parse_parameters(self.name, reference, self.inputs)
        self.samples = samples
        if header is None and role in _ROLES_WITH_DEVICE_CODE:
            header = f"torch_mpk/device/tasks/{self.name}.cuh"
        self.header = header or ""

    def __repr__(self) -> str:
        return f"mpk.{self.name}"

    @property
    def is_mutating(self) -> bool:
        return any(operand.is_write for operand in self.inputs)

    def __call__(self, *operands: torch.Tensor | None, out: torch.Tensor | None = None, **attrs: Any) -> Any:
        operands += (None,) * (len(self.inputs) - len(operands))
        attrs = self.bind_attrs(attrs)
        sizes = self.check(
            [None if t is None else t.shape for t in operands], [t if t is None else t.dtype for t in operands]
        )
        result = self.reference(*operands, **attrs)
        if self.outputs:
            bind_dims(self.name, self.signature, self.outputs, [result.shape], sizes)
        return result if out is None else out.copy_(result)

    def bind_attrs(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """All attributes, in declaration order, with defaults. Raises TaskAttributeError where names do not fit."""
        unknown = attrs.keys() - self.attrs.keys()
        missing = [a.name for a in self.attrs.values() if a.required and a.name not in attrs]
        if unknown or missing:
            problem = f"unknown attribute {sorted(unknown)}" if unknown else f"attribute {missing} is missing"
            raise TaskAttributeError(f"{self.name}: {problem}; it takes {list(self.attrs)}")
        return {a.name: attrs.get(a.name, a.default) for a in self.attrs.values()}

    def check(
        self, shapes: Sequence[Sequence[int] | None], dtypes: Sequence[torch.dtype | None]
    ) -> dict[str, tuple[Any, str]]:
        """Check the operands' shapes and dtypes; returns each named dimension's (size, operand that bound it).

        Raises TaskError naming task, operand, expected, actual and the signature.
        """
        if len(shapes) != len(self.inputs):
            expected = f"expected {len(self.inputs)} operands, got {len(shapes)}"
            raise TaskError(f"{self.name}: {expected} (signature: {self.signature})")
        for operand, dtype in zip(self.inputs, dtypes, strict=True):
            if operand.dtype is not None and dtype is not None and dtype != operand.dtype:
                raise TaskError(
                    f"{self.name}: {operand.name} is {dtype}, expected {operand.dtype} (signature: {self.signature})"
                )
        return bind_dims(self.name, self.signature, self.inputs, shapes, {})

    def sample(
        self, sample: Mapping[str, Any], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> tuple[list[torch.Tensor | None], dict[str, Any]]:
        """Fresh random operands and the attributes for one of ``samples``.

        A sample maps dimensions to sizes, attributes to values, and operands to None (absent) or to a dtype of their
        own.
        """
        operands = [
            None if sample.get(o.name, o) is None else self._sample_operand(o, sample, dtype, device)
            for o in self.inputs
        ]
        return operands, self.bind_attrs({name: sample[name] for name in self.attrs if name in sample})

    def _sample_operand(
        self, operand: Operand, sample: Mapping[str, Any], dtype: torch.dtype, device: Any
    ) -> torch.Tensor:
        shape: list[int] = []
        for dim in operand.dims:
            shape += sample[dim] if dim == "..." else [int(dim) if dim.isdigit() else sample[dim]]
        if operand.dtype is not None and not operand.dtype.is_floating_point:
            return torch.randint(
                sample[operand.bound] if operand.bound else 8, shape, dtype=operand.dtype, device=device
            )
        dtype = sample.get(operand.name, operand.dtype or dtype)
        return (
            torch.randn(shape, device=device).to(dtype)
            if dtype.is_floating_point
            else torch.rand(shape, device=device) < 0.5
        )


def bind_dims(
    name: str,
    signature: str,
    operands: Sequence[Operand],
    shapes: Sequence[Sequence[int] | None],
    sizes: dict[str, tuple[Any, str]],
) -> dict[str, tuple[Any, str]]:
    """Bind the operands' named dimensions to sizes, on top of ``sizes``; raises TaskError where one disagrees."""
    for operand, shape in zip(operands, shapes, strict=True):
        if shape is None:
            if not operand.optional:
                raise TaskError(f"{name}: {operand.name} is required (signature: {signature})")
            continue
        dims, tail = operand.dims, list(shape)
        if dims[:1] == ("...",):
            dims, num_leading = dims[1:], len(tail) - len(dims) + 1
            leading, tail = tuple(tail[: max(num_leading, 0)]), tail[max(num_leading, 0) :]
            _bind(name, signature, operand, "...", leading, sizes)
        if len(dims) != len(tail):
            raise TaskError(
                f"{name}: {operand.name} has shape {tuple(shape)}, expected {len(operand.dims)} dimensions: {operand} "
                f"(signature: {signature})"
            )
        for dim, size in zip(dims, tail, strict=True):
            _bind(name, signature, operand, dim, size, sizes)
    return sizes


def _bind(name: str, signature: str, operand: Operand, dim: str, size: Any, sizes: dict[str, tuple[Any, str]]) -> None:
    expected, by = (int(dim), "the signature") if dim.isdigit() else sizes.setdefault(dim, (size, operand.name))
    if size != expected:
        raise TaskError(
            f"{name}: {operand.name} has {dim}={size}, but {dim}={expected} was bound by {by} (signature: {signature})"
        )


def _parse_signature(name: str, signature: str) -> tuple[list[Operand], list[Operand]]:
    sides = signature.split("->")
    if len(sides) != 2:
        raise TaskError(f"{name}: the signature needs one '->' between inputs and outputs: {signature!r}")
    inputs, outputs = (_parse_operands(name, side, is_output) for is_output, side in enumerate(sides))
    return inputs, outputs


def _parse_operands(name: str, text: str, is_output: int) -> list[Operand]:
    operands, end = [], 0
    for match in _OPERAND.finditer(text):
        if text[end : match.start()].strip() not in (",", "" if end == 0 else ","):
            break
        end = match.end()
        marks, dtype = match["marks"], match["dtype"]
        operands.append(
            Operand(
                name=match["name"],
                dims=tuple(d.strip() for d in match["dims"].split(",") if d.strip()),
                optional="?" in marks,
                is_read=not is_output,
                is_write=bool(is_output) or "!" in marks,
                dtype=getattr(torch, dtype) if dtype else None,
                bound=match["bound"],
            )
        )
    if text[end:].strip():
        raise TaskError(
            f"{name}: cannot read {text[end:].strip()!r} in the signature; write operands as 'weight[N, K]'"
        )
    if any("..." in operand.dims[1:] for operand in operands):
        raise TaskError(f"{name}: '...' can only stand first: {text.strip()!r}")
    return operands


def _parse_parameters(name: str, reference: Callable[..., Any], inputs: list[Operand]) -> dict[str, Attr]:
    parameters = inspect.signature(reference).parameters.values()
    hints = get_type_hints(reference)
    positional = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    if positional != [operand.name for operand in inputs]:
        raise TaskError(
            f"{name}: the reference's positional parameters {positional} must be the signature's operands "
            f"{[operand.name for operand in inputs]}; attributes are keyword-only"
        )
    attrs = {}
    for p in parameters:
        if p.kind is inspect.Parameter.KEYWORD_ONLY:
            if hints.get(p.name) not in _ATTR_TYPES:
                raise TaskError(f"{name}: attribute {p.name} needs one of the types float, int, bool, str")
            attrs[p.name] = Attr(p.name, hints[p.name], p.default)
    return attrs


_tasks: dict[str, Task] = {}
_subscribers: list[Callable[[Task], None]] = []


def task(
    signature: str, *, role: str, samples: Sequence[Mapping[str, Any]] = (), header: str | None = None
) -> Callable[[Callable[..., Any]], Task]:
    """Declare a task: ``@task("x[R, K], weight[N, K], bias[N]? -> y[R, N]", role="stream")`` on its eager reference.

    The reference takes the inputs in order and the attributes keyword-only, and returns a new tensor (None where there
    is no output). Operands marked "?" may be None, those marked "!" are read and updated in place. Row and stream tasks
    have device code in ``header``, by default ``torch_mpk/device/tasks/<name>.cuh``. ``samples`` are what tests and
    benchmarks run: see ``Task.sample``. Raises TaskError for a signature that does not fit the reference or a name
    already taken.
    """

    def declare(reference: Callable[..., Any]) -> Task:
        declared = Task(reference, signature, role, samples, header)
        if declared.name in _tasks:
            raise TaskError(f"task {declared.name!r} is already declared in {_tasks[declared.name].__module__}")
        _C.register_task(
            declared.name,
            role,
            [(o.name, list(o.dims), o.optional, o.is_read, o.is_write) for o in declared.inputs + declared.outputs],
            [a.name for a in declared.attrs.values() if a.required],
            declared.header,
        )
        _tasks[declared.name] = declared
        for subscriber in _subscribers:
            subscriber(declared)
        return declared

    return declare


def tasks() -> tuple[Task, ...]:
    """Every declared task."""
    return tuple(_tasks.values())


def get(name: str) -> Task:
    """The task of that name. Raises UnknownTaskError listing the known ones."""
    if name not in _tasks:
        raise UnknownTaskError(name=name, known=", ".join(_tasks))
    return _tasks[name]


def subscribe(subscriber: Callable[[Task], None]) -> None:
    """Call ``subscriber`` with every task declared so far and with every later one."""
    for declared in tasks():
        subscriber(declared)
    _subscribers.append(subscriber)
