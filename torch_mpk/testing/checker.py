"""What checks of tasks and of kernels have in common: samples run apart from this process, and findings about them."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from torch_mpk.testing.guarded import Check, run_checks

_NUM_ERRORS = 3  # of a compiler that are told

Report = Callable[[str], object]


@dataclass
class Findings:
    failures: list[str] = field(default_factory=list)  # each names file, task, way, dtype, sample and operand
    not_run: list[str] = field(default_factory=list)  # and why


class Sample(Protocol):
    """What is run in one way or several: a call of a task or of a kernel. As a string it says dtypes, sizes and how."""

    @property
    def name(self) -> str: ...
    @property
    def owner(self) -> str: ...  # as in "task l2_norm"
    @property
    def file(self) -> str: ...  # of whoever wrote what it runs
    @property
    def types(self) -> str: ...  # of its tensors


T = TypeVar("T")
S = TypeVar("S", bound=Sample)


class Checker(Generic[S]):
    """Runs samples in processes of their own, and keeps what became of them."""

    def __init__(self, report: Report, seconds: float) -> None:
        self.report, self.seconds = report, seconds
        self.findings = Findings()
        self._told: set[tuple[str, str]] = set()  # the lines of code that do not compile, and in which ways

    def fail(self, way: str, sample: S, what: str) -> None:
        self.findings.failures.append(f"{sample.file}: {sample.owner}, {way}, {sample}: {what}")

    def fail_to_compile(self, way: str, sample: S, errors: Sequence[str]) -> None:
        """A line of code is told of once, in the first way and sample that it breaks: it breaks all others, too."""
        by_place = {_place_of(line): line for line in reversed(errors)}  # each instance of a template errs in its words
        fresh = [line for place, line in by_place.items() if (sample.owner, place) not in self._told]
        self._told |= {(sample.owner, place) for place in by_place}
        if fresh:
            self.fail(way, sample, "; ".join(fresh[::-1][:_NUM_ERRORS]))
        elif (sample.owner, way) not in self._told:
            self.findings.not_run.append(f"{sample.owner}, {way}: not compiled, by what is among the failures")
        self._told.add((sample.owner, way))

    def leave_out(self, way: str, sample: S, why: str) -> None:
        self.findings.not_run.append(f"{sample.owner}, {way}, {sample}: {why}")

    def run(self, way: str, samples: Sequence[S], check: Callable[[S], None]) -> list[S]:
        """Run a check of each sample in other processes. Returns the samples that pass."""
        passed: list[S] = []
        for (name, types), group in grouped(samples, lambda sample: (sample.name, sample.types)).items():
            checks = [Check(functools.partial(check, sample), sample.file) for sample in group]
            good: list[S] = []
            num_failures = len(self.findings.failures)
            with contextlib.closing(run_checks(checks, self.seconds)) as outcomes:
                for number, outcome in enumerate(outcomes):
                    if outcome.failure is not None:
                        self.fail(way, group[number], outcome.failure)
                    elif outcome.left_out is not None:
                        self.leave_out(way, group[number], outcome.left_out)
                    else:
                        good.append(group[number])
                    if outcome.overdue:
                        for sample in group[number + 1 :]:
                            self.leave_out(way, sample, "an earlier sample has not ended")
                        break
            if good and len(self.findings.failures) == num_failures:
                self.report(f"{name}: {way}, {types}: {len(good)} samples pass")
            passed += good
        return passed


def grouped(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _place_of(error: str) -> str:
    """``file:line`` of a compiler's message, as GCC and nvcc spell it; all of the message where it has none."""
    found = re.match(r"(.+?)[:(](\d+)", error)
    return f"{found[1]}:{found[2]}" if found else error
