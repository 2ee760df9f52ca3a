"""``Task``: what a declaration says of a node kind of the task graph, and calls of its reference."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_mpk import _C
from torch_mpk.errors import TaskAttributeError, TaskError
from torch_mpk.registry.attributes import read_attributes
from torch_mpk.registry.checks import (
    CPP_KEYWORDS,
    check_reference,
    check_samples,
    check_stream,
    check_traits,
    read_tile,
)
from torch_mpk.registry.code_files import code_of, find_file, find_headers
from torch_mpk.registry.stream_traits import StreamTraits
from torch_mpk.signature import Operand, Signature, bind_dims, draw

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
# Packed numbers, of which every bit counts in a sample, and what their bits are drawn as.
_PACKED = {torch.uint8: torch.uint8, torch.int32: torch.int32, torch.float4_e2m1fn_x2: torch.uint8}
_MAX_KNOWN_CALLS = 256  # of a task, which are not checked again
_COMPUTE = re.compile(r"\bcompute\s*\(")


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
        traits: StreamTraits | None,
        scales_rows: bool,
        behind_rows: bool,
        alone: str,
    ):
        check_reference(reference, signature)
        self.reference = reference
        self.name = self.__name__ = self.__qualname__ = reference.__name__
        if self.name.endswith("_"):
            raise TaskError(f"{self.name}: such a name is the in-place form's, drop the underscore at its end")
        self.__module__ = reference.__module__
        self.__doc__ = reference.__doc__
        self.role = role
        parsed = Signature(self.name, signature, TaskError)
        self.signature, self.inputs, self.outputs = parsed.text, parsed.inputs, parsed.outputs
        self.attrs = read_attributes(self.name, reference, self.inputs)
        self.samples = samples
        check_samples(self)
        self._known_calls: dict[Hashable, dict[str, Any]] = {}
        self.tile = read_tile(self, tile)
        self.stream = check_stream(self, stream)
        self.traits = check_traits(self, traits)
        self.pattern = pattern
        self.float64 = float64
        self.scales_rows, self.behind_rows = scales_rows, behind_rows
        for trait, is_given, its_role in (("scales_rows", scales_rows, "row"), ("behind_rows", behind_rows, "tile")):
            if is_given and role != its_role:
                raise TaskError(f"{self.name}: {trait}= is for tasks of role {its_role!r}, this one's is {role!r}")
        if alone not in ("reference", "kernel"):
            raise TaskError(f"{self.name}: alone={alone!r}, expected 'reference' or 'kernel'")
        self.alone = alone
        if pattern and (self.is_mutating or not self.outputs or not samples):
            raise TaskError(f"{self.name}: pattern=True takes outputs, nothing updated in place, and samples")
        self.header = header or (f"torch_mpk/device/tasks/{self.name}.cuh" if role in ("row", "stream") else "")
        self.headers: dict[int, str] = {}
        self.cpu_body = ""
        if role == "tile":
            self.header, self.headers = find_headers(self.name, reference, header)
            self.cpu_body = find_file(self.name, reference, cpu, f"{self.name}.cpp")
        if self.name in CPP_KEYWORDS and (self.header or self.headers or self.cpu_body):
            raise TaskError(f"{self.name}: C++ has this word for something else: give the task another name")

    def __repr__(self) -> str:
        return f"mpk.{self.name}"

    @property
    def is_ours(self) -> bool:
        """Whether it comes with torch_mpk: what is wrong with a user's is for them to mend."""
        return is_ours(self)

    @property
    def file(self) -> str:
        """Where it is declared."""
        return code_of(self.reference).co_filename

    @property
    def place(self) -> str:
        """Where it is declared, as ``file.py:line``."""
        return f"{self.file}:{code_of(self.reference).co_firstlineno}"

    def header_for(self, arch: int) -> str:
        """The device code for a device of a compute capability; empty where there is none."""
        generation = _C.arch_of_device(arch)
        return self.headers.get(arch) or self.headers.get(generation.number if generation else 0, self.header)

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
        self.check_tensors(operands)
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
            for output, tensor in zip(self.outputs, results, strict=True):
                if output.dtype is not None and tensor.dtype != output.dtype:
                    raise TaskError(
                        f"{self.name}: the reference returned {output.name} as {tensor.dtype}, expected {output.dtype} "
                        f"(signature: {self.signature})"
                    )
        return result, attrs

    def check_tensors(self, operands: Sequence[object]) -> None:
        """Raises TaskError where an operand is neither a tensor nor None."""
        for operand, given in zip(self.inputs, operands):
            if not isinstance(given, torch.Tensor | None):
                kind = type(given).__name__
                raise TaskError(
                    f"{self.name}: {operand.name} is a {kind}, expected a tensor (signature: {self.signature})"
                )

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
        """All attributes, in declaration order, with defaults.

        Raises TaskAttributeError where names or types do not fit.
        """
        unknown = attrs.keys() - self.attrs.keys()
        missing = [a.name for a in self.attrs.values() if a.required and a.name not in attrs]
        if unknown or missing:
            problem = f"unknown attribute {sorted(unknown)}" if unknown else f"attribute {missing} is missing"
            raise TaskAttributeError(f"{self.name}: {problem}; it takes {list(self.attrs)}")
        bound = {a.name: attrs.get(a.name, a.default) for a in self.attrs.values()}
        for a in self.attrs.values():
            if not a.takes(bound[a.name]):
                raise TaskAttributeError(
                    f"{self.name}: {a.name}={bound[a.name]!r}, expected a value of type {a.type.__name__}"
                )
        return bound

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
        if operand.name == self.traits.paged_by and not operand.bound:  # entries of one page would share positions
            entries = math.prod(shape)
            return torch.randperm(max(8, entries), device=device)[:entries].view(shape).to(operand.dtype)
        if operand.dtype is not None and not operand.dtype.is_floating_point:
            return draw(shape, operand.dtype, device, sample[operand.bound] if operand.bound else 8)
        dtype = sample.get(operand.name, operand.dtype or dtype)
        if dtype in _PACKED:
            limits = torch.iinfo(_PACKED[dtype])
            bits = torch.randint(limits.min, limits.max + 1, shape, dtype=_PACKED[dtype], device=device)
            return bits.view(dtype)
        return draw(shape, dtype, device)


def _key(operands: Sequence[torch.Tensor | None], attrs: Mapping[str, Any]) -> Hashable:
    """What decides whether a call fits its task's signature; None where sizes may be symbols."""
    if not all(t is None or type(t) in _PLAIN_TENSORS for t in operands):
        return None
    return tuple([t if t is None else (t.shape, t.dtype, t.layout) for t in operands]), tuple(attrs.items())


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
    return declared.__module__.startswith(f"{__name__.partition('.')[0]}.")
