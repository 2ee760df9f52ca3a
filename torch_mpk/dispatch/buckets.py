"""Prompts of many lengths by one build: each runs in the smallest bucket that holds it.

Where Dynamo has made the length of a prompt a symbol, the captured graph becomes one over as many positions as a bucket
has. It pads its inputs in front, by a number of the call, and the last positions of its results are the prompt's. In
front, because what is read off the end, such as the last position's logits, stays where it is.

What stands at a padded position is nobody's, so no other may depend on it: every operation is checked to make each
position of what that position alone holds. Caches have no padded positions: theirs lie far below 0, where nothing is
written and no key is seen. What a full window holds comes behind the padding, in front of the prompt's own positions.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor

from torch_mpk.capture.aliasing import (
    eliminate_dead_code,
    evaluate,
    is_scalar,
    storages,
    tensors,
    value,
    written_storages,
)
from torch_mpk.capture.graph import Captured, Conditions, lay_out_as_eager, source_line
from torch_mpk.capture.tracing import graph_module
from torch_mpk.dispatch.prompts import looked_up, positions_of
from torch_mpk.errors import UnsupportedError
from torch_mpk.patterns.rewriter import CASTS, RESHAPES, arguments, aten, is_call

if TYPE_CHECKING:
    import sympy  # type: ignore[import-untyped]

SMALLEST = 16
MOST = 32  # that there are, up to 8,192 positions
# Of each doubling in length. A padded position costs its share of products: on a CPU much, beside its short builds.
_STEPS = {"cpu": 4, "cuda": 1}
# As many positions take as long as a launch does before it is bound by arithmetic: docs/internals/capture.md.
_LAUNCH_POSITIONS = {"cpu": 16, "cuda": 256}
_PADDED = -(2**30)  # the number of a padded position; no cache has as many, so a counter added leaves it below 0


def bucket_of(length: int, most: int, device: str) -> int:
    """The bucket of a prompt of up to ``most`` positions: its length rounded up to 16, 32, 64, 128 and so on, on a CPU
    to quarters of the way between them, too; ``most`` if that is less."""
    step = max(SMALLEST, (1 << (length - 1).bit_length()) // 2 // _STEPS[device])
    return min(-(-length // step) * step, most)


def chunks_of(length: int, most: int, device: str) -> list[int]:
    """The lengths of the chunks in which a prompt takes least time: each but the last fills its bucket, and there are
    several where ``most`` is less than the prompt, or padding would take longer than one more launch."""
    if length > most:
        return [most, *chunks_of(length - most, most, device)]
    whole = bucket_of(length, most, device)
    part = 1 << (length.bit_length() - 1)
    if not SMALLEST <= part < length:
        return [length]
    rest = chunks_of(length - part, most, device)
    split = part + sum(bucket_of(each, most, device) for each in rest) + len(rest) * _LAUNCH_POSITIONS[device]
    return [part, *rest] if split < whole else [length]


@dataclasses.dataclass(frozen=True)
class _Result:
    """A result that has positions: the dimension of them, and whether eager's has no gaps."""

    index: int
    dim: int
    is_contiguous: bool


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Which of a graph's inputs say how large a prompt is; None: its sequences are as many in every call."""

    length: int
    batch: int | None

    @classmethod
    def of(cls, captured: Captured) -> Numbers | None:
        """None where no number is how many positions the graph is over."""
        places = captured.symbols
        for sizes in (*looked_up(captured), *(found[:2] for found in positions_of(captured))):
            if isinstance(sizes[1], int):
                continue
            batch, length = (None if isinstance(n, int) else places.get(n.node.expr, -1) for n in sizes)
            return cls(length, batch) if length is not None and -1 not in (batch, length) else None
        return None


