"""Where the time of megakernels goes: a timeline of every worker, and totals by task."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_mpk.config import is_int
from torch_mpk.errors import ArgumentError, ProfileError
from torch_mpk.runtime import synchronize
from torch_mpk.runtime.bandwidth import bytes_per_second
from torch_mpk.runtime.segment import CompiledSegment, live_segments
from torch_mpk.runtime.timeline import PARTS, Recording, kinds_of, trace_events

WARMUP = 3  # calls: one compiles, and the next may build for what has changed
_COLUMNS = 100  # of the printed table, where the terminal has no more
_NUMBERS = 28 + 12 * len(PARTS)  # columns behind the tasks' names


class Spread(NamedTuple):
    """Microseconds of a phase: over workers the mean, the least and the most."""

    mean: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{_short(self.mean)} ({_short(self.most)})"


@dataclass(frozen=True)
class TaskTimes:
    """The phases of the same tasks in a launch; times are medians over launches.

    Attributes:
        tasks: their names, and the last parts of the module paths that they come from.
        num_phases: how many there are.
        us: microseconds of all of them.
        num_bytes: what their loaders bring, or where there is nothing to load, what the tasks read and write, and of
            experts those that were chosen, if that is known.
        parts: of one phase, "join": waiting for the worker's own warps; "wait": for earlier phases; "stage": loading
            activations to shared memory, with the wait for those that are polled, and pushing them to other ranks;
            "compute": the rest.
        ranks: of one phase, microseconds of "compute" spent waiting for each other rank, by its number in the group.
        experts: of one phase, how many experts the rows chose, the mean; 0 where it has none, or that is not known.
    """

    tasks: str
    num_phases: int
    us: float
    num_bytes: int
    parts: Mapping[str, Spread]
    ranks: Mapping[int, Spread] = field(default_factory=dict)
    experts: float = 0


@dataclass(frozen=True)
class KernelTimes:
    """A megakernel. ``us`` is the median microseconds of a launch; ``bytes_per_second`` what the device's memory
    delivers, if that is known."""

    name: str
    num_launches: int
    us: float
    tasks: list[TaskTimes]
    bytes_per_second: float | None

    @property
    def num_bytes(self) -> int:
        """Of a launch."""
        return sum(task.num_bytes for task in self.tasks)

    def share(self, num_bytes: int, us: float) -> float | None:
        """The part of the memory's speed that is reached, if that is known."""
        return 1e6 * num_bytes / us / self.bytes_per_second if us and self.bytes_per_second else None

    def __str__(self) -> str:
        return "\n".join(_lines(self))


@dataclass(frozen=True)
class Profile:
    """What ``profile`` has measured; ``path`` is where the timeline is. Print it, or read the fields."""

    path: Path
    kernels: list[KernelTimes]

    def __str__(self) -> str:
        return "\n\n".join([*map(str, self.kernels), f"timeline: {self.path}, for https://ui.perfetto.dev"])


def profile(
    step: Callable[[], object], path: str | os.PathLike[str], *, steps: int = 3, warmup: int = WARMUP
) -> Profile:
    """Writes a timeline of the megakernels that ``step`` launches, for https://ui.perfetto.dev.

    It has a track for each worker's consumers and one for its loader, with a slice for each phase and those for what it
    waits for (docs/profiling.md). On CUDA the model must have been compiled with ``options={"profile": True}``; calls
    made meanwhile by other threads are in the timeline as well, replays of CUDA graphs are not.

    Args:
        step: what to run, such as ``lambda: model(input_ids=token, past_key_values=cache)``.
        path: of the file, Chrome's trace events as JSON, compressed where it ends in ".gz".
        steps: how often ``step`` runs while it is recorded.
        warmup: how often before, at least once: the first call compiles.

    Returns:
        totals by task; ``print`` shows them.

    Raises:
        ArgumentError: an argument has a wrong type or range, or the file cannot be written; nothing has run then.
        ProfileError: ``step`` launches nothing that can be recorded.
        Exception: whatever ``step`` raises. The file is then as it was.
    """
    for name, count in (("steps", steps), ("warmup", warmup)):
        if not is_int(count) or count < 1:
            raise ArgumentError(name=name, expected="an int > 0", value=repr(count))
    with _replaced(Path(path)) as part:
        for _ in range(warmup):
            step()
        recordings = record(lambda: [step() for _ in range(steps)])
        write(recordings, part, is_compressed=Path(path).suffix == ".gz")
    speeds = [bytes_per_second(recording.device, recording.times.shape[1]) for recording in recordings]
    return Profile(Path(path), [*map(kernel_times, recordings, speeds)])


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """A new file that becomes the one at ``path`` in the end; where that is not reached, nothing is left of it."""
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.touch()
    except OSError as error:
        expected = "a file in a folder that can be written to"
        raise ArgumentError(name="path", expected=expected, value=f"{path} ({error.strerror or error})") from None
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def record(run: Callable[[], object]) -> list[Recording]:
    """What the megakernels did that ``run`` has launched, by their first launch.

    Raises ProfileError where there were none that can be recorded.
    """
    synchronize()
    segments = live_segments()
    profiled = [segment for segment in segments if segment.executable.is_profiled]
    if segments and not profiled:
        raise ProfileError("the kernels that are loaded were built to run, not to be recorded")
    for segment in profiled:
        segment.executable.start_recording()
    try:
        run()
        synchronize()
    finally:
        launches = [segment.executable.stop_recording() for segment in profiled]
    found = [_recording(segment, made) for segment, made in zip(profiled, launches, strict=True) if made]
    if not found:
        raise ProfileError("it has launched no megakernel, or only in a CUDA graph that was captured before")
    return sorted(found, key=lambda recording: int(recording.begins[0]))


