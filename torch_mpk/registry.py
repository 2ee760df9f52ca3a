"""Task declarations: ``@task`` on an eager reference function gives a ``Task`` and registers it with the C++ core."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import itertools
import math
import re
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch

from torch_mpk import _C
from torch_mpk.errors import TaskAttributeError, TaskError, UnknownTaskError
from torch_mpk.streaming import Streaming

_ATTR_TYPES = (float, int, bool, str)
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_MAX_KNOWN_CALLS = 256  # of a task, which are not checked again
_OPERAND = re.compile(
    r"(?P<name>[A-Za-z_]\w*)\s*\[(?P<dims>[^\[\]]*)\](?P<marks>[?!]*)(\s*:\s*(?P<dtype>\w+)(\s*<\s*(?P<bound>\w+))?)?"
)
_COMPUTE = re.compile(r"\bcompute\s*\(")


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
        float64: bool,
        streaming: Streaming | None,
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
        _check_samples(self)
        self._known_calls: dict[Hashable, dict[str, Any]] = {}
        self.tile = _parse_tile(self, tile)
        self.stream = _check_stream(self, stream)
        self.streaming = _check_streaming(self, streaming)
        self.pattern = pattern
        self.float64 = float64
        if pattern and (self.is_mutating or not self.outputs or not samples):
            raise TaskError(f"{self.name}: pattern=True takes outputs, nothing updated in place, and samples")
        self.header = header or (f"torch_mpk/device/tasks/{self.name}.cuh" if role in ("row", "stream") else "")
        self.headers: dict[int, str] = {}
        self.cpu_body = ""
        if role == "tile":
            self.header, self.headers = _find_headers(self.name, reference, header)
            self.cpu_body = _find_file(self.name, reference, cpu, f"{self.name}.cpp")

    def __repr__(self) -> str:
        return f"mpk.{self.name}"

    @property
    def is_ours(self) -> bool:
        """Whether it comes with torch_mpk: what is wrong with a user's is for them to mend."""
        return is_ours(self)

    @property
    def file(self) -> str:
        """Where it is declared."""
        return _code(self.reference).co_filename

    @property
    def place(self) -> str:
        """Where it is declared, as ``file.py:line``."""
        return f"{self.file}:{_code(self.reference).co_firstlineno}"

    def header_for(self, arch: int) -> str:
        """The device code for an architecture; empty where there is none."""
        return self.headers.get(arch, self.header)

    def code(self, device: str, arch: int = 0) -> str:
        """Where what runs it on a "cpu" or "cuda" device stands, as ``file:line``: ``compute`` in a file of its own, or
        the reference, for which ``place`` stands."""
        file = self.cpu_body if device == "cpu" else self.header_for(arch)
        if not Path(file).is_file():  # there is none, or it is one of ours, which has a place among the headers
            return file or self.place
        lines = Path(file).read_text(errors="replace").splitlines()
        number = next((n for n, line in enumerate(lines, 1) if _COMPUTE.search(line)), 1)
        return f"{file}:{number}"

    def runs_code(self, dtypes: Iterable[torch.dtype]) -> bool:
        """Whether its code is as right as these dtypes of its operands promise; else its reference alone is."""
        return self.role != "tile" or self.float64 or torch.float64 not in dtypes

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
        for operand, tensor in zip(self.inputs, operands):
            if tensor is not None and tensor.layout != torch.strided:
                raise TaskError(
                    f"{self.name}: {operand.name} has layout {tensor.layout}, expected a dense tensor: pass its "
                    f"to_dense() (signature: {self.signature})"
                )
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
        if not dtype.is_floating_point:
            return torch.rand(shape, device=device) < 0.5
        drawn = torch.float64 if dtype == torch.float64 else torch.float32  # so that float64 has all of its digits
        return torch.randn(shape, dtype=drawn, device=device).to(dtype)


