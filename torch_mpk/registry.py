"""Task declarations: ``@task`` on an eager reference function gives a ``Task`` and registers it with the C++ core."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch

from torch_mpk import _C
from torch_mpk.errors import TaskAttributeError, TaskError, UnknownTaskError

_ATTR_TYPES = (float, int, bool, str)
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_MAX_KNOWN_CALLS = 256  # of a task, which are not checked again
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

    def dims_of(self, rank: int) -> tuple[str, ...]:
        """The dimensions of a tensor of that rank: "..." stands for as many as there are."""
        if self.dims[:1] != ("...",):
            return self.dims
        return ("...",) * (rank - len(self.dims) + 1) + self.dims[1:]


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

    With ``out``, a tensor of the only result's shape and dtype, the result is written there instead of to new memory.
    """

    def __init__(
        self,
        reference: Callable[..., Any],
        signature: str,
        role: str,
        samples: Sequence[Mapping[str, Any]],
        header: str | None,
        tile: str | Mapping[str, int] | None,
        stream: str | None,
        cpu: str | None,
        pattern: bool,
    ):
        self.reference = reference
        self.name = self.__name__ = self.__qualname__ = reference.__name__
        if self.name.endswith("_"):
            raise TaskError(f"{self.name}: such a name is the in-place form's, drop the underscore at its end")
        self.__module__ = reference.__module__
        self.__doc__ = reference.__doc__
        self.signature = " ".join(signature.split())
        self.role = role
        self.inputs, self.outputs = _parse_signature(self.name, self.signature)
        self.attrs = _parse_parameters(self.name, reference, self.inputs)
        self.samples = samples
        self._known_calls: dict[Hashable, dict[str, Any]] = {}
        self.tile = _parse_tile(self, tile)
        self.stream = _check_stream(self, stream)
        self.pattern = pattern
        if pattern and (self.is_mutating or len(self.outputs) != 1 or not samples):
            raise TaskError(f"{self.name}: pattern=True takes one output, nothing updated in place, and samples")
        self.header = header or (f"torch_mpk/device/tasks/{self.name}.cuh" if role in ("row", "stream") else "")
        self.headers: dict[int, str] = {}
        self.cpu_body = ""
        if role == "tile":
            self.header, self.headers = _find_headers(self.name, reference, header)
            self.cpu_body = _find_file(self.name, reference, cpu, f"{self.name}.cpp")

    def __repr__(self) -> str:
        return f"mpk.{self.name}"

    @property
    def is_mutating(self) -> bool:
        return any(operand.is_write for operand in self.inputs)

    def __call__(self, *operands: torch.Tensor | None, out: torch.Tensor | None = None, **attrs: Any) -> Any:
        operands += (None,) * (len(self.inputs) - len(operands))
        call = _key(operands, attrs)
        bound = self._known_calls.get(call) if call else None
        if bound is None:
            result, bound = self._checked(operands, attrs)
            if call:
                if len(self._known_calls) == _MAX_KNOWN_CALLS:
                    self._known_calls.clear()
                self._known_calls[call] = bound
        else:
            result = self.reference(*operands, **bound)
        return result if out is None else out.copy_(result)

    def _checked(self, operands: Sequence[torch.Tensor | None], attrs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The reference's result, with operands and result checked against the signature, and all attributes."""
        attrs = self.bind_attrs(attrs)
        sizes = self.check(
            [None if t is None else t.shape for t in operands], [t if t is None else t.dtype for t in operands]
        )
        result = self.reference(*operands, **attrs)
        if self.outputs:
            results = self.results(result)
            bind_dims(self.name, self.signature, self.outputs, [t.shape for t in results], sizes)
        return result, attrs

    def results(self, result: Any) -> tuple[torch.Tensor, ...]:
        """What the reference returned, as a tuple. Raises TaskError where it is not as many tensors as the signature
        has outputs."""
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        if len(results) != len(self.outputs) or not all(isinstance(t, torch.Tensor) for t in results):
            got = ", ".join(type(value).__name__ for value in results) or "nothing"
            raise TaskError(
                f"{self.name}: the reference returned {got}, expected "
                f"{', '.join(map(str, self.outputs)) or 'nothing'} (signature: {self.signature})"
            )
        return results

    def tiles(self, tensors: Sequence[torch.Tensor | None]) -> Iterator[list[torch.Tensor | None]]:
        """The slices of inputs and outputs that each tile has, in the order of the tiles' numbers."""
        specs = [*self.inputs, *self.outputs]
        shapes = [None if t is None else t.shape for t in tensors]
        sizes = bind_dims(self.name, self.signature, specs, shapes, {})
        cuts = [self._cuts(dim, sizes[dim][0]) for dim in sizes if dim in self.tile]
        for tile in itertools.product(*cuts):
            begins = {dim: (begin, size) for dim, begin, size in tile}
            yield [None if t is None else _slice(t, spec, begins) for spec, t in zip(specs, tensors, strict=True)]

    def _cuts(self, dim: str, size: Any) -> list[tuple[str, Any, Any]]:
        if dim == "...":
            return [(dim, index, 1) for index in itertools.product(*map(range, size))]
        step = self.tile[dim]
        return [(dim, begin, min(step, size - begin)) for begin in range(0, size, step)]

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


def _key(operands: Sequence[torch.Tensor | None], attrs: Mapping[str, Any]) -> Hashable:
    """What decides whether a call fits its task's signature; None where sizes may be symbols."""
    if not all(t is None or type(t) in _PLAIN_TENSORS for t in operands):
        return None
    return tuple([t if t is None else (t.shape, t.dtype) for t in operands]), tuple(attrs.items())


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


def _parse_tile(task: Task, tile: str | Mapping[str, int] | None) -> dict[str, int]:
    """Each dimension that is cut, with the size of a tile in it."""
    if task.role != "tile":
        if tile is not None:
            raise TaskError(f"{task.name}: tile= is for tasks of role 'tile', this one's is {task.role!r}")
        return {}
    written = [operand for operand in (*task.inputs, *task.outputs) if operand.is_write]
    if not written:
        raise TaskError(f"{task.name}: it writes nothing; give it an output, or mark what it updates: 'cache[B, L]!'")
    if tile is None:
        cut = dict.fromkeys((dim for dim in written[-1].dims[:-1] if not dim.isdigit()), 1)
    elif isinstance(tile, str):
        cut = dict.fromkeys(re.findall(r"[^\s,]+", tile), 1)
    else:
        cut = dict(tile)
    if any("..." in operand.dims for operand in written):
        cut.setdefault("...", 1)
    for dim, size in cut.items():
        if not isinstance(size, int) or size < 1 or (dim == "..." and size != 1):
            expected = "1" if dim == "..." else "1 or more"
            raise TaskError(f"{task.name}: a tile has {size!r} of dimension {dim}, expected {expected}")
        for operand in written:
            if dim not in operand.dims:
                raise TaskError(
                    f"{task.name}: {operand} is written by every tile along {dim}, but tiles must write different "
                    f"memory: cut along dimensions that all it writes have (signature: {task.signature})"
                )
    names = [*{dim for operand in (*task.inputs, *task.outputs) for dim in operand.dims if not dim.isdigit()}]
    _check_distinct(task.name, [*names, *task.attrs])
    _check_distinct(task.name, [operand.name for operand in (*task.inputs, *task.outputs)])
    return cut


def _check_stream(task: Task, stream: str | None) -> str:
    if stream is None:
        return ""
    operand = next((operand for operand in task.inputs if operand.name == stream), None)
    dims = [dim for dim in operand.dims if dim != "..."] if operand else []
    if operand is None or operand.is_write or operand.optional or len(dims) not in (1, 2) or dims[-1] in task.tile:
        raise TaskError(
            f"{task.name}: stream={stream!r}, expected an operand that is read only and always there, a vector or a "
            f"matrix whose last dimension is not cut (signature: {task.signature})"
        )
    if task.role != "tile":
        raise TaskError(f"{task.name}: stream= is for tasks of role 'tile', this one's is {task.role!r}")
    return stream


def _check_distinct(name: str, names: Sequence[str]) -> None:
    """In device code k_cache is KCache, and an attribute or a dimension kKCache."""
    spelled = {"Leading": "...", "T": "T", "Tile": "a tile", "Tiles": "their number", "TileBytes": "a tile's size"}
    spelled |= dict.fromkeys(("StreamT", "StreamRows", "StreamSize", "StreamPitch"), "what is streamed")
    for each in names:
        camel = "".join(part[:1].upper() + part[1:] for part in each.split("_"))
        if each != "..." and camel in spelled:
            raise TaskError(
                f"{name}: {each!r} and {spelled[camel]!r} have one name in device code, {camel}: rename {each!r}"
            )
        spelled[camel] = each


def _find_headers(name: str, reference: Callable[..., Any], header: str | None) -> tuple[str, dict[int, str]]:
    """The device code beside the Python file, and in folders sm80, sm90, ... beside it that for one architecture."""
    general = _find_file(name, reference, header, f"{name}.cuh")
    path = Path(general or _beside(reference, f"{name}.cuh"))
    variants = path.parent.glob(f"sm[0-9][0-9]*/{path.name}")
    return general, {int(variant.parent.name[2:]): str(variant) for variant in variants}


def _find_file(name: str, reference: Callable[..., Any], given: str | None, default: str) -> str:
    path = _beside(reference, given or default)
    if path.is_file():
        return str(path)
    if given is not None:
        raise TaskError(f"{name}: {given!r} is not there: expected {path}")
    return ""


def _beside(reference: Callable[..., Any], file: str) -> Path:
    return Path(reference.__code__.co_filename).resolve().parent / file


def _slice(t: torch.Tensor, spec: Operand, begins: Mapping[str, tuple[Any, Any]]) -> torch.Tensor:
    dims = spec.dims_of(t.dim())
    for d, dim in enumerate(dims):
        if dim == "..." and dim in begins:
            t = t.narrow(d, begins[dim][0][d], 1)
        elif dim in begins:
            t = t.narrow(d, *begins[dim])
    return t


_tasks: dict[str, Task] = {}
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
) -> Callable[[Callable[..., Any]], Task]:
    """Declare a task: ``@task("x[R, H], weight[H]? -> y[R, H]", tile="R")`` on its eager reference.

    The reference takes the inputs in order and the attributes keyword-only, and returns a new tensor (a tuple where
    there are several outputs, None where there is none). Operands marked "?" may be None, those marked "!" are read and
    updated in place.

    Args:
        signature: operands with named dimensions; see ``Operand``.
        role: "tile", or one of those that torch_mpk's own tasks have: see docs/architecture.md.
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
        pattern: in models, the task takes the place of the operations that its reference is made of.

    Raises:
        TaskError: the signature does not fit the reference, tiles would write the same memory, or the name is taken.
    """

    def declare(reference: Callable[..., Any]) -> Task:
        declared = Task(reference, signature, role, samples, header, tile, stream, cpu, pattern)
        if declared.name in _tasks:
            raise TaskError(f"task {declared.name!r} is already declared in {_tasks[declared.name].__module__}")
        _C.register_task(
            declared.name,
            role,
            [(o.name, list(o.dims), o.optional, o.is_read, o.is_write) for o in declared.inputs + declared.outputs],
            [a.name for a in declared.attrs.values() if a.required],
            declared.header,
            declared.headers,
            list(declared.tile.items()),
            declared.stream,
            declared.cpu_body,
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
