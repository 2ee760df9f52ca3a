"""Schedules taken apart, so that tests can break them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_mpk import _C

# What a job has besides numbers and lists of them.
PLAIN = {"tickets": _C.Tickets, "cut": _C.Cut, "shape": _C.TileShape, "scratch": _C.Scratch, "row_sums": _C.RowSums}


def fields_of(plain: object) -> dict:
    """The properties of one of a schedule's parts, and of those within it."""
    fields = {name: getattr(plain, name) for name, each in vars(type(plain)).items() if isinstance(each, property)}
    return {name: fields_of(v) if type(v) in PLAIN.values() else v for name, v in fields.items()}


def build(kind: type, fields: dict) -> object:
    return kind(**{n: build(PLAIN[n], v) if n in PLAIN and v is not None else v for n, v in fields.items()})


@dataclass
class Parts:
    """A schedule taken apart, to be changed and put together again."""

    schedule: _C.Schedule
    phases: list[tuple[list[dict], list[int]]]
    offsets: list[int]
    workspace_bytes: int
    polled_bytes: int
    polled: list[bool]
    warps: dict

    @classmethod
    def of(cls, s: _C.Schedule) -> Parts:
        phases = [([fields_of(job) for job in p.jobs], list(p.waits)) for p in s.phases]
        sizes = s.workspace_bytes, s.polled_bytes
        return cls(s, phases, list(s.workspace_offsets), *sizes, list(s.polled), fields_of(s.warps))

    def build(self) -> _C.Schedule:
        phases = [_C.Phase([build(_C.Job, job) for job in jobs], waits) for jobs, waits in self.phases]
        s = self.schedule
        sizes = self.workspace_bytes, self.polled_bytes
        return _C.Schedule(
            s.graph, s.target, phases, self.offsets, *sizes, self.polled, build(_C.WarpLayout, self.warps)
        )

    def jobs(self, part: str) -> list[dict]:
        """Those that have this part, which may be one of their cuts."""
        return [job for jobs, _ in self.phases for job in jobs if (job["cut"] if part in job["cut"] else job)[part]]

    def phases_with(self, condition: Callable[[int], bool]) -> list[int]:
        return [p for p in range(len(self.phases)) if condition(p)]
