"""Stage 4: a graph segment of ATen operations and task calls becomes a ``TBGraph``.

Every value that no task needs in memory is *virtual*: a function from an index to an expression, composed through view,
pointwise and indexing operations, and written into the programs of the nodes that use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_mpk import _C
from torch_mpk.capture.aliasing import is_view
from torch_mpk.errors import UnsupportedError
from torch_mpk.lowering import rules  # noqa: F401  (they enter themselves into the table)
from torch_mpk.lowering.expr import Expr
from torch_mpk.lowering.lowerer import Lowerer
from torch_mpk.lowering.steps import build, merge
from torch_mpk.lowering.values import Value, View, contiguous_strides, is_dense, is_static
from torch_mpk.plan import Fresh, Output

__all__ = ["Lowered", "lower", "supports"]


@dataclass(frozen=True)
class Lowered:
    """A task graph, and how the segment's arguments and results map to it."""

    graph: _C.TBGraph
    inputs: tuple[fx.Node, ...]  # the placeholders that are tensors, in the order of input buffer indices
    scalars: tuple[fx.Node, ...]  # the placeholders that are SymInts, in the order of the programs' ``size`` numbers
    outputs: tuple[Output, ...]
    fresh: tuple[Fresh, ...]  # in the order of output buffer indices


def lower(segment: fx.GraphModule) -> Lowered:
    """The task graph of a segment: ATen operations and task calls, with fake tensors in ``node.meta["val"]``.

    Raises UnsupportedError naming the node where the segment cannot be lowered; ``supports`` tells per node beforehand.
    """
    lx = Lowerer()
    placeholders = [n for n in segment.graph.nodes if n.op == "placeholder"]
    inputs = [n for n in placeholders if isinstance(n.meta["val"], torch.Tensor)]
    scalars = [n for n in placeholders if isinstance(n.meta["val"], torch.SymInt)]
    dimensions = {size.node.expr for n in inputs for size in n.meta["val"].shape if isinstance(size, torch.SymInt)}
    for number, n in enumerate(scalars):
        symbol = n.meta["val"].node.expr
        lx.add_symbol(number, n.meta["val"], symbol, symbol in dimensions)
    args = [_argument(lx, n) for n in placeholders]

    results = lx.run(segment.graph, segment, args)
    output = next(n for n in segment.graph.nodes if n.op == "output").args[0]
    nodes = output if isinstance(output, (tuple, list)) else (output,)
    lx.frames.append(dict(enumerate(results)))  # writes still pending keep what the results read
    outputs = _Outputs(lx, args)
    for node, result in zip(nodes, results, strict=True):
        try:
            outputs.add(node, result)
        except UnsupportedError as error:
            raise UnsupportedError(f"as a result: {error.reason}", error.node or str(node), error.source) from error
    lx.flush_all()
    graph = build(merge(lx.steps), lx.buffers)
    return Lowered(graph, tuple(inputs), tuple(scalars), tuple(outputs.specs), tuple(outputs.fresh))


def _argument(lx: Lowerer, node: fx.Node) -> object:
    val = node.meta["val"]
    if isinstance(val, torch.Tensor):
        return lx.add_input(node.name, len(lx.buffers), val)
    return lx.size(val) if isinstance(val, (int, torch.SymInt)) else val


