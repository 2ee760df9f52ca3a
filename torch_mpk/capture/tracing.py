"""PyTorch's ``make_fx``, without its effects on other threads, and one thread at a time; modules of graphs.

To trace modules, ``torch.fx.Tracer`` replaces ``torch.nn.Module.__call__`` and marks the whole process as tracing. A
call of a compiled model in another thread then fails, or compiles what stands in place of the model. ``make_fx`` needs
neither: it records what operators dispatch to, in its own thread. The modes that it traces with before dispatch stand
on a stack of the process, though, so two traces may not overlap, nor may one and a trace of Dynamo's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import PythonKeyTracer


def graph_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph with the attributes of ``root``. Its code is written when somebody asks for it, because
    most of the graphs between two stages are never called or printed."""
    return _LazyGraphModule(root, graph)


def copied(graph: fx.Graph, node: fx.Node, of: Callable[[fx.Node], Any] = lambda arg: arg) -> fx.Node:
    """A node of Dynamo's in another graph, with where Dynamo found it. ``of``: what its arguments are there."""
    copy = graph.node_copy(node, of)
    copy._dynamo_source = getattr(node, "_dynamo_source", None)
    return copy


class _Tracer(PythonKeyTracer):
    def trace(self, root: Any, concrete_args: Any = None) -> torch.fx.Graph:
        """What ``Tracer.trace`` does with a function, less what is said above."""
        self.root = torch.nn.Module()
        self.graph = torch.fx.Graph(tracer_cls=type(self))
        self.tensor_attrs: dict[Any, str] = {}
        function, args = self.create_args_for_root(root, False, concrete_args)
        self.create_node("output", "output", (self.create_arg(function(*args)),), {})
        self.submodule_paths = None
        return self.graph


def make_fx(function: Callable[..., Any], **options: Any) -> Callable[..., torch.fx.GraphModule]:
    """``torch.fx.experimental.proxy_tensor.make_fx``; ``options`` are its."""
    traced = proxy_tensor.make_fx(function, **options)

    def trace(*args: Any) -> torch.fx.GraphModule:
        with torch._dynamo.convert_frame.compile_lock:
            # Where make_fx takes its tracer from. Should another thread look there meanwhile, it gets an equal one.
            proxy_tensor.PythonKeyTracer = _Tracer
            try:
                with _use_lazy_graph_module(True):
                    return traced(*args)
            finally:
                proxy_tensor.PythonKeyTracer = PythonKeyTracer

    return trace
