"""A built graph: its segments in program order, each an executable or what runs it instead."""

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
    """What a build leaves. The callables made from it share its executables.

    Attributes:
        partitioned: the graph's segments; None where the build is an earlier process's.
        segments: the executables of those that are ours, by name.
        others: what runs segments that are not ours, by name; those without run as captured.
        seconds: what each stage of the build took.
    """

    def __init__(self, segments: dict[str, Segment], partitioned: Partitioned | None) -> None:
        self.segments, self.partitioned = segments, partitioned
        self.others: dict[str, Callable[..., Any]] = {}
        self.seconds: dict[str, float] = {}
        _live.update(segments.values())

    @classmethod
    def build(cls, partitioned: Partitioned, device: torch.device, options: Options, dump: Dump) -> Program:
        ours = [segment for segment in partitioned.segments if segment.ours]
        segments = {}
        for index, segment in enumerate(ours):
            folder = dump.segment(index, len(ours))
            plan = make_plan(segment.gm, device, options, folder)
            segments[segment.name] = Segment(plan, device, options, folder)
        return cls(segments, partitioned)

    @classmethod
    def of_plan(cls, plan: Plan, device: torch.device, options: Options) -> Program:
        """The program of a graph that is one segment, whose plan an earlier build has left."""
        return cls({"whole": Segment(plan, device, options, Dump(None))}, None)

    @property
    def plan(self) -> Plan | None:
        """What ``of_plan`` takes, where the graph is one segment."""
        return next(iter(self.segments.values())).plan if self._is_whole else None

    @property
    def _is_whole(self) -> bool:
        """Whether the one segment is all of the graph."""
        return self.partitioned is None or len(self.partitioned.segments) == len(self.segments) == 1

    def callable(self, eager: Callable[..., Any], freeze: bool = False) -> Callable[..., Any]:
        """A function of the captured graph's arguments; ``eager`` is the graph as PyTorch runs it. ``freeze``: see
        ``Options``.

        The program lives as long as one of its callables.
        """
        if self._is_whole:
            call = next(iter(self.segments.values())).callable(eager, freeze)
        else:
            assert self.partitioned is not None
            root = self.partitioned.gm  # calls the segments by their names
            modules = dict(root.named_children())
            ours = {name: segment.callable(modules[name], freeze) for name, segment in self.segments.items()}
            modules |= {name: _Call(run) for name, run in (self.others | ours).items()}
            call = _Call(torch.fx.GraphModule(modules, root.graph).forward)
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