class Prompt:
    """A captured graph over a number of positions that is known at a call only, checked to run in any bucket."""

    def __init__(self, captured: Captured, number: int) -> None:
        """``number``: the length's place among the graph's inputs.

        Raises UnsupportedError, with the operation that does not run on padded positions.
        """
        self.captured, self.number = captured, number
        length = captured.inputs[number].value
        assert isinstance(length, torch.SymInt)
        self._check = check = _Check(length.node.expr)
        for node in captured.graph_module.graph.nodes:
            try:
                check.visit(node)
            except UnsupportedError as error:
                raise UnsupportedError(error.reason, node.name, source_line(node)) from error
        self.conditions = Conditions(captured)

    def graph(self, size: int) -> Captured:
        """The graph over ``size`` positions, with the same inputs; its results have ``size`` positions, too.

        Raises UnsupportedError: it would hold only for some lengths.
        """
        gm, inputs = self.captured.graph_module, self.captured.inputs
        fake_mode: Any = next(each.value.fake_mode for each in inputs if isinstance(each.value, FakeTensor))
        guards = fake_mode.shape_env.guards
        num_guards = len(guards)
        with fake_mode, torch.no_grad(), enable_python_dispatcher():  # by which symbols reach PyTorch's Python code
            graph = _Padding(self._check, gm, self.number, size).run()
        if len(guards) > num_guards:
            raise UnsupportedError(f"its sizes must satisfy {guards[-1].expr}")
        return Captured(graph_module(gm, graph), inputs)

    def callable(self, padded: Callable[..., Sequence[Any]]) -> Callable[..., list[Any]]:
        """What gives the prompt's positions of the results of ``padded``, which runs the graph of a bucket."""

        def call(*args: Any) -> list[Any]:
            results, length = list(padded(*args)), args[self.number]
            for index, dim, is_contiguous in found:
                last = results[index].narrow(dim, results[index].shape[dim] - length, length)
                results[index] = last.contiguous() if is_contiguous else last
            return results

        found = [dataclasses.astuple(result) for result in self._check.results]
        return call


class _Check:
    """Goes through a graph in program order and raises UnsupportedError where positions would not stay apart.

    Attributes:
        results: those of the graph that have positions.
        counted: nodes that number the positions from 0 on.
        tables: slices of the first rows of something, one for each position, and the dimensions of these rows.
        first: nodes that take the first position.
        sized: nodes to which the number of positions is a size, rather than a value.
        chosen: nodes that look something up for each position, by numbers that padded ones have none of.
        joined: what a full window holds, and the positions behind it.
        attending: attention to the prompt's own keys, and softmax of its scores: padded keys are to be hidden from it.
        weights: what such softmax gives, 0 for padded keys.
    """

    def __init__(self, symbol: sympy.Symbol) -> None:
        self.symbol = symbol
        self.results: list[_Result] = []
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

    def is_number(self, node: Any) -> bool:
        """Whether it is the length, or computed from it."""
        number = value(node) if isinstance(node, fx.Node) else node
        return _is_symbolic(number) and self.symbol in number.node.expr.free_symbols

    def ahead(self, node: Any) -> int | None:
        """How many more than the prompt's positions a number is: those of a window in front; None if it is not so."""
        number: Any = value(node) if isinstance(node, fx.Node) else node
        more = number.node.expr - self.symbol if self.is_number(number) else None
        return int(more) if more is not None and more.is_Integer and more >= 0 else None

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
            return 0 <= added < -_PADDED // 2
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
            self.results.append(_Result(index, dim, value(result).is_contiguous()))


def _is_symbolic(number: Any) -> bool:
    return isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool))


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

_Rule = Callable[[_Check, fx.Node, dict[str, Any]], None]
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
def _keeps(check: _Check, node: fx.Node, args: dict[str, Any]) -> None:
    """Each position is what it was, or alike."""


