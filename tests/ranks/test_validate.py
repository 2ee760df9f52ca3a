"""What the validator proves of exchanges."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.ranks.step import graph_of, inputs_of
from tests.schedule.taken_apart import Parts
from torch_mpk import _C
from torch_mpk.testing.emulator import SMEM_BYTES

TARGETS = {
    "polled": _C.Target("cuda", 90, 3, SMEM_BYTES, True, True),
    "events": _C.Target("cuda", 90, 3, SMEM_BYTES, True, False),
    "cpu": _C.Target("cpu", num_workers=2, fuse=False),
}


def parts(target: str) -> Parts:
    return Parts.of(_C.make_schedule(graph_of(inputs_of(1, 2, torch.bfloat16)[0], 4), TARGETS[target]))


def is_exchange(part: Parts, job: dict) -> bool:
    return part.schedule.graph.nodes[job["body"][0]].task in ("all_reduce", "all_gather")


@pytest.mark.parametrize("target", TARGETS)
def test_schedules_of_ranks_are_sound(target: str) -> None:
    _C.validate(parts(target).build())


def draw_tiles(part: Parts, job: dict) -> None:
    job["assignment"] = "claimed"


def share_a_job(part: Parts, job: dict) -> None:
    """Two exchanges of one job: its workers would wait for the first before they push the second."""
    jobs = [each for jobs, _ in part.phases for each in jobs if is_exchange(part, each)]
    other = next(each for each in jobs if each is not job)
    job["body"] += other["body"]
    for phase, _ in part.phases:
        phase[:] = [each for each in phase if each is not other]


@pytest.mark.parametrize(("spoil", "what"), [(draw_tiles, "tiles are drawn"), (share_a_job, "")])
def test_what_could_leave_ranks_waiting_is_refused(spoil: Callable[[Parts, dict], None], what: str) -> None:
    part = parts("polled")
    job = next(job for jobs, _ in part.phases for job in jobs if is_exchange(part, job))
    spoil(part, job)
    with pytest.raises(RuntimeError, match=f"unsound schedule: .*{what}"):
        _C.validate(part.build())
