"""What a call takes, estimated: by launches of ours, and by what PyTorch would do in their place.

A graph that is ours in part is worth that only where it is faster than leaving the whole call to PyTorch. So the two
are compared by a simple model: bytes over bandwidth, or floating-point operations over their rate where that is more,
and beside it what each launch, phase, operation and part costs. The comparison counts, more than either time.
``benchmarks/partial.py`` measures the constants of a machine, and compares estimates with calls.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_mpk.capture.aliasing import is_scalar, is_view, tensors, value
from torch_mpk.capture.foreign import Foreign
from torch_mpk.capture.node_keys import describe
from torch_mpk.registry import Task
from torch_mpk.tasks.embedding import embedding

aten = torch.ops.aten

_MAX_COUNTED = 4096


@dataclass(frozen=True)
class Costs:
    """Of one kind of device, in microseconds."""

    segment: float  # a launch of ours, with Python around it
    phase: float  # that waits for another one of the launch
    operation: float  # an operation of eager PyTorch's
    graph: float  # a call of what Inductor has compiled
    kernel: float  # one of its kernels
    part: float  # Python around a part that is not ours
    bytes_per_us: float  # that ours read
    others_bytes_per_us: float
    flops_per_us: float


# The CPU's are of ``benchmarks/partial.py --constants`` on two cores of an AMD EPYC, where phases took next to nothing.
# Of the H200's, launches, phases and eager's operations (10.2 ms of Qwen3-0.6B's 1,877) were measured. Those of
# Inductor's calls and kernels, and of Python around a part, are estimates until somebody runs that there.
COSTS = {
    "cpu": Costs(
        segment=52,
        phase=1,
        operation=2.6,
        graph=5.4,
        kernel=1.8,
        part=3,
        bytes_per_us=17_500,
        others_bytes_per_us=15_000,
        flops_per_us=50_000,
    ),
    "cuda": Costs(
        segment=20,
        phase=8,
        operation=5.4,
        graph=60,
        kernel=4,
        part=8,
        bytes_per_us=4_000_000,
        others_bytes_per_us=3_500_000,
        flops_per_us=500_000_000,
    ),
}


class Work(NamedTuple):
    """What a run of nodes asks of a device."""

    num_operations: int = 0  # as eager runs them
    num_kernels: int = 0  # about as many as Inductor makes of them
    num_phases: int = 0  # of ours
    num_bytes: int = 0  # that eager's and Inductor's operations read and write
    own_bytes: int = 0  # that one launch reads: what passes between its nodes stays in caches
    flops: int = 0


class Estimate(NamedTuple):
    """Of a graph that is ours in part: by our segments and what is between them, and left whole to ``how``."""

    parts_us: float
    whole_us: float
    how: str

    @property
    def pays(self) -> bool:
        return self.parts_us < self.whole_us

    def __str__(self) -> str:
        parts, whole = (f"{us / 1e3:.3g} ms" for us in (self.parts_us, self.whole_us))
        return f"estimated at {parts} in parts, and at {whole} left whole to {_NAMES[self.how]}"


_NAMES = {"eager": "eager", "inductor": "Inductor", "error": "eager"}


def ours_us(costs: Costs, nodes: Collection[fx.Node]) -> float:
    """One launch of all of these."""
    work = work_of(nodes)
    return costs.segment + costs.phase * work.num_phases + _moved(costs, work.own_bytes, costs.bytes_per_us, work.flops)


def others_us(costs: Costs, nodes: Collection[fx.Node], how: str) -> float:
    """The same by PyTorch: ``how`` is "inductor", or else eager."""
    work = work_of(nodes)
    moved = _moved(costs, work.num_bytes, costs.others_bytes_per_us, work.flops)
    if how == "inductor":
        return costs.graph + costs.kernel * work.num_kernels + moved
    return costs.operation * work.num_operations + moved


def _moved(costs: Costs, num_bytes: int, bytes_per_us: float, flops: int) -> float:
    return max(num_bytes / bytes_per_us, flops / costs.flops_per_us)


def estimate(
    costs: Costs, parts: Sequence[tuple[fx.Graph, bool]], whole: fx.Graph, how: str, how_parts: str
) -> Estimate:
    """``parts``: of the graph, each with whether it is ours. ``whole``: the graph as it was captured."""
    parts_us = 0.0
    for graph, is_ours in parts:
        nodes = working(graph)
        if is_ours:
            parts_us += ours_us(costs, nodes)
        elif nodes:
            parts_us += costs.part + others_us(costs, nodes, how_parts)
    return Estimate(parts_us, others_us(costs, working(whole), how), how)


def working(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that make a device work: neither views nor sizes, nor items of tuples."""
    calls = graph.nodes
    return [n for n in calls if n.op == "call_function" and not is_view(n) and not is_scalar(n) and tensors(n)]


def has_own_phase(node: fx.Node) -> bool:
    """Whether it is a matrix product or attention, which waits for whatever makes its input."""
    return isinstance(node.target, Task) and node.target.role in ("stream", "tile")


