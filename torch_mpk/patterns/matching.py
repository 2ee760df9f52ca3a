"""Whether operations of a graph are those of a form: of a task's reference, traced.

What an operator takes by default counts as given, and arguments by what they mean: lists and tuples of the same are the
same, and so are an integer and a float where a float is taken.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from torch_mpk.capture.aliasing import tensors
from torch_mpk.patterns.rewriter import Rewriter, arguments, aten, is_call

_COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)
_FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}

# What a node of a traced reference is in the graph; by its name, what an attribute is there.
Match = dict[fx.Node | str, Any]


@dataclasses.dataclass(frozen=True)
class Form:
    """A reference as operations, made with ``attrs``, but for numbers in whose place stand-ins occur."""

    inputs: tuple[fx.Node | None, ...]  # None where an optional operand is absent
    outputs: tuple[fx.Node, ...]
    attrs: dict[str, Any]
    stand_ins: dict[float, str] = dataclasses.field(default_factory=dict)  # the attributes they stand for

    @property
    def num_operations(self) -> int:
        return sum(node.op == "call_function" for node in self.outputs[0].graph.nodes)

    def key(self) -> str:
        """The same for forms that match the same."""
        return f"{self.inputs}{self.outputs}{self.attrs}{self.outputs[0].graph}"


class Matching:
    """The comparison of a form's operations with a graph's. Numbers count only where it is exact.

    Attributes:
        furthest, why: what matched in the attempt that went furthest, and what ended it.
    """

    def __init__(self, rw: Rewriter, form: Form, is_exact: bool = False) -> None:
        self.rw, self.form, self.is_exact = rw, form, is_exact
        self.furthest: Match = {}
        self.why = ""

    def match(self, template: fx.Node, found: fx.Node, match: Match) -> Match | None:
        """``match`` with what it takes for ``found`` to be ``template``; None where it is not."""
        if template in match:
            if self.rw.is_same_argument(match[template], found):
                return match
            return self._fail(match, f"{found.name} is not {match[template].name}, which its reference has twice")
        if template.op == "placeholder":
            return match | {template: found}
        if not is_call(found, template.target):
            return self._fail(match, f"{found.name} is {_operation(found)}, in its reference {_operation(template)}")
        match = match | {template: found}
        expected, given = arguments(template), arguments(found)
        if expected.keys() != given.keys():
            return self._fail(match, f"{found.name} has other arguments than {template.target} in its reference")
        for order in _orders(template, expected):
            inner: Match | None = match
            for name, each in order.items():
                inner = inner and self._match_argument(each, given[name], inner, found, name)
            if inner is not None:
                return inner
        return None

    def _match_argument(self, template: Any, found: Any, match: Match, node: fx.Node, name: str) -> Match | None:
        if isinstance(template, fx.Node) and isinstance(found, fx.Node):
            return self.match(template, found, match)
        if isinstance(template, (list, tuple)) and isinstance(found, (list, tuple)) and len(template) == len(found):
            inner: Match | None = match
            for each, given in zip(template, found, strict=True):
                inner = inner and self._match_argument(each, given, inner, node, name)
            return inner
        attr = self.form.stand_ins.get(template) if isinstance(template, float) else None
        if attr is not None:
            is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
            if is_number and _is_same_number(match.get(attr, float(found)), float(found)):
                return match | {attr: float(found)}
        elif not any(isinstance(each, (fx.Node, list, tuple)) for each in (template, found)) and (
            not self.is_exact or _is_same(template, found, node, name)
        ):
            return match
        reference = attr or (_operation(template) if isinstance(template, fx.Node) else repr(template))
        return self._fail(match, f"{name} of {node.name} ({node.target}) is {found!r}, in its reference {reference}")

    def _fail(self, match: Match, why: str) -> Match | None:
        """No match: None."""
        if len(match) > len(self.furthest) or not self.why:
            self.furthest, self.why = match, why
        return None


def _operation(node: fx.Node) -> str:
    return f"a result of {node.target}" if node.op == "call_function" else "an operand"


def _orders(node: fx.Node, given: dict[str, Any]) -> list[dict[str, Any]]:
    """The arguments of a call, and where that makes no difference the first two exchanged."""
    if node.target not in _COMMUTATIVE or given.get("alpha", 1) != 1:
        return [given]
    return [given, given | {"self": given["other"], "other": given["self"]}]


def _is_same(a: Any, b: Any, node: fx.Node, name: str) -> bool:
    """Whether an operator does the same with both as its argument ``name``."""
    if not all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (a, b)):
        return type(a) is type(b) and a == b
    return (type(a) is type(b) or _takes_floats(node, name)) and _is_same_number(a, b)


def _is_same_number(a: float, b: float) -> bool:
    return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)


def _takes_floats(node: fx.Node, name: str) -> bool:
    """Whether an argument is a float, or a number that becomes one: beside tensors of floats and masks, and with no say
    in the result's dtype."""
    [declared] = [each for each in node.target._schema.arguments if each.name == name]
    kind = declared.type
    while kind.kind() in ("OptionalType", "ListType"):
        kind = kind.getElementType()
    if kind.kind() not in ("NumberType", "TensorType"):  # a tensor's place takes a number, too
        return kind.kind() == "FloatType"
    dtypes = {t.dtype for each in (node, *node.all_input_nodes) for t in tensors(each)}
    return all(t.dtype.is_floating_point for t in tensors(node)) and dtypes <= _FLOATS | {torch.bool}