def _key(operands: Sequence[torch.Tensor | None], attrs: Mapping[str, Any]) -> Hashable:
    """What decides whether a call fits its task's signature; None where sizes may be symbols."""
    if not all(t is None or type(t) in _PLAIN_TENSORS for t in operands):
        return None
    return tuple([t if t is None else (t.shape, t.dtype, t.layout) for t in operands]), tuple(attrs.items())


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
            least = "at least " if dims != operand.dims else ""
            raise TaskError(
                f"{name}: {operand.name} has shape {tuple(shape)}, expected {least}{len(dims)} dimensions: {operand} "
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
        marks = match["marks"]
        dims = tuple(d.strip() for d in match["dims"].split(",") if d.strip())
        for dim in dims:
            if dim != "..." and not dim.isidentifier() and not dim.isdigit():
                raise TaskError(
                    f"{name}: {match['name']} has a dimension {dim!r}, expected a name, a number or '...': "
                    f"{match.group().strip()!r}"
                )
        operands.append(
            Operand(
                name=match["name"],
                dims=dims,
                optional="?" in marks,
                is_read=not is_output,
                is_write=bool(is_output) or "!" in marks,
                dtype=_parse_dtype(name, match["name"], match["dtype"]),
                bound=match["bound"],
            )
        )
    if text[end:].strip():
        rest = text[end:].strip()
        hint = "" if rest.count("[") == rest.count("]") else "; a bracket is not closed"
        raise TaskError(f"{name}: cannot read {rest!r} in the signature{hint}; write operands as 'weight[N, K]'")
    if any("..." in operand.dims[1:] for operand in operands):
        raise TaskError(f"{name}: '...' can only stand first: {text.strip()!r}")
    return operands


def _parse_dtype(name: str, operand: str, text: str | None) -> torch.dtype | None:
    if text is None:
        return None
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        known = [key for key, value in vars(torch).items() if isinstance(value, torch.dtype)]
        hint = "".join(f", did you mean {close!r}?" for close in difflib.get_close_matches(text, known, n=1))
        raise TaskError(f"{name}: {operand} is of dtype {text!r}, expected one of torch's, as in 'ids[R]: int64'{hint}")
    return dtype


def _check_samples(task: Task) -> None:
    """Raises TaskError unless each sample says how large the dimensions of its operands are, and nothing unknown."""
    operands = {operand.name: operand for operand in task.inputs}
    named = (dim for o in (*task.inputs, *task.outputs) for dim in (*o.dims, *filter(None, [o.bound])))
    dims = {dim for dim in named if not dim.isdigit()}
    known = [*sorted(dims), *operands, *task.attrs]
    for number, sample in enumerate(task.samples):
        unknown = [key for key in sample if key not in known]
        given = [operand for operand in task.inputs if sample.get(operand.name, operand) is not None]
        needed = {dim: o.name for o in given for dim in (*o.dims, *filter(None, [o.bound])) if not dim.isdigit()}
        missing = [f"{dim} of {operand}" for dim, operand in needed.items() if dim not in sample]
        missing += [attr.name for attr in task.attrs.values() if attr.required and attr.name not in sample]
        if unknown or missing:
            problem = f"has an unknown key {unknown[0]!r}" if unknown else f"does not say {missing[0]}"
            raise TaskError(
                f"{task.name}: samples[{number}] {problem}, expected sizes, attributes and operands' dtypes for "
                f"{', '.join(known)}: {dict(sample)} (signature: {task.signature})"
            )


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
            if isinstance(p.default, float) and not math.isfinite(p.default):  # which an operator's schema cannot say
                raise TaskError(
                    f"{name}: attribute {p.name} is {p.default} by default, expected a finite number or none"
                )
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


def _check_streaming(task: Task, streaming: Streaming | None) -> Streaming:
    """By default the loader may read every input, and waits for what makes it."""
    if streaming is None:
        return Streaming(loaded=tuple(operand.name for operand in task.inputs) if task.role == "stream" else ())
    if task.role != "stream":
        raise TaskError(f"{task.name}: streaming= is for tasks of role 'stream', this one's is {task.role!r}")
    unknown = {*streaming.operands()} - {operand.name for operand in task.inputs}
    if unknown:
        raise TaskError(
            f"{task.name}: streaming= names {sorted(unknown)}, expected inputs (signature: {task.signature})"
        )
    if streaming.cursor and not any(o.name == streaming.cursor and o.bound for o in task.inputs):
        raise TaskError(f"{task.name}: the cursor {streaming.cursor!r} needs a bound: 'slot[1]: int64 < L'")
    return streaming


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
    return Path(_code(reference).co_filename).resolve().parent / file


def _code(reference: Callable[..., Any]) -> types.CodeType:
    """That of the function itself, under what decorators made of it."""
    return inspect.unwrap(reference).__code__


def _slice(t: torch.Tensor, spec: Operand, begins: Mapping[str, tuple[Any, Any]]) -> torch.Tensor:
    dims = spec.dims_of(t.dim())
    for d, dim in enumerate(dims):
        if dim == "..." and dim in begins:
            t = t.narrow(d, begins[dim][0][d], 1)
        elif dim in begins:
            t = t.narrow(d, *begins[dim])
    return t


def is_ours(declared: Any) -> bool:
    """Whether a task, a pattern or a rule comes with torch_mpk, by the module that declares it."""
    return declared.__module__.startswith(f"{__package__}.")


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
    streaming: Streaming | None = None,
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
        pattern: in models, the task takes the place of the operations that its reference is made of. ``explain`` says
            where it nearly did, and what keeps a reference from being found.
        float64: the code computes in double where operands are float64. By default it is taken to compute in float, and
            is left out where that would be less than the operands promise: the reference runs there on the CPU, and
            the call is not taken on CUDA.
        streaming: of role "stream", what the scheduler may do with it; by default as little as possible.

    Declared again as it was, as by ``importlib.reload`` or a notebook's cell, it is the task there is.

    Raises:
        TaskError: the signature does not fit the reference, a sample does not fit the signature, tiles would write the
            same memory, or another task has the name.
    """

    def declare(reference: Callable[..., Any]) -> Task:
        declared = Task(reference, signature, role, samples, header, tile, stream, cpu, pattern, float64, streaming)
        earlier = _tasks.get(declared.name)
        if earlier is not None and _is_same(earlier, declared):
            return earlier
        if earlier is not None:
            raise TaskError(
                f"task {declared.name!r} is already declared at {earlier.place}, otherwise than at {declared.place}: "
                "operators and compiled graphs keep what came first. Give this one another name, or restart the "
                "process (in a notebook the kernel) to have it instead"
            )
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
            declared.streaming.of_operands(),
            declared.streaming.joined_by,
            declared.streaming.tiled_by,
            declared.streaming.hands_over,
        )
        _tasks[declared.name] = declared
        for subscriber in _subscribers:
            subscriber(declared)
        return declared

    return declare


def _is_same(earlier: Task, declared: Task) -> bool:
    """Whether one module has declared a task a second time and nothing that decides what it does has changed."""

    def described(task: Task) -> list[Any]:
        code, fields = _code(task.reference), vars(task).copy()
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


def subscribe(subscriber: Callable[[Task], None]) -> None:
    """Call ``subscriber`` with every task declared so far and with every later one."""
    for declared in tasks():
        subscriber(declared)
    _subscribers.append(subscriber)