def work_of(nodes: Collection[fx.Node]) -> Work:
    works = [node for node in nodes if tensors(node) and not _is_item(node)]
    phases = {node.args[0] for node in works if has_own_phase(node)}
    counts = [_count(node) if isinstance(node.target, Task) or node.target in _PRODUCTS else (1, 0) for node in works]
    return Work(
        num_operations=sum(count for count, _ in counts),
        num_kernels=_num_kernels(works),
        num_phases=len(phases),
        num_bytes=sum(map(_bytes, works)),
        own_bytes=_outer_bytes(nodes),
        flops=sum(flops for _, flops in counts),
    )


def _is_item(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


# ---- operations ----


class _Counter(TorchDispatchMode):
    """Operations that work, and the floating-point operations of those that are products or attention."""

    def __init__(self) -> None:
        super().__init__()
        from torch.utils.flop_counter import flop_registry  # which imports triton, where there is one

        self.num_operations, self.flops, self._flops_of = 0, 0, flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # asks for a device
            return func(*args, **kwargs or {})
        if func._overloadpacket not in self._flops_of:
            with self:  # inference mode decomposes nothing before it comes here
                result = func.decompose(*args, **kwargs or {})
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs or {})
        self.num_operations += not (func.is_view or func in (aten.detach.default, aten.alias.default))
        count = self._flops_of.get(func._overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **kwargs or {}, out_val=result))
        return result


_counted: dict[Any, tuple[int, int]] = {}


def _count(node: fx.Node) -> tuple[int, int]:
    """Operations and floating-point operations of a call. Nodes with equal keys are counted once."""
    key = node.target, *(describe(value(arg)) for arg in node.all_input_nodes)
    if None in key or key not in _counted:
        counter = _Counter()
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
        mode = next((t.fake_mode for t in tensors(node) if isinstance(t, FakeTensor)), None)
        with torch.no_grad(), mode or contextlib.nullcontext(), contextlib.suppress(Exception), counter:
            node.target(*args, **kwargs)
        _counted[key] = max(1, counter.num_operations), counter.flops
        if len(_counted) > _MAX_COUNTED:
            _counted.pop(next(iter(_counted)))
    return _counted[key]


_PRODUCTS = (aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default, aten.addmm.default)
_EXTERN = ("conv", "scaled_dot_product", "grouped_mm", "sort", "topk", "index_put", "scatter", "cumsum", "linalg")


def _is_extern(node: fx.Node) -> bool:
    """Whether Inductor fuses it with nothing."""
    if has_own_phase(node) or isinstance(node.target, Foreign) or node.target in _PRODUCTS:
        return True
    name = str(getattr(node.target, "__name__", node.target))
    return getattr(node.target, "namespace", "aten") != "aten" or any(part in name for part in _EXTERN)


def _num_kernels(nodes: Iterable[fx.Node]) -> int:
    """One for each that is fused with nothing, and one for each run of others between two of these."""
    count, was_fused = 0, False
    for node in nodes:
        is_fused = not _is_extern(node)
        count += not (is_fused and was_fused)
        was_fused = is_fused
    return count


# ---- bytes ----

_GATHERS = (aten.embedding.default, aten.index_select.default, aten.index.Tensor, aten.gather.default)
_SCATTERS = (aten.index_copy_.default, aten.index_put_.default, aten.scatter_.src)


def extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements, those that a stride of 0 repeats counted once."""
    sizes = [_hint(n) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if _hint(stride) != 0]
    return math.prod(sizes) * tensor.dtype.itemsize


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _extents(nodes: Iterable[fx.Node]) -> int:
    return sum(extent_bytes(tensor) for node in nodes for tensor in tensors(node))


def is_gather(node: fx.Node) -> bool:
    """Whether it reads some rows of a table."""
    return node.target in _GATHERS or node.target is embedding


def _bytes(node: fx.Node) -> int:
    """That one operation reads and writes."""
    made = _extents([node])
    if is_gather(node):
        return 2 * made
    if node.target in _SCATTERS:
        *_, source = node.all_input_nodes
        return 2 * _extents([source])
    return made + _read_bytes(node, node.all_input_nodes)


def _read_bytes(node: fx.Node, args: Iterable[fx.Node]) -> int:
    num_bytes = _extents(args)
    if "grouped_mm" in str(node.target):  # of the experts, those that rows chose
        weights, rows = tensors(node.all_input_nodes[1]), tensors(node.all_input_nodes[0])
        if weights and rows and weights[0].dim() == 3:
            unread = max(0, _hint(weights[0].shape[0]) - _hint(rows[0].shape[0])) / _hint(weights[0].shape[0])
            num_bytes -= int(unread * extent_bytes(weights[0]))
    return num_bytes


def _outer_bytes(nodes: Collection[fx.Node]) -> int:
    """That these read of what others make, each once."""
    own, read = set(nodes), dict[fx.Node, int]()
    for node in nodes:
        for arg in node.all_input_nodes:
            if not _is_made_of(arg, own):
                needed = _extents([node]) if is_gather(node) else _extents([arg])
                read[arg] = max(read.get(arg, 0), needed)
    return sum(read.values())


def _is_made_of(node: fx.Node, own: Collection[fx.Node]) -> bool:
    """Whether it is one of these, or a view of one."""
    return node in own or is_view(node) and any(_is_made_of(arg, own) for arg in node.all_input_nodes)
