"""Patterns that tasks bring along: one declared with ``pattern=True`` stands for the operations of its reference.

The reference is traced on each sample, and with every choice of its optional operands. Where a graph has operations of
that structure, whatever their numbers, it is traced again, on the operands found there; only if that gives exactly what
the graph has does the task take its place. What an operator takes by default counts as given.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_mpk import registry
from torch_mpk.capture.aliasing import is_view, storages, value, written_args, written_storages
from torch_mpk.capture.graph import clean
from torch_mpk.capture.provenance import where
from torch_mpk.capture.tracing import make_fx
from torch_mpk.errors import TaskError, first_line
from torch_mpk.patterns.matching import Form, Match, Matching
from torch_mpk.patterns.normalise import normalise
from torch_mpk.patterns.rewriter import (
    CASTS,
    Rewriter,
    arguments,
    aten,
    has_same_layout,
    is_call,
    is_tensor,
    shape,
)
from torch_mpk.patterns.table import Pattern, pattern, withdraw
from torch_mpk.registry import Task
from torch_mpk.warn_once import warn

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # a cast may be none in one of them
_COPIES = (aten.contiguous.default, aten.clone.default, *CASTS)


@dataclasses.dataclass(frozen=True)
class Miss:
    """Operations that a task's pattern almost took, and why it did not."""

    task: str
    anchor: fx.Node  # the last of them
    why: str
    nodes: frozenset[fx.Node]  # that matched
    is_other: bool = False  # they have another structure than the reference: likely something else

    def __str__(self) -> str:
        task, place = registry.get(self.task), where(self.anchor)
        at = f"{self.anchor.name}{f' from {place}' if place else ''}"
        return f"the pattern of {self.task} ({task.place}) is not taken at {at}: {self.why}"


@functools.cache
def _refusals(task: Task) -> list[str]:
    """What the pattern of a task cannot stand for, and why: ``_forms`` fills it."""
    return []


def left_out(misses: Sequence[Miss], taken: Collection[str]) -> list[str]:
    """In words, what the patterns of tasks did not take though they were meant to, perhaps: the almost taken, in
    program order, and what patterns that were not ``taken`` cannot stand for."""
    told: list[Miss] = []
    for miss in misses:
        # Where a task was taken elsewhere, what has another structure is something else; and so is what is gone by now.
        is_something_else = miss.anchor._erased or (miss.is_other and miss.task in taken)
        if not is_something_else and not any(miss.task == m.task and miss.anchor in m.nodes for m in told):
            told.append(miss)
    unused = (task for task in registry.tasks() if task.pattern and task.name not in taken)
    refused = (_refused(task, why) for task in unused for why in _refusals(task))
    return list(dict.fromkeys([*map(str, reversed(told)), *refused]))


def _refused(task: Task, why: str) -> str:
    return f"the pattern of {task.name} ({task.place}) is not used: {why}"


_entered: dict[Task, Pattern | None] = {}  # None: the task's reference makes no pattern


def declare_patterns() -> None:
    """Enter the tasks declared since the last call into the table of patterns, and take hidden ones out."""
    shown = {task: None for task in registry.tasks() if task.pattern}
    for task in _entered.keys() - shown:
        withdraw(_entered.pop(task))
    for task in shown:
        if task not in _entered:
            _entered[task] = declare_pattern(task)


def declare_pattern(task: Task) -> Pattern | None:
    """Enter a task into the table of patterns; a warning says why where its reference makes none."""
    forms = list({form.key(): form for form in _forms(task)}.values())
    if not forms:
        warn(_refused(task, _refusals(task)[0]))
        return None

    def lift(rw: Rewriter, node: fx.Node) -> fx.Node | None:
        misses: list[Miss] = []
        for form in forms:
            lifted = _Lifting(rw, node, task, form, misses).run()
            if lifted is not None:
                return lifted
        if misses:
            rw.misses.append(max(misses, key=lambda miss: (not miss.is_other, len(miss.nodes))))
        return None

    lift.__name__, lift.__module__ = task.name, task.__module__
    pattern(*{output.target for form in forms for output in form.outputs}, first=True)(lift)
    return lift


def _forms(task: Task) -> Iterator[Form]:
    """The forms of its samples, then those with other optional operands left out; ``_refusals`` has what fails."""
    optional = [operand.name for operand in task.inputs if operand.optional]
    samples = list(task.samples)
    for left_out in itertools.chain.from_iterable(
        itertools.combinations(optional, n) for n in range(len(optional) + 1)
    ):
        for sample in task.samples:
            # Present operands need a dtype only where the sample gives one: absence is all that is changed.
            given = {name: each for name, each in sample.items() if each is not None or name not in optional}
            other = given | dict.fromkeys(left_out)
            if other not in samples:
                samples.append(other)
    for sample in samples:
        absent = [name for name in optional if sample.get(name, name) is None]
        for dtype in _DTYPES:
            try:
                yield _form(task, sample, dtype)
            except Exception as error:  # whatever a user's function raises
                why = error.args[0] if isinstance(error, _Refusal) else f"its reference raises {first_line(error)}"
                why = f"without {' and '.join(absent)} {why}" if absent else why
                if why not in _refusals(task):
                    _refusals(task).append(why)


