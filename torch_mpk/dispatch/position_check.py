"""Whether a graph over a prompt's positions stays right for them with padding in front.

What stands at a padded position is nobody's, so no other may depend on it: every operation is checked to make each
position of what that position alone holds. The padding is made by ``padding.py``, by what the check finds on its way.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from torch_mpk.capture.aliasing import is_scalar, storages, tensors, value, written_storages
from torch_mpk.capture.graph import Captured
from torch_mpk.dispatch.position_sizes import PositionSizes, is_symbolic
from torch_mpk.errors import UnsupportedError
from torch_mpk.patterns.rewriter import CASTS, RESHAPES, arguments, aten, is_call

if TYPE_CHECKING:
    import sympy  # type: ignore[import-untyped]

PADDED = -(2**30)  # the number of a padded position; no cache has as many, so a counter added leaves it below 0


@dataclasses.dataclass(frozen=True)
class Result:
    """A result that has positions: the dimension of them, and whether eager's has no gaps."""

    index: int
    dim: int
    is_contiguous: bool


class PositionCheck(PositionSizes):
    """Goes through a graph in program order and raises UnsupportedError where positions would not stay apart.

    Attributes:
        results: those of the graph that have positions.
        counted: nodes that number the positions from 0 on.
        tables: slices of the first rows of something, one for each position, and the dimensions of these rows.
        first: nodes that take the first position.
        sized: nodes to which the number of positions is a size, rather than a value.
        chosen: nodes that look something up for each position, by numbers that padded ones have none of.
        joined: what a window holds, and the positions behind it.
        attending: attention to the prompt's own keys, and softmax of its scores: padded keys are to be hidden from it.
        weights: what such softmax gives, 0 for padded keys.
    """

    def __init__(self, symbol: sympy.Symbol, captured: Captured) -> None:
        super().__init__(symbol, captured)
        self.results: list[Result] = []
        self.counted: set[fx.Node] = set()
        self.tables: dict[fx.Node, int] = {}
        self.first: set[fx.Node] = set()
        self.sized: set[fx.Node] = set()
        self.chosen: set[fx.Node] = set()
        self.joined: set[fx.Node] = set()
        self.attending: set[fx.Node] = set()
        self.weights: set[fx.Node] = set()
        self._inputs: frozenset[int] = frozenset()  # storages of those that have positions
        self._outside: set[fx.Node] = set()  # numbers of positions, far below 0 at padded ones

    def visit(self, node: fx.Node) -> None:
        if node.op == "call_function" and any(map(self.is_pair, (node, *node.all_input_nodes))):
            self._visit_pairs(node)
            return
        dims = [self.dim(t) for t in tensors(node)]
        if node.op == "placeholder":
            for dim in dims:
                self._expect_own(node, dim)
                self._inputs |= storages(node) if dim is not None else frozenset()
        elif node.op == "output":
            self._finish(node)
        elif not is_scalar(node) and node.op != "get_attr":
            numbers = [n for n in node.all_input_nodes if self.is_number(n)]
            if numbers or any(d is not None for d in (*dims, *map(self.dim, node.all_input_nodes))):
                self._visit_call(node, bool(numbers))

    def _visit_pairs(self, node: fx.Node) -> None:
        """Masks and scores of attention to the prompt's own keys."""
        if any(map(self.is_number, node.all_input_nodes)):
            self._expect_size(node)
        if node.target in _PAIRED:
            _PAIRED[node.target](self, node, arguments(node))
        elif not _is_pointwise(node) and node.target not in _PAIR_VIEWS or written_storages(node):
            raise UnsupportedError("it may mix a prompt's positions")
        is_cut = is_call(node, aten.slice.Tensor) and self._ahead_of_keys(node) != self._ahead_of_keys(node.args[0])
        if is_cut or not self.is_pair(node) and node.target not in (*_PAIRED,):
            raise UnsupportedError("it reshapes positions into others")
        if node.target in (*CASTS, aten.dropout.default) and node.args[0] in self.weights:
            self.weights.add(node)

    def _visit_call(self, node: fx.Node, has_numbers: bool) -> None:
        if written_storages(node) & frozenset().union(*map(storages, self._outside)):
            raise UnsupportedError("it writes to the numbers of positions")
        is_pointwise = _is_pointwise(node)
        if is_call(node, aten.arange.default, aten.arange.start):
            args = arguments(node)
            if args.get("start", 0) != 0 or self.ahead(args["end"]) is None:
                raise UnsupportedError("it counts from or to other numbers than the prompt's length")
            self.counted.add(node)
            self._outside.add(node)
        elif is_call(node, aten.slice.Tensor) and self._is_table(node, arguments(node)):
            self.tables[node] = arguments(node)["dim"] % _rank(node)
            return
        elif has_numbers and not is_pointwise:
            self._expect_size(node)
        rule = _RULES.get(node.target)
        if rule is not None:
            rule(self, node, arguments(node))
        elif not is_pointwise and node.target is not operator.getitem:
            raise UnsupportedError("it may mix a prompt's positions")
        if self._is_outside(node):
            self._outside.add(node)

    def _is_table(self, node: fx.Node, args: dict[str, Any]) -> bool:
        """Whether it takes as many rows as there are positions, as models do of numbers and embeddings of positions."""
        return self.dim(args["self"]) is None and args["start"] in (None, 0) and self.is_length(args["end"])

    def _expect_size(self, node: fx.Node) -> None:
        name = _SIZES.get(node.target)
        for given, arg in arguments(node).items():
            numbers: list[fx.Node] = []
            fx.node.map_arg(arg, lambda n, found=numbers: found.append(n) if self.is_number(n) else None)
            if numbers and (given != name or any(self.ahead(n) is None for n in numbers)):
                raise UnsupportedError(f"its {given} is made from the length of the prompt")
        self.sized.add(node)

    def _is_outside(self, node: fx.Node) -> bool:
        """Whether a node's numbers are far below 0 at padded positions."""
        source, *others = node.args[:2] if node.args else (None,)
        if not isinstance(source, fx.Node) or source not in self._outside:
            return False
        if node.target in (*RESHAPES, *CASTS, aten.clone.default):
            return value(node).dtype in (torch.int32, torch.int64)
        if not is_call(node, aten.add.Tensor) or arguments(node)["alpha"] != 1:
            return False
        [added] = others
        if isinstance(added, int):
            return 0 <= added < -PADDED // 2
        tensor = value(added) if isinstance(added, fx.Node) else None
        return isinstance(tensor, torch.Tensor) and tensor.numel() == 1 and not tensor.dtype.is_floating_point

    def is_outside(self, node: fx.Node) -> bool:
        return node in self._outside

    def _expect_own(self, node: fx.Node, dim: int | None) -> None:
        if dim is not None and not self.is_length(value(node).shape[dim]):
            raise UnsupportedError("positions of a window go in or out with the prompt's")

    def _ahead_of_keys(self, node: fx.Node) -> int | None:
        return self.ahead(value(node).shape[-1])

    def _finish(self, node: fx.Node) -> None:
        for index, result in enumerate(node.args[0]):
            dim = self.dim(result) if isinstance(result, fx.Node) else None
            if dim is None:
                continue
            self._expect_own(result, dim)
            if storages(result) & self._inputs:
                raise UnsupportedError("a result is an input with the prompt's positions")
            self.results.append(Result(index, dim, value(result).is_contiguous()))


