"""Which graphs are steps over several positions of a sequence: those in which a position sees the ones before it.

That is said by attention whose mask is causal, and by convolutions that end at each position. Several queries alone say
nothing: those of a resampler are learned, and an image's patches see each other. Nor do looked-up ids: a table may be
of categories, or of distances.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import fx

from torch_mpk.capture.aliasing import is_view, storages, value, written_storages
from torch_mpk.capture.graph import Captured
from torch_mpk.patterns.rewriter import CASTS, argument, aten, is_call, is_tensor

Size = int | torch.SymInt


def hint(size: Size) -> int:
    """As large as it is in the call that a graph was captured from."""
    return size if isinstance(size, int) else int(size.node.hint)


class Positions(NamedTuple):
    """``batch`` sequences, and as many positions of each as ``length``, on which an operation works in ``dtype``."""

    batch: Size
    length: Size
    dtype: torch.dtype


def positions_of(captured: Captured) -> list[Positions]:
    """What operations of the graph work on, where a position sees those before it and not those behind."""
    return _Search(captured).found


def looked_up(captured: Captured) -> list[tuple[Size, Size]]:
    """The sizes of the ids that the graph looks up, [batch, length]: tokens, if it is a prompt."""
    nodes = captured.graph_module.graph.find_nodes(op="call_function", target=aten.embedding.default)
    ids = [value(node.args[1]) for node in nodes]
    return [(each.shape[0], each.shape[1]) for each in ids if each.dim() == 2]


_COMPARISONS = (aten.le.Tensor, aten.lt.Tensor, aten.ge.Tensor, aten.gt.Tensor)
_BOUNDS = (aten.le.Scalar, aten.lt.Scalar, aten.ge.Scalar, aten.gt.Scalar)  # of differences
_TRIANGLES = (aten.tril.default, aten.triu.default, aten.tril_.default, aten.triu_.default)
_KEEPING = (  # beside what is pointwise or a view
    *CASTS,
    aten.clone.default,
    aten.contiguous.default,
    aten.reshape.default,
    aten.cat.default,
    aten.repeat.default,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.Scalar,
    aten.__and__.Tensor,
    aten.__or__.Tensor,
    aten.index.Tensor,
    aten.index_select.default,
    aten.pad.default,
    aten.constant_pad_nd.default,
    aten.dropout.default,
)
_PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.linear.default)


class _Search:
    def __init__(self, captured: Captured) -> None:
        graph = captured.graph_module.graph
        placeholders = graph.find_nodes(op="placeholder")
        self._given = {node for node, each in zip(placeholders, captured.inputs, strict=True) if not each.is_parameter}
        self.found: list[Positions] = []
        self._writers: dict[int, list[fx.Node]] = defaultdict(list)
        self._lengths = [length for _, length in looked_up(captured)]
        self._is_causal: dict[fx.Node, bool] = {}  # of masks
        self._dtype = next((value(node).dtype for node in graph.nodes if node.target in _PRODUCTS), None)
        for node in graph.nodes:
            for storage in written_storages(node):
                self._writers[storage].append(node)
        for node in graph.nodes:
            if is_call(node, aten.scaled_dot_product_attention.default):
                self._attention(node)
            elif is_call(node, aten.softmax.int) and value(node).dim() > 2:
                self._softmax(node)
            elif is_call(node, aten.conv1d.default):
                self._convolution(node)

    def _attention(self, node: fx.Node) -> None:
        query, mask = value(node.args[0]), argument(node, "attn_mask")
        if argument(node, "is_causal") or self._is_mask_causal(mask):
            self.found.append(Positions(query.shape[0], query.shape[-2], query.dtype))

    def _softmax(self, node: fx.Node) -> None:
        scores = value(node)
        if self._is_mask_causal(node.args[0]):
            self.found.append(Positions(scores.shape[0], scores.shape[-2], self._dtype or scores.dtype))

    def _convolution(self, node: fx.Node) -> None:
        """Of each channel by itself, with as much in front of the first position as it is long."""
        source, weight, result = value(node.args[0]), value(node.args[1]), value(node)
        reach = (weight.shape[-1] - 1) * _only(argument(node, "dilation"))
        padding = argument(node, "padding")
        is_apart = argument(node, "groups") == source.shape[1] > 1 and _only(argument(node, "stride")) == 1
        if not is_apart or reach == 0:
            return
        length = result.shape[-1] - _only(padding)  # what is behind the last position is cut off
        if _only(padding) == reach or _only(padding) == 0 and self._are_tokens(length):
            self.found.append(Positions(source.shape[0], length, source.dtype))

    def _is_mask_causal(self, mask: Any) -> bool:
        """Whether a mask, or scores that are masked, let a position see the ones before it alone."""
        if not isinstance(mask, fx.Node):
            return False
        if mask not in self._is_causal:
            self._is_causal[mask] = self._find_causal(mask)
        return self._is_causal[mask]

    def _find_causal(self, mask: fx.Node) -> bool:
        pending, seen = [mask], {mask}
        while pending:
            node = pending.pop()
            if not is_tensor(node) or not _has_rows(value(node)):
                continue
            if self._says_causal(node):
                return True
            if not _keeps_places(node):
                continue
            before = (*node.all_input_nodes, *(w for storage in storages(node) for w in self._writers[storage]))
            pending += (new := [n for n in before if n not in seen])
            seen.update(new)
        return False

    def _says_causal(self, node: fx.Node) -> bool:
        if node in self._given or node.op == "get_attr":
            mask = value(node)
            return mask.dtype == torch.bool or mask.is_floating_point() and self._are_tokens(mask.shape[-2])
        if is_call(node, *_BOUNDS):
            return is_call(node.args[0], aten.sub.Tensor) and _is_integer(node.args[0])
        return is_call(node, *_TRIANGLES) or is_call(node, *_COMPARISONS) and all(map(_is_integer, node.args))

    def _are_tokens(self, length: Size) -> bool:
        return any(_known(length) == _known(n) for n in self._lengths)


def _known(size: Size) -> Any:
    """A size so that comparing it makes no guard."""
    return size if isinstance(size, int) else size.node.expr


def _only(numbers: Any) -> int:
    """Of one dimension."""
    return int(numbers[0]) if isinstance(numbers, (list, tuple)) else int(numbers)


def _has_rows(tensor: torch.Tensor) -> bool:
    """Whether what it holds may differ from query to query, the last but one dimension."""
    return tensor.dim() > 1 and _known(tensor.shape[-2]) != 1 and _known(tensor.stride(-2)) != 0


def _is_integer(node: Any) -> bool:
    return is_tensor(node) and value(node).dtype in (torch.int64, torch.int32)


def _keeps_places(node: fx.Node) -> bool:
    """Whether each place of the result is made of the same places, or of places of the same query."""
    return is_view(node) or node.target in _KEEPING or torch.Tag.pointwise in getattr(node.target, "tags", ())
