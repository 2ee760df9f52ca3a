"""Stage 4: a graph segment of ATen operations and task calls becomes a ``TBGraph``.

Every value that no task needs in memory is *virtual*: a function from an index to an expression, composed through view,
pointwise and indexing operations, and written into the programs of the nodes that use it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from torch_mpk import _C
from torch_mpk.errors import UnsupportedError
from torch_mpk.lowering.expr import Expr
from torch_mpk.lowering.lowerer import Lowerer
from torch_mpk.lowering.steps import build, merge
from torch_mpk.lowering.values import Lazy, Value, View, is_dense, is_static

__all__ = ["Fresh", "Lowered", "Output", "lower", "supports"]


@dataclass(frozen=True)
class Fresh:
    """What to allocate for one output buffer before each call; ``Lowered.fresh`` is in the order of buffer indices."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Output:
    """One result of the segment: ``as_strided(shape, stride, offset)`` of an output or input buffer, or ``value`` itself.

    ``kind`` is "output" (``index`` counts ``Lowered.fresh``), "input" (``index`` counts ``Lowered.inputs``; the result is
    that tensor where ``whole``, else a view of it), "scalar" (``Lowered.scalars[index]``) or "value". ``offset`` is in
    elements from the buffer's first.
    """

    kind: str
    index: int = -1
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    whole: bool = False
    value: object = None


@dataclass(frozen=True)
class Lowered:
    graph: _C.TBGraph
    inputs: tuple[fx.Node, ...]  # the placeholders that are tensors, in the order of input buffer indices
    scalars: tuple[fx.Node, ...]  # the placeholders that are SymInts, in the order of ``size`` instructions
    outputs: tuple[Output, ...]
    fresh: tuple[Fresh, ...]


def lower(segment: fx.GraphModule) -> Lowered:
    """The task graph of a segment: pre-dispatch ATen operations and task calls, with fake tensors in ``node.meta["val"]``.

    Raises UnsupportedError naming the node where the segment cannot be lowered; ``supports`` tells per node beforehand.
    """
    lx = Lowerer()
    inputs: list[fx.Node] = []
    scalars: list[fx.Node] = []
    placeholders = [n for n in segment.graph.nodes if n.op == "placeholder"]
    for node in placeholders:
        if isinstance(node.meta["val"], torch.SymInt):
            lx.symbols[node.meta["val"].node.expr] = len(scalars)
            scalars.append(node)
    args: list[object] = []
    for node in placeholders:
        val = node.meta["val"]
        if isinstance(val, torch.Tensor):
            args.append(lx.add_input(node.name, len(inputs), val))
            inputs.append(node)
        else:
            args.append(lx.size(val) if isinstance(val, (int, torch.SymInt)) else val)

    results = lx.run(segment.graph, segment, args)
    output_node = next(n for n in segment.graph.nodes if n.op == "output")
    nodes = output_node.args[0] if isinstance(output_node.args[0], (tuple, list)) else output_node.args
    fresh: list[Fresh] = []
    lx.frames.append(dict(zip(range(len(results)), results)))  # later writes keep what the outputs still read
    outputs = []
    for node, result in zip(nodes, results):
        try:
            outputs.append(_output(lx, node, result, args, fresh))
        except UnsupportedError as error:
            raise UnsupportedError(f"as an output: {error.reason}", error.node or str(node)) from error
    lx.flush_all()
    return Lowered(build(merge(lx.steps), lx.buffers), tuple(inputs), tuple(scalars), tuple(outputs), tuple(fresh))


def _output(lx: Lowerer, node: object, result: object, args: list[object], fresh: list[Fresh]) -> Output:
    if isinstance(result, Expr):
        if result.op != "size":
            raise UnsupportedError("a size computed from sizes")
        return Output("scalar", result.attr)
    if not isinstance(result, Value):
        return Output("value", value=result)
    view = lx.realise(result) if isinstance(result, Lazy) else result
    assert isinstance(view, View)
    if view.buffer.kind == "input":
        if not is_static((*view.shape, *view.strides)) and view not in args:
            raise UnsupportedError("a view of an input whose size is known only at run time")
        whole = view in args
        static = () if not is_static((*view.shape, *view.strides)) else (view.shape, view.strides)
        shape, stride = static or ((), ())
        return Output("input", view.buffer.index, view.dtype, shape, stride, view.offset, whole)
    eager = lx.meta(node.meta["val"]) if isinstance(node, fx.Node) else None
    if eager is not None and view.buffer.kind == "workspace" and _must_copy(view, eager.strides):
        view = lx.copy(view, eager.strides)
    buffer = view.buffer
    if buffer.kind == "workspace":
        buffer.kind, buffer.index = "output", len(fresh)
        fresh.append(Fresh(buffer.dtype, buffer.shape, buffer.strides))
    return Output("output", buffer.index, view.dtype, view.shape, view.strides, view.offset)


def _must_copy(view: View, eager: tuple[int, ...] | None) -> bool:
    """Whether returning a view of its buffer would waste memory, or show strides that eager's result does not have."""
    if eager is None or not is_dense(view.shape, eager):
        return False
    wanted = [s for s, n in zip(eager, view.shape) if n != 1]
    return view.numel < view.buffer.extent or [s for s, n in zip(view.strides, view.shape) if n != 1] != wanted


def supports(node: fx.Node) -> str | None:
    """None when ``lower`` can take the node, else the reason in plain words.

    The node is lowered by itself, its tensor arguments standing as inputs, so that there is one place that knows.
    """
    if node.op in ("placeholder", "output"):
        return None
    lx = Lowerer()
    module = node.graph.owning_module
    try:
        frame: dict[fx.Node, object] = {}
        for arg in node.all_input_nodes:
            _collect_symbols(lx, arg.meta.get("val"))
        lx.frames.append(frame)
        for arg in node.all_input_nodes:
            frame[arg] = lx.call(arg, module) if arg.op == "get_attr" else _stand_in(lx, arg)
        result = lx.call(node, module)
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(value, Value) and is_static(value.shape):
                lx.realise(value)
        lx.flush_all()
    except UnsupportedError as error:
        return error.reason
    return None


def _stand_in(lx: Lowerer, arg: fx.Node) -> object:
    val = arg.meta.get("val")
    if isinstance(val, (list, tuple)):
        return [lx.add_input(arg.name, -1, v) if isinstance(v, torch.Tensor) else v for v in val]
    if isinstance(val, torch.Tensor):
        return lx.add_input(arg.name, len(lx.buffers), val)
    return lx.size(val) if isinstance(val, (int, torch.SymInt)) else val


def _collect_symbols(lx: Lowerer, val: object) -> None:
    """Every free symbol is taken to be a scalar input."""
    sizes = [*val.shape, *val.stride()] if isinstance(val, torch.Tensor) else [val]
    for size in sizes:
        if isinstance(size, torch.SymInt):
            for symbol in sorted(size.node.expr.free_symbols, key=str):
                lx.symbols.setdefault(symbol, len(lx.symbols))


