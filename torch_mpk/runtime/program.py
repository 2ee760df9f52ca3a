"""A built graph: its segments in program order, each an executable or, where it falls back, the captured nodes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from torch_mpk.config import Options
from torch_mpk.dump import Dump
from torch_mpk.partition import Partitioned
from torch_mpk.runtime.segment import Segment

_live: weakref.WeakSet[Segment] = weakref.WeakSet()


class Program:
    """What a build leaves. The callables made from it share its executables."""

    def __init__(self, partitioned: Partitioned, device: torch.device, options: Options, dump: Dump) -> None:
        ours = [segment for segment in partitioned.segments if segment.ours]
        self._segments = {
            segment.name: Segment(segment.gm, device, options, dump.segment(index, len(ours)))
            for index, segment in enumerate(ours)
        }
        is_whole = len(partitioned.segments) == len(ours) == 1
        self._root = None if is_whole else partitioned.gm  # calls the segments by their names
        _live.update(self._segments.values())

    def callable(self, eager: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the captured graph's arguments; ``eager`` is the graph as PyTorch runs it.

        The program lives as long as one of its callables.
        """
        if self._root is None:
            call = next(iter(self._segments.values())).callable(eager)
        else:
            modules = dict(self._root.named_children())
            modules.update({name: _Call(segment.callable(modules[name])) for name, segment in self._segments.items()})
            call = _Call(torch.fx.GraphModule(modules, self._root.graph).forward)
        call.__dict__["program"] = self
        return call


class _Call(torch.nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = call


def live_segments() -> list[Segment]:
    """The executables in use."""
    return list(_live)


def synchronize() -> None:
    """Waits for every launch of every model, and raises the error of one that was aborted.

    Raises:
        MegakernelTimeout: a launch was aborted by its watchdog; its outputs are NaN and its counters did not advance.
    """
    for segment in live_segments():
        segment.synchronize()
