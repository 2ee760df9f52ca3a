"""What launches did when: recordings of executables, and timelines of them as Chrome's trace events, which Perfetto
opens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

# The fields of mpk::PhaseTimes (include/torch_mpk/launch_times.h).
FIELDS = (
    *("begin", "joined", "ready", "staged", "computed"),
    *("load_begin", "described", "waits", "awaited", "loaded", "loaded_bytes"),
)
PARTS = ("join", "wait", "stage", "compute")  # of a phase, of a worker's consumers
_TRACKS_OF_A_PROCESS = 10_000  # their numbers, in whose order viewers show them, differ in all of a file


class Slice(NamedTuple):
    """Something that took from ``begin`` to ``end``, in nanoseconds."""

    name: str
    begin: int
    end: int
    args: dict[str, Any]
    category: str = "work"  # or "launch", "load", "stage" and "wait"


@dataclass(frozen=True)
class Recording:
    """Launches of one executable.

    Attributes:
        name: what it is called.
        device: where it runs.
        phase_names: of each phase, its tasks with their labels.
        operand_bytes: of each phase, what its tasks read and write; of caches all positions.
        times: int64[launches, workers, phases, len(FIELDS)], launches in the order in which they began: nanoseconds of
            the device's clock, 0 where there is nothing to say, and bytes.
        waited: int64[launches, workers, phases, ranks]: nanoseconds for which a worker waited for each rank of its
            group; no ranks where it exchanges with none.
        experts: of each phase, how many experts it chooses from, and the bytes of one expert's weights.
        pairs: int64[launches, phases, experts]: how many pairs of a row and a choice chose each expert; zeros where a
            phase has no experts, or its kernel does not say.
    """

    name: str
    device: torch.device
    phase_names: Sequence[str]
    operand_bytes: Sequence[int]
    times: torch.Tensor
    waited: torch.Tensor
    experts: Sequence[Sequence[int]]
    pairs: torch.Tensor

    @classmethod
    def read(
        cls,
        name: str,
        device: torch.device,
        phase_names: Sequence[str],
        operand_bytes: Sequence[int],
        launches: Sequence[bytes],
        ranks: int = 1,
        experts: Sequence[Sequence[int]] = (),
    ) -> Recording:
        """``launches``, of which there is one at least, as an executable's ``stop_recording`` returns them."""
        values = torch.frombuffer(bytearray(b"".join(launches)), dtype=torch.int64).view(len(launches), -1)
        num_phases, fields, waits = len(phase_names), len(FIELDS), ranks if ranks > 1 else 0
        experts = experts or [[0, 0]] * num_phases
        most = max(number for number, _ in experts)
        num_workers = (values.shape[1] - num_phases * most) // (num_phases * (fields + waits))
        shape = num_workers, num_phases
        sizes = [num_workers * num_phases * fields, num_workers * num_phases * waits, num_phases * most]
        times, waited, pairs = values.split(sizes, 1)
        times = times.unflatten(1, (*shape, fields))
        order = times[:, :, 0, 0].amin(1).argsort()
        waited, pairs = waited.unflatten(1, (*shape, waits)), pairs.unflatten(1, (num_phases, most))
        return cls(name, device, phase_names, operand_bytes, times[order], waited[order], experts, pairs[order])

    def field(self, name: str) -> torch.Tensor:
        """int64[launches, workers, phases]"""
        return self.times[..., FIELDS.index(name)]

    @property
    def begins(self) -> torch.Tensor:
        """When each launch began: int64[launches]."""
        return self.field("begin")[:, :, 0].amin(1)

    @property
    def ends(self) -> torch.Tensor:
        return self.field("computed").amax((1, 2))

    @property
    def chosen(self) -> torch.Tensor:
        """int64[launches, phases]: how many experts were chosen; 0 where that is not known."""
        return (self.pairs > 0).sum(-1)

    @property
    def phase_bytes(self) -> torch.Tensor:
        """int64[launches, phases]: what loaders have brought, or where they bring nothing, the bytes of operands, of
        experts those that were chosen."""
        loaded, chosen = self.field("loaded_bytes").sum(1), self.chosen
        number, num_bytes = torch.tensor(self.experts).unbind(-1)
        left = torch.where(chosen > 0, (number - chosen) * num_bytes, 0)
        return torch.where(loaded > 0, loaded, torch.tensor(self.operand_bytes) - left)

    def durations(self) -> torch.Tensor:
        """float64[launches, workers, phases, PARTS], nanoseconds: until the worker's own warps were done with the phase
        before, until the phases it waits for were, until the first activations were staged, and the rest."""
        begin, joined, ready, staged, computed = (self.field(name) for name in FIELDS[:5])
        computed = torch.where(computed == 0, ready, computed)
        staged = torch.where(staged == 0, ready, staged)
        return torch.stack([joined - begin, ready - joined, staged - ready, computed - staged], -1).double()

    def tracks(self) -> Iterator[tuple[str, list[Slice]]]:
        """The slices of each track: of each worker its consumers and its loader, if it has one, then what experts were
        chosen, if any, and launches. Some viewers open on the first track, and that is to show work."""
        times, waited, num_bytes = self.times.tolist(), self.waited.tolist(), self.phase_bytes.tolist()
        kinds = [kinds_of(name) for name in self.phase_names]
        has_loader = bool(self.field("loaded").any())
        for worker in range(self.times.shape[1]):
            consumers: list[Slice] = []
            loader: list[Slice] = []
            for launch, by_worker in enumerate(times):
                for phase, (kind, row) in enumerate(zip(kinds, by_worker[worker], strict=True)):
                    args = {"phase": phase, "tasks": self.phase_names[phase], "bytes": num_bytes[launch][phase]}
                    consumers += _compute_slices(kind, row, args)
                    consumers += _rank_slices(row, waited[launch][worker][phase])
                    loader += _load_slices(kind, row, {"phase": phase, "bytes": row[-1]})
            yield f"worker {worker}" + (" consumers" if has_loader else ""), consumers
            if has_loader:
                yield f"worker {worker} loader", loader
        if self.pairs.any():
            yield "experts", list(self._expert_slices(kinds))
        launches = zip(self.begins.tolist(), self.ends.tolist(), self.phase_bytes.sum(1).tolist(), strict=True)
        yield (
            "launches",
            [Slice(f"launch {i}", begin, end, {"bytes": n}, "launch") for i, (begin, end, n) in enumerate(launches)],
        )

    def _expert_slices(self, kinds: Sequence[str]) -> Iterator[Slice]:
        """One for each phase that has chosen experts, from its first worker's begin to its last one's end."""
        ready, computed = self.field("ready").amin(1).tolist(), self.field("computed").amax(1).tolist()
        num_bytes, chosen = self.phase_bytes.tolist(), self.chosen.tolist()
        end = 0
        for launch, phase in self.chosen.nonzero().tolist():
            pairs = {str(i): count for i, count in enumerate(self.pairs[launch, phase].tolist()) if count}
            args = {"phase": phase, "bytes": num_bytes[launch][phase], "pairs of experts": pairs}
            name = f"{kinds[phase]}: {chosen[launch][phase]} of {self.experts[phase][0]} experts"
            begin, end = max(end, ready[launch][phase]), max(end, computed[launch][phase])
            yield Slice(name, begin, end, args)


