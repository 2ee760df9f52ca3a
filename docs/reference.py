"""Writes what follows from docstrings and declarations: pages of options, the API and errors, and the stub of layers.

``python docs/reference.py`` writes all of them.
"""

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
from torch_mpk import jit, registry
from torch_mpk.config import Environment, Options
from torch_mpk.errors import errors
from torch_mpk.persistent_kernel.task_layers import stub

_NOTE = "<!-- python docs/reference.py writes this page -->"
_SECTION = re.compile(r"^(Args|Returns|Raises|A call raises|Attributes):$")
_ABOUT_ERRORS = """\
Each is a class of `torch_mpk.errors`. While a graph is being compiled, `torch.compile` wraps an error in its own
`BackendCompilerFailed`, whose `inner_exception` it is. Braces stand for what the message fills in, … for what to do."""
_MISSING = "# docs/api_examples.py has none"
_EXPERIMENTS = Path(__file__).parent / "experiments"
_LINE = 100  # characters of a signature before its parameters stand one below the other


class _Text(str):
    """An annotation as it is written: ``inspect`` shows its ``repr``."""

    def __repr__(self) -> str:
        return str(self)


def files() -> dict[str, str]:
    """The text of each file, by its path in the repository."""
    return {
        "docs/options.md": _joined(_options()),
        "docs/api.md": _joined(_api()),
        "docs/errors.md": _joined(_errors()),
        "docs/experiments.md": _experiments(),
        "torch_mpk/persistent_kernel/task_layers.pyi": stub([task for task in registry.tasks() if task.is_ours]),
    }


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
    yield "Examples share names. They are of one file, `docs/api_examples.py`, which begins with"
    yield f"```python\n{examples()['']}\n```"
    public = {f"torch_mpk.{name}": getattr(torch_mpk, name) for name in torch_mpk.__all__}
    public |= {
        "torch_mpk.jit.kernel": jit.kernel,
        "torch_mpk.jit.module": jit.module,
        "torch_mpk.jit.by_device": jit.by_device,
    }
    for name, value in sorted(public.items(), key=lambda item: item[0].lower()):
        if inspect.ismodule(value) or (isinstance(value, type) and issubclass(value, BaseException)):
            continue
        yield f"## {name}"
        if dataclasses.is_dataclass(value):  # those are made by others
            yield _doc(value)
            shown = [field for field in dataclasses.fields(value) if field.repr and field.default != ()]
            yield "Fields: " + ", ".join(f"`{field.name}: {field.type}`" for field in shown) + "."
        else:
            yield _signature(name, value)
            yield _doc(value)
        yield f"For example:\n\n```python\n{examples().get(name, _MISSING)}\n```"
        yield from _members(name.rpartition(".")[2], value)


def _members(name: str, value: Any) -> Iterator[str]:
    for member, function in vars(value).items() if isinstance(value, type) else ():
        if not member.startswith("_") and isinstance(function, (FunctionType, property)) and function.__doc__:
            yield f"### {name}.{member}"
            if isinstance(function, FunctionType):
                yield _signature(member, function)
            else:
                yield f"`{member}: {inspect.signature(function.fget).return_annotation}`"  # type: ignore[arg-type]
            yield _doc(function)


def examples() -> dict[str, str]:
    """The example of each name of the API, and under "" what stands in front of all."""
    text = (Path(__file__).parent / "api_examples.py").read_text()
    front, *parts = re.split(r"^# (torch_mpk\.[\w.]+)\n", text.partition('"""\n\n')[2], flags=re.MULTILINE)
    return {"": front.strip()} | {
        name: code.strip().replace("  # noqa: N803", "") for name, code in zip(parts[::2], parts[1::2], strict=True)
    }


def _errors() -> Iterator[str]:
    yield "# Errors"
    yield _NOTE
    yield _ABOUT_ERRORS
    for cls in errors():
        yield f"## {cls.__name__}"
        bases = " and ".join(f"`{base.__name__}`" for base in cls.__bases__)
        summary = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
        yield f"Derived from {bases}. {summary}"
        message = cls.template.replace("{remedy}", "…")
        if message != "{what}":
            yield f"```text\n{message}\n```"
        if cls.remedy:
            yield f"What to do: {_capitalised(cls.remedy.rstrip('.'))}."


def _experiments() -> str:
    """The page's introduction as it is, and a table of the entries, which say in one line each what stands in it."""
    introduction, mark, _ = _EXPERIMENTS.with_suffix(".md").read_text().partition("from the entries -->\n")
    lines = ["| date | part | experiment | effect | kept | commit |", "|---|---|---|---|---|---|"]
    entries = []
    for page in _EXPERIMENTS.glob("*.md"):
        for heading, short in re.findall(r"^## (.*)\n\n- \*\*In short\*\*: (.*)$", page.read_text(), re.MULTILINE):
            part, effect, kept, date, commit = short.split(" | ")
            link = f"[{heading}](experiments/{page.name}#{anchor(heading)})"
            entries.append((date, page.name, f"| {date} | {part} | {link} | {effect} | {kept} | `{commit}` |"))
    entries.sort(key=lambda entry: entry[:2])  # those of a day and a page in the page's order
    return introduction + mark + "\n" + "\n".join([*lines, *(line for _, _, line in entries)]) + "\n"


def anchor(heading: str) -> str:
    """The fragment of a heading, as mkdocs and GitHub make it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


def _capitalised(sentence: str) -> str:
    """With a capital in front, unless code stands there."""
    first = sentence.split()[0]
    return sentence[0].upper() + sentence[1:] if first.isalpha() else sentence


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
    for name, text in files().items():
        (Path(__file__).parents[1] / name).write_text(text)
