"""Calls of tasks as a segment of a graph, run in one of the ways there are and compared with their references."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torch_mpk import _C, lowering
from torch_mpk.builds.dump import Dump
from torch_mpk.config import Options
from torch_mpk.dispatch.compiled_graph import build_segment
from torch_mpk.registry import Task
from torch_mpk.registry.calls import Call, graph_of
from torch_mpk.testing import reference_vm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What other orders of sums may give.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def samples_of(tasks: Iterable[Task], dtype: torch.dtype, device: str = "cpu") -> list[Call]:
    return [Call(task, *task.sample(sample, dtype, device)) for task in tasks for sample in task.samples]


def copies(operands: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if t is None else t.clone() for t in operands]


class Calls:
    """One segment of independent calls."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.gm = graph_of(calls)

    @functools.cached_property
    def lowered(self) -> lowering.Lowered:
        return lowering.lower(self.gm)

    def schedule(self, arch: int, num_workers: int = 132, fuse: bool = True) -> _C.Schedule:
        """For a device of a compute capability."""
        generation = _C.arch_of_device(arch)
        assert generation is not None
        target = _C.Target("cuda", generation.number, num_workers, generation.smem_bytes, fuse, device_arch=arch)
        schedule = _C.make_schedule(self.lowered.graph, target)
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
            runner(operands, [poison(t) for t in fresh], ())
            return [fresh[o.index].as_strided(o.shape, o.stride, o.offset) for o in self.lowered.outputs]

        self.check(run)

    def callable(self, device: torch.device) -> Callable[..., Sequence[torch.Tensor]]:
        """What the stages behind partitioning make of the segment."""
        return build_segment(self.gm, device, Options(), Dump(None)).callable(self.gm)

    def check_pipeline(self, device: torch.device) -> None:
        """``check`` of ``callable``."""
        self.check(self.callable(device))

    def check(self, run: Callable[..., Sequence[torch.Tensor]]) -> None:
        """Compare results, what was updated in place, and what was not to be touched with the references', twice.

        Raises AssertionError naming the task and the operand that differs.
        """
        for _ in range(2):
            before = [copies(call.operands) for call in self.calls]
            results = iter(run(*(t for call in self.calls for t in call.operands if t is not None)))
            for call, operands in zip(self.calls, before, strict=True):
                expected = call.task.results(call.task(*operands, **call.attrs))
                for output, wanted in zip(call.task.outputs, expected, strict=True):
                    compare(f"{call.task} {output.name}", next(results), wanted)
                for operand, got, want in zip(call.task.inputs, call.operands, operands, strict=True):
                    if got is not None and want is not None:
                        compare(f"{call.task} {operand.name}", got, want)


def poison(t: torch.Tensor) -> torch.Tensor:
    return t.fill_(torch.nan if t.dtype.is_floating_point else 77)


def compare(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Raises AssertionError where two values of ``what`` differ by more than other orders of sums may give."""
    tolerance = TOLERANCE.get(want.dtype, 0)
    # Where terms of a sum cancel, its error is still of their size.
    size = want[want.isfinite()].double().square().mean().sqrt().nan_to_num().item() if tolerance else 0
    torch.testing.assert_close(
        got,
        want,
        rtol=tolerance,
        atol=tolerance * max(size, 1),
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )
