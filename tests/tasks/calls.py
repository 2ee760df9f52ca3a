"""Graphs of calls of tasks: every sample a task is declared with, run in each of the ways there are."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import harness
import torch
from torch import fx

from torch_mpk import lowering
from torch_mpk.config import Options
from torch_mpk.dump import Dump
from torch_mpk.registry import Task
from torch_mpk.runtime.plan import make_plan
from torch_mpk.runtime.segment import Segment

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass
class Call:
    task: Task
    operands: list[torch.Tensor | None]
    attrs: dict[str, Any]


def samples_of(tasks: Iterable[Task], dtype: torch.dtype, device: str = "cpu") -> list[Call]:
    return [Call(task, *task.sample(sample, dtype, device)) for task in tasks for sample in task.samples]


class Calls:
    """One segment of independent calls."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        graph, outputs = fx.Graph(), []
        for call in calls:
            nodes = [None if t is None else self._placeholder(graph, t) for t in call.operands]
            node = graph.call_function(call.task, tuple(nodes), call.attrs)
            copies = [None if t is None else t.clone() for t in call.operands]
            node.meta["val"] = call.task(*copies, **call.attrs)
            outputs += self._results(graph, node) if call.task.outputs else []
        graph.output(tuple(outputs))
        self.gm = fx.GraphModule({}, graph)

    @staticmethod
    def _placeholder(graph: fx.Graph, t: torch.Tensor) -> fx.Node:
        node = graph.placeholder(f"operand{len(graph.nodes)}")
        node.meta["val"] = t
        return node

    @staticmethod
    def _results(graph: fx.Graph, call: fx.Node) -> list[fx.Node]:
        values = call.meta["val"]
        if isinstance(values, torch.Tensor):
            return [call]
        items = [graph.call_function(operator.getitem, (call, i)) for i in range(len(values))]
        for item, value in zip(items, values, strict=True):
            item.meta["val"] = value
        return items

    @functools.cached_property
    def lowered(self) -> lowering.Lowered:
        return lowering.lower(self.gm)

    def check_graph(self, runner: Callable[..., Any]) -> None:
        """``check`` of the task graph, run by ``runner(inputs, outputs, scalars)``."""
        self.check(lambda *operands: harness.run(self.lowered, operands, runner))

    def check_pipeline(self, device: torch.device) -> None:
        """``check`` of what the stages behind partitioning make of the segment."""
        plan = make_plan(self.gm, device, Options(), Dump(None))
        self.check(Segment(plan, device, Options(), Dump(None)).callable(eager=None))

    def check(self, run: Callable[..., Sequence[torch.Tensor]]) -> None:
        """Compare results, what was updated in place, and what was not to be touched with the references', twice."""
        for _ in range(2):
            before = [[None if t is None else t.clone() for t in call.operands] for call in self.calls]
            results = iter(run(*(t for call in self.calls for t in call.operands if t is not None)))
            for call, operands in zip(self.calls, before, strict=True):
                expected = call.task.results(call.task(*operands, **call.attrs))
                for output, want in zip(call.task.outputs, expected, strict=True):
                    self._compare(call, output.name, next(results), want)
                for operand, got, want in zip(call.task.inputs, call.operands, operands, strict=True):
                    if got is not None:
                        self._compare(call, operand.name, got, want)

    @staticmethod
    def _compare(call: Call, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        tolerance = TOLERANCE.get(want.dtype, 0)
        torch.testing.assert_close(
            got, want, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text: f"{call.task} {name}: {text}"
        )
