"""What a kernel takes and how it is launched, read from the two lines of its declaration."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal, NoReturn, get_type_hints

import torch

from torch_mpk import signature
from torch_mpk.config import is_int
from torch_mpk.errors import KernelSignatureError
from torch_mpk.jit import launch as launches
from torch_mpk.jit.expression import Expression, Scope
from torch_mpk.jit.launch import Argument, Launch, cpp_type
from torch_mpk.signature import DTYPES, Signature

_SCHEMA_TYPES = {int: "int", float: "float", bool: "bool", torch.dtype: "ScalarType"}

_MAX_ARGUMENTS = 64  # of an operator of PyTorch, and slots of a call, as in signature.h
_MAX_THREADS = 1024  # of a block, on every device
_MAX_SHARED_BYTES = 227 * 1024  # of a block, on the devices that have most of it
_MAX_CLUSTER = 16  # blocks
_NUM_SMS = "num_sms"  # in a launch, where the signature has no such name: the device's multiprocessors

# A size or stride: its slot, its value, nothing, or which of the declaration's ``extents`` computes it.
Extent = tuple[Literal["slot", "literal", "any", "expression"], int]


@dataclass(frozen=True, kw_only=True)
class Operand(signature.Operand):
    """A tensor of the signature, and what its sizes, strides and dtype stand for."""

    size_extents: tuple[Extent, ...]  # but for "..."
    stride_extents: tuple[Extent, ...]
    dtype_slot: int
    numel_slot: int = -1

    @property
    def is_output(self) -> bool:
        return not self.is_read


@dataclass(frozen=True)
class Attribute:
    """A keyword-only parameter: a template argument, or a number that is passed to the kernel."""

    name: str
    type: type
    default: Any  # None: it must be given
    slot: int

    @property
    def is_finite(self) -> bool:
        """False for a default that a schema cannot have: inf or nan."""
        return not isinstance(self.default, float) or math.isfinite(self.default)

    @property
    def type_name(self) -> str:
        """As an operator's schema has it."""
        return _SCHEMA_TYPES[self.type]

    @property
    def schema(self) -> str:
        text = f"{self.type_name} {self.name}"
        if self.default is None or not self.is_finite:
            return text
        return f"{text}={str(self.default).removeprefix('torch.')}"


