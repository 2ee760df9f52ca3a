"""``torch.ops.mpk.<task>``: every declared task as a ``torch.library`` operator, generated from the registry."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import torch

import torch_mpk.tasks  # noqa: F401  (declares them)
from torch_mpk import registry
from torch_mpk.errors import NoDerivativeError
from torch_mpk.registry import Attr, Operand, Task

_library = torch.library.Library("mpk", "DEF")


def schema(task: Task) -> str:
    """The operator's schema: operands updated in place carry an alias annotation, attributes are keyword-only."""
    aliases = iter(string.ascii_lowercase)
    arguments = [_argument(operand, aliases) for operand in task.inputs]
    last_required = max((i for i, operand in enumerate(task.inputs) if not operand.optional), default=-1)
    arguments = [text if i <= last_required else f"{text}=None" for i, text in enumerate(arguments)]
    if task.attrs:
        arguments += ["*", *map(_attribute, task.attrs.values())]
    results = ", ".join(["Tensor"] * len(task.outputs))
    return f"{task.name}({', '.join(arguments)}) -> {results if len(task.outputs) == 1 else f'({results})'}"


def _argument(operand: Operand, aliases) -> str:
    annotation = f"({next(aliases)}!)" if operand.is_write else ""
    return f"Tensor{annotation}{'?' if operand.optional else ''} {operand.name}"


def _attribute(attr: Attr) -> str:
    text = f"{attr.type.__name__} {attr.name}"
    return text if attr.required else f"{text}={attr.default!r}".replace("'", '"')


def _define(task: Task) -> None:
    _library.define(schema(task), tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(task.name, task, "CompositeExplicitAutograd")
    _library.impl(task.name, _refusing_autograd(task), "Autograd", with_keyset=True)
    torch.library.register_fake(f"mpk::{task.name}", task, lib=_library)


def _refusing_autograd(task: Task) -> Callable[..., Any]:
    """What stands in front of the operator's kernel where an operand may require grad."""
    op = getattr(torch.ops.mpk, task.name).default

    def call(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            raise NoDerivativeError(op=f"torch.ops.mpk.{task.name}")
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    return call


registry.subscribe(_define)
