"""Nodes that become other nodes: operations through PyTorch's decompositions, tasks through their references."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._subclasses.fake_tensor import maybe_get_fake_mode

from torch_mpk.capture.node_keys import call_text, describe
from torch_mpk.capture.tracing import make_fx
from torch_mpk.errors import UnsupportedError, first_line
from torch_mpk.lowering.convolution import depthwise

if TYPE_CHECKING:
    from torch_mpk.lowering.lowerer import Lowerer


def inline(lx: Lowerer, node: fx.Node, call: Callable[..., object], decompositions: dict | None = None) -> list[Any]:
    """Trace ``call`` on the node's arguments and lower what it does; returns its results."""
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    if len(tensors) != len(node.all_input_nodes):
        raise UnsupportedError("an argument is no tensor known when the graph is captured")

    def body(*values: torch.Tensor) -> object:
        given = dict(zip(tensors, values, strict=False))
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: given[n])
        return call(*args, **kwargs)

    examples = [t.meta["val"] for t in tensors]
    key = None
    described = tuple(map(describe, examples))
    if None not in described:
        key = node.target, described, call_text(node, {t: i for i, t in enumerate(tensors)})
    module = lx.traced.get(key) if key else None
    if module is None:
        # The mode is for what ``call`` makes from nothing.
        with next(filter(None, map(maybe_get_fake_mode, examples)), nullcontext()):
            module = make_fx(
                body,
                decomposition_table=decompositions,
                tracing_mode="real",
                pre_dispatch=decompositions is None,
                _allow_non_fake_inputs=True,
            )(*examples)
        if key:
            lx.traced[key] = module
    if any(n.target is node.target for n in module.graph.nodes):
        raise UnsupportedError("it has no decomposition")
    return lx.run(module.graph, module, [lx.env[t] for t in tensors])


@functools.cache
def _decompositions() -> dict[Any, Callable[..., object]]:
    """PyTorch's, of what is not core ATen and of some that is, and one of ours."""
    aten = torch.ops.aten
    core = [aten.elu, aten.leaky_relu, aten.hardtanh, aten.linalg_vector_norm, aten.native_group_norm]
    return {**core_aten_decompositions(), **get_decompositions(core), aten.convolution.default: depthwise}


def decompose(lx: Lowerer, node: fx.Node) -> object:
    """Lower an operation that has no rule through a decomposition of it."""
    target, table = node.target, _decompositions()
    if target._schema.is_mutable or (target not in table and not target._can_decompose()):
        raise UnsupportedError(f"{target} is not supported")
    try:
        results = inline(lx, node, target, table)
    except Exception as error:
        reason = error.reason if isinstance(error, UnsupportedError) else first_line(error)
        raise UnsupportedError(f"{target} is not supported: {reason}") from error
    return results if isinstance(node.meta["val"], (tuple, list)) else results[0]
