"""What the backend declines before it tries: calls and graphs that are better off, or only right, in eager PyTorch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from torch_mpk import _C, registry
from torch_mpk.capture.aliasing import value
from torch_mpk.capture.foreign import is_foreign, is_plain, path_of
from torch_mpk.capture.graph import Captured, source_line
from torch_mpk.config import MAX_POSITIONS, MAX_ROWS
from torch_mpk.dispatch.prompts import Positions, hint, positions_of
from torch_mpk.errors import (
    AutocastError,
    GradModeError,
    GrowingCacheError,
    PrefillDeclined,
    SeveralDevicesError,
    UnsupportedError,
)

aten = torch.ops.aten

_CACHE_SOURCE = re.compile(r"past_key_values|\.layers\[\d+\]\.(keys|values)$")
_CACHE_CODE = re.compile(r"cache\w*\.py:\d+")


def check_call(inputs: Sequence[Any], names: Sequence[str] | None = None) -> torch.device:
    """Checks the state around a call, which Dynamo guards: grad mode, autocast, devices, and what its tensors are.

    Args:
        inputs: but for numbers.
        names: what messages call them.

    Returns:
        the one device of the inputs.

    Raises:
        UnsupportedError: such a call is not ours.
    """
    tensors = [given for given in inputs if isinstance(given, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise GradModeError
    devices = sorted({str(tensor.device) for tensor in tensors})
    if not devices:
        raise UnsupportedError("the graph has no tensor input")
    if len(devices) > 1:
        raise SeveralDevicesError(devices=", ".join(devices))
    device = tensors[0].device
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"the inputs are on {device}, and torch_mpk runs on cpu and cuda")
    if torch.is_autocast_enabled(device.type):
        raise AutocastError(device=device.type)
    for i, given in enumerate(inputs):
        if isinstance(given, torch.Tensor) and not is_plain(given) and not is_foreign(given):
            name = path_of(names[i]) if names is not None else f"input {i}"
            raise UnsupportedError(f"{name} is a {type(given).__qualname__}, and so is what is made of it")
    return device


def check_graph(captured: Captured, max_positions: int = MAX_POSITIONS, target: _C.Target | None = None) -> None:
    """Raises DeclinedError for a cache that grows, and for a prefill that is left to others, unless it goes by page: a
    step over more positions than ``max_positions``, or where a GPU's warpgroups cannot multiply, over more than a few
    of one sequence. ``target``: what is built for, a CPU by default."""
    nodes = captured.graph_module.graph.nodes
    sources = {node: graph_input.source for node, graph_input in zip(nodes, captured.inputs)}
    results = next(node for node in reversed(nodes) if node.op == "output").all_input_nodes
    for node in nodes:
        if node.target is aten.cat.default and node in results:
            grown = [sources[part] for part in node.args[0] if _CACHE_SOURCE.search(sources.get(part, ""))]
            if grown:
                raise GrowingCacheError(source=grown[0], line=source_line(node))
    lengths = [hint(length) for _, length, _ in _positions(captured)]
    most, why = longest(captured, max_positions, target)
    if lengths and max(lengths) > most:
        raise PrefillDeclined(length=max(lengths), why=why)
    for node in nodes:
        is_first = node.target is aten.cat.default and any(map(_is_empty_cache, node.args[0]))
        if is_first and max(lengths, default=1) == 1:  # a prompt is worth a launch whatever follows
            raise GrowingCacheError(source="a key/value cache that is empty before this call", line=source_line(node))


def longest(captured: Captured, max_positions: int, target: _C.Target | None = None) -> tuple[int, str]:
    """Over how many positions of a sequence a graph like this may be, and why over no more."""
    most, why = max_positions, f"max_positions is {max_positions}"
    for batch, _, dtype in _positions(captured):
        rows = MAX_ROWS if hint(batch) == 1 else 1
        if rows < most and not takes_prompts(target, dtype):
            most, why = rows, f"{dtype} on this device takes {MAX_ROWS} of one sequence, and 1 of several"
    return most, why


def is_prompt(captured: Captured) -> bool:
    """Whether it is over several positions of a sequence."""
    return any(hint(length) > 1 for _, length, _ in _positions(captured))


def _positions(captured: Captured) -> list[Positions]:
    """Of each sequence. Where caches go by page, tokens are rows of a batch."""
    return [] if any(map(_is_paged, captured.graph_module.graph.nodes)) else positions_of(captured)


def takes_prompts(target: _C.Target | None, dtype: torch.dtype) -> bool:
    """Whether many positions are ours: on a GPU where warpgroups multiply, 16-bit elements."""
    if target is None or target.device == "cpu":
        return True
    return _C.arch_of(target.arch).has_warpgroup_products and dtype.itemsize == 2


def _is_empty_cache(node: torch.fx.Node) -> bool:
    """Whether it is what a DynamicCache begins with: made by the call itself, of no element, in a cache's code."""
    is_empty = node.op != "placeholder" and value(node).numel() == 0
    return is_empty and any(_CACHE_CODE.search(source_line(user) or "") for user in node.users)


def _is_paged(node: torch.fx.Node) -> bool:
    """Whether it calls a task to which tokens are rows of a batch, however the graph around it has them."""
    task = registry.of_operator(node.target)
    return task is not None and bool(task.traits.paged_by)