class _Refusal(Exception):
    """Why the operations of a reference cannot be found in a graph."""


def _form(task: Task, sample: Mapping[str, Any], dtype: torch.dtype) -> Form:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    numbers = [attr.name for attr in task.attrs.values() if attr.type is float]
    stand_ins = {0.7182818 / (1 + i): name for i, name in enumerate(numbers)}
    with mode:
        operands, attrs = task.sample(sample, dtype)
    try:
        form = _trace(task, operands, attrs | {name: number for number, name in stand_ins.items()}, mode)
    except _Refusal:
        raise
    except Exception:  # a reference that checks its attributes
        return _trace(task, operands, attrs, mode)
    return dataclasses.replace(form, attrs=attrs, stand_ins=stand_ins)


def _trace(
    task: Task, operands: Sequence[torch.Tensor | None], attrs: dict[str, Any], mode: AbstractContextManager
) -> Form:
    """``mode`` is that of the operands, which are fake."""

    def call(*present: torch.Tensor) -> Any:
        given = iter(present)
        return task.results(task.reference(*(None if t is None else next(given) for t in operands), **attrs))

    present = [t for t in operands if t is not None]
    with torch.no_grad(), mode:
        traced = make_fx(call, pre_dispatch=True, tracing_mode="real", _allow_non_fake_inputs=True)(*present)
    clean(traced)
    graph = traced.graph
    if any(map(written_args, graph.nodes)):
        raise _Refusal("its reference writes in place")
    normalise(graph)
    if any(map(_draws, graph.nodes)):
        raise _Refusal("its reference draws random numbers")
    [output] = graph.find_nodes(op="output")
    outputs = tuple(output.args[0])
    placeholders = graph.find_nodes(op="placeholder")
    names = [spec.name for spec, t in zip(task.inputs, operands, strict=True) if t is not None]
    if graph.find_nodes(op="get_attr"):
        raise _Refusal("its reference has a tensor of its own, which a graph does not show")
    for spec, node in zip(task.outputs, outputs, strict=True):
        if storages(node) & frozenset().union(*map(storages, placeholders)):
            raise _Refusal(f"its reference returns {spec.name} as a view of an operand")
    for name, node in zip(names, placeholders, strict=True):
        if not node.users:
            raise _Refusal(f"its reference makes no use of {name}, so that nothing says what it is")
    given = iter(placeholders)
    return Form(tuple(None if t is None else next(given) for t in operands), outputs, attrs)


