"""Patterns that tasks bring along: one declared with ``pattern=True`` stands for the operations of its reference.

The reference is traced on each sample. Where a graph has operations of that structure, whatever their numbers, it is
traced again, on the operands found there; only if that gives exactly what the graph has does the task take its place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_mpk import registry
from torch_mpk.aliasing import value, written_args
from torch_mpk.errors import TaskError
from torch_mpk.patterns.normalise import normalise
from torch_mpk.patterns.rewriter import Rewriter, aten, is_call, is_tensor, shape
from torch_mpk.patterns.table import pattern
from torch_mpk.registry import Task
from torch_mpk.tracing import make_fx

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # a cast may be none in one of them
_COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)

# What a node of a traced reference is in the graph; by its name, what an attribute is there.
Match = dict[fx.Node | str, Any]


@dataclasses.dataclass(frozen=True)
class Form:
    """A reference as operations, made with ``attrs``, but for numbers in whose place stand-ins occur."""

    inputs: tuple[fx.Node | None, ...]  # None where an optional operand is absent
    output: fx.Node
    attrs: dict[str, Any]
    stand_ins: dict[float, str]  # the attributes they stand for


def declare_patterns() -> None:
    """Enter the tasks declared since the last call into the table of patterns."""
    for task in registry.tasks():
        if task.pattern:
            _declare(task)


@functools.cache
def _declare(task: Task) -> None:
    forms = list(_forms(task))

    def lift(rw: Rewriter, node: fx.Node) -> fx.Node | None:
        lifted = (_lift(rw, node, task, form) for form in forms if is_call(node, form.output.target))
        return next(filter(None, lifted), None)

    lift.__name__, lift.__module__ = task.name, task.__module__
    pattern(*{form.output.target for form in forms}, first=True)(lift)


def _forms(task: Task) -> Iterator[Form]:
    stand_ins = {0.7182818 + i: name for i, (name, attr) in enumerate(task.attrs.items()) if attr.type is float}
    replaced = {name: number for number, name in stand_ins.items()}
    for sample in task.samples:
        for dtype in _DTYPES:
            with FakeTensorMode():
                operands, attrs = task.sample(sample, dtype)
                form = _trace(task, operands, attrs | replaced)
            yield dataclasses.replace(form, attrs=attrs, stand_ins=stand_ins)


def _trace(task: Task, operands: Sequence[torch.Tensor | None], attrs: dict[str, Any]) -> Form:
    def call(*present: torch.Tensor) -> Any:
        given = iter(present)
        return task.reference(*(None if t is None else next(given) for t in operands), **attrs)

    present = [t for t in operands if t is not None]
    with torch.no_grad():
        graph = make_fx(call, pre_dispatch=True, tracing_mode="real", _allow_non_fake_inputs=True)(*present).graph
    if any(map(written_args, graph.nodes)):
        raise TaskError(f"{task.name}: its reference writes in place, which a pattern cannot stand for")
    normalise(graph)
    placeholders = iter(graph.find_nodes(op="placeholder"))
    [output] = graph.find_nodes(op="output")
    return Form(tuple(None if t is None else next(placeholders) for t in operands), output.args[0], attrs, {})


def _lift(rw: Rewriter, node: fx.Node, task: Task, form: Form) -> fx.Node | None:
    match = _match(form, form.output, node, {}, is_exact=False)
    if match is None:
        return None
    operands = [None if t is None else match.get(t) for t in form.inputs]
    attrs = form.attrs | {name: match[name] for name in form.stand_ins.values() if name in match}
    given = [operand for operand in operands if operand is not None]
    if len(given) != sum(t is not None for t in form.inputs) or not all(map(is_tensor, given)):
        return None
    if any(None in shape(operand) for operand in given):
        return None
    try:
        with rw.fake_mode:
            again = _trace(task, [None if t is None else value(t) for t in operands], attrs)
    except (RuntimeError, TypeError, ValueError):  # a reference that cannot take these operands
        return None
    found = {t: operand for t, operand in zip(again.inputs, operands, strict=True) if t is not None}
    match = _match(again, again.output, node, found, is_exact=True)
    if match is None:
        return None
    rw.see(
        *(seen for template, seen in match.items() if isinstance(template, fx.Node) and template not in again.inputs)
    )
    try:
        return rw.task(task.name, *operands, **attrs)
    except TaskError:  # shapes that the signature does not allow
        return None


def _match(form: Form, template: Any, found: Any, match: Match, *, is_exact: bool) -> Match | None:
    """``match`` with what it takes for ``found`` to be ``template``; None where it is not. Numbers count if exact."""
    if isinstance(template, fx.Node):
        if template in match:
            return match if match[template] is found else None
        if not isinstance(found, fx.Node):
            return None
        if template.op == "placeholder":
            return match | {template: found}
        if template.op != "call_function" or not is_call(found, template.target):
            return None
        if template.kwargs.keys() != found.kwargs.keys():
            return None
        pairs = [*template.kwargs.values()], [*(found.kwargs[name] for name in template.kwargs)]
        orders = [template.args]
        if template.target in _COMMUTATIVE:
            orders.append((template.args[1], template.args[0], *template.args[2:]))
        for args in orders:
            inner = _match_all(form, (*args, *pairs[0]), (*found.args, *pairs[1]), match, is_exact=is_exact)
            if inner is not None:
                return inner | {template: found}
        return None
    if isinstance(found, fx.Node):
        return None
    if isinstance(template, (list, tuple)) and isinstance(found, (list, tuple)):
        return _match_all(form, template, found, match, is_exact=is_exact)
    if isinstance(template, float) and template in form.stand_ins and isinstance(found, (int, float)):
        name = form.stand_ins[template]
        return match | {name: float(found)} if match.get(name, found) == found else None
    if is_exact and (type(template) is not type(found) or template != found):
        return None
    return match


def _match_all(
    form: Form, templates: Sequence[Any], found: Sequence[Any], match: Match, *, is_exact: bool
) -> Match | None:
    if len(templates) != len(found):
        return None
    for template, each in zip(templates, found, strict=True):
        inner = _match(form, template, each, match, is_exact=is_exact)
        if inner is None:
            return None
        match = inner
    return match
