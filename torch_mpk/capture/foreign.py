"""Inputs that are no plain tensors: quantised weights with classes of their own, sparse tensors, objects that operators
take. What is done with one is known to its class alone, so that a graph keeps such calls as they are, for PyTorch."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from torch_mpk.capture import quantized_inputs
from torch_mpk.errors import UnsupportedError

NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
_MEMBER = re.compile(r"\.(?:__dict__\[')?_(?:modules|parameters|buffers)(?:'\])?\['([^']+)'\]")  # as Dynamo names them
_ROOT = re.compile(r"^L\[(?:'self'|'fn'|'args'\]\[0)\]\.")
# Classes of parameters that change operations, but not their ``data``, which is a strided tensor.
_PLAIN_DATA = {"bitsandbytes.nn.modules.Params4bit"}
_IN_PLACE = (operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.iand)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether operations see no more in it than a strided tensor: its class, as some of parameters, changes none."""
    cls = type(tensor)
    if tensor.layout != torch.strided or not _dispatches_as_tensor(cls):
        return False
    if _names(cls) in _PLAIN_DATA:
        return True
    return cls is torch.Tensor or cls.__torch_function__ == torch._C._disabled_torch_function_impl


def is_foreign(value: Any) -> bool:
    """Whether calls that take an input are kept as they are. Not where its class makes others of its kind of all that
    it meets, in Python alone: that would be the whole graph. Fake tensors stand for plain ones."""
    if not isinstance(value, torch.Tensor):
        return not isinstance(value, NUMBERS)
    if isinstance(value, FakeTensor):
        return False
    is_contagious = _dispatches_as_tensor(type(value)) and not isinstance(value, torch.nn.Parameter)
    return not is_plain(value) and not (is_contagious and value.layout == torch.strided)


def _names(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_read_otherwise(node: fx.Node, value: Any) -> bool:
    """Whether calls of a graph take a parameter of ``_PLAIN_DATA`` itself, and so its class's operations."""
    as_data = getattr(torch._C._autograd, "_get_data_attr", None)
    return _names(type(value)) in _PLAIN_DATA and any(user.target not in (as_data, "output") for user in node.users)


def _dispatches_as_tensor(cls: type) -> bool:
    own: Any = cls
    return bool(own.__torch_dispatch__ == torch.Tensor.__torch_dispatch__)


def path_of(source: str) -> str:
    """Where Dynamo found an input, as users would write it: "model.layers.0.mlp.up_proj.weight"."""
    return _ROOT.sub("", _MEMBER.sub(r".\1", source))


def stand_in(value: Any, device: torch.device) -> torch.Tensor:
    """A plain tensor in its place, in the fake mode that is active."""
    if not isinstance(value, torch.Tensor):
        return torch.empty(0, device=device)
    if value.layout != torch.strided:
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


class Foreign:
    """A call of Dynamo's graph that takes such an input: the target of a node of the captured graph.

    Attributes:
        why: the reason why it is not ours.
    """

    def __init__(self, node: fx.Node, why: str, results: Any) -> None:
        """``results``: examples of what it gives."""
        self.op, self.called, self.why = node.op, node.target, why
        self._results = results
        self.__name__ = self.__qualname__ = getattr(node.target, "__name__", str(node.target)).split(".")[-1]

    def __str__(self) -> str:
        name = self.called if isinstance(self.called, str) else f"{self.called.__module__}.{self.__name__}"
        return f"{name}, of which {self.why}"

    __repr__ = __str__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(isinstance(t, FakeTensor) for t in leaves):
            with contextlib.suppress(Exception):  # what counts operations sees those of plain tensors
                self._call(args, kwargs)
            return tree_map(lambda t: torch.empty_like(t) if isinstance(t, torch.Tensor) else t, self._results)
        storages = {t.untyped_storage()._cdata for t in leaves if is_plain(t)}

        def apart(result: Any) -> Any:
            """No part of a plain argument: nothing else in the graph shows that they would be one."""
            is_part = isinstance(result, torch.Tensor) and is_plain(result)
            return result.clone() if is_part and result.untyped_storage()._cdata in storages else result

        return tree_map(apart, self._call(args, kwargs))

    def _call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        # The graph already has what a class's ``__torch_function__`` does, unless it wraps tensors. PyTorch before 2.13
        # would do it once more.
        is_wrapped = any(map(is_traceable_wrapper_subclass, tree_leaves((args, kwargs))))
        with contextlib.nullcontext() if is_wrapped else torch._C.DisableTorchFunctionSubclass():
            if self.op == "call_method":
                return getattr(args[0], self.called)(*args[1:], **kwargs)
            return self.called(*args, **kwargs)

    def trace(self, args: Any, kwargs: Any) -> Any:
        """Notes the call in the graph that ``make_fx`` is tracing, and gives its example results."""
        mode: Any = proxy_tensor.get_proxy_mode()
        tracer = mode.tracer
        with proxy_tensor.disable_proxy_modes_tracing():
            results = tree_map(lambda t: torch.empty_like(t) if isinstance(t, torch.Tensor) else t, self._results)
        proxies = tree_map(tracer.unwrap_proxy, (tuple(args), dict(kwargs)))
        proxy = tracer.create_proxy("call_function", self, *proxies, name=self.__name__)
        return proxy_tensor.track_tensor_tree(results, proxy, constant=None, tracer=tracer)


def foreign_calls(graph: fx.Graph, inputs: Sequence[Any], sources: Sequence[str]) -> dict[fx.Node, str]:
    """The nodes of Dynamo's graph that take an input which is no plain tensor, or what was made of one; and why.

    Raises UnsupportedError where one writes in place.
    """
    reasons: dict[fx.Node, str] = {}  # of such values
    calls: dict[fx.Node, str] = {}
    for node, value, source in zip(graph.find_nodes(op="placeholder"), inputs, sources, strict=True):
        if is_foreign(value) or _is_read_otherwise(node, value):
            reasons[node] = _reason(value, path_of(source))
    for node in graph.nodes if reasons else ():
        why = next((reasons[arg] for arg in node.all_input_nodes if arg in reasons), None)
        if why is None or node.op == "output":
            continue
        if _writes(node):
            raise UnsupportedError(f"{why}; {node.name} writes in place")
        calls[node] = why
        made = tree_leaves(node.meta.get("example_value"))
        if any(isinstance(t, torch.Tensor) and not isinstance(t, FakeTensor) and not is_plain(t) for t in made):
            reasons[node] = why
    return calls


def _reason(value: Any, path: str) -> str:
    kind = _names(type(value))
    if not isinstance(value, torch.Tensor):
        return f"{path} is of class {kind}, neither a tensor nor a number"
    if value.layout != torch.strided:
        return f"{path} is of layout {value.layout}"
    why = quantized_inputs.reason(value)
    return f"{path} is of class {kind}, whose operations are its own" + (f": {why}" if why else "")


def _writes(node: fx.Node) -> bool:
    name = str(getattr(node.target, "__name__", node.target))
    schemas = getattr(node.target, "_schemas", None) or {"": getattr(node.target, "_schema", None)}
    is_mutable = any(schema is not None and schema.is_mutable for schema in schemas.values())
    return node.target in _IN_PLACE or is_mutable or "out" in node.kwargs or re.search(r"[^_]_$", name) is not None