@_rule(*RESHAPES)
def _reshape(check: _Check, node: fx.Node, args: dict[str, Any]) -> None:
    before, after = check.dim(node.args[0]), check.dim(node)
    if before is None or after is None:
        raise UnsupportedError("it reshapes positions into others")
    outer = [*value(node.args[0]).shape[:before], *value(node).shape[:after]]
    if any(map(_is_symbolic, outer)) or math.prod(outer[:before]) != math.prod(outer[before:]):
        raise UnsupportedError("it reshapes positions into others")


@_rule(*_ALONG)
def _along(check: _Check, node: fx.Node, args: dict[str, Any]) -> None:
    several = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
    if is_call(node, aten.cat.default):
        several = [each for each in several if value(each).shape != (0,)]  # what a cache begins with
        if len(several) == 1:
            return
        if _is_joined(check, several, args["dim"] % _rank(node)):
            check.joined.add(node)
            return
    dims = args.get("dim")
    for arg in several:
        dim = check.dim(arg)
        listed = dims if isinstance(dims, (list, tuple)) else [dims]
        if dim is not None and (not listed or any(d is None or d % _rank(arg) == dim for d in listed)):
            raise UnsupportedError("it works along the positions of a prompt")


def _is_joined(check: _Check, several: Sequence[fx.Node], dim: int) -> bool:
    """Whether it is what a window holds, and a prompt's positions behind it."""
    return [check.dim(each) for each in several] == [None, dim] and check.is_length(value(several[1]).shape[dim])


@_rule(aten.slice.Tensor)
def _slice(check: _Check, node: fx.Node, args: dict[str, Any]) -> None:
    source, start, end, step = (args[name] for name in ("self", "start", "end", "step"))
    if check.dim(source) is None or args["dim"] % _rank(source) != check.dim(source):
        return
    is_to_the_end = end is None or (isinstance(end, int) and end >= 2**62)
    is_from_the_end = start in (None, 0) or (isinstance(start, int) and start < 0 and check.dim(node) is None)
    if not (is_to_the_end and is_from_the_end and step == 1):
        raise UnsupportedError("it takes positions that are not the last")


@_rule(aten.select.int)
def _select(check: _Check, node: fx.Node, args: dict[str, Any]) -> None:
    source, index = args["self"], args["index"]
    if args["dim"] % _rank(source) != check.dim(source) or isinstance(index, int) and index < 0:
        return
    # Counted from the first real position it has another place in each call, so that it is a copy, and no view.
    if index != 0 or any(written_storages(each) & storages(node) for each in node.graph.nodes):
        raise UnsupportedError("it takes a position that is neither the first nor among the last")
    check.first.add(node)


@_rule(aten.rms_norm.default, aten.layer_norm.default)
def _norm(check: _Check, node: fx.Node, args: dict[str, Any]) -> None:
    dim = check.dim(args["input"])
    if dim is None or dim >= _rank(args["input"]) - len(args["normalized_shape"]):
        raise UnsupportedError("it normalises over the positions of a prompt")


@_rule(aten.linear.default, aten.matmul.default, aten.bmm.default, aten.mm.default)
def _product(check: _Check, node: fx.Node, args: dict[str, Any]) -> None:
    a, b = node.args[:2]
    contracted = {a: _rank(a) - 1, b: _rank(b) - (1 if node.target is aten.linear.default else 2)}
    if min(_rank(a), _rank(b)) < 2 or any(check.dim(factor) == dim for factor, dim in contracted.items()):
        raise UnsupportedError("it sums over the positions of a prompt")


@_rule(
    *(aten.floor_divide.default, aten.div.Tensor_mode, aten.div_.Tensor_mode),
    *(aten.remainder.Tensor, aten.remainder_.Tensor, aten.remainder.Scalar_Tensor, aten.fmod.Tensor, aten.fmod_.Tensor),
)
def _division(check: _Check, node: fx.Node, args: dict[str, Any]) -> None:
    if not value(node).dtype.is_floating_point and check.dim(args["other"]) is not None:
        raise UnsupportedError("it may divide by zero at padded positions")


