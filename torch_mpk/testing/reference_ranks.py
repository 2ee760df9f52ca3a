"""Executes the schedules of several ranks in any interleaving, with mailboxes between them: the reference VM of ranks.

Each rank's workers push the words of their own part of an exchange, and wait for those of the other ranks. Words travel
by themselves, so they come late and in any order. A schedule, or a placing of mailboxes, that is wrong shows as a wrong
result, or as ranks that wait for each other.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from torch_mpk import _C
from torch_mpk.testing.reference_vm import Machine, ScheduledMemory, Workers, WorkItem, dtype_of, run_job

_UNIT_BYTES, _UNIT_WORDS, _WORD_BYTES = 16, 4, 8  # of abi/mailboxes.h
_CHUNKS = 3  # in which the words of a part travel

Arguments = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]  # inputs and outputs


class RanksStuckError(RuntimeError):
    """No rank can go on."""


def run(
    schedule: _C.Schedule,
    launches: Sequence[Sequence[Arguments]],
    *,
    seed: int,
    mailboxes: _C.Mailboxes | None = None,
) -> None:
    """Runs launches of a schedule on each rank; ranks may be several launches apart.

    Args:
        launches: of each launch each rank's inputs and outputs, CPU tensors. Outputs are written in place.
        seed: of the interleaving, and of how words travel.
        mailboxes: where words stand, in place of what ``place_mailboxes`` says.

    Raises RanksStuckError, naming who waits for whom, where no rank can go on.
    """
    order = random.Random(seed)
    network = _Network(_C.place_mailboxes(schedule) if mailboxes is None else mailboxes, order)
    num_workers = order.randint(2, 4)
    ranks = [
        _Rank(schedule, network, number, [launch[number] for launch in launches], num_workers)
        for number in range(network.ranks)
    ]
    speeds = _Speeds(order, len(ranks))
    while not all(rank.is_done for rank in ranks):
        ready = [rank.number for rank in ranks if rank.ready()]
        if network.in_flight and (not ready or order.random() < 0.5):
            ranks[network.deliver()].look_again()
        elif ready:
            ranks[speeds.choose(ready)].step()
        else:
            raise RanksStuckError("; ".join(rank.waits_for() for rank in ranks if not rank.is_done))


class _Speeds:
    """Chooses who goes on. Some are much faster than others for a while."""

    def __init__(self, order: random.Random, count: int) -> None:
        self._order, self._speeds = order, [1] * count

    def choose(self, ready: Sequence[int]) -> int:
        if self._order.random() < 0.05:
            self._speeds = [16 ** self._order.randrange(3) for _ in self._speeds]
        return self._order.choices(ready, [self._speeds[number] for number in ready])[0]


class _Part(NamedTuple):
    """A step of an exchange: a worker pushes its part, or takes what the others have pushed of it."""

    node: int
    takes: bool
    words: slice  # of those that a rank pushes
    elements: slice  # of x


class _Words(NamedTuple):
    """Words on their way to where they will stand in a rank's mailbox."""

    to: int
    first: int
    words: torch.Tensor


class _Network:
    """Each rank's mailbox, int64 words, and the words that travel."""

    def __init__(self, boxes: _C.Mailboxes, order: random.Random) -> None:
        self.boxes, self.ranks, self.order = boxes, boxes.ranks, order
        size = 2 * boxes.place_bytes // _WORD_BYTES
        self.memory = [torch.zeros(size, dtype=torch.int64) for _ in range(self.ranks)]
        self.in_flight: list[_Words] = []

    def push(self, launch: int, part: _Part, rank: int, data: torch.Tensor) -> None:
        """A rank's ``data``, int32, to all others."""
        words = (data.to(torch.int64) & 0xFFFFFFFF) | self._tag(launch, part.node) << 32
        for to in range(self.ranks):
            first = self._first_word(launch, part.node, rank) + part.words.start
            for chunk in words.chunk(_CHUNKS) if to != rank else ():
                self.in_flight.append(_Words(to, first, chunk))
                first += len(chunk)

    def deliver(self) -> int:
        """Some words come, whichever. The rank that they come to."""
        to, first, words = self.in_flight.pop(self.order.randrange(len(self.in_flight)))
        self.memory[to][first : first + len(words)] = words
        return to

    def take(self, launch: int, part: _Part, rank: int, pusher: int) -> torch.Tensor | None:
        """What ``pusher`` has pushed to a rank, int32[words]; None where some of it has not come."""
        at = self._first_word(launch, part.node, pusher)
        words = self.memory[rank][at + part.words.start : at + part.words.stop]
        if bool((words >> 32 != self._tag(launch, part.node)).any()):
            return None
        return (words & 0xFFFFFFFF).to(torch.int32)

    def _first_word(self, launch: int, node: int, pusher: int) -> int:
        box = self.boxes.of_nodes[node]
        place = self.boxes.place_of(launch, box.turn)
        return (place * self.boxes.place_bytes + box.offset) // _WORD_BYTES + pusher * box.words

    def _tag(self, launch: int, node: int) -> int:
        return launch * self.boxes.turns + self.boxes.of_nodes[node].turn + 1


