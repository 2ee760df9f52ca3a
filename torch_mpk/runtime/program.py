"""A built graph: its segments in program order, each an executable or, where it falls back, the captured nodes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from torch_mpk.config import Options
from torch_mpk.dump import Dump
from torch_mpk.partition import Partitioned
from torch_mpk.runtime.plan import Plan, make_plan
from torch_mpk.runtime.segment import Segment

_live: weakref.WeakSet[Segment] = weakref.WeakSet()


class Program:
    """What a build leaves. The callables made from it share its executables."""

    def __init__(self, segments: dict[str, Segment], root: torch.fx.GraphModule | None) -> None:
        """``root`` calls the segments by their names; None where there is one, which is the whole graph."""
        self._segments, self._root = segments, root
        _live.update(segments.values())

    @classmethod
    def build(cls, partitioned: Partitioned, device: torch.device, options: Options, dump: Dump) -> Program:
        ours = [segment for segment in partitioned.segments if segment.ours]
        segments = {}
        for index, segment in enumerate(ours):
            folder = dump.segment(index, len(ours))
            plan = make_plan(segment.gm, device, options, folder)
            segments[segment.name] = Segment(plan, device, options, folder)
        is_whole = len(partitioned.segments) == len(ours) == 1
        return cls(segments, None if is_whole else partitioned.gm)

    @classmethod
    def of_plan(cls, plan: Plan, device: torch.device, options: Options) -> Program:
        """The program of a graph that is one segment, whose plan an earlier build has left."""
        return cls({"whole": Segment(plan, device, options, Dump(None))}, None)

    @property
    def plan(self) -> Plan | None:
        """What ``of_plan`` takes, where the graph is one segment."""
        return next(iter(self._segments.values())).plan if self._root is None else None

    def callable(self, eager: Callable[..., Any], freeze: bool = False) -> Callable[..., Any]:
        """A function of the captured graph's arguments; ``eager`` is the graph as PyTorch runs it. ``freeze``: see
        ``Options``.

        The program lives as long as one of its callables.
        """
        if self._root is None:
            call = next(iter(self._segments.values())).callable(eager, freeze)
        else:
            modules = dict(self._root.named_children())
            for name, segment in self._segments.items():
                modules[name] = _Call(segment.callable(modules[name], freeze))
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
