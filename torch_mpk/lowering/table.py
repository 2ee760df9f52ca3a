"""Which rule lowers which ATen operation. The rules are in ``rules/`` and enter themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

Rule = Callable[..., Any]  # (lowerer, node, *args, **kwargs) -> the node's value
RULES: dict[torch._ops.OpOverload, Rule] = {}


def rule(*targets: torch._ops.OpOverload | Mapping[torch._ops.OpOverload, Any]) -> Callable[[Rule], Rule]:
    """Enters a function as the rule of operations.

    Where one function lowers several that compute different things, a mapping says of each what it is, and the function
    takes that as its third argument. Rules never look at ``node.target``: it may be the in-place form of the operation
    that they are for, or a composite that contains it, and whatever they do not know would pass for something they do.
    """

    def register(fn: Rule) -> Rule:
        for target in targets:
            if isinstance(target, Mapping):
                RULES.update({each: _rule_of(fn, what) for each, what in target.items()})
            else:
                RULES[target] = fn
        return fn

    return register


def _rule_of(fn: Rule, what: Any) -> Rule:
    @functools.wraps(fn)
    def lower(lx: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
        return fn(lx, node, what, *args, **kwargs)

    return lower
