"""PyTorch's ``make_fx``, without its effects on other threads.

To trace modules, ``torch.fx.Tracer`` replaces ``torch.nn.Module.__call__`` and marks the whole process as tracing. A
call of a compiled model in another thread then fails, or compiles what stands in place of the model. ``make_fx`` needs
neither: it records what operators dispatch to, in its own thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import PythonKeyTracer


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
        # Where make_fx takes its tracer from. Should another thread look there meanwhile, it gets an equal one.
        proxy_tensor.PythonKeyTracer = _Tracer
        try:
            return traced(*args)
        finally:
            proxy_tensor.PythonKeyTracer = PythonKeyTracer

    return trace
