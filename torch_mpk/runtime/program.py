"""A built graph: its segments in program order, each an executable or what runs it instead."""

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
    """What a build leaves. The callables made from it share its executables.

    Attributes:
        partitioned: the graph's segments.
        segments: the executables of those that are ours, by name.
        others: what runs segments that are not ours, by name; those without run as captured.
        seconds: what each stage of the build took.
    """

    def __init__(self, partitioned: Partitioned, device: torch.device, options: Options, dump: Dump) -> None:
        ours = [segment for segment in partitioned.segments if segment.ours]
        self.partitioned = partitioned
        self.segments = {
            segment.name: Segment(segment.gm, device, options, dump.segment(index, len(ours)))
            for index, segment in enumerate(ours)
        }
        self.others: dict[str, Callable[..., Any]] = {}
        self.seconds: dict[str, float] = {}
        _live.update(self.segments.values())

    def callable(self, eager: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the captured graph's arguments; ``eager`` is the graph as PyTorch runs it.

        The program lives as long as one of its callables.
        """
        if len(self.partitioned.segments) == len(self.segments) == 1:
            call = next(iter(self.segments.values())).callable(eager)
        else:
            root = self.partitioned.gm  # calls the segments by their names
            modules = dict(root.named_children())
            ours = {name: segment.callable(modules[name]) for name, segment in self.segments.items()}
            modules |= {name: _Call(run) for name, run in (self.others | ours).items()}
            call = _Call(torch.fx.GraphModule(modules, root.graph).forward)
        call.__dict__["program"] = self
        return call


class _Call(torch.nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = call


def synchronize() -> None:
    """Waits for every launch of every model, and raises the error of one that was aborted.

    Raises:
        MegakernelTimeout: a launch was aborted by its watchdog; its outputs are NaN and its counters did not advance.
    """
    for segment in list(_live):
        segment.synchronize()
