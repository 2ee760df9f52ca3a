"""Stage 2: an ATen graph becomes a graph in which known subgraphs are calls of tasks.

A file of this folder declares patterns with ``@pattern(op, ...)``: functions that are given a node of such an op, the
last of the subgraph, and return the node to take its place, or None where the subgraph is another one. The whole folder
is imported with the package.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules

from torch import fx

from torch_mpk.capture.aliasing import eliminate_dead_code, is_view, storages, written_storages
from torch_mpk.capture.provenance import where
from torch_mpk.capture.tracing import graph_module
from torch_mpk.patterns.complex_numbers import expand
from torch_mpk.patterns.experts import ungroup
from torch_mpk.patterns.normalise import normalise
from torch_mpk.patterns.references import declare_patterns, left_out
from torch_mpk.patterns.rewriter import Rewriter, aten, has_same_layout, is_call, reshape_source, shape
from torch_mpk.patterns.table import patterns_of

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


@dataclass(frozen=True)
class Lift:
    """A subgraph that was replaced: by which pattern, and where it came from."""

    pattern: str
    anchor: str  # the name of the last node of the subgraph
    where: str | None  # source line and module path


def apply(gm: fx.GraphModule) -> fx.GraphModule:
    """A new module that computes the same bits, with known subgraphs as calls of tasks (``node.target`` is a ``Task``).
    But for a linear that becomes two, as PyTorch may add up products of other sizes in another order, and for attention
    over latents, whose products are formed in another order (``latent_attention``).

    ``gm`` holds ATen overloads with example values in ``node.meta["val"]``, in-place ops in program order. The result's
    ``meta["lifts"]`` lists the replacements in program order, and ``meta["misses"]`` what the patterns of
    tasks left out, in words.
    """
    declare_patterns()
    gm = graph_module(gm, copy.deepcopy(gm.graph))
    normalise(gm.graph)
    rewriter = Rewriter(gm.graph)
    expand(rewriter)
    ungroup(rewriter)
    lifts: list[Lift] = []
    for anchor in reversed(list(gm.graph.nodes)):  # from the end, so that the largest subgraph is met first
        if anchor._erased:
            continue
        for pattern in patterns_of(anchor):
            rewriter.begin(anchor)
            replacement = pattern(rewriter, anchor)
            if replacement is None or not has_same_layout(replacement, anchor) or not rewriter.is_movable():
                rewriter.rollback()
                continue
            lifts.append(Lift(pattern.__name__, anchor.name, where(anchor)))
            rewriter.commit(replacement)
            break
    misses = left_out(rewriter.misses, {lift.pattern for lift in lifts})
    _fold_views(rewriter)
    eliminate_dead_code(gm.graph)
    gm.recompile()
    gm.meta["lifts"], gm.meta["misses"] = lifts[::-1], misses
    return gm


def _fold_views(rw: Rewriter) -> None:
    """Views of views become reshapes of the tensor below, one for each shape.

    Not where anything writes their memory: a reshape that has to copy would not see it.
    """
    written = frozenset().union(*map(written_storages, rw.writers))
    folded: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}
    for node in list(rw.graph.nodes):
        if reshape_source(node) is None or not is_view(node) or None in shape(node) or storages(node) & written:
            continue
        below = rw.below(node.args[0], shape(node))
        key = below, shape(node)
        view = folded.get(key)
        if view is None or view._erased:  # it had views only, which are folded by now
            if is_call(node, aten.reshape.default) and node.args[0] is below and shape(below) != shape(node):
                folded[key] = node
                continue
            rw.begin(node)
            view = rw.reshape(below, shape(node))
        else:
            rw.begin(node)
        if (rw.made and not is_view(view)) or not has_same_layout(view, node):
            rw.rollback()
            continue
        if rw.made:
            folded[key] = view
        rw.commit(view)
