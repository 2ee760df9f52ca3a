"""Stage 3: a graph becomes program-order segments, each either ours or run by PyTorch.

Segments follow each other in program order and a node never moves across another one, so in-place effects keep their
order whatever falls back. Views and sizes cost nothing: each segment makes those it needs again, and only tensors with
memory of their own pass from one segment to another.

Where some nodes fall back, what lies between them is ours only if one launch is estimated to take less than PyTorch
does (``costs.py``). A graph that is ours whole is one launch, whatever its size.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import fx

from torch_mpk import _C
from torch_mpk.capture.aliasing import is_scalar, is_view, read_through_inplace, storages, value, written_storages
from torch_mpk.capture.foreign import Foreign
from torch_mpk.capture.node_keys import NodeKey, node_key
from torch_mpk.capture.provenance import where
from torch_mpk.capture.tracing import graph_module
from torch_mpk.lowering import supports
from torch_mpk.partition.costs import COSTS, Costs, Estimate, has_own_phase, others_us, ours_us


@dataclass(frozen=True)
class Segment:
    """A run of nodes. ``gm`` takes the tensors and sizes it reads and returns a tuple of what others need of it."""

    name: str
    ours: bool
    gm: fx.GraphModule

    @property
    def num_operations(self) -> int:
        """Nodes that work: neither views nor sizes."""
        return len(_work(self.gm.graph))


class Fallback(NamedTuple):
    """Why a node is not in a segment of ours."""

    node: str
    source: str | None  # source line and module path in the user's model
    why: str


@dataclass
class Partitioned:
    """``gm`` calls the segments in order, by their names. Where there is one segment, it has all of ``gm``'s inputs and
    outputs, in their order."""

    gm: fx.GraphModule
    segments: list[Segment]
    fallbacks: list[Fallback]
    estimate: Estimate | None = None  # where it was asked whether the parts pay

    def __str__(self) -> str:
        parts = [
            f"{s.name} ({'ours' if s.ours else 'fallback'})\n{s.gm.print_readable(print_output=False)}"
            for s in self.segments
        ]
        reasons = [f"{node}: {why}" + (f" ({source})" if source else "") for node, source, why in self.fallbacks]
        return "\n".join([self.gm.print_readable(print_output=False), *parts, *reasons])


@dataclass
class _Run:
    ours: bool
    nodes: list[fx.Node]
    outputs: list[fx.Node] = field(default_factory=list)


def partition(
    gm: fx.GraphModule,
    min_segment_nodes: int | None = None,
    target: _C.Target | None = None,
    how: str = "eager",
    costs: Costs | None = None,
) -> Partitioned:
    """Split a graph of ATen and task calls, with example values in ``node.meta["val"]``, into segments.

    Ours are the runs of nodes that lowering, and codegen for ``target``, support, where they hold a stream task and pay
    for a launch, or have ``min_segment_nodes`` if that is given. ``how``: what runs the others, "inductor" or "eager";
    ``costs``: of the target's kind of device, as a rule.
    """
    gm, graph = _prepared(gm)
    costs = costs or COSTS["cpu" if target is None else target.device]
    reasons = _reasons(graph, target)
    runs = _runs(graph, reasons)
    fallbacks = [Fallback(node.name, where(node), why) for node, why in reasons.items()]
    for run in runs:
        why = _why_not_worth(run, bool(reasons), min_segment_nodes, costs, how) if run.ours else None
        if why is not None:
            run.ours = False
            fallbacks.append(Fallback(run.nodes[0].name, where(run.nodes[0]), why))
    runs = _merged(runs)
    _choose_outputs(graph, runs)
    return _assemble(gm, runs, fallbacks)


def operations(gm: fx.GraphModule) -> list[str]:
    """The names of the nodes that ``split`` counts, in program order: of a tuple and its items the tuple."""
    return [group[0].name for group in _groups(_prepared(gm)[1])]


def split(gm: fx.GraphModule, cuts: Sequence[int]) -> Partitioned:
    """Split before the operations of these numbers. All segments are ours, but for one at the end of mere views."""
    gm, graph = _prepared(gm)
    groups = _groups(graph)
    bounds = [0, *cuts, len(groups)]
    runs = [
        _Run(True, list(itertools.chain(*groups[begin:end])))
        for begin, end in itertools.pairwise(bounds)
        if begin < end
    ]
    _choose_outputs(graph, runs)
    return _assemble(gm, runs, [])


def _prepared(gm: fx.GraphModule) -> tuple[fx.GraphModule, fx.Graph]:
    """A copy whose every write is read through the tensor it updates, and whose tuples are followed by their items."""
    graph = copy.deepcopy(gm.graph)
    copied = graph_module(gm, graph)
    read_through_inplace(copied.graph)
    _keep_items_with_their_tuple(copied.graph)
    return copied, copied.graph


def _why_not_worth(run: _Run, is_part: bool, min_nodes: int | None, costs: Costs, how: str) -> str | None:
    if not any(map(has_own_phase, run.nodes)):
        return "it and its neighbours hold no matrix product or attention, and are not worth a launch"
    if not is_part:
        return None
    if min_nodes is not None:
        is_worth = len(run.nodes) >= min_nodes
    else:
        is_worth = ours_us(costs, run.nodes) <= others_us(costs, run.nodes, how)
    if is_worth:
        return None
    return f"it and its neighbours, {len(run.nodes)} operations between what falls back, are not worth a launch"


def _work(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output") and not _is_free(node)]


def _groups(graph: fx.Graph) -> list[list[fx.Node]]:
    """What works, each tuple with its items: no segment hands over a tuple."""
    groups: list[list[fx.Node]] = []
    for node in _work(graph):
        if _is_item(node):
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


def _is_free(node: fx.Node) -> bool:
    """Made again wherever it is used."""
    return node.op == "get_attr" or is_view(node) or is_scalar(node)


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node) and not _is_free(node)


def _keep_items_with_their_tuple(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if _is_item(node):
            node.args[0].append(node)


def _reasons(graph: fx.Graph, target: _C.Target | None) -> dict[fx.Node, str]:
    """The nodes that are not ours, in program order, and why."""
    work = _work(graph)
    if any(torch.Tag.inplace_view in getattr(node.target, "tags", ()) for node in work):
        return dict.fromkeys(work, "the graph changes a tensor's shape in place")
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    uses = Counter(storage for node in placeholders for storage in storages(node))
    shared = {storage for storage, count in uses.items() if count > 1}
    reasons: dict[fx.Node, str] = {}
    taken: set[NodeKey] = set()
    for node in work:
        key = node_key(node)
        if isinstance(node.target, Foreign):
            why: str | None = node.target.why
        else:
            why = None if key in taken else supports(node, target)
        if why is None and key is not None:
            taken.add(key)
        if why is None and written_storages(node) & shared:
            why = "it writes memory that two inputs share"
        if why is not None:
            reasons[node] = why
    for node in work:  # a tuple and its items stay together
        if _is_item(node) and ((node in reasons) != (node.args[0] in reasons)):
            why = reasons.get(node) or reasons[node.args[0]]
            reasons |= dict.fromkeys((node.args[0], *node.args[0].users), why)
    return {node: reasons[node] for node in work if node in reasons}


def _runs(graph: fx.Graph, reasons: Iterable[fx.Node]) -> list[_Run]:
    runs: list[_Run] = []
    for node in _work(graph):
        if not runs or runs[-1].ours != (node not in reasons):
            runs.append(_Run(node not in reasons, []))
        runs[-1].nodes.append(node)
    return runs


def _merged(runs: list[_Run]) -> list[_Run]:
    merged: list[_Run] = []
    for run in runs:
        if merged and merged[-1].ours == run.ours:
            merged[-1].nodes += run.nodes
        else:
            merged.append(run)
    return merged


def _sources(node: fx.Node) -> dict[fx.Node, None]:
    """The inputs and computed values that a free node is made of; any other node is its own source."""
    if node.op == "placeholder" or not _is_free(node):
        return {node: None}
    return {source: None for arg in node.all_input_nodes for source in _sources(arg)}


def _results(graph: fx.Graph) -> list[fx.Node]:
    (output,) = graph.find_nodes(op="output")
    return list(dict.fromkeys(output.all_input_nodes))


def _choose_outputs(graph: fx.Graph, runs: list[_Run]) -> None:
    """Decide what each run returns: what later runs read of it, and the graph's results.

    A result that is a whole fresh tensor in another shape is returned as it is. Other views, and what belongs to an
    input, are made at the end by PyTorch.
    """
    home = {node: run for run in runs for node in run.nodes}
    needed: dict[fx.Node, None] = {}
    for run in runs:
        for node in run.nodes:
            for arg in node.all_input_nodes:
                needed |= {source: None for source in _sources(arg) if source in home and home[source] is not run}
    results = _results(graph)
    views_of = {source: [r for r in results if source in _sources(r)] for r in results for source in _sources(r)}
    made_last: list[fx.Node] = []
    for result in results:
        sources = list(_sources(result))
        source = sources[0] if len(sources) == 1 else None
        if result in home:
            needed[result] = None
        elif source in home and source not in needed and views_of[source] == [result] and _is_whole(result, source):
            home[source].outputs.append(result)
        else:
            made_last.append(result)
            needed |= {source: None for source in sources if source in home}
    if made_last:
        if not runs or runs[-1].ours:
            runs.append(_Run(False, []))
        runs[-1].outputs += made_last
        needed = {node: None for node in needed if home[node] is not runs[-1] or node in results}
    for node in needed:
        home[node].outputs.append(node)


def _is_whole(view: fx.Node, source: fx.Node) -> bool:
    a, b = value(view), value(source)
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return a.dtype == b.dtype and a.numel() == b.numel() and a.is_contiguous() and b.is_contiguous()


def _assemble(gm: fx.GraphModule, runs: list[_Run], fallbacks: list[Fallback]) -> Partitioned:
    placeholders = gm.graph.find_nodes(op="placeholder")
    position = {node: i for i, node in enumerate(gm.graph.nodes)}
    (output,) = gm.graph.find_nodes(op="output")
    numbers = {node for node in placeholders if isinstance(value(node), torch.SymInt)}  # sizes of any segment's tensors
    is_one = len(runs) == 1
    top = fx.Graph()
    values = {node: top.node_copy(node) for node in placeholders}
    segments: list[Segment] = []
    modules: dict[str, torch.nn.Module] = {}
    for i, run in enumerate(runs):
        read = {arg for node in (*run.nodes, *run.outputs) for arg in (node, *node.all_input_nodes)}
        used = {source for arg in read for source in _sources(arg)} - set(run.nodes) | numbers
        inputs = placeholders if is_one else sorted(used, key=position.__getitem__)
        outputs = output.args[0] if is_one else tuple(run.outputs)
        segment = Segment(f"segment_{i}", run.ours, _segment_module(gm, run.nodes, inputs, outputs))
        segments.append(segment)
        modules[segment.name] = segment.gm
        call = top.call_module(segment.name, tuple(values[node] for node in inputs))
        for k, node in enumerate(outputs):
            if isinstance(node, fx.Node) and node not in values:
                values[node] = top.call_function(operator.getitem, (call, k))
                values[node].meta = dict(node.meta)
    top.output(fx.node.map_arg(output.args[0], values.__getitem__))
    return Partitioned(graph_module(modules, top), segments, fallbacks)


def _segment_module(
    gm: fx.GraphModule, nodes: list[fx.Node], inputs: Iterable[fx.Node], outputs: Iterable[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)

    def load(node: fx.Node) -> fx.Node:
        if node not in copies:  # free
            for arg in node.all_input_nodes:
                load(arg)
            copies[node] = graph.node_copy(node, copies.__getitem__)
        return copies[node]

    for node in nodes:
        load(node)
    graph.output(fx.node.map_arg(tuple(outputs), load))
    return graph_module(gm, graph)
