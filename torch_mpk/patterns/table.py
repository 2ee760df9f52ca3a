"""The table that ``@pattern`` fills."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

if TYPE_CHECKING:
    from torch_mpk.patterns.rewriter import Rewriter

Pattern = Callable[["Rewriter", fx.Node], "fx.Node | None"]

_patterns: dict[Any, list[Pattern]] = defaultdict(list)


def pattern(*ops: Any, first: bool = False) -> Callable[[Pattern], Pattern]:
    """Try the decorated function on every node that calls one of ``ops``, ``first`` or after those declared before."""

    def declare(function: Pattern) -> Pattern:
        for op in ops:
            _patterns[op].insert(0 if first else len(_patterns[op]), function)
        return function

    return declare


def withdraw(function: Pattern | None) -> None:
    """A pattern is tried no more."""
    for functions in _patterns.values():
        if function in functions:
            functions.remove(function)


def patterns() -> list[Pattern]:
    """Every pattern there is."""
    return [function for functions in _patterns.values() for function in functions]


def patterns_of(node: fx.Node) -> Sequence[Pattern]:
    return _patterns.get(node.target, ()) if node.op == "call_function" else ()
