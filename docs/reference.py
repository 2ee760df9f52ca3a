"""Writes the pages of options and of the Python API from docstrings: ``python docs/reference.py``."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import torch_mpk
from torch_mpk import jit
from torch_mpk.config import Environment, Options
from torch_mpk.explain import Report
from torch_mpk.profile import KernelTimes, Profile, TaskTimes

_NOTE = "<!-- python docs/reference.py writes this page -->"
_SECTION = re.compile(r"^(Args|Returns|Raises):$")
_LINE = 100  # characters of a signature before its parameters stand one below the other


class _Text(str):
    """An annotation as it is written: ``inspect`` shows its ``repr``."""

    def __repr__(self) -> str:
        return str(self)


def pages() -> dict[str, str]:
    """The text of each page, by its file name."""
    return {"options.md": _joined(_options()), "api.md": _joined(_api())}


def _joined(blocks: Iterator[str]) -> str:
    return "\n\n".join([*blocks]) + "\n"


def _options() -> Iterator[str]:
    yield "# Options and environment variables"
    yield _NOTE
    yield "## Options"
    yield _doc(Options)
    for field, text in _fields(Options):
        yield f"### {field.target.id}\n\n`{ast.unparse(field)}`\n\n{text}"
    yield "## Environment variables"
    yield _doc(Environment)
    for member in vars(Environment).values():
        if isinstance(member, property):
            name, _, text = _doc(member).partition(": ")
            yield f"### {name}\n\n{text[0].upper()}{text[1:]}"


def _fields(cls: type) -> Iterator[tuple[ast.AnnAssign, str]]:
    """The fields of a dataclass with the texts below them."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(cls)).body if isinstance(node, ast.ClassDef))
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            yield field, inspect.cleandoc(text.value.value)


def _api() -> Iterator[str]:
    yield "# Python API"
    yield _NOTE
    yield "Errors have [a page](errors.md) of their own, and single kernels [another](jit.md)."
    public = {f"torch_mpk.{name}": getattr(torch_mpk, name) for name in torch_mpk.__all__}
    public |= {
        "torch_mpk.explain.Report": Report,
        "torch_mpk.jit.kernel": jit.kernel,
        "torch_mpk.jit.module": jit.module,
        "torch_mpk.profile.KernelTimes": KernelTimes,
        "torch_mpk.profile.Profile": Profile,
        "torch_mpk.profile.TaskTimes": TaskTimes,
    }
    for name, value in sorted(public.items(), key=lambda item: item[0].lower()):
        if inspect.ismodule(value) or (isinstance(value, type) and issubclass(value, BaseException)):
            continue
        yield f"## {name}"
        if not dataclasses.is_dataclass(value):  # those are made by others
            yield _signature(name, value)
        yield _doc(value)
        for member, function in vars(value).items() if isinstance(value, type) else ():
            if not member.startswith("_") and isinstance(function, (FunctionType, property)) and function.__doc__:
                yield f"### {name.rpartition('.')[2]}.{member}"
                if isinstance(function, FunctionType):
                    yield _signature(member, function)
                yield _doc(function)


def _signature(name: str, function: Any) -> str:
    """How it is called, in a line, or where that is long with a line for each parameter."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=_Text(p.annotation)) for p in signature.parameters.values() if p.name != "self"]
    result = "" if isinstance(function, type) else f" -> {signature.return_annotation}"
    text = f"{name}{signature.replace(parameters=parameters, return_annotation=signature.empty)}{result}"
    if len(text) > _LINE:
        shown = [str(parameter) for parameter in parameters]
        is_keyword = [parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters]
        if True in is_keyword and not any(each.startswith("*") for each in shown):
            shown.insert(is_keyword.index(True), "*")
        text = "\n".join([f"{name}(", *(f"    {each}," for each in shown), f"){result}"])
    return f"```python\n{text}\n```"


def _doc(documented: Any) -> str:
    """A docstring as Markdown: what stands below ``Args:`` and the like becomes a list."""
    lines: list[str] = []
    is_list = False
    for line in (inspect.getdoc(documented) or "").splitlines():
        if _SECTION.match(line):
            is_list = True
            lines += [line, ""]
        elif is_list and re.match(r" {4}\S", line):
            lines.append("- " + re.sub(r"^([\w, ]+): ", r"`\1`: ", line.strip()))
        elif is_list and line.startswith(" "):
            lines.append(f"  {line.strip()}")
        else:
            is_list = is_list and not line
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    for name, text in pages().items():
        (Path(__file__).parent / name).write_text(text)
