"""Quantised linears that other packages have as modules of their own.

Where Dynamo traces for this backend, a module whose numbers stand as in its checkpoint is ``quantized_linear`` of these
numbers. Others keep their package's forward, and a warning names the class, the reason and the first such module. Calls
outside of ``torch.compile`` stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_mpk.capture.expert_loops import is_traced_for_us
from torch_mpk.warn_once import warn


@functools.cache
def constants() -> tuple[Callable[[], bool], Callable[[str, str], None]]:
    """``is_traced_for_us`` and ``announce`` as Dynamo calls them itself while it traces. To mark them imports it."""
    mark = torch.compiler.assume_constant_result
    return mark(lambda: is_traced_for_us()), mark(lambda kind, why: announce(kind, why))


def take(cls: Any, refuses: Callable[[Any], str], product: Callable[[Any, Tensor], Tensor] | None = None) -> None:
    """Has Dynamo trace ``product`` as the class's forward, where ``refuses`` has no reason against a module."""
    known = cls.forward
    is_ours, tell = constants()
    kind = f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}"

    @functools.wraps(known)
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() or not is_ours():
            return known(self, x, *args, **kwargs)
        why = refuses(self)
        if why:
            tell(kind, why)
        return known(self, x, *args, **kwargs) if why or product is None else product(self, x)

    cls.forward = forward


def leave(module: Any, names: Iterable[str], why: str) -> None:
    """Has the linears of these names, of a module that has been imported, say why their forward is their package's."""
    for name in names:
        if hasattr(module, name):
            take(getattr(module, name), lambda _: why)


def announce(kind: str, why: str) -> None:
    """Says once for each class and reason that modules keep their forward, while the first of them is traced."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    from torch_mpk.capture.foreign import path_of

    tx: Any = InstructionTranslator.current_tx().output.current_tx  # of the call that is inlined
    stack = list(tx.nn_module_stack.values())
    path = path_of(stack[-1][0]) if stack else ""
    text = f"torch_mpk leaves linears of class {kind} to their package: {why}"
    warn(f"{text} (the first is {path})" if path else text, key=text)


def product(x: Tensor, rows: int, *operands: Tensor | None, **attrs: int) -> Tensor:
    """``quantized_linear`` of an x with any dimensions. ``rows``: of the weight."""
    y = torch.ops.mpk.quantized_linear(x.reshape(-1, x.shape[-1]), *operands, **attrs)
    return y.reshape(x.shape[:-1] + (rows,))
