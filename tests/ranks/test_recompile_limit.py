"""Dynamo compiles a function no more on one rank alone: the others do as that one does, or end with an error that names
it, and steps that all have built go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.ranks.team import run
from tests.ranks.test_processes import HIDDEN
from tests.ranks.test_ways import outcome
from torch_mpk.backend import pipeline
from torch_mpk.runtime import team

WATCHDOG = 4.0
SECONDS = 1.5  # that ranks wait for one that may run eagerly
BOUND = 15.0  # seconds: of a busy machine; ranks that wait for each other take half an hour


class Layer(torch.nn.Module):
    """One with a sum over the ranks, or of a single rank's."""

    def __init__(self, rank: int, is_shared: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.weight = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5)
        self.is_shared = is_shared

    def forward(self, x: torch.Tensor, written: torch.Tensor | None = None) -> torch.Tensor:
        part = F.linear(x, self.weight)
        if written is not None:
            written.add_(1)
        if self.is_shared:
            dist.all_reduce(part)
        return x + part


def inputs(rows: int) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows))


@torch.no_grad()
def right(rows: int) -> float:
    x = inputs(rows)
    return (x + sum(F.linear(x, Layer(rank).weight) for rank in range(2))).sum().item()


def own(rank: int, *numbers: int) -> None:
    """Compiles the same function for this rank alone."""
    for rows in numbers:
        torch.compile(Layer(rank, is_shared=False), backend="mpk", dynamic=False)(inputs(rows))


def begin(rank: int, fullgraph: bool = False, **options: object) -> Callable[..., torch.Tensor]:
    """A step that both ranks have built for two rows, of a function that Dynamo compiles no more on rank 1."""
    torch.compiler.reset()
    step = fresh(rank, fullgraph=fullgraph, **options)
    step(inputs(2))
    if rank == 1:
        own(rank, 2)
    dist.barrier()
    return step


def fresh(
    rank: int, *, dynamic: bool = False, fullgraph: bool = False, **options: object
) -> Callable[..., torch.Tensor]:
    options = {"fallback": "eager", "watchdog_seconds": WATCHDOG} | options
    return torch.compile(Layer(rank), backend="mpk", dynamic=dynamic, fullgraph=fullgraph, options=options)


def called(call: Callable[..., torch.Tensor], rows: int, *args: torch.Tensor) -> tuple[str, str, float]:
    """Calls it. Returns what comes of it, what it warns of, and how long it takes."""
    start = time.monotonic()
    return *outcome(call, inputs(rows), *args), time.monotonic() - start


def forget(rank: int) -> None:
    """Rank 1 forgets what the other has built, and compiles the function no more."""
    if rank == 1:
        torch.compiler.reset()
        own(rank, 2, 3)
    dist.barrier()


@torch.no_grad()
def at_limit(rank: int) -> dict[str, object]:
    torch._dynamo.config.recompile_limit = 2
    team.meeting_seconds = lambda watchdog: SECONDS
    found: dict[str, object] = {}
    forget(rank)
    found["never met"] = called(fresh(rank), 4)

    step = begin(rank)
    found["eager"] = called(step, 3), called(step, 3), called(step, 2)

    step = begin(rank, fullgraph=True)
    found["raised"] = called(step, 3), called(step, 2)

    step = begin(rank, fallback="error")
    found["error"] = called(step, 3)
    if rank == 0:  # which ends the exchange that rank 1 is in
        Layer(rank)(inputs(3))
    found["error"] = found["error"], called(step, 2)

    # It is at its limit still, as far as the other knows.
    step, build = begin(rank), pipeline.build
    torch._dynamo.config.recompile_limit = 8
    if rank == 1:
        pipeline.build = lambda *args: time.sleep(2 * SECONDS) or build(*args)
    found["slow"] = called(step, 3)
    pipeline.build = build
    if rank == 1:
        time.sleep(2 * SECONDS)
    found["late"] = called(step, 4), called(step, 2)

    torch._dynamo.config.recompile_limit = 2
    torch.compiler.reset()
    step = fresh(rank, dynamic=True)  # one graph, with a build for each size of what it writes
    step(inputs(2), torch.zeros(2, HIDDEN))
    forget(rank)
    found["at a call"] = called(step, 3, torch.zeros(3, HIDDEN))

    step = begin(rank, watchdog_seconds=1)
    forget(rank)
    found["launched"] = called(step, 2)
    if rank == 0:
        Layer(rank)(inputs(2))
    return found


@pytest.mark.slow
def test_a_rank_at_its_limit_alone(tmp_path: Path) -> None:
    first, second = run(2, at_limit, tmp_path, seconds=100)
    sums = {rows: right(rows) for rows in (2, 3, 4)}

    def is_right(*calls: tuple[str, str, float], rows: int) -> bool:
        return all(abs(float(result) - sums[rows]) < 1e-3 and seconds < BOUND for result, _, seconds in calls)

    at_limit_alone = f"and has compiled forward in {__file__} as often as Dynamo allows"
    for found in (first, second):
        assert is_right(found["never met"], rows=4) and is_right(found["at a call"], rows=3)
        assert is_right(*found["eager"][:2], rows=3) and is_right(found["eager"][2], rows=2)
        assert is_right(found["raised"][1], found["error"][1], found["late"][1], rows=2)
    assert f"rank 1 of group 0 has not come in {SECONDS} s, {at_limit_alone}" in first["never met"][1]
    assert first["eager"][1][2] < SECONDS, "it waits once"

    for what in ("raised", "error"):
        said, _, seconds = first[what][0]
        assert f"RankLostError: rank 1 of group 0 has not come in {WATCHDOG / 2:g} s, {at_limit_alone}" in said
        assert "torch._dynamo.config.recompile_limit" in said and seconds < BOUND
    assert "FailOnRecompileLimitHit" in second["raised"][0][0]
    assert is_right(second["error"][0], rows=3)

    for found in (first, second):
        [result, warned, seconds] = found["slow"]
        assert abs(float(result) - sums[3]) < 1e-3 and not warned and seconds > SECONDS, "a build is waited for"
    assert "have waited in vain for rank 1, and run this graph eagerly" in second["late"][0][1]
    assert is_right(first["late"][0], second["late"][0], rows=4)

    assert first["at a call"][2] > SECONDS
    said = first["launched"][0]
    assert "waited for rank 1 in all_reduce" in said and "(rank 1 has compiled forward in" in said
