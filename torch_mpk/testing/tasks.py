"""Every sample a task is declared with, run in each of the ways there are and compared with its reference."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_mpk import _C, lowering, reference_vm
from torch_mpk.config import ARCHS, Options, env
from torch_mpk.dump import Dump
from torch_mpk.errors import CompileError, TaskError
from torch_mpk.jit import compile_cuda, find_compiler
from torch_mpk.registry import Task
from torch_mpk.runtime.plan import make_plan
from torch_mpk.runtime.segment import Segment

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # what other orders of sums may give
SMEM_BYTES = {80: 166912, 90: 232448}


def check_task(
    task: Task, dtypes: Sequence[torch.dtype] = DTYPES, report: Callable[[str], object] = lambda passed: None
) -> None:
    """Run every sample of a task in each dtype and way; ``report`` is told of each that has passed.

    The ways: its operator, by ``torch.library.opcheck``; its tiles in random order, by the reference; the CPU runtime;
    its device code compiled for each architecture, where there is a compiler; a CUDA kernel, where there is a device.

    Raises AssertionError naming task and operand where a result differs, TaskError without samples, and what a way
    raises.
    """
    if not task.samples:
        raise TaskError(f"{task.name}: there is nothing to check it with: declare samples=[{{...}}]")
    for dtype in dtypes:
        calls = Calls(samples_of([task], dtype))
        for call in calls.calls:
            op = getattr(torch.ops.mpk, task.name).default
            torch.library.opcheck(op, tuple(copies(call.operands)), call.attrs)
        report(f"{task} {dtype}: operator")
        calls.check_schedule(seed=0)
        report(f"{task} {dtype}: tiles in random order")
        calls.check_pipeline(torch.device("cpu"))
        report(f"{task} {dtype}: CPU")
        if not (task.header or task.headers):
            continue
        if has_compiler():
            for arch in ARCHS:
                compile_cuda(calls.program(arch).source, arch)
                report(f"{task} {dtype}: compiles for sm_{arch}")
        if torch.cuda.is_available():
            Calls(samples_of([task], dtype, "cuda")).check_pipeline(torch.device("cuda", torch.cuda.current_device()))
            report(f"{task} {dtype}: CUDA")


def has_compiler() -> bool:
    try:
        find_compiler(env.compiler)
    except CompileError:
        return False
    return True


@dataclass
class Call:
    task: Task
    operands: list[torch.Tensor | None]
    attrs: dict[str, Any]


def samples_of(tasks: Iterable[Task], dtype: torch.dtype, device: str = "cpu") -> list[Call]:
    return [Call(task, *task.sample(sample, dtype, device)) for task in tasks for sample in task.samples]


def copies(operands: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if t is None else t.clone() for t in operands]


class Calls:
    """One segment of independent calls."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        graph, outputs = fx.Graph(), []
        for call in calls:
            nodes = [None if t is None else _placeholder(graph, t) for t in call.operands]
            node = graph.call_function(call.task, tuple(nodes), call.attrs)
            node.meta["val"] = call.task(*copies(call.operands), **call.attrs)
            outputs += _results(graph, node)
        graph.output(tuple(outputs))
        self.gm = fx.GraphModule({}, graph)

    @functools.cached_property
    def lowered(self) -> lowering.Lowered:
        return lowering.lower(self.gm)

    def schedule(self, arch: int, num_workers: int = 132, fuse: bool = True) -> _C.Schedule:
        schedule = _C.make_schedule(self.lowered.graph, _C.Target("cuda", arch, num_workers, SMEM_BYTES[arch], fuse))
        _C.validate(schedule)
        return schedule

    def program(self, arch: int) -> _C.CudaProgram:
        return _C.generate_cuda(self.schedule(arch))

    def check_schedule(self, seed: int) -> None:
        """``check`` of schedules with and without fusion, in an order that their events allow."""
        for fuse in (False, True):
            self.check_graph(functools.partial(reference_vm.run, self.schedule(90, 4, fuse), seed=seed))

    def check_graph(self, runner: Callable[..., Any]) -> None:
        """``check`` of the task graph, run by ``runner(inputs, outputs, scalars)``."""

        def run(*operands: torch.Tensor) -> list[torch.Tensor]:
            fresh = [torch.empty_strided(f.shape, f.stride, dtype=f.dtype) for f in self.lowered.fresh]
            runner(operands, [_poison(t) for t in fresh], ())
            return [fresh[o.index].as_strided(o.shape, o.stride, o.offset) for o in self.lowered.outputs]

        self.check(run)

    def check_pipeline(self, device: torch.device) -> None:
        """``check`` of what the stages behind partitioning make of the segment."""
        plan = make_plan(self.gm, device, Options(), Dump(None))

        def eager(*operands: torch.Tensor) -> None:
            raise AssertionError("the executable cannot take the operands")

        self.check(Segment(plan, device, Options(), Dump(None)).callable(eager))

    def check(self, run: Callable[..., Sequence[torch.Tensor]]) -> None:
        """Compare results, what was updated in place, and what was not to be touched with the references', twice."""
        for _ in range(2):
            before = [copies(call.operands) for call in self.calls]
            results = iter(run(*(t for call in self.calls for t in call.operands if t is not None)))
            for call, operands in zip(self.calls, before, strict=True):
                expected = call.task.results(call.task(*operands, **call.attrs))
                for output, wanted in zip(call.task.outputs, expected, strict=True):
                    _compare(call, output.name, next(results), wanted)
                for operand, got, want in zip(call.task.inputs, call.operands, operands, strict=True):
                    if got is not None and want is not None:
                        _compare(call, operand.name, got, want)


def _placeholder(graph: fx.Graph, t: torch.Tensor) -> fx.Node:
    node = graph.placeholder(f"operand{len(graph.nodes)}")
    node.meta["val"] = t
    return node


def _results(graph: fx.Graph, call: fx.Node) -> list[fx.Node]:
    value = call.meta["val"]
    if not isinstance(value, tuple):
        return [] if value is None else [call]
    items = [graph.call_function(operator.getitem, (call, i)) for i in range(len(value))]
    for item, val in zip(items, value, strict=True):
        item.meta["val"] = val
    return items


def _poison(t: torch.Tensor) -> torch.Tensor:
    return t.fill_(torch.nan if t.dtype.is_floating_point else 77)


def _compare(call: Call, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE.get(want.dtype, 0)
    # Where terms of a sum cancel, its error is still of their size.
    size = want[want.isfinite()].double().square().mean().sqrt().nan_to_num().item() if tolerance else 0
    torch.testing.assert_close(
        got,
        want,
        rtol=tolerance,
        atol=tolerance * max(size, 1),
        equal_nan=True,
        msg=lambda text: f"{call.task} {name}: {text}",
    )
