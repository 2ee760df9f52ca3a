"""What patterns match and build with: reading through views, making nodes, and proving that a lift keeps every read."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

import torch_mpk.tasks  # noqa: F401  (declares them)
from torch_mpk import registry
from torch_mpk.capture.aliasing import evaluate, is_impure, is_view, storages, value, written_args, written_storages

if TYPE_CHECKING:
    from torch_mpk.patterns.references import Miss

aten = torch.ops.aten

RESHAPES = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.contiguous.default,
    aten.alias.default,
)
CASTS = (
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten.type_as.default,
    aten._to_copy.default,
)
_PROVENANCE = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")


def is_call(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(value(node), torch.Tensor)


def shape(node: fx.Node) -> tuple[Any, ...]:
    """Sizes as plain integers, None where one is only known at run time."""
    return tuple(size if isinstance(size, int) else size.node.maybe_as_int() for size in value(node).shape)


def numel(node: fx.Node) -> int | None:
    """None where it is only known at run time."""
    return None if None in shape(node) else math.prod(shape(node))


def dtype(node: fx.Node) -> torch.dtype:
    return value(node).dtype


def argument(node: fx.Node, name: str) -> Any:
    """An ATen call's argument by its schema name, or the schema's default."""
    return arguments(node)[name]


def arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of a call by their names, the schema's defaults where they are not given; by their positions where
    there is no schema."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {str(position): arg for position, arg in enumerate(node.args)} | node.kwargs
    declared = node.target._schema.arguments
    given = dict(zip((each.name for each in declared), node.args, strict=False)) | node.kwargs
    return {each.name: given.get(each.name, each.default_value) for each in declared}


def swapped(pair: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Both orders of a commutative operation's two arguments."""
    a, b = pair[:2]
    return [(a, b), (b, a)]


def has_same_layout(a: fx.Node, b: fx.Node) -> bool:
    """The same dtype, sizes and strides, but for the strides of dimensions of size 1."""
    return dtype(a) == dtype(b) and shape(a) == shape(b) and has_same_strides(a, b)


def has_same_strides(a: fx.Node, b: fx.Node) -> bool:
    """In every dimension of which ``a`` has more than one index; ``b`` has as many dimensions."""
    return all(size == 1 or s == t for size, s, t in zip(shape(a), value(a).stride(), value(b).stride(), strict=True))


def cast_source(node: Any) -> fx.Node | None:
    """What ``node`` converts to another dtype; None when it is no conversion on one device."""
    if not is_call(node, *CASTS):
        return None
    source = node.args[0]
    return source if value(source).device == value(node).device and dtype(source) != dtype(node) else None


def reshape_source(node: fx.Node) -> fx.Node | None:
    """The tensor that ``node`` was made from with the same elements in the same row-major order, or None."""
    if is_call(node, *RESHAPES):
        return node.args[0]
    if is_call(node, aten.transpose.int, aten.permute.default) and None not in shape(node):
        source = node.args[0]
        order = list(range(len(shape(source))))
        if node.target is aten.permute.default:
            order = [d % len(order) for d in node.args[1]]
        else:
            a, b = (d % len(order) for d in node.args[1:3])
            order[a], order[b] = b, a
        moved = [d for d in order if shape(source)[d] != 1]
        return source if moved == sorted(moved) else None
    return None


def _is_static(t: torch.Tensor) -> bool:
    return all(isinstance(n, int) for n in (*t.shape, *t.stride()))


