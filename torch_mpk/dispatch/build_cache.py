"""Builds of earlier processes: a graph that one of them has built goes from Dynamo straight to loading its kernel.

A build is found by a hash of all that decides it: Dynamo's code and what it says of each input, options, the target,
PyTorch's version and the content of torch_mpk itself. What headers hold is none of that: it counts when the build's
source is compiled or found compiled. A build is JSON, source and bytes beside the compiled kernels, checked like them
by hash; of a CPU's program it is JSON alone, the task graph, from which the same schedule is made again. What does not
fit that form is not kept: graphs with sizes or several segments, and whatever user code had a part in. Nor are programs
of the CPU that are made in no time.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import _get_qualified_name

from torch_mpk import _C
from torch_mpk.capture.foreign import is_foreign
from torch_mpk.capture.graph import input_sources, number_positions
from torch_mpk.config import Options, env
from torch_mpk.errors import CacheError
from torch_mpk.jit import Cache
from torch_mpk.lowering.table import RULES
from torch_mpk.patterns.table import patterns
from torch_mpk.plan import Fresh, IndexBound, Output, Plan, pack, unpack
from torch_mpk.planning.graph_json import pack_graph, unpack_graph
from torch_mpk.registry import get as get_task
from torch_mpk.registry import is_ours, tasks
from torch_mpk.runtime.backend import backend_of

logger = logging.getLogger(__name__)

_PLAN, _GRAPH = "plan.json", "graph.json"
WORTH_SECONDS = 0.3  # that a CPU's program takes to make, or it is not kept: writing and finding it take time, too


@dataclass(frozen=True)
class Stored:
    plan: Plan
    graph: str  # Captured.key()
    mutated: tuple[int, ...]  # positions of the inputs that the graph writes in place


def build_key(gm: torch.fx.GraphModule, inputs: Sequence[Any], device: torch.device, options: Options) -> str | None:
    """The key of a graph of Dynamo's, or None where its build is not kept."""
    target = backend_of(device).target(device, options)
    placeholders = gm.graph.find_nodes(op="placeholder")
    is_kept = (
        env.dump is None  # a hit would leave no artefacts
        and not number_positions(gm, inputs)
        and not any(map(is_foreign, inputs))
        and not any(_is_symbolic(node.meta.get("example_value")) for node in placeholders)
        and all(map(_is_known, gm.graph.nodes))
        and not _has_user_patterns()
    )
    if not is_kept:
        return None
    digest = hashlib.sha256()

    def add(*parts: Any) -> None:
        digest.update(repr(parts).encode())

    add(fingerprint(), torch.__version__, torch.get_default_dtype(), torch.get_default_device(), options, device)
    add({name: getattr(target, name) for name in dir(_C.Target) if not name.startswith("_")})
    add([(task.name, task.header, task.headers) for task in tasks() if is_ours(task)])  # a source includes some by path
    add(gm.code)
    for source, value in zip(input_sources(gm), inputs, strict=True):
        cls = torch.Tensor if isinstance(value, FakeTensor) else type(value)  # for which it stands
        add(source, cls, value.dtype, value.size(), value.stride(), value.device)
    return digest.hexdigest()


def get(key: str, target: _C.Target) -> Stored | None:
    entry = _cache().get(key)
    if entry is None:
        return None
    try:
        return _unpack(entry.files, target)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        logger.warning("build %s is of no use, and made again: %s", entry.path, error)
        return None


def put(key: str, stored: Stored, seconds: float) -> None:
    """``seconds``: that it took to make."""
    is_worth = stored.plan.kernel is not None or seconds >= WORTH_SECONDS
    files = _pack(stored) if is_worth else None
    if files is None:
        return
    cache = _cache()
    try:
        with cache.workspace() as folder:
            cache.write(folder, files)
            cache.put(key, folder, {})
    except CacheError as error:
        logger.info("the build is not kept: %s", error)


