"""Calls that a kernel's declaration gives as samples: random tensors such as its signature wants."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_mpk.config import closest
from torch_mpk.jit.declaration import Declaration, Extent, Operand
from torch_mpk.signature import DTYPES, draw

_FREE_DTYPES = ("float32", "bfloat16", "float16")  # of a tensor whose signature names no dtype
_MOST_CHOICES = 9  # of dtypes: each is compiled for itself
_PADDING = 3  # elements behind a row whose stride the signature leaves open


def check_samples(declaration: Declaration, samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The samples. Raises KernelSignatureError where they are no list of dicts, or a name in them fits nothing."""
    if not isinstance(samples, (list, tuple)) or not all(isinstance(each, Mapping) for each in samples):
        declaration.fail(f"samples={samples!r}, expected a list of dicts, as [{{'M': 3, 'K': 64}}]")
    dtypes = {operand.dtype_name for operand in declaration.operands}
    names = {slot for slot in declaration.slots if slot.isidentifier()} - dtypes
    known = ["..."] * any(operand.has_leading for operand in declaration.operands)
    known += [*sorted(names), *(operand.name for operand in declaration.inputs)]
    for number, sample in enumerate(samples):
        for name in sample:
            if name not in known:
                hint = closest(str(name), known)
                declaration.fail(f"samples[{number}] has an unknown key {name!r}{hint}, expected {', '.join(known)}")
    return [*samples]


@dataclass(frozen=True)
class Sample:
    """Sizes, parameters and absent tensors of a call, by name, and the dtypes that its tensors have, by slot.

    A value for a tensor is None, where it is absent, or an int that its elements stay below. Methods
    raise KernelSignatureError where a size is missing, or a parameter without a default.
    """

    declaration: Declaration
    given: Mapping[str, Any]
    dtypes: Mapping[int, str]

    @property
    def _operands(self) -> list[Operand]:
        return self.declaration.operands

    @property
    def attributes(self) -> dict[str, Any]:
        """The parameters, those that are not given at their defaults."""
        found = {}
        for attribute in self.declaration.attributes:
            value = self.given.get(attribute.name, attribute.default)
            if value is None:
                self.declaration.fail(f"a sample needs {attribute.name}, which has no default: {dict(self.given)}")
            is_member = attribute.name in self.declaration.enums
            found[attribute.name] = self.declaration.member(attribute.name, value) if is_member else value
        return found

    @property
    def fulfils_requirements(self) -> bool:
        """Whether a call with it is not refused by ``require``."""
        values = self.values()
        try:
            return all(requirement.evaluate(values) for requirement in self.declaration.requirements)
        except (ZeroDivisionError, KeyError):
            return False

    def values(self) -> dict[int, Any]:
        """What slots stand for: sizes, strides, parameters, dtypes by their names."""
        declaration = self.declaration
        attributes = self.attributes
        values: dict[int, Any] = {a.slot: _named(attributes[a.name]) for a in declaration.attributes}
        values |= dict(self.dtypes)
        for slot, name in enumerate(declaration.slots):
            if name in self.given and slot not in values:
                values[slot] = self.given[name]
        for operand in self._operands:
            if self._is_given(operand):
                shape = self.shape(operand, values)
                if operand.numel_slot >= 0:
                    values[operand.numel_slot] = math.prod(shape)
                self._strides(operand, shape, values)
        return values

    def key(self) -> dict[str, Any]:
        """What ``Kernel.compile`` takes."""
        values, slots = self.values(), self.declaration.slots
        return {slots[slot]: values[slot] for slot in self.declaration.key_slots}

    def inputs(self, device: torch.device | str = "cpu") -> list[torch.Tensor | None]:
        """Fresh random tensors; None for absent ones."""
        return [self.tensor(o, device) if self._is_given(o) else None for o in self.declaration.inputs]

    def tensor(self, operand: Operand, device: torch.device | str = "cpu") -> torch.Tensor:
        values = self.values()
        shape = self.shape(operand, values)
        name = values[operand.dtype_slot] if operand.dtype_slot >= 0 else operand.dtypes[0]
        drawn = draw(shape, getattr(torch, name), device, self.given.get(operand.name))
        strides = self._strides(operand, shape, values)
        return torch.empty_strided(shape, strides, dtype=drawn.dtype, device=device).copy_(drawn)

    def shape(self, operand: Operand, values: Mapping[int, Any]) -> list[int]:
        shape: list[int] = []
        if operand.has_leading:
            shape += self._size("...")
        return shape + [self._extent(operand, extent, values) for extent in operand.size_extents]

    def _is_given(self, operand: Operand) -> bool:
        return self.given.get(operand.name, operand) is not None

    def _size(self, name: str) -> Any:
        if name not in self.given:
            self.declaration.fail(f"a sample does not say {name}: {dict(self.given)}")
        return self.given[name]

    def _extent(self, operand: Operand, extent: Extent, values: Mapping[int, Any]) -> int:
        kind, value = extent
        if kind == "expression":
            return self.declaration.extents[value].evaluate(dict(values))
        if kind == "literal":
            return value
        return values[value] if value in values else self._size(self.declaration.slots[value])

    def _strides(self, operand: Operand, shape: Sequence[int], values: dict[int, Any]) -> list[int]:
        """Those that the signature says; what it leaves open has elements in between. Binds the names of strides."""
        extents = operand.stride_extents or (None,) * len(shape)
        strides: list[int] = []
        least = 1
        for size, extent in zip(reversed(shape), reversed(extents), strict=True):
            kind, value = extent or ("contiguous", 0)
            stride = least
            if kind in ("any", "slot") and strides:
                stride += _PADDING
            if kind == "slot":
                stride = values.setdefault(value, stride)
            elif kind in ("literal", "expression"):
                stride = value if kind == "literal" else self.declaration.extents[value].evaluate(values)
            strides.append(stride)
            least = max(least, stride * max(size, 1))
        return strides[::-1]


def _named(value: Any) -> Any:
    """A dtype by its name, as slots have it."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def dtype_choices(declaration: Declaration, wanted: Sequence[str] = ()) -> Iterator[dict[int, str]]:
    """Choices of the tensors' dtypes, by slot; ``wanted`` narrows them. All that there are, or where these are many,
    some with each dtype of each tensor."""
    allowed: dict[int, list[str]] = {}
    for operand in declaration.inputs:
        if operand.dtype_slot >= 0:
            # A tensor for any dtype is checked with floats: which others its code takes is not said.
            dtypes = [*operand.dtypes] if len(operand.dtypes) < len(DTYPES) else [*_FREE_DTYPES]
            before = allowed.get(operand.dtype_slot, dtypes)
            allowed[operand.dtype_slot] = [name for name in before if name in operand.dtypes]
    narrowed = {slot: [n for n in names if n in wanted] or names for slot, names in allowed.items()}
    if math.prod(map(len, narrowed.values())) <= _MOST_CHOICES:
        yield from (dict(zip(narrowed, names)) for names in itertools.product(*narrowed.values()))
        return
    for i in range(max(map(len, narrowed.values()))):
        yield {slot: names[i % len(names)] for slot, names in narrowed.items()}
