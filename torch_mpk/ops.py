"""``torch.ops.mpk.<task>``: every declared task as a ``torch.library`` operator, generated from the registry.

Where a task's result is as large as its first operand, ``torch.ops.mpk.<task>_`` writes it there and returns nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import string
from collections.abc import Callable
from typing import Any

import torch

import torch_mpk.tasks  # noqa: F401  (declares them)
from torch_mpk import registry
from torch_mpk.errors import NoDerivativeError
from torch_mpk.registry import Attr, Operand, Task

logger = logging.getLogger(__name__)
_library = torch.library.Library("mpk", "DEF")


def schema(task: Task) -> str:
    """The operator's schema: operands updated in place carry an alias annotation, attributes are keyword-only."""
    results = ", ".join(["Tensor"] * len(task.outputs))
    return f"{task.name}({_arguments(task)}) -> {results if len(task.outputs) == 1 else f'({results})'}"


def _arguments(task: Task, writes_first: bool = False) -> str:
    aliases = iter(string.ascii_lowercase)
    first, *others = task.inputs
    operands = [dataclasses.replace(first, is_write=first.is_write or writes_first), *others]
    arguments = [_argument(operand, aliases) for operand in operands]
    last_required = max((i for i, operand in enumerate(task.inputs) if not operand.optional), default=-1)
    arguments = [text if i <= last_required else f"{text}=None" for i, text in enumerate(arguments)]
    if task.attrs:
        arguments += ["*", *map(_attribute, task.attrs.values())]
    return ", ".join(arguments)


def _argument(operand: Operand, aliases) -> str:
    annotation = f"({next(aliases)}!)" if operand.is_write else ""
    return f"Tensor{annotation}{'?' if operand.optional else ''} {operand.name}"


def _attribute(attr: Attr) -> str:
    text = f"{attr.type.__name__} {attr.name}"
    return text if attr.required else f"{text}={attr.default!r}".replace("'", '"')


def has_in_place_form(task: Task) -> bool:
    """Whether the result has the first operand's dimensions, of a task that works on elements or rows."""
    is_like_first = [operand.dims for operand in task.outputs] == [task.inputs[0].dims]
    return is_like_first and not task.is_mutating and task.role in ("pointwise", "row", "reduce")


def _define(task: Task) -> None:
    eager = _in_its_kernel(task) if task.alone == "kernel" else _announced(task)
    _define_operator(task.name, schema(task), task, eager)
    if has_in_place_form(task):

        def in_place(first: torch.Tensor, *others: Any, **attrs: Any) -> None:
            task(first, *others, out=first, **attrs)

        _define_operator(f"{task.name}_", f"{task.name}_({_arguments(task, writes_first=True)}) -> ()", in_place)


def _in_its_kernel(task: Task) -> Callable[..., Any]:
    from torch_mpk.task_kernel import TaskKernel  # which takes operators' graphs through all stages

    return TaskKernel(task, or_reference=True)


def _announced(task: Task) -> Callable[..., Any]:
    """The task's reference, and a line in the log where code of a user's was perhaps expected."""
    if task.is_ours or not (task.cpu_body or task.header or task.headers):
        return task

    @functools.cache
    def say() -> None:
        logger.info(
            "torch.ops.mpk.%s runs the task's reference: its code runs in models that torch_mpk compiles, and alone by "
            "torch_mpk.kernel_of",
            task.name,
        )

    def eager(*operands: Any, **attrs: Any) -> Any:
        say()
        return task(*operands, **attrs)

    return eager


def _define_operator(
    name: str, schema: str, kernel: Callable[..., Any], eager: Callable[..., Any] | None = None
) -> None:
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, eager or kernel, "CompositeExplicitAutograd")
    _library.impl(name, _refusing_autograd(name), "Autograd", with_keyset=True)
    torch.library.register_fake(f"mpk::{name}", kernel, lib=_library)


def _refusing_autograd(name: str) -> Callable[..., Any]:
    """What stands in front of the operator's kernel where an operand may require grad."""
    op = getattr(torch.ops.mpk, name).default

    def call(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            raise NoDerivativeError(op=f"torch.ops.mpk.{name}")
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    return call


registry.subscribe(_define)
