"""Ranks on the CPU, each a process: what they exchange, and what becomes of them when one is lost."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import torch_mpk
from tests.ranks.team import run, start
from torch_mpk.builds import timing
from torch_mpk.dispatch import build_cache
from torch_mpk.errors import RankLostError

HIDDEN, ROWS = 64, 2
WATCHDOG = 3.0


class Layers(torch.nn.Module):
    """Two products whose sums the ranks exchange, as a sharded model's."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            part = F.linear(x, weight)
            dist.all_reduce(part)
            x = x + part
        return x


def digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.float().numpy().tobytes() for t in tensors)).hexdigest()


def compiled(model: torch.nn.Module, **options: object) -> Callable[..., torch.Tensor]:
    return torch.compile(model, backend="mpk", options={"fallback": "error", "watchdog_seconds": WATCHDOG} | options)


def inputs(number: int) -> torch.Tensor:
    return torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1000 + number))


@torch.no_grad()
def exchanged(rank: int) -> dict[str, object]:
    model = Layers(rank)
    step = compiled(model)
    found = [step(inputs(i)) for i in range(5)]
    wide = Layers(rank).double()
    errors = [(a.double() - wide(inputs(i).double())).abs().max().item() for i, a in enumerate(found)]
    again = [step(inputs(i)) for i in range(5)]
    explained = torch_mpk.explain(model, inputs(0))
    [part] = explained.graphs[0].parts
    told = {"explained": str(explained), "peers": part.peers, "exchanges": part.exchanges}
    return {"digest": digest(found), "again": digest(again), "error": max(errors)} | told


@pytest.mark.slow
def test_sums_have_the_same_bits_on_all_ranks(tmp_path: Path) -> None:
    results = run(2, exchanged, tmp_path)
    assert {each[key] for each in results for key in ("digest", "again")} == {results[0]["digest"]}
    assert max(each["error"] for each in results) < 1e-5
    size = ROWS * HIDDEN * 2 * 4  # half of it tags
    for rank, each in enumerate(results):
        assert f"exchanges with rank {1 - rank} of group 0, to each 0.00195 MiB a call:" in each["explained"]
        assert f"all_reduce: {size} bytes in 2 phases, 1 to " in each["explained"]
        assert each["peers"] == [1 - rank] and [num_bytes for *_, num_bytes in each["exchanges"]] == [size, size]


@torch.no_grad()
def with_a_kept_build(rank: int, folder: str) -> dict[str, object]:
    """Rank 0 alone keeps its program, so it finds that where rank 1, of another machine, builds its own again."""
    os.environ["TORCH_MPK_CACHE_DIR"] = f"{folder}/cache{rank}"
    build_cache.WORTH_SECONDS = float("inf") if rank else 0.0
    found, stages = [], []
    for _ in range(2):
        torch.compiler.reset()
        step = compiled(Layers(rank))
        found.append(digest([step(inputs(i)) for i in range(3)]))
        stages.append("lowering" in timing.recent[-1].stages)
    return {"digests": found, "built": stages}


@pytest.mark.slow
def test_ranks_of_which_one_finds_its_build(tmp_path: Path) -> None:
    first, second = run(2, with_a_kept_build, tmp_path, str(tmp_path))
    assert first["built"] == [True, False] and second["built"] == [True, True]
    assert {*first["digests"], *second["digests"]} == {first["digests"][0]}


@torch.no_grad()
def after_a_late_rank(rank: int) -> dict[str, object]:
    """Rank 1 is late for a step, but not too late; then it leaves one out."""
    step = compiled(Layers(rank))
    right = [step(inputs(i)) for i in range(3)]
    if rank == 1:
        time.sleep(WATCHDOG / 2)
    late = step(inputs(0))
    said, begin = "", time.monotonic()
    try:
        if rank == 1:
            time.sleep(WATCHDOG * 1.5)
        step(inputs(1))
    except RankLostError as error:
        said = str(error)
    seconds = time.monotonic() - begin
    again = [step(inputs(i)) for i in range(3)]
    return {"is_right": torch.equal(late, right[0]) and all(map(torch.equal, again, right)), "said": said, "s": seconds}


@pytest.mark.slow
def test_a_rank_that_comes_too_late_is_named_and_the_next_step_works(tmp_path: Path) -> None:
    results = run(2, after_a_late_rank, tmp_path)
    assert all(each["is_right"] for each in results)
    assert "waited for rank 1" in results[0]["said"] and "rank 0 has aborted" in results[1]["said"]
    assert all(each["s"] < 2 * WATCHDOG for each in results)


@torch.no_grad()
def until_killed(rank: int, folder: str) -> str:
    step = compiled(Layers(rank))
    step(inputs(0))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    said = []
    for _ in range(2):  # the second finds that the group is not whole
        try:
            step(inputs(1))
        except RankLostError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    team = start(3, until_killed, tmp_path, str(tmp_path)).wait(120)
    [first, killed, last] = team.results
    assert killed is None
    for said in (first, last):
        assert said is not None, team.logs
        assert len(said) == 2 and "rank" in said[1]
    assert any("waited for rank 1" in said[0] for said in (first, last))


@torch.no_grad()
def after_an_exception(rank: int) -> dict[str, object]:
    step = compiled(Layers(rank))
    right = step(inputs(0))
    said = ""
    try:
        if rank == 1:
            raise ValueError("of the user's")
        step(inputs(0))
    except (RankLostError, ValueError) as error:
        said = str(error)
    if rank == 1:  # whose own call was not made: it is told that the others gave up
        try:
            time.sleep(WATCHDOG * 1.5)
            step(inputs(0))
        except RankLostError:
            pass
    return {"said": said, "is_right": torch.equal(step(inputs(0)), right)}


@pytest.mark.slow
def test_a_rank_that_raises_leaves_the_others_an_error(tmp_path: Path) -> None:
    results = run(2, after_an_exception, tmp_path)
    assert "waited for rank 1" in results[0]["said"]
    assert all(each["is_right"] for each in results)


@torch.no_grad()
def after_an_interrupt(rank: int) -> dict[str, object]:
    step = compiled(Layers(rank), watchdog_seconds=60)
    right = step(inputs(0))
    said, begin = "", time.monotonic()
    try:
        if rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 1)
            signal.signal(signal.SIGALRM, signal.default_int_handler)
        else:
            time.sleep(2)
        step(inputs(0))
    except KeyboardInterrupt:
        said = "interrupted"
    except RankLostError as error:
        said = str(error)
    seconds = time.monotonic() - begin
    return {"said": said, "s": seconds, "is_right": torch.equal(step(inputs(0)), right)}


@pytest.mark.slow
def test_an_interrupt_ends_the_wait(tmp_path: Path) -> None:
    results = run(2, after_an_interrupt, tmp_path)
    assert results[0]["said"] == "interrupted" and "rank 0 has aborted" in results[1]["said"]
    assert all(each["s"] < 10 and each["is_right"] for each in results)
