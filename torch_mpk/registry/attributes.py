"""Attributes of tasks, read from the references that declare them."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch

from torch_mpk.errors import TaskError
from torch_mpk.signature import Operand

# Of each type that an attribute may have, those of its values: numpy's numbers and, while Dynamo traces, symbols too.
_VALUES: dict[type, tuple[type, ...]] = {
    float: (numbers.Real, torch.SymFloat, torch.SymInt),
    int: (numbers.Integral, torch.SymInt),
    bool: (bool, torch.SymBool),
    str: (str,),
}


@dataclass(frozen=True)
class Attr:
    """A compile-time constant of a task: a keyword-only parameter of its reference."""

    name: str
    type: type
    default: Any = inspect.Parameter.empty

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    def takes(self, value: object) -> bool:
        return isinstance(value, _VALUES[self.type]) and (self.type is bool or not isinstance(value, bool))


def read_attributes(name: str, reference: Callable[..., Any], inputs: Sequence[Operand]) -> dict[str, Attr]:
    """Raises TaskError where the reference takes other operands than the signature has."""
    parameters = inspect.signature(reference).parameters.values()
    try:
        hints = get_type_hints(reference)
    except (NameError, TypeError) as error:
        raise TaskError(f"{name}: the annotations of the reference cannot be read: {error}") from None
    starred = [str(p).split(":")[0] for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if starred:
        raise TaskError(f"{name}: the reference takes {starred[0]}, expected its operands and attributes by name")
    positional = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    if positional != [operand.name for operand in inputs]:
        raise TaskError(
            f"{name}: the reference's positional parameters {positional} must be the signature's operands "
            f"{[operand.name for operand in inputs]}; attributes are keyword-only"
        )
    attrs = {}
    for p in parameters:
        if p.kind is inspect.Parameter.KEYWORD_ONLY:
            if hints.get(p.name) not in _VALUES:
                known = ", ".join(each.__name__ for each in _VALUES)
                raise TaskError(f"{name}: attribute {p.name} needs one of the types {known}")
            if isinstance(p.default, float) and not math.isfinite(p.default):  # which an operator's schema cannot say
                raise TaskError(
                    f"{name}: attribute {p.name} is {p.default} by default, expected a finite number or none"
                )
            attrs[p.name] = Attr(p.name, hints[p.name], p.default)
    return attrs
