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
from torch_mpk.lowering.values import Value, View, contiguous_strides, is_dense, is_static

__all__ = ["Alias", "Fresh", "Literal", "Lowered", "lower", "supports"]


@dataclass(frozen=True)
class Fresh:
    """A result that is a new tensor at every call; the n-th one is the output buffer of index n."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Alias:
    """A result that is a strided view of an argument, or of the n-th new tensor: exactly one of the two is given."""

    argument: int | None
    fresh: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements from the viewed tensor's first


@dataclass(frozen=True)
class Literal:
    """A result that is no tensor."""

    value: object


@dataclass(frozen=True)
class Lowered:
    """A task graph and how the segment's arguments and results map to it. Positions count the segment's placeholders."""

    graph: _C.TBGraph
    inputs: tuple[int, ...]  # positions of the tensors, in the order of input buffer indices
    scalars: tuple[int, ...]  # positions of the SymInts, in the order of the programs' ``size`` numbers
    outputs: tuple[int | Fresh | Alias | Literal, ...]  # an int: the argument at that position itself


def lower(segment: fx.GraphModule) -> Lowered:
    """The task graph of a segment: pre-dispatch ATen operations and task calls, with fake tensors in ``node.meta["val"]``.

    Raises UnsupportedError naming the node where the segment cannot be lowered; ``supports`` tells per node beforehand.
    """
    lx = Lowerer()
    inputs: list[int] = []
    scalars: list[int] = []
    vals = [n.meta["val"] for n in segment.graph.nodes if n.op == "placeholder"]
    names = [n.name for n in segment.graph.nodes if n.op == "placeholder"]
    for position, val in enumerate(vals):
        if isinstance(val, torch.SymInt):
            lx.symbols[val.node.expr] = len(scalars)
            scalars.append(position)
    args: list[object] = []
    for position, val in enumerate(vals):
        if isinstance(val, torch.Tensor):
            args.append(lx.add_input(names[position], len(inputs), val))
            inputs.append(position)
        else:
            args.append(lx.size(val) if isinstance(val, (int, torch.SymInt)) else val)

    results = lx.run(segment.graph, segment, args)
    output = next(n for n in segment.graph.nodes if n.op == "output").args[0]
    nodes = output if isinstance(output, (tuple, list)) else (output,)
    lx.frames.append(dict(enumerate(results)))  # writes still pending keep what the results read
    outputs = _Outputs(lx, args, inputs)
    for node, result in zip(nodes, results):
        try:
            outputs.add(node, result)
        except UnsupportedError as error:
            raise UnsupportedError(f"as a result: {error.reason}", error.node or str(node), error.source) from error
    lx.flush_all()
    return Lowered(build(merge(lx.steps), lx.buffers), tuple(inputs), tuple(scalars), tuple(outputs.specs))


class _Outputs:
    def __init__(self, lx: Lowerer, args: list[object], inputs: list[int]) -> None:
        self.lx, self.args, self.inputs = lx, args, inputs
        self.specs: list[int | Fresh | Alias | Literal] = []
        self.num_fresh = 0

    def add(self, node: object, result: object) -> None:
        if isinstance(result, (Value, Expr)) and any(result is arg for arg in self.args):
            self.specs.append(next(i for i, arg in enumerate(self.args) if arg is result))
        elif isinstance(result, Expr):
            raise UnsupportedError("a size computed from sizes")
        elif not isinstance(result, Value):
            self.specs.append(Literal(result))
        else:
            self.specs.append(self._tensor(self.lx.realise(result), node.meta["val"]))

    def _tensor(self, view: View, eager: torch.Tensor) -> Fresh | Alias:
        if not is_static((*view.shape, *view.strides)):
            raise UnsupportedError("a view of an argument whose size is known only at run time")
        if view.buffer.kind == "input":
            return Alias(self.inputs[view.buffer.index], None, view.shape, view.strides, int(view.offset))
        if view.buffer.kind == "output":
            return Alias(None, view.buffer.index, view.shape, view.strides, int(view.offset))
        if not _is_all_of_its_buffer(view, eager):
            view = self.lx.copy(view, tuple(eager.stride()))
        view.buffer.kind, view.buffer.index = "output", self.num_fresh
        self.num_fresh += 1
        return Fresh(view.dtype, view.shape, view.strides)


def _is_all_of_its_buffer(view: View, eager: torch.Tensor) -> bool:
    """Whether a view wastes no memory when it keeps its buffer alive, and has the strides of eager's result."""
    if not is_dense(view.shape, view.strides) or view.numel != view.buffer.extent:
        return False
    wanted = eager.stride() if is_dense(view.shape, eager.stride()) else contiguous_strides(view.shape)
    return all(a == b for a, b, n in zip(view.strides, wanted, view.shape) if n != 1)


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


