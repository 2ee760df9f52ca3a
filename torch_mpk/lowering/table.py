"""Which rule lowers which ATen operation. The rules are in ``rules/`` and enter themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Rule = Callable[..., Any]  # (lowerer, node, *args, **kwargs) -> the node's value
RULES: dict[torch._ops.OpOverload, Rule] = {}


def rule(*targets: torch._ops.OpOverload) -> Callable[[Rule], Rule]:
    def register(fn: Rule) -> Rule:
        for target in targets:
            RULES[target] = fn
        return fn

    return register