@_rule(aten.dropout.default)
def _dropout(check: _Check, node: fx.Node, args: dict[str, Any]) -> None:
    if args["train"]:
        raise UnsupportedError("it draws random numbers")


@_rule(aten.embedding.default)
def _embedding(check: _Check, node: fx.Node, args: dict[str, Any]) -> None:
    if check.dim(node.args[0]) is not None:  # its rows
        raise UnsupportedError("it looks up positions of a prompt")


@_rule(aten.gather.default)
def _gather(check: _Check, node: fx.Node, args: dict[str, Any]) -> None:
    if check.dim(args["self"]) is not None or check.is_outside(args["index"]):
        raise UnsupportedError("it looks up positions of a prompt")


@_rule(aten.index.Tensor)
def _index(check: _Check, node: fx.Node, args: dict[str, Any]) -> None:
    is_number = all(value(index).dtype in (torch.int32, torch.int64) for index in args["indices"] if index is not None)
    if check.dim(args["self"]) is not None or not is_number:
        raise UnsupportedError("it looks up positions of a prompt")
    check.chosen.add(node)


@_rule(aten.scaled_dot_product_attention.default)
def _attention(check: _Check, node: fx.Node, args: dict[str, Any]) -> None:
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


def _scores(check: _Check, node: fx.Node, args: dict[str, Any]) -> None:
    """Products of queries and keys, or of weights and values."""
    a, b = node.args[:2]
    is_scores = not check.is_pair(a) and check.is_pair(node)
    is_sum = a in check.weights and not check.is_pair(b) and check.dim(b) == _rank(b) - 2
    if not is_sum and not (is_scores and (check.dim(a), check.dim(b)) == (_rank(a) - 2, _rank(b) - 1)):
        raise UnsupportedError("it sums over the positions of a prompt")


def _weights(check: _Check, node: fx.Node, args: dict[str, Any]) -> None:
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
def _cache_write(check: _Check, node: fx.Node, args: dict[str, Any]) -> None:
    target, index, source = (args[name] for name in ("self", "index", "source"))
    is_along = check.dim(target) is None and check.dim(source) == args["dim"] % _rank(target)
    if not is_along or not check.is_outside(index):
        raise UnsupportedError("it writes at places that are not counted from the first position of the prompt")


@_rule(aten.pad.default, aten.constant_pad_nd.default)
def _pad(check: _Check, node: fx.Node, args: dict[str, Any]) -> None:
    source, dim = node.args[0], check.dim(node.args[0])
    if dim is None or len(args["pad"]) // 2 >= _rank(source) - dim or args.get("mode", "constant") != "constant":
        raise UnsupportedError("it pads the positions of a prompt")


# ---- the graph of a bucket ----


