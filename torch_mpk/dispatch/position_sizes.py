"""Which sizes of a graph count a prompt's positions, and those of a window in front of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from torch_mpk.capture.aliasing import value
from torch_mpk.capture.graph import Captured
from torch_mpk.errors import UnsupportedError
from torch_mpk.patterns.rewriter import arguments, aten

if TYPE_CHECKING:
    import sympy  # type: ignore[import-untyped]


@dataclasses.dataclass(frozen=True)
class Window:
    """One of ``size`` positions that earlier calls have begun to fill: ``held`` of them, a number of the call."""

    size: int
    held: fx.Node


class PositionSizes:
    """The sizes of a graph over as many positions as ``symbol`` says.

    Attributes:
        windows: those that earlier calls have begun to fill, by slices of them, which are what they hold.
    """

    def __init__(self, symbol: sympy.Symbol, captured: Captured) -> None:
        self.symbol = symbol
        self.windows: dict[fx.Node, fx.Node] = {}
        self._held: dict[sympy.Expr, Window] = {}
        for node in captured.graph_module.graph.find_nodes(op="call_function", target=aten.slice.Tensor):
            self._note_window(node, arguments(node))
        # Each layer counts what its window holds. Where one mask serves all, a condition says that they hold the same.
        equal = {each.lhs - each.rhs for each in captured.conditions if each.is_Equality}
        for held, window in self._held.items():
            first, same = next(iter(self._held.items()))
            if window.size == same.size and {held - first, first - held} & equal:
                self._held[held] = same

    def _note_window(self, node: fx.Node, args: dict[str, Any]) -> None:
        size, taken = (value(each).shape[args["dim"]] for each in (args["self"], node))
        held, is_first = args["end"], args["start"] in (None, 0) and args["step"] == 1
        if not is_first or not isinstance(size, int) or not is_symbolic(taken) or self.is_number(taken):
            return
        if held.op == "placeholder":  # what stands before all that needs it
            self.windows[node] = args["self"]
            self._held.setdefault(taken.node.expr, Window(size, held))

    def is_number(self, node: Any) -> bool:
        """Whether it is the length, or computed from it."""
        number = value(node) if isinstance(node, fx.Node) else node
        return is_symbolic(number) and self.symbol in number.node.expr.free_symbols

    def ahead(self, node: Any) -> int | None:
        """How many more than the prompt's positions a number is at most: those of a window in front; None if it is not
        so."""
        if window := self.window(node):
            return window.size
        more = self._more(node)
        return int(more) if more is not None and more.is_Integer and more >= 0 else None

    def window(self, node: Any) -> Window | None:
        """The window of which a number counts what it holds, and the prompt's positions."""
        return self._held.get(self._more(node))

    def _more(self, node: Any) -> sympy.Expr | None:
        number: Any = value(node) if isinstance(node, fx.Node) else node
        return number.node.expr - self.symbol if self.is_number(number) else None

    def is_length(self, node: Any) -> bool:
        return self.ahead(node) == 0

    def dim(self, tensor: Any) -> int | None:
        """Which dimension of a tensor, or of a node's, has a prompt's positions, maybe behind those of a window; None
        where none has."""
        tensor = value(tensor) if isinstance(tensor, fx.Node) else tensor
        if not isinstance(tensor, torch.Tensor):
            return None
        dims = [d for d, n in enumerate(tensor.shape) if self.is_number(n)]
        if len(dims) > 1 or any(self.ahead(tensor.shape[d]) is None for d in dims):
            raise UnsupportedError(f"a tensor of shape {list(tensor.shape)} has positions not side by side")
        return dims[0] if dims else None

    def is_pair(self, tensor: Any) -> bool:
        """Whether a tensor, or a node's, has a number for each query and each key of a prompt: its last two sizes."""
        tensor = value(tensor) if isinstance(tensor, fx.Node) else tensor
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2 or any(map(self.is_number, tensor.shape[:-2])):
            return False
        return self.is_length(tensor.shape[-2]) and self.ahead(tensor.shape[-1]) is not None


def is_symbolic(number: Any) -> bool:
    return isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool))