def kinds_of(phase_name: str) -> str:
    """The phase's tasks without the number of their layer."""
    kinds = []
    for part in phase_name.split(", "):
        task, _, label = part.partition(" ")
        last = [word for word in label.split(".") if word and not word.isdigit()][-1:]
        if label or "." not in task:  # otherwise it is another label of the task before
            kinds.append(" ".join([task, *last]))
    return ", ".join(dict.fromkeys(kinds))


def _compute_slices(kind: str, row: Sequence[int], args: dict[str, Any]) -> Iterator[Slice]:
    begin, joined, ready, staged, computed = row[:5]
    yield Slice("wait for own warps", begin, joined, {}, "wait")
    yield Slice("wait for events", joined, ready, {}, "wait")
    if computed:
        yield Slice(kind, ready, computed, args)
        yield Slice("stage", ready, staged, {}, "stage")


def _rank_slices(row: Sequence[int], waited: Sequence[int]) -> Iterator[Slice]:
    """One for each rank that was waited for. A worker turns from rank to rank; its waits for one are put together."""
    begin, end = row[3] or row[2], row[4]
    for rank, ns in enumerate(waited):
        if ns:
            until = min(begin + ns, end)
            yield Slice(f"wait for rank {rank}", begin, until, {}, "wait")
            begin = until


def _load_slices(kind: str, row: Sequence[int], args: dict[str, Any]) -> Iterator[Slice]:
    begin, described, waits, awaited, loaded, num_bytes = row[5:]
    yield Slice("wait for consumers", begin, described, {}, "wait")
    if num_bytes:
        yield Slice(f"load {kind}", described, loaded, args, "load")
    if waits:
        yield Slice("wait for events", waits, awaited, {}, "wait")


def trace_events(recordings: Sequence[Recording]) -> Iterator[str]:
    """The lines of a JSON file of Chrome's trace events: a process for each executable, whose threads are tracks.

    Devices have clocks of their own: the first launch on each begins at 0.
    """
    origins: dict[torch.device, int] = {}
    for recording in recordings:
        times = recording.times[..., :-1]
        begin = int(times[times > 0].min())
        origins[recording.device] = min(begin, origins.get(recording.device, begin))
    yield '{"traceEvents": ['
    separator = ""
    for pid, recording in enumerate(recordings, 1):
        for event in _events(recording, pid, origins[recording.device]):
            yield separator + event
            separator = ",\n"
    yield "]}\n"


def _events(recording: Recording, pid: int, origin: int) -> Iterator[str]:
    process = f"{recording.name} on {recording.device}"
    yield json.dumps({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}})
    quoted: dict[str, str] = {}
    for number, (track, slices) in enumerate(recording.tracks()):
        tid = pid * _TRACKS_OF_A_PROCESS + number
        yield json.dumps({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": track}})
        for name, begin, end, args, category in slices:
            if end <= begin:
                continue
            text = quoted.get(name) or quoted.setdefault(name, json.dumps(name))
            rest = f', "args": {json.dumps(args)}' if args else ""
            # A nanosecond less: viewers read floats, in which an end may lie behind the next begin that it equals, and
            # show what overlaps as nested.
            when = f'"ts": {(begin - origin) / 1e3:.3f}, "dur": {(end - begin - 1) / 1e3:.3f}'
            kind = f'"cat": "{category}"' + (', "cname": "grey"' if category == "wait" else "")
            yield f'{{"ph": "X", "pid": {pid}, "tid": {tid}, {when}, {kind}, "name": {text}{rest}}}'