class _Padding:
    """Makes the graph over ``size`` positions. Runs in the graph's fake mode."""

    def __init__(self, check: _Check, gm: fx.GraphModule, number: int, size: int) -> None:
        self.check, self.gm, self.size = check, gm, size
        self.graph = fx.Graph(owning_module=gm)
        self.nodes: dict[fx.Node, Any] = {}  # the captured graph's -> this one's
        self.number = gm.graph.find_nodes(op="placeholder")[number]
        self.positions: dict[tuple[torch.device, int, int], fx.Node] = {}
        self.visible: dict[tuple[torch.device, bool, int, int], fx.Node] = {}
        self.sources: dict[tuple[torch.device, int], fx.Node] = {}

    def run(self) -> fx.Graph:
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        for node in placeholders:
            self.nodes[node] = self._copy(node)
        self.front = self._call(operator.sub, self.size, self.nodes[self.number])
        for node in placeholders:
            if (dim := self.check.dim(node)) is not None:
                self.nodes[node] = self._padded(self.nodes[node], dim)
        for node in list(self.gm.graph.nodes)[len(placeholders) :]:
            if node in self.check.counted:
                self.nodes[node] = self._count(node)
            elif node in self.check.tables:
                self.nodes[node] = self._take(node)
            elif node in self.check.first:
                self.nodes[node] = self._first(node)
            elif node in self.check.chosen:
                self.nodes[node] = self._choose(node)
            elif node in self.check.joined:
                self.nodes[node] = self._join(node)
            elif node in self.check.attending:
                self.nodes[node] = self._attend(node)
            else:
                self.nodes[node] = self._copy(node)
        lay_out_as_eager(self.graph)
        eliminate_dead_code(self.graph)
        return self.graph

    def _copy(self, node: fx.Node) -> fx.Node:
        def new(arg: fx.Node) -> Any:
            ahead = self.check.ahead(arg) if node in self.check.sized else None
            return self.nodes[arg] if ahead is None else self.size + ahead

        copy = self.graph.node_copy(node, self.nodes.__getitem__)
        copy.args, copy.kwargs = fx.node.map_arg((node.args, node.kwargs), new)
        is_as_before = node not in self.check.sized and all(
            value(arg) is value(self.nodes[arg]) for arg in node.all_input_nodes
        )
        if node.op == "call_function" and not is_as_before:
            copy.meta["val"] = evaluate(copy.target, copy.args, copy.kwargs)
        return copy

    def _call(self, target: Any, *args: Any, val: Any = None, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = evaluate(target, args, kwargs) if val is None else val
        return node

    def _padded(self, source: fx.Node, dim: int) -> fx.Node:
        shape = list(value(source).shape)
        pad = [0, 0] * (len(shape) - 1 - dim) + [self.front, 0]
        shape[dim] = self.size
        # Made by hand: PyTorch would ask how the length compares with the bucket.
        val = torch.empty(shape, dtype=value(source).dtype, device=value(source).device)
        return self._call(aten.constant_pad_nd.default, source, pad, 0, val=val)

    def _attend(self, node: fx.Node) -> fx.Node:
        """Attention, or softmax of scores, from which padded keys are hidden."""
        device = value(node).device
        args = {name: fx.node.map_arg(arg, self.nodes.__getitem__) for name, arg in arguments(node).items()}
        if node.target is aten.softmax.int:
            visible, scores = self._visible(device, False, _rank(node), self._bucket(node, -1)), args.pop("self")
            if is_call(scores, aten.add.Tensor) and isinstance(scores.args[1], fx.Node):  # a mask, which patterns know
                masked = self._hidden(scores.args[1], visible)
                scores = self._call(aten.add.Tensor, scores.args[0], masked, **scores.kwargs)
            else:
                scores = self._hidden(scores, visible)
            given: tuple[Any, ...] = (scores, args.pop("dim"))
        else:
            num_keys = self._bucket(node.args[1], -2)
            visible = self._visible(device, args.pop("is_causal"), _rank(node), num_keys)
            mask = args.pop("attn_mask")
            mask = visible if mask is None else self._hidden(mask, visible)
            given = (*(args.pop(name) for name in ("query", "key", "value")), mask)
        made = self._call(node.target, *given, **args)
        made.meta = node.meta | {"val": made.meta["val"]}
        return made

    def _hidden(self, mask: fx.Node, visible: fx.Node) -> fx.Node:
        if value(mask).dtype == torch.bool:
            return self._call(aten.__and__.Tensor, mask, visible)
        return self._call(aten.where.ScalarOther, visible, mask, -math.inf)

    def _bucket(self, node: fx.Node, dim: int) -> int:
        """As many positions as a bucket has along a dimension, those of a window among them."""
        return self.size + (self.check.ahead(value(node).shape[dim]) or 0)

    def _visible(self, device: torch.device, is_causal: bool, rank: int, num_keys: int) -> fx.Node:
        """Which keys a query may see, [1, 1, S, L] for patterns, [S, L] where there are fewer dimensions than four or
        more: those of real positions; padded queries see padded keys, too, since a row that sees none is NaN."""
        outer = [1, 1] if rank == 4 else []
        key = (device, is_causal, len(outer), num_keys)
        if key not in self.visible:
            queries, keys = (
                self._call(aten.view.default, self._call(aten.arange.default, number, device=device), [*outer, *ends])
                for number, ends in ((self.size, (-1, 1)), (num_keys, (1, -1)))
            )
            is_real = self._call(aten.ge.Scalar, keys, self.front)
            visible = self._call(aten.__or__.Tensor, is_real, self._call(aten.lt.Scalar, queries, self.front))
            if is_causal:
                visible = self._call(aten.__and__.Tensor, self._call(aten.le.Tensor, keys, queries), visible)
            self.visible[key] = visible
        return self.visible[key]

    def _count(self, node: fx.Node) -> fx.Node:
        like = value(node)
        numbers = self._numbers(like.device, _PADDED, self._bucket(node, 0))
        return numbers if like.dtype == torch.int64 else self._call(aten.to.dtype, numbers, like.dtype)

    def _take(self, node: fx.Node) -> fx.Node:
        """A row for each position; any row there is for padded ones."""
        rows = self._numbers(value(node).device, 0, self.size)
        return self._call(aten.index_select.default, self.nodes[node.args[0]], self.check.tables[node], rows)

    def _first(self, node: fx.Node) -> fx.Node:
        source, dim = self.nodes[node.args[0]], arguments(node)["dim"]
        places = self._call(aten.arange.default, 1, device=value(source).device)
        place = self._call(aten.add.Tensor, places, self.front)
        first = self._call(aten.index_select.default, source, dim, place)
        return self._call(aten.select.int, first, dim, 0)

    def _choose(self, node: fx.Node) -> fx.Node:
        """As the graph does; the first there is for padded positions."""
        indices = [None if index is None else self._in_range(index) for index in arguments(node)["indices"]]
        return self._call(aten.index.Tensor, self.nodes[node.args[0]], indices)

    def _in_range(self, index: fx.Node) -> fx.Node:
        dim, new = self.check.dim(index), self.nodes[index]
        if dim is None:
            return new
        places = self._call(aten.arange.default, self._bucket(index, dim), device=value(index).device)
        places = self._call(aten.view.default, places, [-1, *[1] * (_rank(index) - 1 - dim)])
        return self._call(aten.where.ScalarOther, self._call(aten.ge.Scalar, places, self.front), new, 0)

    def _join(self, node: fx.Node) -> fx.Node:
        """Joins what a window holds and the prompt's positions, with the padding in front of both."""
        dim = arguments(node)["dim"]
        apart = self._copy(node)  # padding stands between the two
        sources = self._sources(value(node).device, self._bucket(node, dim))
        return self._call(aten.index_select.default, apart, dim, sources)

    def _sources(self, device: torch.device, size: int) -> fx.Node:
        """Where each of ``size`` joined positions stands while padding is between a window and the prompt's own."""
        key = (device, size)
        if key not in self.sources:
            places = self._call(aten.arange.default, size, device=device)
            held = self._call(aten.clamp_min.default, self._call(aten.sub.Tensor, places, self.front), 0)
            is_own = self._call(aten.ge.Scalar, places, self._call(operator.add, self.front, size - self.size))
            self.sources[key] = self._call(aten.where.self, is_own, places, held)
        return self.sources[key]

    def _numbers(self, device: torch.device, padded: int, size: int) -> fx.Node:
        """The number of each of ``size`` positions: from 0 on, and ``padded`` at padded ones."""
        key = (device, padded, size)
        if key not in self.positions:
            places = self._call(aten.arange.default, size, device=device)
            is_real = self._call(aten.ge.Scalar, places, self.front)
            numbers = self._call(aten.sub.Tensor, places, self.front)
            self.positions[key] = self._call(aten.where.ScalarOther, is_real, numbers, padded)
        return self.positions[key]
