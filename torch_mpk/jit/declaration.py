"""What a kernel takes and how it is launched, read from the two lines of its declaration."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_type_hints

import torch

from torch_mpk import _C, registry
from torch_mpk.errors import KernelSignatureError

DTYPES: tuple[str, ...] = _C.DTYPES  # that kernels take
_CPP_TYPES = {"float16": "mpk::fp16_t", "bfloat16": "mpk::bf16_t", "float32": "float", "float64": "double"}
_SCHEMA_TYPES = {int: "int", float: "float", bool: "bool", torch.dtype: "ScalarType"}

_OPERAND = re.compile(r"(\w+)\s*\[([^\];]*)(?:;([^\]]*))?\]\s*([?!]*)\s*(?::\s*(?:(\w+)\s*=\s*)?([\w\s|]+))?")
_LAUNCH = re.compile(r"([\w:]+)\s*(?:<(?!<<)([^<>]*)>)?\s*(?:<<<(.*)>>>)?\s*\((.*)\)", re.DOTALL)
_OPS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"}
_FUNCTIONS = ("cdiv", "min", "max")
_MAX_ARGUMENTS = 64  # of an operator of PyTorch, and slots of a call, as in signature.h

Extent = tuple[Literal["slot", "literal", "any"], int]  # a size or stride: its slot, its value, or nothing
Instruction = tuple[str, int]  # "constant" or "slot" and which, or an operation


@dataclass(frozen=True)
class Operand(registry.Operand):
    """A tensor of the signature, as in ``x[M, K; S, 1]?: T=float32|bfloat16``: sizes; strides, marks, dtype."""

    strides: tuple[str, ...]  # a name, a number or "_"; none: contiguous
    dtypes: tuple[str, ...]  # that are accepted
    dtype_name: str | None  # a variable's
    size_extents: tuple[Extent, ...]
    stride_extents: tuple[Extent, ...]
    dtype_slot: int
    numel_slot: int = -1

    @property
    def is_output(self) -> bool:
        return not self.is_read

    @property
    def has_leading(self) -> bool:
        return self.dims[:1] == ("...",)

    def __str__(self) -> str:
        strides = f"; {', '.join(self.strides)}" if self.strides else ""
        return f"{self.name}[{', '.join(self.dims)}{strides}]"


@dataclass(frozen=True)
class Attribute:
    """A keyword-only parameter: a template argument, or a number that is passed to the kernel."""

    name: str
    type: type
    default: Any  # None: it must be given
    slot: int

    @property
    def type_name(self) -> str:
        """As an operator's schema has it."""
        return _SCHEMA_TYPES[self.type]

    @property
    def schema(self) -> str:
        text = f"{self.type_name} {self.name}"
        if self.default is None:
            return text
        return f"{text}={str(self.default).removeprefix('torch.')}"


@dataclass(frozen=True)
class Expression:
    text: str
    code: tuple[Instruction, ...]  # postfix


@dataclass(frozen=True)
class Argument:
    kind: Literal["pointer", "integer", "float"]
    index: int  # of the operand, or of the slot of a float
    value: Expression | None  # an integer's
    text: str


