"""The CPU's executables of several ranks, each on a thread of its own."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from tests.codegen.emulated_calls import allocate, relative_error, tensors
from tests.ranks.step import graph_of, inputs_of, wanted
from tests.runtime.traces import read_tracks
from torch_mpk import _C
from torch_mpk.errors import RankLostError
from torch_mpk.profile import kernel_times, write
from torch_mpk.runtime import ranks
from torch_mpk.runtime.timeline import Recording

WATCHDOG_NS = 3 * 10**8
LATE_SECONDS = 0.05


class Threads:
    """Ranks that share memory because they share a process."""

    def __init__(self, ranks: int, rows: int, dtype: torch.dtype) -> None:
        self.inputs = inputs_of(ranks, rows, dtype)
        graph = graph_of(self.inputs[0], ranks)
        self.schedule = schedule = _C.make_schedule(graph, _C.Target("cpu", num_workers=1, fuse=False))
        _C.validate(schedule)
        self.ranks = [_C.CpuExecutable(schedule, 1) for _ in range(ranks)]
        self.outputs = [[allocate(t) for t in tensors(graph, "output")] for _ in range(ranks)]
        self.boxes = [torch.empty(self.ranks[0].mailbox_bytes, dtype=torch.uint8) for _ in range(ranks)]

    def join(self, watchdog_ns: int = 0) -> None:
        for box in self.boxes:
            box.zero_()
        for rank, executable in enumerate(self.ranks):
            executable.join(rank, [box.data_ptr() for box in self.boxes], watchdog_ns)

    def run(self, rank: int, times: int = 1) -> None:
        for _ in range(times):
            self.ranks[rank].run(self.inputs[rank], self.outputs[rank])

    def run_all(self, times: int = 1) -> None:
        threads = [threading.Thread(target=self.run, args=(rank, times)) for rank in range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    ("ranks", "rows", "dtype"),
    [
        (2, 1, torch.bfloat16),
        (4, 3, torch.float32),
        (3, 5, torch.float64),
        (8, 2, torch.bfloat16),
        (2, 70, torch.float16),
    ],
    ids=str,
)
def test_all_ranks_have_the_sums(ranks: int, rows: int, dtype: torch.dtype) -> None:
    team = Threads(ranks, rows, dtype)
    team.join()
    want = wanted(team.inputs)
    for times in (1, 2, 50):
        for outputs in team.outputs:
            for out in outputs:
                out.fill_(torch.nan)
        team.run_all(times)
        for outputs in team.outputs:
            for out, first, exact in zip(outputs, team.outputs[0], want, strict=True):
                assert torch.equal(out, first), "ranks have different bits"
                assert relative_error(out, exact) < (2e-2 if out.element_size() == 2 else 1e-5)


def test_sums_are_rounded_once_in_the_order_of_ranks() -> None:
    team = Threads(3, 2, torch.bfloat16)
    team.join()
    team.run_all()
    parts = [torch.nn.functional.linear(own[0], own[2]).float() for own in team.inputs]
    total = (parts[0] + parts[1] + parts[2]).bfloat16()
    first = team.inputs[0][1] + total
    normed = torch.ops.mpk.rms_norm(first, team.inputs[0][3], eps=1e-6, style="llama")
    parts = [torch.nn.functional.linear(normed, own[4]).float() for own in team.inputs]
    second = first + (parts[0] + parts[1] + parts[2]).bfloat16()
    assert (team.outputs[0][1] == second).float().mean() > 0.95  # products are added up in another order


def test_memory_of_another_machine_is_not_made_anew(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="all ranks must run on one machine"):
        ranks._opened(str(tmp_path / "mailbox"), 64)
    assert not any(tmp_path.iterdir())


def test_a_rank_that_does_not_come_is_named() -> None:
    team = Threads(2, 1, torch.bfloat16)
    with pytest.raises(ValueError, match="call join first"):
        team.run(0)
    with pytest.raises(ValueError, match="rank 2 of 2, but the schedule is for 2 ranks"):
        team.ranks[0].join(2, [box.data_ptr() for box in team.boxes], 0)
    team.join(WATCHDOG_NS)
    begin = time.monotonic()
    with pytest.raises(RankLostError, match="rank 0 of 2 of group 0 waited for rank 1 in all_reduce.*not come for 0.3"):
        team.run(0)
    with pytest.raises(RankLostError, match="rank 0 has aborted"):  # and so rank 1 waits no longer
        team.run(1, times=2)
    assert time.monotonic() - begin < 60
    assert all(rank.is_torn for rank in team.ranks)
    team.join()
    assert not any(rank.is_torn for rank in team.ranks)
    team.run_all()
    assert all(map(torch.equal, *team.outputs))


def test_a_timeline_has_the_waits_for_each_rank(tmp_path: Path) -> None:
    """Rank 2 comes when rank 0 has pushed its first part."""
    team = Threads(3, 2, torch.float32)
    team.join()
    team.ranks[0].start_recording()
    threads = [threading.Thread(target=team.run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    while not team.boxes[2].any():
        time.sleep(0.001)
    time.sleep(LATE_SECONDS)
    team.run(2)
    for thread in threads:
        thread.join()
    names, num_bytes = team.schedule.phase_names, team.schedule.phase_bytes
    recording = Recording.read("step", torch.device("cpu"), names, num_bytes, team.ranks[0].stop_recording(), 3)
    [[waited]] = recording.waited.tolist()  # of one launch and worker
    assert all(own == 0 for own, *_ in waited) and sum(late for *_, late in waited) > LATE_SECONDS / 2 * 1e9
    exchanges = [name.startswith(("all_reduce", "all_gather")) for name in names]
    assert any(exchanges) and not any(sum(row) for row, is_one in zip(waited, exchanges, strict=True) if not is_one)
    staged, computed = (recording.field(name)[0, 0] for name in ("staged", "computed"))
    assert [bool(at) for at in staged] == exchanges and (staged <= computed).all()
    write([recording], tmp_path / "trace.json", is_compressed=False)
    slices = read_tracks(tmp_path / "trace.json")["worker 0"].of("wait for rank 2")
    assert sum(end - begin for begin, end, *_ in slices) > LATE_SECONDS / 2 * 1e9
    kernel = kernel_times(recording, None)
    [task] = [task for task in kernel.tasks if task.ranks.get(2) and task.tasks.startswith("all_reduce")]
    assert task.ranks[2].most <= task.parts["compute"].most and "waiting for rank 2 in" in str(kernel)