class _Outputs:
    """The results of a segment, given memory one by one."""

    def __init__(self, lx: Lowerer, args: list[object]) -> None:
        self.lx, self.args = lx, args
        self.specs: list[Output] = []
        self.fresh: list[Fresh] = []

    def add(self, node: Any, result: object) -> None:
        if isinstance(result, Value):
            self.specs.append(self._tensor(result, node.meta["val"]))
        elif not isinstance(result, Expr):
            self.specs.append(Output("value", value=result))
        elif result.op == "size":
            self.specs.append(Output("scalar", result.attr[0]))
        else:
            raise UnsupportedError("a size computed from sizes")

    def _tensor(self, value: Value, eager: torch.Tensor) -> Output:
        if isinstance(value, View) and value in self.args:
            return Output("input", value.buffer.index, value.dtype, whole=True)
        view = self.lx.realise(value)
        if view.buffer.kind == "workspace" and not _is_all_of_its_buffer(view, eager):
            view = self.lx.copy(view, tuple(eager.stride()))
        buffer, shape, strides, offset = view.buffer, view.shape, view.strides, view.offset
        if not (is_static(shape) and is_static(strides) and isinstance(offset, int)):
            raise UnsupportedError("a view of an argument whose size is known only at run time")
        # No address depends on the stride of a dimension of size 1, but whoever reads a layout from strides does.
        as_eagers = tuple(e if n == 1 and isinstance(e, int) else s for e, n, s in zip(eager.stride(), shape, strides))
        if buffer.kind == "workspace":
            buffer.kind, buffer.index = "output", len(self.fresh)
            self.fresh.append(Fresh(view.dtype, shape, as_eagers))
        return Output(buffer.kind, buffer.index, view.dtype, shape, as_eagers, offset)


def _is_all_of_its_buffer(view: View, eager: torch.Tensor) -> bool:
    """Whether a view wastes no memory when it keeps its buffer alive, and has the strides of eager's result."""
    if not (is_static(view.shape) and is_static(view.strides) and is_dense(view.shape, view.strides)):
        return False
    if view.numel != view.buffer.extent:
        return False
    wanted = eager.stride() if is_dense(view.shape, eager.stride()) else contiguous_strides(view.shape)
    return all(a == b for a, b, n in zip(view.strides, wanted, view.shape, strict=False) if n != 1)


def supports(node: fx.Node, target: _C.Target | None = None) -> str | None:
    """None when a rule takes the node and, where ``target`` is a CUDA device, kernels take what it becomes; else the
    reason in plain words.

    Rules and kernels are the declarations of what is taken, so that there is one place that knows. They are asked about
    the node by itself. Its tensor arguments are inputs or lie in the workspace, as they do in the graph.
    """
    if node.op in ("placeholder", "output"):
        return None
    lx = Lowerer()
    lx.frames.append({})
    try:
        for arg in node.all_input_nodes:
            _define(lx, arg)
        result = lx.call(node, node.graph.owning_module)
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(value, Value) and is_static(value.shape):
                lx.realise(value)
        lx.flush_all()
        if target is not None and target.device == "cuda" and lx.steps:
            return _C.refusal(build(merge(lx.steps), lx.buffers), target)
    except UnsupportedError as error:
        return error.reason
    return None


def _define(lx: Lowerer, arg: fx.Node) -> None:
    """Views are lowered too: where they lie in what they are of decides whether code can be made."""
    if arg in lx.env:
        return
    val = arg.meta.get("val")
    _collect_symbols(lx, val)
    if arg.op == "get_attr" or is_view(arg):
        for source in arg.all_input_nodes:
            _define(lx, source)
        lx.env[arg] = lx.call(arg, arg.graph.owning_module)
    elif isinstance(val, (list, tuple)):
        lx.env[arg] = [_stand_in(lx, arg, v) for v in val]
    else:
        lx.env[arg] = _stand_in(lx, arg, val)


def _stand_in(lx: Lowerer, arg: fx.Node, val: object) -> object:
    if isinstance(val, torch.Tensor):
        view = lx.add_input(arg.name, len(lx.buffers), val)
        view.buffer.kind = "input" if arg.op == "placeholder" else "workspace"
        return view
    return lx.size(val) if isinstance(val, (int, torch.SymInt)) else val


def _collect_symbols(lx: Lowerer, val: object) -> None:
    """Every free symbol is taken to be a scalar input."""
    sizes = [*val.shape, *val.stride()] if isinstance(val, torch.Tensor) else [val]
    for size in sizes:
        if isinstance(size, torch.SymInt):
            for symbol in sorted(size.node.expr.free_symbols, key=str):
                lx.add_symbol(len(lx.symbols), size, symbol, isinstance(val, torch.Tensor))