class Rewriter:
    """One graph being rewritten. Between ``begin`` and ``commit`` or ``rollback`` it holds one lift in the making.

    Attributes:
        anchor: the last node of the subgraph, which is replaced.
        others: more nodes that are, where the subgraph has several results.
        place: the node that what is made goes before.
        misses: what the tasks' own patterns almost took.
    """

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        # Not detect_fake_mode(): inside a backend that is Dynamo's mode, and the capture has one of its own.
        self.fake_mode = next(
            (value(node).fake_mode for node in graph.nodes if isinstance(value(node), FakeTensor)), nullcontext()
        )
        self.writers = [node for node in graph.nodes if written_args(node)]
        # Eager raises where one of these is out of range, so each may be taken to be in range.
        self.checked_indices = [node.args[2] for node in graph.nodes if is_call(node, aten.index_copy_.default)]
        self.misses: list[Miss] = []
        self._examples: dict[Hashable, torch.Tensor] = {}
        self.limits: dict[tuple[Any, ...], fx.Node] = {}  # attention limits made so far, by what they were made from

    def begin(self, anchor: fx.Node) -> None:
        self.anchor = self.place = anchor
        self.others: dict[fx.Node, fx.Node] = {}
        self.made: list[fx.Node] = []
        self.interior: list[fx.Node] = []
        self.trusted: list[fx.Node] = []
        self.absorbed: list[fx.Node] = []

    def see(self, *nodes: fx.Node) -> None:
        """Note interior nodes of the match: what they read is now read at the anchor."""
        self.interior += nodes

    def trust(self, *nodes: fx.Node) -> None:
        """Note nodes whose values the match relies on, without reading again what they read."""
        self.trusted += nodes

    def absorb(self, *writers: fx.Node) -> None:
        """Note in-place nodes that the replacement performs itself."""
        self.interior += writers
        self.absorbed += writers

    def is_movable(self) -> bool:
        """Whether nothing that the interior reads, or made, is written by others between there and the new place."""
        watched = [(node, storages(node).union(*map(storages, node.all_input_nodes))) for node in self.interior]
        watched += [(node, storages(node)) for node in self.trusted]
        nodes = [self.place, *(node for node, _ in watched)]
        first, last = min(nodes), max(nodes)

        def is_passed(writer: fx.Node, node: fx.Node) -> bool:
            return node < writer < self.place or (self.place < node and self.place <= writer < node)

        return not any(
            is_passed(writer, node) and touched & written_storages(writer)
            for writer in self.writers
            if first <= writer <= last and writer not in self.absorbed and writer not in self.made
            for node, touched in watched
        )

    def is_written_between(self, touched: frozenset[int], start: fx.Node, end: fx.Node) -> bool:
        return any(start < writer < end and touched & written_storages(writer) for writer in self.writers)

    def survives(self, node: fx.Node) -> bool:
        """Whether an interior node is still needed once the anchor, and the others, are replaced."""
        return any(
            user is not self.anchor and user not in self.others and (user not in self.interior or self.survives(user))
            for user in node.users
        )

    def is_same_argument(self, a: Any, b: Any) -> bool:
        """Whether an operation does the same with both."""
        are_tensors = is_tensor(a) and is_tensor(b)
        return (not are_tensors or shape(a) == shape(b)) and self.is_same_value(a, b)

    def is_same_value(self, a: Any, b: Any) -> bool:
        """Whether two nodes have the same elements, made of the same, with no write to what they read in between;
        perhaps in other shapes."""
        if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or a is b:
            return a is b or (type(a) is type(b) and a == b)
        while is_view(a) and (source := reshape_source(a)) is not None:
            a = source
        while is_view(b) and (source := reshape_source(b)) is not None:
            b = source
        if a is b:
            return True
        if not is_call(b, a.target) or not isinstance(a.target, torch._ops.OpOverload) or is_impure(a):
            return False
        if len(a.args) != len(b.args) or a.kwargs != b.kwargs:
            return False
        if not all(self.is_same_argument(x, y) for x, y in zip(a.args, b.args, strict=True)):
            return False
        touched = frozenset().union(*map(storages, (*a.all_input_nodes, *b.all_input_nodes)))
        return not self.is_written_between(touched, min(a, b), max(a, b))

    def call(self, target: Any, *args: Any, after: fx.Node | None = None, **kwargs: Any) -> fx.Node:
        """A new node before the anchor, or right after ``after``, with its example value."""
        with self.fake_mode:
            example = self._example(target, args, kwargs)
        if after is not None and after.op == "placeholder":
            after = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        with self.graph.inserting_before(self.place) if after is None else self.graph.inserting_after(after):
            node = self.graph.call_function(target, args, kwargs)
        node.meta = {key: self.anchor.meta[key] for key in _PROVENANCE if key in self.anchor.meta}
        node.meta["val"] = example
        self.made.append(node)
        return node

    def _example(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The example value of a call. Layers repeat each other, and a reference is long: a task that was called with
        the like before gives the like of what it gave then, in memory of its own."""
        values = [value(arg) if isinstance(arg, fx.Node) else arg for arg in args]
        if not isinstance(target, registry.Task) or not all(t is None or _is_static(t) for t in values):
            return evaluate(target, args, kwargs)
        described = tuple(None if t is None else (t.dtype, t.device, t.shape, t.stride()) for t in values)
        key = target, described, tuple(kwargs.items())
        known = self._examples.get(key)
        if known is not None:
            return torch.empty_strided(known.shape, known.stride(), dtype=known.dtype, device=known.device)
        example = evaluate(target, args, kwargs)
        if isinstance(example, torch.Tensor) and _is_static(example):
            given = {t.untyped_storage()._cdata for t in values if t is not None}
            if example.untyped_storage()._cdata not in given:
                self._examples[key] = example
        return example

    def task(self, name: str, *operands: fx.Node | None, **attrs: Any) -> fx.Node:
        """A call of a task with every operand (None where absent) and every attribute given."""
        task = registry.get(name)
        operands += (None,) * (len(task.inputs) - len(operands))
        node = self.call(task, *operands, **task.bind_attrs(attrs))
        if task.is_mutating:
            self.writers.append(node)
        return node

    def reshape(self, node: fx.Node, to: Sequence[int]) -> fx.Node:
        """``node`` in another shape, made from the lowest tensor that it is itself a view of.

        Never a ``view``: folding changes the strides of dimensions of size 1, by which PyTorch chooses the layout of
        some results (``pad``), so real tensors may have other strides than their example values. A reshape may copy
        then, hence its result must only be read, and before its memory is written, unless ``to`` merges no dimensions.
        """
        to = tuple(to)
        node = self.below(node, to)
        return node if shape(node) == to else self.call(aten.reshape.default, node, list(to))

    def below(self, node: fx.Node, to: tuple[int, ...]) -> fx.Node:
        """The lowest tensor that ``node`` is itself a view of, or the first below it that has shape ``to``."""
        while shape(node) != to and (source := reshape_source(node)) is not None and is_view(node):
            node = source
        return node

    def rollback(self) -> None:
        self.limits = {key: node for key, node in self.limits.items() if node not in self.made}
        for node in reversed(self.made):
            self._erase(node)

    def commit(self, replacement: fx.Node) -> None:
        replacements = {self.anchor: replacement} | self.others
        for replaced, node in replacements.items():
            # Example values of later views share what is replaced's storage: the replacement's must do so too.
            is_viewed, old = True, value(replaced)
            with torch.no_grad(), self.fake_mode:
                while is_viewed and node in self.made:
                    is_viewed = is_view(node)
                    new = value(node)
                    is_like = old.shape == new.shape and old.stride() == new.stride()
                    node.meta["val"] = old = old if is_like else old.view(new.shape)
                    if is_call(node, aten.transpose.int):
                        old = old.transpose(*node.args[1:])
                    node = node.args[0]
        for replaced, node in replacements.items():
            replaced.replace_all_uses_with(node)
        for node in [*replacements, *self.absorbed]:
            if not node._erased:  # with another that read it
                self._erase(node, and_unused_inputs=True)

    def _erase(self, node: fx.Node, and_unused_inputs: bool = False) -> None:
        inputs = node.all_input_nodes
        if node in self.writers:
            self.writers.remove(node)
        self.graph.erase_node(node)
        if and_unused_inputs:
            for below in inputs:
                if not below._erased and not below.users and not is_impure(below):
                    self._erase(below, and_unused_inputs=True)
