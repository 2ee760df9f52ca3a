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
    """How a weight is a product's operands: attributes of it, and ``quantized_linear``'s own.

    Attributes:
        operands: the weight's attribute, by the operand of ``product``.
    """

    operands: Mapping[str, str]
    attrs: Mapping[str, int]


def parts_of(value: Any, dim: int = 2) -> Parts | None:
    """The parts of a weight; None where it is none of the classes that are known.

    Args:
        dim: 2 for a matrix, 3 for those of experts, [E, N, K].

    Raises UnsupportedError where its class is known, but not what it says.
    """
    cls = type(value)
    reader = _READERS.get(cls.__name__) if cls.__module__.startswith("torchao.") else None
    return None if reader is None else reader(value, dim)


def _torchao(value: Any, dim: int, storage: torch.dtype) -> Parts:
    block = list(value.block_size)
    if value.qdata.dtype != storage or value.dim() != dim or len(block) != dim or block[:-2] != [1] * (dim - 2):
        raise UnsupportedError(f"it stores {value.qdata.dtype} in blocks of {block}")
    if value.qdata.stride(-1) != 1:
        raise UnsupportedError("its rows lie apart, as those of a transposed weight")
    attrs = {"block_rows": block[-2], "block_columns": block[-1], "x_columns": 0}
    return Parts({"weight": "qdata", "scale": "scale"}, attrs)


def _torchao_float8(value: Any, dim: int) -> Parts:
    """Activations stay as they are, or are quantised by row, or by one scale that is given."""
    parts, of_x = _torchao(value, dim, torch.float8_e4m3fn), value.act_quant_kwargs
    if getattr(value, "output_act_quant_kwargs", None) is not None:
        raise UnsupportedError("it quantises its results as well")
    if of_x is None:
        return parts
    given, attrs = getattr(value, "act_quant_scale", None), dict(parts.attrs, x_columns=-1)
    if dim > 2 or of_x.float8_dtype != torch.float8_e4m3fn or of_x.hp_value_lb or of_x.hp_value_ub:
        raise UnsupportedError("it quantises activations as well")
    if given is not None and given.numel() == 1:
        return Parts({**parts.operands, "x_scale": "act_quant_scale"}, attrs)
    if given is None and getattr(of_x.granularity, "dim", None) == -1:
        return Parts(parts.operands, attrs)
    raise UnsupportedError(f"it quantises activations by {of_x.granularity}, expected by row or by a given scale")


def _torchao_int8(value: Any, dim: int) -> Parts:
    if value.act_quant_kwargs is not None:
        raise UnsupportedError("it quantises activations as well")
    if value.act_pre_scale is not None:
        raise UnsupportedError("it scales activations before the product")
    parts = _torchao(value, dim, torch.int8)
    # torchao's products over whole rows leave zero points out, whatever they are.
    if value.zero_point is None or value.block_size[-1] >= value.qdata.shape[-1]:
        return parts
    return Parts({**parts.operands, "zero": "zero_point"}, parts.attrs)


def _torchao_int4(value: Any, dim: int) -> Parts:
    """Two numbers of -8 to 7 to a byte; scales and zero points, which are added, are [columns of blocks, rows]."""
    block = list(value.block_size)
    if value.act_pre_scale is not None:
        raise UnsupportedError("it scales activations before the product")
    if value.activation_dtype != torch.bfloat16:
        raise UnsupportedError("it quantises activations as well")
    if value.qdata.dtype != torch.int8 or value.qdata.dim() != dim or block[:-1] != [1] * (dim - 1):
        raise UnsupportedError(f"it stores {value.qdata.dim()}-dimensional {value.qdata.dtype} in blocks of {block}")
    if value.qdata.stride(-1) != 1:
        raise UnsupportedError("its rows lie apart, as those of a transposed weight")
    attrs = {"block_rows": 1, "block_columns": block[-1], "x_columns": 0}
    return Parts({"weight": "qdata", "scales_by_column": "scale", "zeros_by_column": "zero_point"}, attrs)


def _packed_elsewhere(value: Any, dim: int) -> Parts:
    raise UnsupportedError("its packing is not the plain one")


_READERS: dict[str, Callable[[Any, int], Parts]] = {
    "Float8Tensor": _torchao_float8,
    "PrototypeFloat8Tensor": _torchao_float8,
    "Int8Tensor": _torchao_int8,
    "Int4Tensor": _torchao_int4,
    **dict.fromkeys(("Int4TilePackedTo4dTensor", "Int4PreshuffledTensor", "Int4PlainInt32Tensor"), _packed_elsewhere),
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
        taken: dict[fx.Node, tuple[dict[str, fx.Node], Mapping[str, int]]] = {}
        for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
            if i in parts:
                self._getters.append(operator.attrgetter(*parts[i].operands.values()))
                nodes = {operand: _part(graph, node, name) for operand, name in parts[i].operands.items()}
                taken[node] = nodes, parts[i].attrs
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
            args = (copies[x], None if bias is None else copies[bias])
            copies[node] = graph.call_function(product, args, nodes | dict(attrs))
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
    x: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    scales_by_column: torch.Tensor | None = None,
    zeros_by_column: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    **attrs: int,
) -> torch.Tensor:
    """``F.linear`` with a weight in parts. Scales and zero points by column are transposed."""
    if scales_by_column is not None:
        scales = scales_by_column.t()
    else:
        assert scale is not None
        sizes = [-(-size // (attrs[name] or size)) for size, name in zip(weight.shape, ("block_rows", "block_columns"))]
        scales = scale.reshape(sizes)
        zero = None if zero is None else zero.reshape(sizes)
    if zeros_by_column is not None:
        zero = zeros_by_column.t()
    rows = x.reshape(-1, x.shape[-1])
    x_scale = None if x_scale is None else x_scale.reshape(1)
    y = torch.ops.mpk.quantized_linear(rows, weight, scales, bias, x_scale, zero, **attrs)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def product_with(input: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002
    """``F.linear`` with a weight of a class that is known.

    Raises UnsupportedError where it is not.
    """
    parts = parts_of(weight)
    if parts is None:
        raise UnsupportedError(f"{type(weight).__name__} is no class of quantised weights that is known")
    operands: dict[str, Any] = {name: getattr(weight, part) for name, part in parts.operands.items()}
    return product(input, bias, **(operands | dict(parts.attrs)))


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
