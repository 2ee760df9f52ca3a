"""The rules: how each ATen operation becomes an expression of its arguments' elements."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from torch_mpk.errors import UnsupportedError
from torch_mpk.lowering import expr as E
from torch_mpk.lowering.expr import Expr
from torch_mpk.lowering.lowerer import Lowerer, Meta
from torch_mpk.lowering.values import Lazy, Value

aten = torch.ops.aten

Rule = Callable[..., object]
RULES: dict[torch._ops.OpOverload, Rule] = {}
MAX_CONSTANT = 16  # elements of a tensor constant that becomes part of programs


def rule(*targets: torch._ops.OpOverload) -> Callable[[Rule], Rule]:
    def register(fn: Rule) -> Rule:
        for target in targets:
            RULES[target] = fn
        return fn

    return register


def out_meta(lx: Lowerer, node: fx.Node) -> Meta:
    return lx.meta(node.meta["val"])


def normalise_dim(dim: int, rank: int) -> int:
    return dim + max(rank, 1) if dim < 0 else dim


def scalar(value: bool | int | float | Expr, dtype: torch.dtype) -> Expr:
    """A Python number as an argument of an operation computed in ``dtype``: half types compute in fp32."""
    if isinstance(value, Expr):
        return E.cast(value, dtype)
    return E.const(value, torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype)


def constant(lx: Lowerer, value: object) -> Value:
    """A tensor the graph holds, as part of the programs that use it."""
    if not isinstance(value, torch.Tensor):
        raise UnsupportedError(f"a graph attribute of type {type(value).__name__}")
    if isinstance(value, torch._subclasses.FakeTensor) or value.numel() > MAX_CONSTANT:
        raise UnsupportedError(
            f"a tensor constant of {value.numel()} elements is held by the graph; at most {MAX_CONSTANT} become part of it"
        )
    meta = lx.meta(value)
    shape = [int(n) for n in value.shape]
    elements = value.detach().cpu().reshape(-1).tolist()

    def inner(idx: list[Expr], predicate: Expr | None) -> Expr:
        linear = E.ravel(idx, shape)
        out = E.const(elements[-1], meta.dtype)
        for i in range(len(elements) - 2, -1, -1):
            out = E.where(E.compare("eq", linear, E.const(i, E.INT64)), E.const(elements[i], meta.dtype), out)
        return out

    if not elements:
        raise UnsupportedError("an empty tensor constant")
    return Lazy(meta.dtype, shape, (), inner, cost=2 * len(elements))


def decompose(lx: Lowerer, node: fx.Node) -> object:
    """Lower an operation that has no rule through PyTorch's own decomposition of it."""
    from torch._decomp import core_aten_decompositions
    from torch.fx.experimental.proxy_tensor import make_fx

    name = str(node.target)
    if node.target not in core_aten_decompositions() and not node.target._can_decompose():
        raise UnsupportedError(f"{name} is not supported")
    if node.target._schema.is_mutable:
        raise UnsupportedError(f"{name} writes in place in a way that is not supported")
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    if len(tensors) != len(node.all_input_nodes):
        raise UnsupportedError(f"{name} with a size that is known only at run time is not supported")

    def body(*values: torch.Tensor) -> object:
        lookup = dict(zip(tensors, values))
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: lookup[n])
        return node.target(*args, **kwargs)

    fakes = [t.meta["val"] for t in tensors]
    try:
        module = make_fx(body, decomposition_table=core_aten_decompositions(), tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
    except Exception as error:
        raise UnsupportedError(f"{name} is not supported: its decomposition failed: {error}") from error
    if any(n.target is node.target for n in module.graph.nodes):
        raise UnsupportedError(f"{name} is not supported")
    try:
        result = lx.run(module.graph, module, [lx.env[t] for t in tensors])
    except UnsupportedError as error:
        raise UnsupportedError(f"{name} is not supported: {error.reason}") from error
    return result if isinstance(node.meta["val"], (tuple, list)) else result[0]


# The rules register themselves.
from torch_mpk.lowering import rules_index, rules_pointwise, rules_reduce, rules_view, rules_write  # noqa: E402, F401
