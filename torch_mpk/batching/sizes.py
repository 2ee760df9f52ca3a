"""One trace for all sizes of a step: where sizes are symbols of Dynamo's graph, each size is made from one capture.

Dynamo takes seconds for a deep model, and so does capture, and graphs of different sizes differ in numbers alone. So
the graph is captured once, with symbols; a size's graph is that one, run again on tensors of its sizes. Fake tensors
say what each operation gives there, which takes a fraction of a capture. It is what a capture with these numbers gives,
as long as they satisfy the ``conditions`` of the one with symbols. Others are captured by themselves.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import tracing

from torch_mpk.backend.build import compile_graph
from torch_mpk.builds import timing
from torch_mpk.capture.aliasing import evaluate, is_scalar
from torch_mpk.capture.fake_mode import repeated_fakes
from torch_mpk.capture.graph import (
    Captured,
    Conditions,
    GraphInput,
    capture,
    input_sources,
    lay_out_as_eager,
    number_positions,
    without_numbers,
)
from torch_mpk.capture.tracing import graph_module
from torch_mpk.config import Options
from torch_mpk.dispatch.admission import check_call
from torch_mpk.dispatch.fallback import leave_to_others
from torch_mpk.dispatch.specialize import per_call_numbers
from torch_mpk.errors import UnsupportedError

logger = logging.getLogger(__name__)

MAX_BUILDS = 32  # of a trace
MAX_CAPTURES = 4  # of a trace, with symbols


def specialised(captured: Captured, args: Sequence[Any]) -> Captured:
    """The graph of a capture for the numbers among ``args``, made from one with symbols, whose conditions hold.

    Raises UnsupportedError: it has an operation that is not run on fake tensors.
    """
    known = {symbol: args[i] for symbol, i in captured.symbols.items()}

    def number(n: Any) -> Any:
        return n if isinstance(n, (int, float)) else int(n.node.expr.xreplace(known))

    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # with sympy, which importing should not need

    gm = captured.graph_module
    graph = fx.Graph(owning_module=gm)
    made: dict[fx.Node, Any] = {}  # nodes, and what is a number now
    inputs: list[GraphInput] = []
    mode = repeated_fakes(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    placeholders = gm.graph.find_nodes(op="placeholder")
    with tracing(None), mode, torch.no_grad(), enable_python_dispatcher():
        for node, given in zip(placeholders, captured.inputs, strict=True):
            if not isinstance(given.value, torch.Tensor):
                made[node] = number(given.value)
                continue
            sizes, strides = (list(map(number, dims)) for dims in (given.value.size(), given.value.stride()))
            value = torch.empty_strided(sizes, strides, dtype=given.value.dtype, device=given.value.device)
            made[node] = graph.node_copy(node)
            made[node].meta = node.meta | {"val": value}
            inputs.append(GraphInput(**vars(given) | {"value": value}))
        for node in list(gm.graph.nodes)[len(placeholders) :]:
            made[node] = _made(node, graph, made)
    lay_out_as_eager(graph)
    return Captured(graph_module(gm, graph), inputs)


def _made(node: fx.Node, graph: fx.Graph, made: Mapping[fx.Node, Any]) -> Any:
    if node.op not in ("call_function", "get_attr", "output"):
        raise UnsupportedError(f"it is a {node.op}", node.name)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
    if is_scalar(node):
        return evaluate(node.target, args, kwargs)
    if node.op == "call_function" and not _is_operator(node.target):
        raise UnsupportedError("it is no operator of PyTorch", node.name)
    copy = graph.create_node(node.op, node.target, args, kwargs, node.name)
    copy.meta = dict(node.meta)
    if node.op == "call_function":
        copy.meta["val"] = evaluate(node.target, args, kwargs)
    return copy


def _is_operator(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) or getattr(target, "__module__", None) == "_operator"


class _Captures:
    """Of a graph of Dynamo's, for the numbers of calls. The first is captured by itself. The second shows which numbers
    differ from step to step: with symbols for those it is captured once more, and all others are made of that. Where
    other numbers differ, as in an engine with another cache, it begins anew, with symbols at once: symbols for all take
    longer than they save."""

    def __init__(self, gm: fx.GraphModule, numbers: Sequence[int]) -> None:
        self._gm, self._numbers = gm, numbers
        self._first: dict[int, Any] | None = None  # the numbers of what was captured first
        self._is_hopeless = False  # to capture with symbols
        self._fixed: list[int] = []  # the places of those that are no symbols
        self._known: OrderedDict[tuple[Any, ...], tuple[Captured, Conditions] | None] = OrderedDict()  # by their values

    def make(self, own: fx.GraphModule, others: Sequence[Any], args: Sequence[Any]) -> Captured:
        """``own``, ``others``: the graph without its numbers, and what it takes of ``args``."""
        found = self._find(args)
        if found is not None:
            try:
                return specialised(found, args)
            except UnsupportedError as error:
                logger.info("capturing this size, because it cannot be made from that of another: %s", error)
        return capture(own, others)

    def _find(self, args: Sequence[Any]) -> Captured | None:
        numbers = {i: args[i] for i in self._numbers}
        if self._first is None or self._is_hopeless:
            self._first = numbers
            return None
        if not self._known:
            self._fixed = [i for i, n in numbers.items() if n == self._first[i] or not isinstance(n, int)]
            self._known[tuple(numbers[i] for i in self._fixed)] = None
        key = tuple(numbers[i] for i in self._fixed)
        if key not in self._known:
            is_one_of_few = not any(self._known.values())  # else all sizes of another engine are to come
            self._known[key] = None
            if len(self._known) > MAX_CAPTURES:
                self._known.popitem(last=False)
            if is_one_of_few:
                return None
        found = self._known[key]
        if found is None:
            found = self._known[key] = self._symbolic(args)
        return found[0] if found is not None and found[1].hold(args) else None

    def _symbolic(self, args: Sequence[Any]) -> tuple[Captured, Conditions] | None:
        try:
            captured = capture(self._gm, args, specialize=self._fixed, conditional=True)
            return captured, Conditions(captured)
        except UnsupportedError as error:
            logger.info("capturing each size, because one capture cannot hold for all: %s", error)
            self._is_hopeless = True
            return None


def for_each_size(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """What runs a graph of Dynamo's, with a build for each combination of the sizes among its inputs.

    Raises UnsupportedError: such a call is not ours (``check_call``).
    """
    numbers = number_positions(gm, inputs)
    sources = input_sources(gm)
    tensors = [i for i in range(len(inputs)) if i not in numbers]
    device = check_call([inputs[i] for i in tensors], [sources[i] for i in tensors])

    captures = _Captures(gm, numbers)  # which keep none of the tensors

    def build(args: Sequence[Any]) -> Callable[..., Any]:
        own, places = without_numbers(gm, args, numbers)
        others = [args[i] for i in places]
        with timing.build():
            run = compile_graph(own, others, device, options, functools.partial(captures.make, own, others, args))

        def call(*args: Any) -> Any:
            return run(*[args[i] for i in places])

        call.__dict__["compiled_graph"] = getattr(run, "compiled_graph", None)
        return call

    def on_failure(args: Sequence[Any], error: Exception) -> Callable[..., Any]:
        return leave_to_others(gm, args, options, error)

    return per_call_numbers(_that_matter(gm, numbers), build, on_failure, MAX_BUILDS)


def _that_matter(gm: fx.GraphModule, numbers: Sequence[int]) -> list[int]:
    """Those of the numbers among a graph's inputs that are not just where a tensor begins in its memory."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    symbols: set[Any] = set()
    for node in placeholders:
        example = node.meta.get("example_value")
        if isinstance(example, torch.Tensor):
            for n in (*example.size(), *example.stride()):
                symbols |= n.node.expr.free_symbols if isinstance(n, torch.SymInt) else set()

    def matters(node: fx.Node) -> bool:
        example = node.meta.get("example_value")
        return (
            bool(node.users) or not isinstance(example, torch.SymInt) or bool(example.node.expr.free_symbols & symbols)
        )

    return [i for i in numbers if matters(placeholders[i])]
