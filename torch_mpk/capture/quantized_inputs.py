"""Weights of other packages' tensor classes, whose parts are plain tensors that ``quantized_linear`` takes.

Dynamo passes such a weight as it is, and leaves ``F.linear`` with it to the weight's class. Here the graph takes the
parts in its place, read where they lie. What is not known here stays foreign (foreign.py).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from torch_mpk.capture.tracing import copied, graph_module
from torch_mpk.errors import UnsupportedError

_LINEARS = (torch._C._nn.linear, torch.nn.functional.linear)


@dataclasses.dataclass(frozen=True)
class Parts:
    """How a weight is a product's operands: attributes of it, and ``quantized_linear``'s own."""

    weight: str
    scale: str
    attrs: Mapping[str, int]


def parts_of(value: Any) -> Parts | None:
    """The parts of a weight; None where it is none of the classes that are known.

    Raises UnsupportedError where its class is known, but not what it says.
    """
    cls = type(value)
    reader = _READERS.get(cls.__name__) if cls.__module__.startswith("torchao.") else None
    return None if reader is None else reader(value)


def _torchao(value: Any, storage: torch.dtype) -> Parts:
    block = list(value.block_size)
    if value.act_quant_kwargs is not None:
        raise UnsupportedError("it quantises activations as well")
    if value.qdata.dtype != storage or value.dim() != 2 or len(block) != 2:
        raise UnsupportedError(f"it stores {value.qdata.dtype} in blocks of {block}")
    if value.qdata.stride(-1) != 1:
        raise UnsupportedError("its rows lie apart, as those of a transposed weight")
    return Parts("qdata", "scale", {"block_rows": block[0], "block_columns": block[1], "x_columns": 0})


def _torchao_int8(value: Any) -> Parts:
    zero_point = value.zero_point
    if value.act_pre_scale is not None:
        raise UnsupportedError("it scales activations before the product")
    if zero_point is not None and not _is_fake(zero_point) and bool(zero_point.any()):
        raise UnsupportedError("it has zero points")
    return _torchao(value, torch.int8)


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor)


_READERS: dict[str, Callable[[Any], Parts]] = {
    "Float8Tensor": lambda value: _torchao(value, torch.float8_e4m3fn),
    "Int8Tensor": _torchao_int8,
}


def reason(value: Any) -> str:
    """Why a weight of a class that is known is left to it; empty if it is not."""
    try:
        return "" if parts_of(value) is None else "it is no weight of linears alone"
    except UnsupportedError as error:
        return error.reason


class Unpacked:
    """A graph of Dynamo's that takes the parts of some inputs in their place."""

    def __init__(self, gm: fx.GraphModule, parts: Mapping[int, Parts]) -> None:
        """``parts``: of the inputs, by position."""
        graph = fx.Graph()
        self._getters: list[Callable[[Any], Any] | None] = []
        copies: dict[fx.Node, fx.Node] = {}
        taken: dict[fx.Node, tuple[list[fx.Node], Mapping[str, int]]] = {}
        for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
            if i in parts:
                names = parts[i].weight, parts[i].scale
                self._getters.append(operator.attrgetter(*names))
                taken[node] = [_part(graph, node, name) for name in names], parts[i].attrs
            else:
                self._getters.append(None)
                copies[node] = copied(graph, node)
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                continue
            used = next((arg for arg in node.all_input_nodes if arg in taken), None)
            if used is None:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                continue
            x, bias = _operands(node)
            nodes, attrs = taken[used]
            args = (copies[x], *nodes, None if bias is None else copies[bias])
            copies[node] = graph.call_function(product, args, dict(attrs))
            copies[node].meta = dict(node.meta)
        self.gm = graph_module(gm, graph)

    def args(self, args: Sequence[Any]) -> list[Any]:
        flat: list[Any] = []
        for get, arg in zip(self._getters, args, strict=True):
            flat.append(arg) if get is None else flat.extend(get(arg))
        return flat

    def callable(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, which takes this graph's arguments, for those of Dynamo's."""

        def call(*args: Any) -> Any:
            return run(*self.args(args))

        call.__dict__.update(getattr(run, "__dict__", {}))
        return call


def unpack(gm: fx.GraphModule, inputs: Sequence[Any]) -> Unpacked | None:
    """The graph with the parts of weights of linears as its inputs; None where there are no such weights."""
    parts: dict[int, Parts] = {}
    for i, (node, value) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)):
        if not isinstance(value, torch.Tensor) or not all(_is_linear(user, node) for user in node.users):
            continue
        try:
            found = parts_of(value)
        except UnsupportedError:
            continue
        if found is not None:
            parts[i] = found
    return Unpacked(gm, parts) if parts else None


def product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, **attrs: int
) -> torch.Tensor:
    """``F.linear`` with a weight in parts."""
    sizes = [-(-size // (attrs[name] or size)) for size, name in zip(weight.shape, ("block_rows", "block_columns"))]
    y = torch.ops.mpk.quantized_linear(x.reshape(-1, x.shape[-1]), weight, scale.reshape(sizes), bias, **attrs)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _is_linear(user: fx.Node, weight: fx.Node) -> bool:
    if user.op != "call_function" or user.target not in _LINEARS:
        return False
    used = user.args[1] if len(user.args) > 1 else user.kwargs.get("weight")
    return used is weight and user.all_input_nodes.count(weight) == 1 and _operands(user)[0] is not weight


def _operands(linear: fx.Node) -> tuple[Any, Any]:
    args = dict(zip(("input", "weight", "bias"), linear.args)) | linear.kwargs
    return args["input"], args.get("bias")


def _part(graph: fx.Graph, node: fx.Node, name: str) -> fx.Node:
    part = graph.placeholder(f"{node.name}_{name}")
    example = node.meta.get("example_value")
    if example is not None:
        part.meta["example_value"] = getattr(example, name)
    source: Any = getattr(node, "_dynamo_source", None)
    of_whole = getattr(source, "name", node.name)
    of_whole = of_whole() if callable(of_whole) else of_whole
    part._dynamo_source = SimpleNamespace(name=f"{of_whole}.{name}")
    return part