# ---- which operations keep positions apart ----

_SIZES = {  # -> the argument that is a shape
    aten.view.default: "size",
    aten.reshape.default: "shape",
    aten._unsafe_view.default: "size",
    aten.expand.default: "size",
    aten.ones.default: "size",
    aten.zeros.default: "size",
    aten.full.default: "size",
    aten.new_ones.default: "size",
    aten.new_zeros.default: "size",
    aten.new_full.default: "size",
}
_POINTWISE = (  # that are not tagged so
    *CASTS,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.Scalar,
    aten.__and__.Tensor,
    aten.__or__.Tensor,
    aten.floor_divide.default,
    aten.masked_fill_.Scalar,
    aten.copy_.default,
    aten.ones_like.default,
    aten.zeros_like.default,
    aten.full_like.default,
)
_ALONG = (  # along one dimension or several
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.amax.default,
    aten.amin.default,
    aten.var.correction,
    aten.argmax.default,
    aten.softmax.int,
    aten.log_softmax.int,
    aten.cumsum.default,
    aten.cat.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.unbind.int,
    aten.repeat_interleave.self_int,
)

_Rule = Callable[[PositionCheck, fx.Node, dict[str, Any]], None]
_RULES: dict[Any, _Rule] = {}


def _is_pointwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return node.target in _POINTWISE or torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _rule(*targets: Any) -> Callable[[_Rule], _Rule]:
    def enter(rule: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(targets, rule))
        return rule

    return enter


