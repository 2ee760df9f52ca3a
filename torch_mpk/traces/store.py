"""Traces of earlier processes, beside the compiled kernels.

A trace is found by what it is a trace of, and by the versions of Python, PyTorch, transformers and torch_mpk's content;
whether it is a call's, its facts say (``traces``). It is pickled: who can write to the cache can run code in our
process anyway, and ``Cache`` looks at who that is.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import pickle
import sys
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_mpk.config import env
from torch_mpk.dispatch.build_cache import fingerprint
from torch_mpk.errors import CacheError
from torch_mpk.jit import Cache
from torch_mpk.traces.trace import Sizes, Trace

logger = logging.getLogger(__name__)

MAX_STORED = 4  # of each kind
_FILE = "trace.pickle"


class Place:
    """What stands for a source of Dynamo's in a graph that was loaded."""

    def __init__(self, name: str) -> None:
        self.name = name


def stored(kind: Hashable) -> Iterator[Trace]:
    """Those of a kind, newest versions of everything given, one by one as they are asked for."""
    for key in _keys(kind):
        try:
            entry = _cache().get(key)
            if entry is None:
                return
            yield _unpack(entry.files[_FILE])
        except Exception as error:  # what other versions of PyTorch's classes raise is theirs
            logger.warning("the trace in %s/traces/%s is of no use: %s", env.cache_dir, key, error)


def store(kind: Hashable, trace: Trace) -> None:
    """Keeps a trace for other processes, if there is room for one more of its kind; the log says why not."""
    cache = _cache()
    try:
        free = next((key for key in _keys(kind) if cache.get(key) is None), None)
        if free is None:
            logger.info("a trace is not kept on disk: there are %d of its kind", MAX_STORED)
            return
        content = _pack(trace)
        with cache.workspace() as folder:
            cache.write(folder, {_FILE: content})
            cache.put(free, folder, {})
    except CacheError as error:
        logger.info("a trace is not kept on disk: %s", error)
    except Exception as error:  # PyTorch's, whose graphs may hold what cannot be pickled
        what = type(error).__name__, error
        logger.warning("a trace is not kept on disk, so each process makes it anew: %s: %s", *what)


def _cache() -> Cache:
    return Cache(env.cache_dir, env.cache_bytes, "traces")


def _keys(kind: Hashable) -> list[str]:
    from transformers import __version__ as transformers_version

    versions = sys.version, torch.__version__, transformers_version, fingerprint()
    digest = hashlib.sha256(repr((kind, versions)).encode()).hexdigest()
    return [f"{digest}-{number}" for number in range(MAX_STORED)]


def _pack(trace: Trace) -> bytes:
    from torch._dynamo.aot_compile_types import GraphModuleSerializableCallable

    gm = fx.GraphModule(trace.gm, copy.deepcopy(trace.gm.graph))  # since PyTorch takes from it what cannot be saved
    with _nodes_in_slices():
        graph = GraphModuleSerializableCallable.serialize_compile_artifacts(GraphModuleSerializableCallable(gm))
    modules = {
        node.name: [path for path, _ in node.meta["nn_module_stack"].values()]
        for node in trace.gm.graph.nodes
        if node.meta.get("nn_module_stack")
    }
    facts = trace.inputs, trace.objects, trace.values, trace.sizes, trace.same, trace.module, trace.state
    return pickle.dumps((graph, modules, facts))


def _unpack(content: bytes) -> Trace:
    from torch._dynamo.aot_compile_types import GraphModuleSerializableCallable

    graph, modules, facts = pickle.loads(content)
    inputs, objects, values, sizes, same, module, state = facts
    with _nodes_in_slices():
        gm = GraphModuleSerializableCallable.deserialize_compile_artifacts(graph).graph_module
    for node in gm.graph.nodes:
        if node.name in modules:
            node.meta["nn_module_stack"] = {path: (path, None) for path in modules[node.name]}
    _set_examples(gm, inputs, sizes)
    trace = Trace(gm, inputs, objects, values, sizes, same, module)
    trace.state = state
    return trace


@contextlib.contextmanager
def _nodes_in_slices() -> Iterator[None]:
    """Lets PyTorch's pickler find a graph's nodes in slices, as those of symbolic sizes are.

    Before 2.13 it does not look there, and refuses the graph.
    """
    from torch.utils import _pytree as pytree

    # Another thread that traces would take a slice for a tree, too.
    with torch._dynamo.convert_frame.compile_lock:
        if hasattr(torch.fx._graph_pickler, "patch_pytree_map_over_slice") or slice in pytree.SUPPORTED_NODES:
            yield
            return
        pytree._private_register_pytree_node(
            slice, lambda each: ([each.start, each.stop, each.step], None), lambda parts, _: slice(*parts)
        )
        try:
            yield
        finally:
            pytree._deregister_pytree_node(slice)


def _set_examples(gm: fx.GraphModule, inputs: tuple[str, ...], sizes: Sizes) -> None:
    """Gives a graph's inputs the stand-ins, and sources, that Dynamo's have."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    own: dict[Any, Any] = {}
    for symbol, hint in sizes.hints.items():
        own[symbol] = shape_env.create_symbol(hint, ConstantSource(str(symbol)), dynamic_dim=DimDynamic.DYNAMIC)

    def number(n: Any) -> int | torch.SymInt:
        if isinstance(n, int):
            return n
        return shape_env.create_symintnode(n.xreplace(own), hint=int(n.xreplace(sizes.hints)))

    # Another thread that traces would take these for calls of what it traces.
    with torch._dynamo.convert_frame.compile_lock, mode:
        for node, place in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
            node._dynamo_source = Place(place)
            if place in sizes.numbers:
                node.meta["example_value"] = number(sizes.numbers[place])
                continue
            layout = sizes.tensors[place]
            size, stride = (list(map(number, dims)) for dims in (layout.size, layout.stride))
            example = torch.empty_strided(size, stride, dtype=layout.dtype, device=layout.device)
            node.meta["example_value"] = example
