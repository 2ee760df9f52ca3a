"""Times of tasks and of single kernels, beside their references in eager mode and compiled by Inductor."""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_mpk.errors import MpkError, TaskError, first_line
from torch_mpk.jit import ByDevice, Kernel
from torch_mpk.registry import Task
from torch_mpk.registry.calls import Call
from torch_mpk.task_kernel import kernel_of
from torch_mpk.testing.check_kernel import Sample, implementations, samples_of
from torch_mpk.testing.tasks import Calls

ROUNDS = 30  # of calls on a CPU
GPU_MS = 100.0  # of calls that are timed
_OURS, _EAGER, _INDUCTOR = "ours", "eager", "Inductor"
COLUMNS = (_OURS, _EAGER, _INDUCTOR)

Run = Callable[[], object]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Timed:
    """A sample of a task or a kernel, in each way that agrees with the reference; as a line, with ratios to ours."""

    what: str  # as in "l2_norm, sample 0 {'H': 64}"
    milliseconds: dict[str, float]  # medians, by the names in COLUMNS
    notes: dict[str, str]  # of a way that has no time, why

    @property
    def failure(self) -> str | None:
        """What our code, or ours alone, did wrong."""
        return self.notes.get(_OURS)

    def __str__(self) -> str:
        ours = self.milliseconds.get(_OURS)
        cells = []
        for name in COLUMNS:
            ms = self.milliseconds.get(name)
            ratio = f" ({ms / ours:.2f}x)" if ms and ours and name != _OURS else ""
            cells.append(f"{'-' if ms is None else format(ms, '.4f'):>9}{ratio:9}")
        return "  ".join([*cells, self.what]) + "".join(f"; {name}: {note}" for name, note in self.notes.items())


def header() -> str:
    """Of the lines that ``str`` makes of ``Timed``."""
    return "  ".join([*(f"{name:>9}{'' if name == _OURS else '  (/ours)':9}" for name in COLUMNS), "sample"])


def bench_task(
    task: Task, dtype: torch.dtype, device: torch.device, rounds: int = ROUNDS, gpu_ms: float = GPU_MS
) -> Iterator[Timed]:
    """Times every sample of a task, after comparing what each way computes with the reference: ``rounds`` calls on a
    CPU, and on a GPU as many as fill ``gpu_ms``.

    Raises TaskError where the task has no samples.
    """
    if not task.samples:
        raise TaskError(f"{task.name}: there is nothing to time it with: declare samples=[{{...}}]")
    for number, sample in enumerate(task.samples):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            operands, attrs = task.sample(sample, dtype, device)
        call = Call(task, operands, attrs)
        calls = Calls([call])

        def check(function: Function, call: Call = call, calls: Calls = calls) -> None:
            def run(*present: torch.Tensor) -> Sequence[torch.Tensor]:
                given = iter(present)
                operands = [None if t is None else next(given) for t in call.operands]
                return call.task.results(function(*operands, **call.attrs))

            calls.check(run)

        ways, notes = _agreeing(kernel_of(task), task.reference, check, operands, attrs)
        what = f"{task.name}, sample {number} {dict(sample)}"
        yield _timed(what, ways, notes, device, rounds, gpu_ms)


def bench_kernel(
    kernel: Kernel | ByDevice,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    rounds: int = ROUNDS,
    gpu_ms: float = GPU_MS,
) -> Iterator[Timed]:
    """The same of a kernel of ``torch_mpk.jit``, in each dtype that its signature has, or those of them that ``dtypes``
    names.

    One that does not run on the device has a line that says so. Raises KernelSignatureError where it has no samples.
    """
    is_cuda = device.type == "cuda"
    parts = implementations(kernel)
    chosen = [part for part in parts if part[0].declaration.is_cuda == is_cuda]
    if not chosen:
        yield Timed(parts[0][0].declaration.name, {}, {"not timed": f"it does not run on {device}"})
        return
    for sample in samples_of(*chosen[0], dtypes):
        inputs = [None if t is None else t.to(device) for t in sample.inputs]

        def check(function: Function, sample: Sample = sample) -> None:
            sample.check(function, device)

        ways, notes = _agreeing(sample.kernel, sample.kernel.reference, check, inputs, sample.attributes)
        yield _timed(f"{sample.name}, {sample}", ways, notes, device, rounds, gpu_ms)


def _timed(
    what: str, ways: Mapping[str, Run], notes: dict[str, str], device: torch.device, rounds: int, gpu_ms: float
) -> Timed:
    return Timed(
        what, {name: us["median"] / 1e3 for name, us in microseconds(ways, device, rounds, gpu_ms).items()}, notes
    )


def _agreeing(
    ours: Function,
    reference: Function,
    check: Callable[[Function], None],
    operands: Sequence[torch.Tensor | None],
    attrs: Mapping[str, Any],
) -> tuple[dict[str, Run], dict[str, str]]:
    """Calls in the ways that compute what the reference does, and what the others said."""
    torch.compiler.reset()  # a function is compiled for some eight samples, and then runs eagerly
    compiled = torch.compile(reference, dynamic=False)
    functions: dict[str, Function] = {_OURS: ours, _EAGER: reference, _INDUCTOR: compiled}
    ways: dict[str, Run] = {}
    notes: dict[str, str] = {}
    for name, function in functions.items():
        try:
            check(function)
        except (AssertionError, MpkError, RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            notes[name] = first_line(error)
        else:
            ways[name] = functools.partial(function, *operands, **attrs)
    return ways, notes


def microseconds(
    ways: Mapping[str, Run], device: torch.device, rounds: int, gpu_ms: float = GPU_MS
) -> dict[str, dict[str, float]]:
    """Of a call: on a GPU the device's time with a cold L2 cache, of as many calls as fill ``gpu_ms``; on the CPU a
    call's, in rounds of changing order."""
    if device.type == "cuda":
        from triton.testing import do_bench

        quantiles = [0.5, 0.1, 0.9]
        times = {name: do_bench(call, rep=gpu_ms, quantiles=quantiles) for name, call in ways.items()}
        return {
            name: dict(zip(("median", "p10", "p90"), (1e3 * t for t in ts), strict=True)) for name, ts in times.items()
        }
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in random.sample(list(ways.items()), len(ways)):
            call()
            begin = time.perf_counter()
            call()
            samples[name].append(1e6 * (time.perf_counter() - begin))
    return {name: summary(us) for name, us in samples.items()}


def summary(times: Sequence[float]) -> dict[str, float]:
    """Median and 10th and 90th percentile."""
    ordered = sorted(times)
    return {
        "median": statistics.median(ordered),
        "p10": ordered[len(ordered) // 10],
        "p90": ordered[-1 - len(ordered) // 10],
    }