def _rank(node: fx.Node) -> int:
    return len(value(node).shape)


@_rule(
    *(*_SIZES, aten.transpose.int, aten.permute.default, aten.t.default, aten.stack.default),
    *(aten.arange.default, aten.arange.start),
)
def _keeps(check: PositionCheck, node: fx.Node, args: dict[str, Any]) -> None:
    """Each position is what it was, or alike."""


@_rule(*RESHAPES)
def _reshape(check: PositionCheck, node: fx.Node, args: dict[str, Any]) -> None:
    before, after = check.dim(node.args[0]), check.dim(node)
    if before is None or after is None:
        raise UnsupportedError("it reshapes positions into others")
    outer = [*value(node.args[0]).shape[:before], *value(node).shape[:after]]
    if any(map(is_symbolic, outer)) or math.prod(outer[:before]) != math.prod(outer[before:]):
        raise UnsupportedError("it reshapes positions into others")


@_rule(*_ALONG)
def _along(check: PositionCheck, node: fx.Node, args: dict[str, Any]) -> None:
    several = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
    if is_call(node, aten.cat.default):
        several = [each for each in several if value(each).shape != (0,)]  # what a cache begins with
        if len(several) == 1:
            return
        if _is_joined(check, node, several, args["dim"] % _rank(node)):
            check.joined.add(node)
            return
    dims = args.get("dim")
    for arg in several:
        dim = check.dim(arg)
        listed = dims if isinstance(dims, (list, tuple)) else [dims]
        if dim is not None and (not listed or any(d is None or d % _rank(arg) == dim for d in listed)):
            raise UnsupportedError("it works along the positions of a prompt")


def _is_joined(check: PositionCheck, node: fx.Node, several: Sequence[fx.Node], dim: int) -> bool:
    """Whether it is what a window holds, and a prompt's positions behind it."""
    if [check.dim(each) for each in several] != [None, dim] or not check.is_length(value(several[1]).shape[dim]):
        return False
    window, whole = check.window(value(node).shape[dim]), check.windows.get(several[0])
    return window is None or whole is not None and value(whole).shape[dim] == window.size


@_rule(aten.slice.Tensor)
def _slice(check: PositionCheck, node: fx.Node, args: dict[str, Any]) -> None:
    source, start, end, step = (args[name] for name in ("self", "start", "end", "step"))
    if check.dim(source) is None or args["dim"] % _rank(source) != check.dim(source):
        return
    is_to_the_end = end is None or (isinstance(end, int) and end >= 2**62)
    is_from_the_end = start in (None, 0) or (isinstance(start, int) and start < 0 and check.dim(node) is None)
    if not (is_to_the_end and is_from_the_end and step == 1):
        raise UnsupportedError("it takes positions that are not the last")


@_rule(aten.select.int)
def _select(check: PositionCheck, node: fx.Node, args: dict[str, Any]) -> None:
    source, index = args["self"], args["index"]
    if args["dim"] % _rank(source) != check.dim(source) or isinstance(index, int) and index < 0:
        return
    # Counted from the first real position it has another place in each call, so that it is a copy, and no view.
    if index != 0 or any(written_storages(each) & storages(node) for each in node.graph.nodes):
        raise UnsupportedError("it takes a position that is neither the first nor among the last")
    check.first.add(node)


@_rule(aten.rms_norm.default, aten.layer_norm.default)
def _norm(check: PositionCheck, node: fx.Node, args: dict[str, Any]) -> None:
    dim = check.dim(args["input"])
    if dim is None or dim >= _rank(args["input"]) - len(args["normalized_shape"]):
        raise UnsupportedError("it normalises over the positions of a prompt")


@_rule(aten.linear.default, aten.matmul.default, aten.bmm.default, aten.mm.default)
def _product(check: PositionCheck, node: fx.Node, args: dict[str, Any]) -> None:
    a, b = node.args[:2]
    contracted = {a: _rank(a) - 1, b: _rank(b) - (1 if node.target is aten.linear.default else 2)}
    if min(_rank(a), _rank(b)) < 2 or any(check.dim(factor) == dim for factor, dim in contracted.items()):
        raise UnsupportedError("it sums over the positions of a prompt")


@_rule(
    *(aten.floor_divide.default, aten.div.Tensor_mode, aten.div_.Tensor_mode),
    *(aten.remainder.Tensor, aten.remainder_.Tensor, aten.remainder.Scalar_Tensor, aten.fmod.Tensor, aten.fmod_.Tensor),
)
def _division(check: PositionCheck, node: fx.Node, args: dict[str, Any]) -> None:
    if not value(node).dtype.is_floating_point and check.dim(args["other"]) is not None:
        raise UnsupportedError("it may divide by zero at padded positions")


@_rule(aten.dropout.default)
def _dropout(check: PositionCheck, node: fx.Node, args: dict[str, Any]) -> None:
    if args["train"]:
        raise UnsupportedError("it draws random numbers")


@_rule(aten.embedding.default)
def _embedding(check: PositionCheck, node: fx.Node, args: dict[str, Any]) -> None:
    if check.dim(node.args[0]) is not None:  # its rows
        raise UnsupportedError("it looks up positions of a prompt")


@_rule(aten.gather.default)
def _gather(check: PositionCheck, node: fx.Node, args: dict[str, Any]) -> None:
    if check.dim(args["self"]) is not None or check.is_outside(args["index"]):
        raise UnsupportedError("it looks up positions of a prompt")


@_rule(aten.index.Tensor)
def _index(check: PositionCheck, node: fx.Node, args: dict[str, Any]) -> None:
    is_number = all(value(index).dtype in (torch.int32, torch.int64) for index in args["indices"] if index is not None)
    if check.dim(args["self"]) is not None or not is_number:
        raise UnsupportedError("it looks up positions of a prompt")
    check.chosen.add(node)


@_rule(aten.scaled_dot_product_attention.default)
def _attention(check: PositionCheck, node: fx.Node, args: dict[str, Any]) -> None:
    q, k, v, mask = (args[name] for name in ("query", "key", "value", "attn_mask"))
    own = [check.dim(t) is not None for t in (k, v)]
    if any(own):
        if any(check.dim(t) != _rank(t) - 2 for t in (q, k, v)) or mask is not None and not check.is_pair(mask):
            raise UnsupportedError("it may mix a prompt's positions")
        if args["is_causal"] and not check.is_length(value(k).shape[-2]):
            raise UnsupportedError("it counts the keys that a query sees from the first of a window")
        check.attending.add(node)
    elif args["is_causal"] or any(check.dim(t) not in (None, _rank(t) - 2) for t in (q, mask) if t is not None):
        raise UnsupportedError("it may mix a prompt's positions")
    if args["dropout_p"] != 0:
        raise UnsupportedError("it draws random numbers")


def _scores(check: PositionCheck, node: fx.Node, args: dict[str, Any]) -> None:
    """Products of queries and keys, or of weights and values."""
    a, b = node.args[:2]
    is_scores = not check.is_pair(a) and check.is_pair(node)
    is_sum = a in check.weights and not check.is_pair(b) and check.dim(b) == _rank(b) - 2
    if not is_sum and not (is_scores and (check.dim(a), check.dim(b)) == (_rank(a) - 2, _rank(b) - 1)):
        raise UnsupportedError("it sums over the positions of a prompt")


def _weights(check: PositionCheck, node: fx.Node, args: dict[str, Any]) -> None:
    if args["dim"] not in (-1, _rank(node) - 1):
        raise UnsupportedError("it works along the positions of a prompt")
    check.attending.add(node)
    check.weights.add(node)


_PAIRED: dict[Any, _Rule] = {
    aten.scaled_dot_product_attention.default: _attention,
    aten.matmul.default: _scores,
    aten.softmax.int: _weights,
    aten.dropout.default: _dropout,
}
_PAIR_VIEWS = (aten.expand.default, aten.unsqueeze.default, aten.clone.default, aten.slice.Tensor)


@_rule(aten.index_copy_.default)
def _cache_write(check: PositionCheck, node: fx.Node, args: dict[str, Any]) -> None:
    target, index, source = (args[name] for name in ("self", "index", "source"))
    is_along = check.dim(target) is None and check.dim(source) == args["dim"] % _rank(target)
    if not is_along or not check.is_outside(index):
        raise UnsupportedError("it writes at places that are not counted from the first position of the prompt")


@_rule(aten.pad.default, aten.constant_pad_nd.default)
def _pad(check: PositionCheck, node: fx.Node, args: dict[str, Any]) -> None:
    source, dim = node.args[0], check.dim(node.args[0])
    if dim is None or len(args["pad"]) // 2 >= _rank(source) - dim or args.get("mode", "constant") != "constant":
        raise UnsupportedError("it pads the positions of a prompt")