def _recording(segment: CompiledSegment, launches: Sequence[bytes]) -> Recording:
    described: Any = segment.plan.kernel or segment.plan.schedule
    name = f"megakernel {segment.name}"
    names, num_bytes, executable = described.phase_names, described.phase_bytes, segment.executable
    return Recording.read(name, segment.device, names, num_bytes, launches, executable.ranks, executable.phase_experts)


def write(recordings: Sequence[Recording], path: Path, is_compressed: bool) -> None:
    with open(path, "wb") as file, gzip.GzipFile("", "wb", 6, file) if is_compressed else file as out:
        for line in trace_events(recordings):
            out.write(line.encode())


def kernel_times(recording: Recording, speed: float | None) -> KernelTimes:
    """Totals by task; ``speed`` is what the device's memory delivers, in bytes a second, if that is known."""
    us = recording.durations().median(0).values / 1e3  # [worker, phase, part]
    waited = recording.waited.double().median(0).values / 1e3  # [worker, phase, rank]
    groups: dict[str, list[int]] = {}
    for phase, name in enumerate(recording.phase_names):
        groups.setdefault(kinds_of(name), []).append(phase)
    num_bytes = recording.phase_bytes.median(0).values
    tasks = []
    for kinds, phases in groups.items():
        parts = dict(zip(PARTS, _spreads(us[:, phases].mean(1)), strict=True))
        ranks = {rank: spread for rank, spread in enumerate(_spreads(waited[:, phases].mean(1))) if spread.most}
        total = float(us[:, phases].sum((1, 2)).mean())
        experts = float(recording.chosen[:, phases].double().mean())
        tasks.append(TaskTimes(kinds, len(phases), total, int(num_bytes[phases].sum()), parts, ranks, experts))
    device = recording.device
    took = float((recording.ends - recording.begins).double().median()) / 1e3
    return KernelTimes(f"{recording.name} on {device}", len(recording.times), took, tasks, speed)


def _spreads(times: torch.Tensor) -> list[Spread]:
    """``times``: [workers, things]"""
    columns = (values.tolist() for values in (times.mean(0), times.amin(0), times.amax(0)))
    return [Spread(*spread) for spread in zip(*columns, strict=True)]


def _short(number: float) -> str:
    """In four characters, but for large ones."""
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f}"


def _cut(text: str, width: int) -> str:
    return text if len(text) < width else f"{text[: width - 2]}…"


def _lines(kernel: KernelTimes) -> Iterator[str]:
    num_phases = sum(task.num_phases for task in kernel.tasks)
    share = kernel.share(kernel.num_bytes, kernel.us)
    reached = f", {share:.1%} of the memory's speed" if share is not None else ""
    yield (
        f"{kernel.name}, {kernel.num_launches} launches of {num_phases} phases: {kernel.us:.1f} us, "
        f"{kernel.num_bytes / 1e6:.1f} MB{reached}"
    )
    yield "us of a phase: the mean of the workers, in parentheses the most of one"
    columns = max(shutil.get_terminal_size((_COLUMNS, 24)).columns, _COLUMNS)
    width = min(columns - _NUMBERS, max(len(task.tasks) for task in kernel.tasks) + 1)
    yield f"{'tasks':{width}}{'n':>4}{'us':>8}{'MB':>8}{'speed':>8}" + "".join(f"{part:>12}" for part in PARTS)
    for task in kernel.tasks:
        share = kernel.share(task.num_bytes, task.us)
        speed = f"{share:>8.1%}" if share is not None else f"{'-':>8}"
        numbers = f"{task.num_phases:>4}{_short(task.us):>8}{_short(task.num_bytes / 1e6):>8}{speed}"
        yield f"{_cut(task.tasks, width):{width}}{numbers}" + "".join(f"{task.parts[part]!s:>12}" for part in PARTS)
    totals = ((part, sum(task.num_phases * task.parts[part].mean for task in kernel.tasks)) for part in PARTS)
    yield "of a launch, us: " + ", ".join(f"{part} {total:.1f}" for part, total in totals)
    for task in kernel.tasks:
        if task.experts:
            yield f"of a phase of {_cut(task.tasks, columns - 40)}: {task.experts:.1f} experts chosen"
    waits = [(rank, spread, task) for task in kernel.tasks for rank, spread in task.ranks.items()]
    for rank in sorted({rank for rank, *_ in waits}):
        own = [(task.num_phases, spread) for other, spread, task in waits if other == rank]
        mean, most = (sum(n * getattr(spread, which) for n, spread in own) for which in ("mean", "most"))
        phases = sum(n for n, _ in own)
        yield f"of compute: waiting for rank {rank} in {phases} phases {_short(mean)} ({_short(most)})"
