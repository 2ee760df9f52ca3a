"""What the backend gives to ``torch.compile``'s ahead-of-time mode, which saves compiled functions."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._dynamo.aot_compile_types import SerializableCallable


class Saveable(SerializableCallable):
    """A compiled graph that is saved as the graph and the options: where it is loaded, its first call builds it, from
    the kernels in the cache where the same graph was built before."""

    def __init__(
        self, call: Callable[..., Any], gm: fx.GraphModule, mode: str | None, options: Mapping[str, Any] | None
    ):
        self.call, self.gm, self.mode, self.options = call, gm, mode, options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    @classmethod
    def serialize_compile_artifacts(cls, fn: Saveable) -> bytes:
        from torch._dynamo.aot_compile_types import GraphModuleSerializableCallable

        gm = fx.GraphModule(fn.gm, copy.deepcopy(fn.gm.graph))  # since PyTorch takes from it what cannot be saved
        graph = GraphModuleSerializableCallable.serialize_compile_artifacts(GraphModuleSerializableCallable(gm))
        return pickle.dumps((graph, fn.mode, None if fn.options is None else dict(fn.options)))

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Saveable:
        from torch._dynamo.aot_compile_types import GraphModuleSerializableCallable

        graph, mode, options = pickle.loads(data)
        gm = GraphModuleSerializableCallable.deserialize_compile_artifacts(graph).graph_module

        def build_and_call(*args: Any) -> Any:
            with torch._dynamo.convert_frame.compile_lock:
                if fn.call is build_and_call:
                    backend: Any = torch._dynamo.lookup_backend("mpk")
                    fn.call = backend(gm, list(args), mode=mode, options=options)
            return fn.call(*args)

        fn = cls(build_and_call, gm, mode, options)
        return fn
