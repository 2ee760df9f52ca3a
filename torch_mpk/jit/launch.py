"""One launch of a declaration, ``Kernel<T, 4>::run<<<grid, block, bytes>>>(x, {.n = N})``: its parts, and its C++."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch_mpk.jit.expression import Expression

_CPP_TYPES = {"float16": "mpk::fp16_t", "bfloat16": "mpk::bf16_t", "float32": "float", "float64": "double"}
_STRUCT = "__struct__"  # what {.n = N} is called where Python's parser reads it


@dataclass(frozen=True)
class Argument:
    kind: Literal["pointer", "integer", "float"]
    index: int  # of the operand, or of the slot of a float
    value: Expression | None  # an integer's
    text: str
    parameter: int  # of the C++ function
    field: str | None  # of that parameter, which is a struct: a name, or "inner.name"


@dataclass(frozen=True)
class Launch:
    function: tuple[str, ...]  # its name, with template arguments at the odd places
    grid: list[Expression]
    block: list[Expression]
    shared_bytes: Expression | None
    arguments: list[Argument]
    num_parameters: int
    structs: tuple[int, ...]  # which parameters are some

    @property
    def path(self) -> tuple[str, ...]:
        """The function's name without template arguments: namespaces, classes, itself."""
        return tuple(name for part in self.function[::2] for name in part.split("::") if name)

    @property
    def is_member(self) -> bool:
        """Whether it is a class template's, which CUDA's kernels cannot be."""
        return any(part.startswith("::") for part in self.function[2::2])

    @property
    def names(self) -> set[str]:
        """What stands in the template arguments."""
        return {name for part in self.function[1::2] for name in re.findall(r"\w+", part)}

    def function_name(self, values: dict[str, Any]) -> str:
        """The C++ function with its template arguments."""
        parts = [_substituted(part, values) if i % 2 else part for i, part in enumerate(self.function)]
        return "".join(parts)


@dataclass(frozen=True)
class Text:
    """The parts of a launch as they are written."""

    function: tuple[str, ...]
    config: list[ast.expr] | None  # None: a call on the CPU
    arguments: list[ast.expr]


def read(text: str) -> Text | str:
    """The parts, or what cannot be read."""
    head, configured, rest = text.partition("<<<")
    config = None
    if configured:
        config_text, closed, rest = rest.partition(">>>")
        config = _elements(config_text)
        if not closed or config is None:
            return config_text if closed else text
    else:
        start = _start_of_call(text)
        head, rest = text[:start], text[start:]
    function, rest = _function(head.strip()), rest.strip()
    if function is None or _start_of_call(rest) != 0:
        return text
    arguments = _elements(rest[1:-1])
    return rest[1:-1] if arguments is None else Text(function, config, arguments)


def fields(node: ast.expr) -> list[tuple[str, ast.expr]] | None:
    """What ``{.a = x, .b = {.c = y}}`` gives to ``a`` and ``b.c``; None for another argument."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != _STRUCT:
        return None
    found: list[tuple[str, ast.expr]] = []
    for keyword in node.keywords:
        inner = fields(keyword.value)
        if inner is None:
            found.append((str(keyword.arg), keyword.value))
        else:
            found += [(f"{keyword.arg}.{name}", value) for name, value in inner]
    return found


def cpp_type(dtype: str) -> str:
    """The element type of a dtype in kernels."""
    return _CPP_TYPES.get(dtype) or ("bool" if dtype == "bool" else f"{dtype}_t")


def _start_of_call(text: str) -> int:
    """Where the parentheses open that the text ends with; -1 where it does not."""
    depth = 0
    for i in range(len(text) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(text[i], 0)
        if depth == 0:
            return i if text[i] == "(" else -1
    return -1


def _function(text: str) -> tuple[str, ...] | None:
    """``a::B<T>::run`` as ("a::B", "<T>", "::run"); None for what is no name of a function."""
    parts, part, angles, others = [], "", 0, 0
    for c in text:
        others += {"(": 1, ")": -1}.get(c, 0)
        if c == "<" and not others:
            if not angles:
                parts.append(part)
                part = ""
            angles += 1
        part += c
        if c == ">" and not others:
            angles -= 1
            if not angles:
                parts.append(part)
                part = ""
    if part:
        parts.append(part)
    parts = [re.sub(r"\s+", "", part) if i % 2 == 0 else part for i, part in enumerate(parts)]
    is_name = [re.fullmatch(r"(?:::)?[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*", part) is not None for part in parts[::2]]
    is_apart = all(part.startswith("::") for part in parts[2::2])
    return tuple(parts) if parts and not angles and not others and all(is_name) and is_apart else None


def _elements(text: str) -> list[ast.expr] | None:
    """Of a list of arguments; a struct is a call of ``_STRUCT`` with its fields by name."""
    called = re.sub(r"\.\s*([A-Za-z_]\w*)\s*=(?!=)", r"\1=", text.replace("{", f"{_STRUCT}(").replace("}", ")"))
    try:
        call = ast.parse(f"f({' '.join(called.split())})", mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.keywords:
        return None
    for node in ast.walk(call):
        if isinstance(node, ast.Call) and node is not call and (node.keywords if fields(node) is None else node.args):
            return None
    return call.args


def _substituted(text: str, values: dict[str, Any]) -> str:
    """Template arguments with what their names stand for; ``mpk::T`` is no such name."""

    def replace(match: re.Match[str]) -> str:
        value = values.get(match[0])
        if value is None:
            return match[0]
        is_alone = text[: match.start()].rstrip()[-1:] in "<," and text[match.end() :].lstrip()[:1] in ",>"
        return _cpp(value, is_alone)

    return re.sub(r"(?<![\w:.])[A-Za-z_]\w*", replace, text)


def _cpp(value: Any, is_alone: bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        # Of a float or a double, whichever the parameter is: C++ makes neither of the other.
        return f"mpk::jit::Number{{{_literal(value)}}}" if is_alone else f"({_literal(value)})"
    if isinstance(value, int):
        return str(value) if value >= 0 else f"({value})" if value > -(2**63) else f"({value + 1} - 1)"
    return cpp_type(value)


def _literal(value: float) -> str:
    sign = "-" * (math.copysign(1, value) < 0)
    if math.isfinite(value):
        return value.hex()
    return sign + ("__builtin_inf()" if math.isinf(value) else '__builtin_nan("")')


def split(text: str) -> Iterator[str]:
    """The launches of a text, which stand one behind the other as statements."""
    for part in text.split(";"):
        if part.strip():
            yield part.strip()