class Declaration:
    """Everything about a kernel but its code. Raises KernelSignatureError where the parts do not fit."""

    def __init__(
        self,
        function: Callable[..., Any],
        text: str,
        launch: str,
        require: str | Sequence[str],
        cluster: int | Sequence[int],
        cooperative: bool,
        pdl: bool | str,
    ) -> None:
        if not isinstance(function, FunctionType):
            raise KernelSignatureError(f"jit.kernel: expected a function to decorate, got {function!r}")
        self.name: str = function.__name__
        self.signature = " ".join(str(text).split())
        self.slots: list[str] = []
        self.extents: list[Expression] = []
        self._extent_nodes: list[tuple[str, ast.expr]] = []  # and whose they are
        if not self.name.isidentifier():
            self.fail("a kernel needs a function with a name")
        for what, given in (("signature", text), ("launch", launch)):
            if not isinstance(given, str):
                self.fail(f"the {what} is {given!r}, expected a string")
        requirements = [require] if isinstance(require, str) else require
        if not isinstance(requirements, (list, tuple)) or not all(isinstance(each, str) for each in requirements):
            self.fail(f"require={require!r}, expected a condition as a string, or a list of them")
        parsed = Signature(self.name, text, KernelSignatureError, is_kernel=True)
        self.operands = [self._resolved(operand) for operand in (*parsed.inputs, *parsed.outputs)]
        self._check_operands()
        self.attributes = self._parse_parameters(function)
        self._read_extents()
        self.launch = " ".join(launch.split())
        self.launches = [self._parse_launch(part) for part in launches.split(self.launch)]
        self.is_cuda = any(launch.grid for launch in self.launches)
        if not self.launches or any(bool(launch.grid) != self.is_cuda for launch in self.launches):
            self.fail("there must be a launch, and where one has <<<grid, block>>>, all must have it")
        self.key_slots = self._find_key_slots()
        conditions = dataclasses.replace(self._scope, place="a condition")
        self.requirements = [conditions.parse(text) for text in requirements]
        if len(self.operands) + len(self.attributes) > _MAX_ARGUMENTS or len(self.slots) > _MAX_ARGUMENTS:
            self.fail(f"a kernel takes at most {_MAX_ARGUMENTS} tensors and parameters, and as many names of sizes")
        extents = self._three(cluster)
        if not all(is_int(extent) for extent in extents):
            self.fail(f"cluster={cluster!r}, expected a number of blocks, or up to three")
        if not isinstance(cooperative, bool) or not isinstance(pdl, (bool, str)):
            self.fail(
                f"cooperative={cooperative!r} and pdl={pdl!r}, expected True or False, and of pdl also a condition"
            )
        self.cluster = [self._scope.read(ast.Constant(extent)) for extent in extents]
        self.cooperative, self.pdl = cooperative, conditions.parse(str(pdl))
        if not self.is_cuda and (cluster != 1 or cooperative or pdl or self.sms_slot >= 0):
            self.fail(f"cluster, cooperative, pdl and {_NUM_SMS} are for CUDA: the launch has no <<<grid, block>>>")
        self.check_geometry({})

    def check_geometry(self, values: Mapping[int, Any]) -> None:
        """Raises KernelSignatureError where no device has launches like these, as far as slots' values say."""

        def known(expressions: Sequence[Expression]) -> list[int] | None:
            if any(expression.slots - values.keys() for expression in expressions):
                return None
            try:
                return [expression.evaluate(dict(values)) for expression in expressions]
            except ZeroDivisionError:
                return self.fail(f"{', '.join(expression.text for expression in expressions)} divides by 0")

        def expect(what: str, expressions: Sequence[Expression], least: int, most: Sequence[int], in_all: int) -> None:
            numbers = known(expressions)
            if numbers is None or not numbers:
                return
            if not all(least <= n <= limit for n, limit in zip(numbers, most)) or math.prod(numbers) > in_all:
                limits = f"{least} to {tuple(most) if len(numbers) > 1 else most[0]}"
                bound = f", and at most {in_all} in all" if len(numbers) > 1 and what != "grid" else ""
                self.fail(
                    f"the {what} is {tuple(numbers) if len(numbers) > 1 else numbers[0]}, expected {limits}{bound}"
                )

        for launch in self.launches:
            expect("grid", launch.grid, 0, (2**31 - 1, 65535, 65535), 2**63)
            expect("block", launch.block, 1, (_MAX_THREADS, _MAX_THREADS, 64), _MAX_THREADS)
            if launch.shared_bytes is not None:
                expect("shared memory", [launch.shared_bytes], 0, [_MAX_SHARED_BYTES], _MAX_SHARED_BYTES)
        expect("cluster", self.cluster, 1, [_MAX_CLUSTER] * 3, _MAX_CLUSTER)

    def value(self, name: str, value: Any) -> Any:
        """What a name of a key slot stands for, given as ``compile`` takes it: a dtype by its name.

        Raises KernelSignatureError where it cannot.
        """
        expected = dict(self.key)[name]
        types = {"int": int, "size": int, "bool": bool, "float": float, "dtype": torch.dtype, "ScalarType": torch.dtype}
        type_ = types[expected]
        if not _is_a(type_, value) or (type_ in (int, float) and isinstance(value, bool)):
            self.fail(f"{name} is {value!r}, expected a value of type {type_.__name__}")
        if type_ is int and not -(2**63) <= value < 2**63:
            self.fail(f"{name} is {value}, expected an int of 64 bits")
        return str(value).removeprefix("torch.") if type_ is torch.dtype else value

    def __repr__(self) -> str:
        cluster = [extent.text for extent in self.cluster]
        options = [f"cluster={cluster}", f"cooperative={self.cooperative}", f"pdl={self.pdl.text}"]
        options.append(f"require={[requirement.text for requirement in self.requirements]}")
        return f"{self.name}{self.schema}: {self.signature}; {self.launch}; {', '.join(options)}"

    def fail(self, what: str) -> NoReturn:
        raise KernelSignatureError(f"{self.name}: {what} (signature: {self.signature})")

    @property
    def inputs(self) -> list[Operand]:
        return [operand for operand in self.operands if operand.is_read]

    @property
    def outputs(self) -> list[Operand]:
        """What is returned."""
        return [operand for operand in self.operands if operand.is_output and not operand.is_scratch]

    @property
    def schema(self) -> str:
        """The operator's."""
        last_required = max((i for i, operand in enumerate(self.inputs) if not operand.optional), default=-1)
        arguments = []
        for i, operand in enumerate(self.inputs):
            alias = f"(a{i}!)" if operand.is_write else ""
            default = "" if i <= last_required else "=None"
            arguments.append(f"Tensor{alias}{'?' * operand.optional} {operand.name}{default}")
        if self.attributes:
            arguments += ["*", *(attribute.schema for attribute in self.attributes)]
        results = ", ".join(["Tensor"] * len(self.outputs))
        return f"({', '.join(arguments)}) -> {results if len(self.outputs) == 1 else f'({results})'}"

    def decode(self, key: Sequence[int]) -> dict[str, Any]:
        """The values of the key slots by name: an int, a bool, a float, or a dtype's name."""
        return {self.slots[slot]: self._decode(slot, value) for slot, value in zip(self.key_slots, key, strict=True)}

    @property
    def key(self) -> frozenset[tuple[str, str]]:
        """The names of the key slots, each with what it stands for: a type of Python, "dtype" or "size"."""
        types = {attribute.slot: attribute.type_name for attribute in self.attributes}
        dtypes = {operand.dtype_slot for operand in self.operands}
        return frozenset(
            (self.slots[slot], types.get(slot, "dtype" if slot in dtypes else "size")) for slot in self.key_slots
        )

    def takes_dtypes(self, values: dict[str, Any]) -> bool:
        """Whether dtypes among the values of the key slots are some that the tensors may have."""
        keyed = [operand for operand in self.operands if operand.dtype_slot in self.key_slots]
        return all(values[self.slots[operand.dtype_slot]] in operand.dtypes for operand in keyed)

    def parameters(self, launch: Launch, values: dict[str, Any]) -> Iterator[tuple[Argument, str, str, str]]:
        """For each argument of a launch: what ``parameters.h`` calls it, how to describe it, and what to declare."""
        for argument in launch.arguments:
            if argument.kind == "integer":
                yield argument, "Integer", f"{argument.text} is an integer", "int or int64_t"
            elif argument.kind == "float":
                yield argument, "Float", f"{argument.text} is a float", "float or double"
            else:
                operand = self.operands[argument.index]
                dtype = operand.dtypes[0] if operand.dtype_slot < 0 else values[self.slots[operand.dtype_slot]]
                cpp = cpp_type(dtype)
                if operand.is_write and len(self.launches) > 1:  # one may read what another writes
                    either = f"{cpp}*, const {cpp}*, void* or const void*"
                    yield argument, f"Either<{cpp}>", f"{argument.text} is {dtype}", either
                elif operand.is_write:
                    yield argument, f"Write<{cpp}>", f"{argument.text} is {dtype} and written", f"{cpp}* or void*"
                else:
                    constant = f"const {cpp}* or const void*"
                    yield argument, f"Read<{cpp}>", f"{argument.text} is {dtype} and only read", constant

    def _resolved(self, parsed: signature.Operand) -> Operand:
        """An operand with the slots that its names stand for."""
        name, plain = parsed.name, parsed.dims[parsed.has_leading :]
        has_slot = parsed.dtype_name or len(parsed.dtypes) != 1
        return Operand(
            **vars(parsed),
            size_extents=tuple(self._extent(name, size) for size in plain),
            stride_extents=tuple(self._extent(name, stride, is_stride=True) for stride in parsed.strides),
            dtype_slot=self._slot(parsed.dtype_name or f"{name}.dtype") if has_slot else -1,
        )

    def _check_operands(self) -> None:
        names = [operand.name for operand in self.operands]
        if len(set(names)) < len(names):
            self.fail("two tensors have the same name")
        extents = {o.name: {*o.size_extents, *o.stride_extents} for o in self.operands}
        dtype_slots = {operand.dtype_slot for operand in self.operands}
        for operand in self.operands:
            sizes = {self.slots[value] for kind, value in extents[operand.name] if kind == "slot"}
            if sizes & {*names, *(self.slots[slot] for slot in dtype_slots if slot >= 0)}:
                self.fail(f"{operand.name}: a name stands for a size, and for a dtype or a tensor")
        required = [operand for operand in self.inputs if not operand.optional]
        bound = {extent for operand in required for extent in extents[operand.name]}
        for operand in self.outputs:
            free = [self.slots[value] for kind, value in extents[operand.name] - bound if kind == "slot"]
            if free or (operand.has_leading and not any(other.has_leading for other in required)):
                self.fail(f"no required input has {operand.name}'s size {(free or ['...'])[0]}")
            if operand.dtype_slot >= 0 and all(other.dtype_slot != operand.dtype_slot for other in self.inputs):
                self.fail(f"give {operand.name} one dtype, or one that an input has")

    def _extent(self, operand: str, text: str, is_stride: bool = False) -> Extent:
        if text.isdigit():
            return "literal", int(text)
        if text == "_" and is_stride:
            return "any", 0
        if text.isidentifier() and text != "_":
            return "slot", self._slot(text)
        self._extent_nodes.append((operand, ast.parse(text, mode="eval").body))
        return "expression", len(self._extent_nodes) - 1

    def _read_extents(self) -> None:
        """Sizes and strides that are computed, from parameters and from what stands in front of them by name."""
        self.sms_slot = -1
        self._scope = Scope(self._integer_slot, self._numel_slot, self.fail)
        for name, node in self._extent_nodes:
            scope = dataclasses.replace(self._scope, place=f"a size of {name}")
            self.extents.append(scope.read(node))
        known = {attribute.slot for attribute in self.attributes}
        for operand in self.operands:
            bound = set(known)
            for kind, value in (*operand.size_extents, *operand.stride_extents):
                if kind == "slot":
                    bound.add(value)
                elif kind == "expression" and (unknown := self.extents[value].slots - bound):
                    what = f"{operand.name}'s {self.extents[value].text!r} needs {self.slots[min(unknown)]}"
                    self.fail(f"{what}, which no required tensor in front of it has for itself")
            if not operand.optional and operand.is_read:
                known = bound | {operand.numel_slot}
        self._scope = dataclasses.replace(self._scope, has_conditions=True)  # of what is no size

    def _slot(self, name: str) -> int:
        if name not in self.slots:
            self.slots.append(name)
        return self.slots.index(name)

    def _parse_parameters(self, function: Callable[..., Any]) -> list[Attribute]:
        hints = get_type_hints(function)
        parameters = inspect.signature(function).parameters.values()
        positional = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        expected = [operand.name for operand in self.inputs]
        if positional != expected:
            self.fail(f"the function's parameters are {positional}, the signature's tensors {expected}")
        attributes = []
        self.enums: dict[str, type[enum.IntEnum]] = {}  # of parameters, which are passed as integers
        for p in parameters:
            if p.kind is inspect.Parameter.KEYWORD_ONLY:
                hint = hints.get(p.name)
                if isinstance(hint, type) and issubclass(hint, enum.IntEnum):
                    self.enums[p.name], hints[p.name] = hint, int
                elif hint not in _SCHEMA_TYPES:
                    self.fail(f"{p.name} must be annotated as int, float, bool, torch.dtype or an enum.IntEnum")
                if p.name in (*self.slots, *(operand.name for operand in self.operands)):
                    self.fail(f"{p.name} is a parameter and a name of the signature")
                default = None if p.default is inspect.Parameter.empty else p.default
                if default is not None and not _is_a(hints[p.name], default):
                    self.fail(f"{p.name} is {default!r} by default, which is not what it is annotated as")
                if default is not None and p.name in self.enums:
                    default = int(self.member(p.name, default))
                attributes.append(Attribute(p.name, hints[p.name], default, self._slot(p.name)))
        return attributes

    def member(self, name: str, value: Any) -> int:
        """The number of an enum's member. Raises KernelSignatureError where the value is none."""
        known = self.enums[name]
        try:
            return int(known(value))
        except ValueError:
            members = ", ".join(f"{member.name} ({int(member)})" for member in known)
            self.fail(f"{name} is {value!r}, expected a member of {known.__name__}: {members}")

    def _parse_launch(self, text: str) -> Launch:
        parts = launches.read(text)
        if parts == text:
            self.fail(f"cannot read the launch {text!r}; write it as 'name<T><<<grid, block>>>(x, {{.n = N}})'")
        if isinstance(parts, str):
            forms = "tensors, float parameters, expressions of sizes, and structs with their fields' names: {.n = N}"
            self.fail(f"cannot read {parts!r} in the launch: arguments are {forms}")
        grid: list[Expression] = []
        block: list[Expression] = []
        shared_bytes: Expression | None = None
        if parts.config is not None:
            if len(parts.config) not in (2, 3):
                self.fail(f"{text!r}: in <<< >>> must be grid, block and, if there is any, bytes of shared memory")
            grid, block = ([self._scope.read(node) for node in self._three(part)] for part in parts.config[:2])
            shared_bytes = self._scope.read(parts.config[2]) if len(parts.config) == 3 else None
        arguments, structs = [], []
        for i, node in enumerate(parts.arguments):
            fields = launches.fields(node)
            if fields is not None:
                structs.append(i)
            arguments += [self._argument(value, i, name) for name, value in fields or []]
            arguments += [self._argument(node, i, None)] if fields is None else []
        return Launch(parts.function, grid, block, shared_bytes, arguments, len(parts.arguments), tuple(structs))

    def _find_key_slots(self) -> list[int]:
        in_template = {name for launch in self.launches for name in launch.names}
        dtype_slots = {operand.dtype_slot for operand in self.operands} - {-1}
        key_slots = [i for i, name in enumerate(self.slots) if name in in_template or i in dtype_slots]
        for slot in key_slots:
            self._check_is_always_bound(slot)
        return key_slots

    def _three(self, extent: Any) -> list[Any]:
        """A grid, a block or a cluster, which may have fewer dimensions."""
        elements = extent.elts if isinstance(extent, ast.Tuple) else extent
        parts = [*elements] if isinstance(elements, (tuple, list)) else [elements]
        if not 1 <= len(parts) <= 3:
            self.fail("a grid, a block and a cluster have one to three dimensions")
        one = ast.Constant(1) if isinstance(extent, ast.expr) else 1
        return [*parts, *[one] * (3 - len(parts))]

    def _argument(self, node: ast.expr, parameter: int, field: str | None) -> Argument:
        text = ast.unparse(node)
        for i, operand in enumerate(self.operands):
            if text == operand.name:
                return Argument("pointer", i, None, text, parameter, field)
        for attribute in self.attributes:
            if text == attribute.name and attribute.type is float:
                return Argument("float", attribute.slot, None, text, parameter, field)
        return Argument("integer", 0, self._scope.read(node), text, parameter, field)

    def _numel_slot(self, name: str) -> int | None:
        for i, operand in enumerate(self.operands):
            if name == operand.name and not operand.optional:
                slot = self._slot(f"numel({name})")
                self.operands[i] = dataclasses.replace(operand, numel_slot=slot)
                return slot
        return None

    def _integer_slot(self, name: str) -> int:
        if name == _NUM_SMS and name not in self.slots and self._scope.has_conditions:  # no size depends on a device
            self.sms_slot = self._slot(name)
            return self.sms_slot
        types = {attribute.name: attribute.type for attribute in self.attributes}
        is_dtype = any(operand.dtype_name == name for operand in self.operands)
        if types.get(name) is float:
            self.fail(f"{name} is a float: it is passed alone, as an argument or a template argument")
        if name not in self.slots or is_dtype or types.get(name, int) not in (int, bool):
            dtypes = {self.slots[operand.dtype_slot] for operand in self.operands if operand.dtype_slot >= 0}
            others = {name for name, type_ in types.items() if type_ not in (int, bool)} | dtypes
            known = ", ".join(slot for slot in self.slots if slot not in others and slot.isidentifier())
            self.fail(f"{name} is not an integer of the signature; those are {known or 'none'}")
        slot = self.slots.index(name)
        self._check_is_always_bound(slot)
        return slot

    def _check_is_always_bound(self, slot: int) -> None:
        extent = ("slot", slot)
        by = [o for o in self.inputs if extent in (*o.size_extents, *o.stride_extents) or o.dtype_slot == slot]
        if by and all(operand.optional for operand in by):
            self.fail(f"{self.slots[slot]} is known only where {by[0].name} is given, which is optional")

    def _decode(self, slot: int, value: int) -> Any:
        attribute = next((a for a in self.attributes if a.slot == slot), None)
        if attribute is None:
            is_dtype = any(operand.dtype_slot == slot for operand in self.operands)
            return DTYPES[value] if is_dtype else value
        if attribute.type is torch.dtype:
            return DTYPES[value]
        if attribute.type is float:
            return torch.tensor(value, dtype=torch.int64).view(torch.float64).item()
        return attribute.type(value)


def _is_a(type_: type, value: Any) -> bool:
    if type_ is torch.dtype:
        return str(value).removeprefix("torch.") in DTYPES
    return isinstance(value, (int, float) if type_ is float else type_)