def _draws(node: fx.Node) -> bool:
    """Whether it draws random numbers; dropout of none does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return arguments(node).get("dropout_p") != 0


class _Lifting:
    """An attempt to lift the operations of a form that end at a node, which is one of its results."""

    def __init__(self, rw: Rewriter, node: fx.Node, task: Task, form: Form, misses: list[Miss]) -> None:
        self.rw, self.node, self.task, self.form, self.misses = rw, node, task, form, misses

    def run(self) -> fx.Node | None:
        for number in reversed(range(len(self.form.outputs))):
            if not is_call(self.node, self.form.outputs[number].target):
                continue
            matching = Matching(self.rw, self.form)
            for match in self._matches(matching, number):
                lifted = self._take(match, number)
                if lifted is not None:
                    return lifted
            if matching.why:
                self._miss(matching.why, matching.furthest, is_other=True)
        return None

    def _miss(self, why: str, match: Match, *, is_other: bool = False) -> None:
        """Note what keeps the task from being taken here, where half of its operations are there."""
        nodes = frozenset(node for t, node in match.items() if isinstance(t, fx.Node) and t.op == "call_function")
        if 2 * len(nodes) >= self.form.num_operations and (len(nodes) > 1 or not is_other):
            self.misses.append(Miss(self.task.name, self.node, why, nodes, is_other))

    def _matches(self, matching: Matching, number: int, match: Match | None = None) -> Iterator[Match]:
        """Ways to see the form in the graph, with the node as result ``number``, and the others where they are found:
        the nearest before the node first."""
        first = matching.match(matching.form.outputs[number], self.node, match or {})
        if first is not None:
            others = [output for i, output in enumerate(matching.form.outputs) if i != number]
            yield from self._with_others(matching, others, first)

    def _with_others(self, matching: Matching, others: Sequence[fx.Node], match: Match) -> Iterator[Match]:
        others = [output for output in others if output not in match]
        if not others:
            yield match
            return
        output, *rest = others
        taken = {match[each] for each in matching.form.outputs if each in match}
        candidate = self.node.prev
        while candidate.op != "root":
            if is_call(candidate, output.target) and candidate not in taken:
                found = matching.match(output, candidate, match)
                if found is not None:
                    yield from self._with_others(matching, rest, found)
            candidate = candidate.prev
        yield from self._with_others(matching, rest, match)

    def _take(self, match: Match, number: int) -> fx.Node | None:
        """A call of the task in the place of what matched but for its numbers, if the reference gives exactly that."""
        operands = [None if t is None else match.get(t) for t in self.form.inputs]
        attrs = self.form.attrs | {name: match[name] for name in self.form.stand_ins.values() if name in match}
        for spec, t, operand in zip(self.task.inputs, self.form.inputs, operands, strict=True):
            if t is not None and (operand is None or not is_tensor(operand)):
                self._miss(f"nothing there is {spec.name}", match)
                return None
            if operand is not None and None in shape(operand):
                self._miss(f"the size of {operand.name}, its {spec.name}, is known only at run time", match)
                return None
        try:
            values = [None if t is None else value(t) for t in operands]
            again = _trace(self.task, values, attrs, self.rw.fake_mode)
        except _Refusal as refusal:
            self._miss(f"on these operands {refusal}", match)
            return None
        except Exception as error:  # a reference that cannot take these operands
            self._miss(f"its reference raises {first_line(error)}", match)
            return None
        exactly = Matching(self.rw, again, is_exact=True)
        found = {t: operand for t, operand in zip(again.inputs, operands, strict=True) if t is not None}
        for exact in self._matches(exactly, number, found):
            lifted = self._replace(again, exact, operands, attrs)
            if lifted is not None:
                return lifted
        if exactly.why:
            self._miss(exactly.why, match)
        return None

    def _replace(
        self, form: Form, match: Match, operands: Sequence[fx.Node | None], attrs: dict[str, Any]
    ) -> fx.Node | None:
        rw, task = self.rw, self.task
        seen = {node for template, node in match.items() if isinstance(template, fx.Node)} - {*operands}
        results = {match[output]: i for i, output in reversed([*enumerate(form.outputs)]) if output in match}
        missing = [node for node in form.outputs[0].graph.nodes if node.op == "call_function" and node not in match]
        if any(not is_view(node) and not is_call(node, operator.getitem, *_COPIES) for node in missing):
            absent = [spec.name for spec, output in zip(task.outputs, form.outputs, strict=True) if output not in match]
            self._miss(f"nothing there is {' or '.join(absent)}", match)
            return None
        rw.begin(self.node)
        rw.see(*seen)
        rw.others = dict.fromkeys(each for each in results if each is not self.node)
        why = self._place(seen, results, operands)
        try:
            call = rw.task(task.name, *operands, **attrs) if why is None else None
        except TaskError as error:  # shapes that the signature does not allow
            why = str(error)
        if why is not None:
            self._refuse(why, match)
            return None
        items = {
            node: call if len(form.outputs) == 1 else rw.call(operator.getitem, call, i) for node, i in results.items()
        }
        for node, item in items.items():
            if not has_same_layout(item, node):
                spec = task.outputs[results[node]]
                self._refuse(
                    f"{node.name} has other strides or another dtype than its reference gives {spec.name}", match
                )
                return None
        lifted = items.pop(self.node)
        rw.others = items
        return lifted

    def _refuse(self, why: str, match: Match) -> None:
        self._miss(why, match)
        self.rw.rollback()
        self.rw.begin(self.node)

    def _place(
        self, seen: set[fx.Node], results: Mapping[fx.Node, int], operands: Sequence[fx.Node | None]
    ) -> str | None:
        """Choose where the call goes: before whatever reads a result first. Why there is no such place, or None."""
        rw = self.rw
        readers = {user for node in results for user in node.users if user not in seen or rw.survives(user)}
        rw.place = min([self.node, *(readers - {*results})])
        late = [operand.name for operand in operands if operand is not None and not operand < rw.place]
        if late:
            return f"{rw.place.name} reads one of its results before {late[0]} is there"
        if not rw.is_movable():
            return "something in between writes what its operations read"
        written = frozenset().union(*map(written_storages, rw.writers))
        kept = [node for node in seen if node not in results and rw.survives(node)]
        for node in results:
            others = [*kept, *(each for each in results if each is not node)]
            if storages(node) & written & frozenset().union(*map(storages, others)):
                return f"{node.name} shares memory with something else, and it is written in place"
        return None