class _Rank:
    """One rank: its launches, one behind the other."""

    def __init__(
        self, schedule: _C.Schedule, network: _Network, number: int, launches: list[Arguments], num_workers: int
    ) -> None:
        self.schedule, self.network, self.number, self.num_workers = schedule, network, number, num_workers
        self.is_cpu = schedule.target.device == "cpu"
        self.launches, self.launch = launches, 0
        self.speeds = _Speeds(network.order, num_workers)
        self._begin()

    @property
    def is_done(self) -> bool:
        return self.launch == len(self.launches)

    def _begin(self) -> None:
        self.memory = ScheduledMemory(self.schedule, *self.launches[self.launch])
        self.machine = Machine(self.schedule.graph, self.memory, [])
        self.workers = _RankWorkers(self)
        self.look_again()

    def look_again(self) -> None:
        """Something has come, so other workers may go on."""
        self._ready: list[int] | None = None

    def ready(self) -> list[int]:
        """Workers that may do something now."""
        if self._ready is None:
            self._ready = [] if self.is_done else self.workers.ready()
        return self._ready

    def step(self) -> None:
        item = self.workers.step(self.speeds.choose(self.ready()))
        if item is not None:
            with torch.no_grad():
                self._run(item)
        self.look_again()
        if self.workers.are_done:
            self.launch += 1
            if not self.is_done:
                self._begin()

    def _run(self, item: WorkItem) -> None:
        job, part = self.schedule.phases[item.phase].jobs[item.job], item.step
        if part is None:
            run_job(self.machine, self.memory, job, self.network.order)
            return
        self.memory.private = dict.fromkeys(job.unstored)
        if part.takes:
            self._take(job, part)
        else:
            self.network.push(self.launch, part, self.number, self._own(part))
        self.memory.private = {}

    def spans_of(self, node: int) -> list[tuple[slice, slice]]:
        """The words and the elements of each part of an exchange: a worker's, or on the CPU all."""
        x = self.schedule.graph.nodes[node].operands[0].tensor
        size = torch.Size(x.shape).numel()
        elements = _UNIT_BYTES // dtype_of(x.dtype).itemsize
        units, parts = -(-size // elements), 1 if self.is_cpu else self.num_workers
        ends = [units * i // parts for i in range(parts + 1)]
        return [
            (slice(_UNIT_WORDS * a, _UNIT_WORDS * b), slice(elements * a, min(elements * b, size)))
            for a, b in itertools.pairwise(ends)
        ]

    def _own(self, part: _Part) -> torch.Tensor:
        """What this rank has of a part, int32[words]."""
        x = self.memory.view(self.schedule.graph.nodes[part.node].operands[0].tensor)
        return x.flatten()[part.elements].view(torch.int32)

    def missing(self, part: _Part) -> int | None:
        """A rank whose part has not come yet."""
        others = (rank for rank in range(self.network.ranks) if rank != self.number)
        return next((rank for rank in others if self.network.take(self.launch, part, self.number, rank) is None), None)

    def _take(self, job: _C.Job, part: _Part) -> None:
        node = self.schedule.graph.nodes[part.node]
        x, y = (self.memory.view(operand.tensor) for operand in node.operands)
        taken = [self.network.take(self.launch, part, self.number, rank) for rank in range(self.network.ranks)]
        taken[self.number] = self._own(part)
        parts = [words.view(x.dtype) for words in taken if words is not None]
        numbers = torch.arange(part.elements.start, part.elements.stop)
        if y.numel() == x.numel():  # a sum
            total = parts[0].to(torch.promote_types(x.dtype, torch.float32))
            for other in parts[1:]:
                total = total + other
            y.view(-1)[numbers] = total.to(x.dtype)
        else:  # what all have, side by side
            width = x.shape[-1]
            for rank, columns in enumerate(parts):
                y.view(-1)[(numbers // width * len(parts) + rank) * width + numbers % width] = columns
        for behind in job.epilogue:
            self.machine.run(behind, numbers)

    def waits_for(self) -> str:
        """Where its workers are, for whoever wonders why it does not go on."""
        found = []
        for worker in range(self.num_workers):
            item = self.workers.next_item(worker)
            if item is not None and item.step is not None and item.step.takes:
                node = self.schedule.graph.nodes[item.step.node]
                rank = self.missing(item.step)
                found.append(f"worker {worker} for rank {rank} in {node.task} (node {node.id})")
        return f"rank {self.number} waits in launch {self.launch}: {', '.join(found) or 'for its own workers'}"


class _RankWorkers(Workers):
    """Workers whose exchanges come in parts, dealt out alike on every rank."""

    def __init__(self, rank: _Rank) -> None:
        self.rank = rank
        super().__init__(rank.schedule, rank.network.order, rank.num_workers)

    def dealt(self, number: int, phase: _C.Phase) -> Iterator[tuple[int, WorkItem]]:
        """Jobs in any order, but exchanges in the schedule's, as on a device."""
        known = self.rank.network.boxes.of_nodes
        exchanges = [j for j, job in enumerate(phase.jobs) if any(node in known for node in job.body)]
        yield from ((worker, item) for worker, item in super().dealt(number, phase) if item.job not in exchanges)
        for j in exchanges:
            body, assignment = phase.jobs[j].body, phase.jobs[j].assignment
            for worker, part in self._parts(len(self.rank.spans_of(body[0])), assignment):
                for node in self.order.sample(body, len(body)):  # there is no order among the nodes of a body
                    for takes in (False, True):
                        yield worker, WorkItem(number, j, _Part(node, takes, *self.rank.spans_of(node)[part]))

    def _parts(self, count: int, assignment: str) -> Iterator[tuple[int, int]]:
        """Each part of an exchange with its worker."""
        if assignment == "static" and not self.rank.is_cpu:
            yield from ((part, part) for part in range(count))
        else:  # whoever comes first
            yield from (
                (self.order.randrange(self.rank.num_workers), p) for p in self.order.sample(range(count), count)
            )

    def may_step(self, worker: int) -> bool:
        p = self.position[worker]
        if self.rank.is_cpu and p < len(self.phases) and min(self.position) < p:  # threads meet between phases
            return False
        if not super().may_step(worker):
            return False
        item = self.next_item(worker)
        return item is None or item.step is None or not item.step.takes or self.rank.missing(item.step) is None
