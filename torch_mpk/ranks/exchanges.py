"""What the phases of a schedule exchange with other ranks."""

from __future__ import annotations

from typing import NamedTuple

from torch_mpk import _C

_WORD_BYTES = 8  # of a mailbox, with 4 of data


class Exchange(NamedTuple):
    """A phase's. ``task``: with the module path that it comes from. ``num_bytes``: pushed to each other rank, with the
    tags of words."""

    phase: int
    task: str
    num_bytes: int


def exchanges_of(schedule: _C.Schedule) -> list[Exchange]:
    """By phase; none for a single rank.

    Raises ValueError as ``_C.place_mailboxes`` does.
    """
    boxes, nodes = _C.place_mailboxes(schedule), schedule.graph.nodes
    if boxes.ranks == 1:
        return []
    return [
        Exchange(number, f"{nodes[node].task} {nodes[node].label}".strip(), _WORD_BYTES * boxes.of_nodes[node].words)
        for number, phase in enumerate(schedule.phases)
        for job in phase.jobs
        for node in job.body
        if node in boxes.of_nodes
    ]