def _cache() -> Cache:
    return Cache(env.cache_dir, env.cache_bytes, "builds")


def _is_symbolic(example: Any) -> bool:
    return isinstance(example, torch.Tensor) and not all(
        isinstance(n, int) for n in (*example.size(), *example.stride())
    )


def _is_known(node: torch.fx.Node) -> bool:
    """Whether the graph's code says all about a node: it calls nothing but PyTorch, Python and our tasks."""
    if node.op == "call_function":
        try:
            name = _get_qualified_name(node.target)
        except (AttributeError, RuntimeError):  # it has none
            return False
        if name.startswith("torch.ops.mpk."):
            return is_ours(get_task(name.split(".")[3].removesuffix("_")))  # or its in-place form
        return name.split(".")[0] in ("torch", "_operator", "math")
    return node.op in ("placeholder", "output", "call_method")


def _has_user_patterns() -> bool:
    """Whether a pattern or rule comes from elsewhere: the fingerprint does not cover it, nor the task it leads to."""
    declared = [*patterns(), *RULES.values(), *(task for task in tasks() if task.pattern)]
    return not all(map(is_ours, declared))


@functools.cache
def fingerprint() -> str:
    """Hash of torch_mpk: its Python files and its C++ core."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in (*sorted(package.rglob("*.py")), Path(_C.__file__)):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _pack(stored: Stored) -> dict[str, bytes] | None:
    plan = stored.plan
    values = (output.value for output in plan.outputs)
    if any(type(value) not in (type(None), bool, int, float, str) for value in values):
        return None
    program = _pack_schedule(plan.schedule) if plan.kernel is None else pack(plan.kernel)
    if program is None:
        return None
    fields = {name: getattr(plan, name) for name in ("inputs", "scalars", "written", "index_bounds")}
    fields["fresh"] = [asdict(buffer) for buffer in plan.fresh]
    fields["outputs"] = [asdict(output) for output in plan.outputs]
    text = json.dumps({"graph": stored.graph, "mutated": stored.mutated, "plan": fields}, default=_dtype_name)
    return {_PLAN: text.encode(), **program}


def _pack_schedule(schedule: _C.Schedule | None) -> dict[str, bytes] | None:
    """The graph, where the same schedule follows from it."""
    if schedule is None:
        return None
    files = {_GRAPH: _graph_text(schedule.graph)}
    made = _unpack_schedule(files, schedule.target)
    is_same = made.to_json() == schedule.to_json() and _graph_text(made.graph) == files[_GRAPH]
    return files if is_same else None


def _graph_text(graph: _C.TBGraph) -> bytes:
    return json.dumps(pack_graph(graph)).encode()


def _unpack_schedule(files: dict[str, bytes], target: _C.Target) -> _C.Schedule:
    return _C.make_schedule(unpack_graph(json.loads(files[_GRAPH])), target)


def _unpack(files: dict[str, bytes], target: _C.Target) -> Stored:
    stored = json.loads(files[_PLAN])
    fields: dict[str, Any] = {name: tuple(value) for name, value in stored["plan"].items()}
    fields["fresh"] = tuple(Fresh(**_typed(buffer)) for buffer in fields["fresh"])
    fields["outputs"] = tuple(Output(**_typed(output)) for output in fields["outputs"])
    fields["index_bounds"] = tuple(IndexBound(*bound) for bound in fields["index_bounds"])
    if _GRAPH in files:
        plan = Plan(kernel=None, schedule=_unpack_schedule(files, target), **fields)
    else:
        plan = Plan(kernel=unpack(files), **fields)
    return Stored(plan, stored["graph"], tuple(stored["mutated"]))


def _dtype_name(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise TypeError(f"{value!r} has no form in JSON")


def _typed(fields: dict[str, Any]) -> dict[str, Any]:
    dtype = fields["dtype"] and getattr(torch, fields["dtype"])
    return fields | {"dtype": dtype, "shape": tuple(fields["shape"]), "stride": tuple(fields["stride"])}