class Declaration:
    """Everything about a kernel but its code. Raises KernelSignatureError where the parts do not fit."""

    def __init__(
        self,
        function: Callable[..., Any],
        signature: str,
        launch: str,
        cluster: int | Sequence[int],
        cooperative: bool,
        pdl: bool,
    ) -> None:
        self.name: str = function.__name__
        self.signature = " ".join(signature.split())
        self.slots: list[str] = []
        if not self.name.isidentifier():
            self.fail("a kernel needs a function with a name")
        sides = self.signature.split("->")
        if len(sides) > 2:
            self.fail("there is more than one '->'")
        self.operands = [operand for i, side in enumerate(sides) for operand in self._parse_operands(side, i == 1)]
        self._check_operands()
        self.attributes = self._parse_parameters(function)
        self.launch = " ".join(launch.split())
        self._parse_launch(self.launch)
        if len(self.operands) + len(self.attributes) > _MAX_ARGUMENTS or len(self.slots) > _MAX_ARGUMENTS:
            self.fail(f"a kernel takes at most {_MAX_ARGUMENTS} tensors and parameters, and as many names of sizes")
        self.cluster = [self._expression(ast.Constant(extent)) for extent in self._three(cluster)]
        self.cooperative, self.pdl = cooperative, pdl
        if not self.is_cuda and (cluster != 1 or cooperative or pdl):
            self.fail("cluster, cooperative and pdl are for CUDA: the launch has no <<<grid, block>>>")

    def __repr__(self) -> str:
        cluster = [extent.text for extent in self.cluster]
        options = [f"cluster={cluster}", f"cooperative={self.cooperative}", f"pdl={self.pdl}"]
        return f"{self.name}{self.schema}: {self.signature}; {self.launch}; {', '.join(options)}"

    def fail(self, what: str) -> NoReturn:
        raise KernelSignatureError(f"{self.name}: {what} (signature: {self.signature})")

    @property
    def inputs(self) -> list[Operand]:
        return [operand for operand in self.operands if operand.is_read]

    @property
    def outputs(self) -> list[Operand]:
        return [operand for operand in self.operands if operand.is_output]

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

    def function_name(self, values: dict[str, Any]) -> str:
        """The C++ function with its template arguments."""
        if self.template is None:
            return self.function
        text = re.sub(r"\w+", lambda match: _cpp(values.get(match[0], match[0])), self.template)
        return f"{self.function}<{text}>"

    def parameters(self, values: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
        """For each argument of the launch: what ``parameters.h`` calls it, how to describe it, and what to declare."""
        for argument in self.arguments:
            if argument.kind == "integer":
                yield "Integer", f"{argument.text} is an integer", "int or int64_t"
            elif argument.kind == "float":
                yield "Float", f"{argument.text} is a float", "float or double"
            else:
                operand = self.operands[argument.index]
                dtype = operand.dtypes[0] if operand.dtype_slot < 0 else values[self.slots[operand.dtype_slot]]
                cpp = cpp_type(dtype)
                if operand.is_write:
                    yield f"Write<{cpp}>", f"{argument.text} is {dtype} and written", f"{cpp}* or void*"
                else:
                    constant = f"const {cpp}* or const void*"
                    yield f"Read<{cpp}>", f"{argument.text} is {dtype} and only read", constant

    def _parse_operands(self, text: str, is_output: bool) -> Iterator[Operand]:
        end = 0
        for match in _OPERAND.finditer(text):
            if text[end : match.start()].strip() != ("," if end else ""):
                break
            end = match.end()
            name, dims, strides, marks, dtype_name, dtypes = match.groups()
            chosen = tuple(word.strip() for word in (dtypes or "").split("|") if word.strip())
            if len(chosen) == 1 and not dtype_name and chosen[0] not in DTYPES:
                dtype_name, chosen = chosen[0], ()
            unknown = [word for word in chosen if word not in DTYPES]
            if unknown or dtype_name in DTYPES:
                self.fail(f"{name} has dtype {(unknown or [dtype_name])[0]}; the dtypes are {', '.join(DTYPES)}")
            sizes, apart = _words(dims), _words(strides or "")
            if "..." in sizes[1:]:
                self.fail(f"{name}: '...' can only stand first")
            if apart and ("..." in sizes or len(apart) != len(sizes)):
                self.fail(f"{name} needs as many strides as sizes, and no '...'")
            if is_output and (apart or marks):
                self.fail(f"{name} is allocated by the call: it is contiguous and has no marks")
            yield Operand(
                name=name,
                dims=sizes,
                optional="?" in marks,
                is_read=not is_output,
                is_write=is_output or "!" in marks,
                dtype=getattr(torch, chosen[0]) if len(chosen) == 1 else None,
                bound=None,
                strides=apart,
                dtypes=chosen or DTYPES,
                dtype_name=dtype_name,
                size_extents=tuple(self._extent(name, size) for size in sizes if size != "..."),
                stride_extents=tuple(self._extent(name, stride, is_stride=True) for stride in apart),
                dtype_slot=self._slot(dtype_name or f"{name}.dtype") if dtype_name or len(chosen) != 1 else -1,
            )
        if text[end:].strip():
            self.fail(f"cannot read {text[end:].strip()!r}; write tensors as 'x[M, K]: float32'")

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
        if not text.isidentifier() or text == "_":
            self.fail(f"cannot read {text!r} in {operand}: it must be a name or a number")
        return "slot", self._slot(text)

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
        for p in parameters:
            if p.kind is inspect.Parameter.KEYWORD_ONLY:
                if hints.get(p.name) not in _SCHEMA_TYPES:
                    self.fail(f"{p.name} must be annotated as int, float, bool or torch.dtype")
                if p.name in (*self.slots, *(operand.name for operand in self.operands)):
                    self.fail(f"{p.name} is a parameter and a name of the signature")
                default = None if p.default is inspect.Parameter.empty else p.default
                if default is not None and not _is_a(hints[p.name], default):
                    self.fail(f"{p.name} is {default!r} by default, which is not what it is annotated as")
                attributes.append(Attribute(p.name, hints[p.name], default, self._slot(p.name)))
        return attributes

    def _parse_launch(self, launch: str) -> None:
        match = _LAUNCH.fullmatch(launch)
        if not match:
            self.fail(f"cannot read the launch {launch!r}; write it as 'name<T><<<grid, block>>>(x, N)'")
        self.function, self.template, config, arguments = match.groups()
        self.is_cuda = config is not None
        in_template = set(re.findall(r"\w+", self.template or ""))
        dtype_slots = {operand.dtype_slot for operand in self.operands} - {-1}
        self.key_slots = [i for i, name in enumerate(self.slots) if name in in_template or i in dtype_slots]
        for slot in self.key_slots:
            self._check_is_always_bound(slot)
        self.grid: list[Expression] = []
        self.block: list[Expression] = []
        self.shared_bytes: Expression | None = None
        if config is not None:
            parts = self._parse(config)
            if len(parts) not in (2, 3):
                self.fail(f"<<<{config}>>> must be grid, block and, if there is any, bytes of shared memory")
            self.grid, self.block = ([self._expression(node) for node in self._three(part)] for part in parts[:2])
            self.shared_bytes = self._expression(parts[2]) if len(parts) == 3 else None
        self.arguments = [self._argument(node) for node in self._parse(arguments)]

    def _three(self, extent: Any) -> list[Any]:
        """A grid, a block or a cluster, which may have fewer dimensions."""
        elements = extent.elts if isinstance(extent, ast.Tuple) else extent
        parts = [*elements] if isinstance(elements, (tuple, list)) else [elements]
        if not 1 <= len(parts) <= 3:
            self.fail("a grid, a block and a cluster have one to three dimensions")
        one = ast.Constant(1) if isinstance(extent, ast.expr) else 1
        return [*parts, *[one] * (3 - len(parts))]

    def _parse(self, text: str) -> list[ast.expr]:
        try:
            call = ast.parse(f"f({text})", mode="eval").body
        except SyntaxError:
            call = None
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.keywords:
            self.fail(f"cannot read {text!r} in the launch")
        return call.args

    def _argument(self, node: ast.expr) -> Argument:
        text = ast.unparse(node)
        for i, operand in enumerate(self.operands):
            if text == operand.name:
                return Argument("pointer", i, None, text)
        for attribute in self.attributes:
            if text == attribute.name and attribute.type is float:
                return Argument("float", attribute.slot, None, text)
        return Argument("integer", 0, self._expression(node), text)

    def _expression(self, node: ast.expr) -> Expression:
        return Expression(ast.unparse(node), tuple(self._code(node)))

    def _code(self, node: ast.expr) -> Iterator[Instruction]:
        text = ast.unparse(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            if not -(2**63) <= node.value < 2**63:
                self.fail(f"'{text}' is beyond 64 bits")
            yield "constant", int(node.value)
        elif isinstance(node, ast.Name):
            yield "slot", self._integer_slot(node.id)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield from (("constant", 0), *self._code(node.operand), (_OPS[ast.Sub], 0))
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPS:
            yield from (*self._code(node.left), *self._code(node.right), (_OPS[type(node.op)], 0))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            yield from self._call(node.func.id, node.args, text)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            self.fail(f"'{text}' is not an integer: write // or cdiv(a, b)")
        else:
            self.fail(f"cannot read '{text}' in the launch: it may have names, ints, + - * // %, {_known()}")

    def _call(self, function: str, arguments: list[ast.expr], text: str) -> Iterator[Instruction]:
        if function in _FUNCTIONS and len(arguments) == 2:
            yield from (*self._code(arguments[0]), *self._code(arguments[1]), (function, 0))
            return
        names = [ast.unparse(node) for node in arguments]
        for i, operand in enumerate(self.operands):
            if function == "numel" and names == [operand.name] and not operand.optional:
                slot = self._slot(f"numel({operand.name})")
                self.operands[i] = dataclasses.replace(operand, numel_slot=slot)
                yield "slot", slot
                return
        self.fail(f"cannot read '{text}' in the launch: the functions are {_known()}")

    def _integer_slot(self, name: str) -> int:
        types = {attribute.name: attribute.type for attribute in self.attributes}
        is_dtype = any(operand.dtype_name == name for operand in self.operands)
        if name not in self.slots or is_dtype or types.get(name, int) not in (int, bool):
            self.fail(f"{name} is not an integer of the signature")
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


def cpp_type(dtype: str) -> str:
    """The element type of a dtype in kernels."""
    return _CPP_TYPES.get(dtype) or ("bool" if dtype == "bool" else f"{dtype}_t")


def _is_a(type_: type, value: Any) -> bool:
    if type_ is torch.dtype:
        return str(value).removeprefix("torch.") in DTYPES
    return isinstance(value, (int, float) if type_ is float else type_)


def _cpp(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return cpp_type(value) if isinstance(value, str) and value in DTYPES else str(value)


def _known() -> str:
    return f"{', '.join(f'{name}(a, b)' for name in _FUNCTIONS)} and numel(x)"


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
