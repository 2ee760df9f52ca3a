"""Ranks that do not build the same, or do not make the same calls: each is told why, and none waits for ever."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.ranks.team import run
from tests.ranks.test_processes import Layers, compiled, inputs
from torch_mpk import _C
from torch_mpk.errors import UnsupportedError


def said_by(call: Callable[..., torch.Tensor], *args: torch.Tensor) -> str:
    try:
        call(*args)
    except Exception as error:  # of Dynamo, around ours
        return f"{type(error).__name__}: {error}"
    return ""


def refuse(*args: object) -> None:
    raise UnsupportedError("of no use here")


@torch.no_grad()
def disagreements(rank: int, folder: str) -> dict[str, object]:
    from torch_mpk.backend import pipeline
    from torch_mpk.ranks import agreement

    model, deeper = Layers(rank), Layers(rank)
    deeper.weights.append(deeper.weights[0])
    found: dict[str, object] = {}

    def fresh(model: torch.nn.Module = model, **options: object) -> Callable[..., torch.Tensor]:
        torch.compiler.reset()
        return compiled(model, watchdog_seconds=1, **options)

    os.environ["TORCH_MPK_CACHE_DIR"] = f"{folder}/0"
    right = fresh()(inputs(0))
    os.environ["TORCH_MPK_CACHE_DIR"] = f"{folder}/{rank}"  # rank 0 has left a build there
    found["cached"] = torch.equal(fresh()(inputs(0)), right)

    versions = agreement.fingerprint
    agreement.fingerprint = lambda: f"of rank {rank}"
    found["version"] = said_by(fresh(), inputs(0))
    agreement.fingerprint = versions
    found["option"] = said_by(fresh(verify=bool(rank)), inputs(0))
    os.environ["TORCH_MPK_CPU_ISA"] = "generic" if rank else _C.cpu_isas()[-1]
    found["isa"] = said_by(fresh(), inputs(0))
    del os.environ["TORCH_MPK_CPU_ISA"]
    found["model"] = said_by(fresh(deeper if rank else model), inputs(0))
    found["verified"] = torch.equal(fresh(verify=True)(inputs(0)), right)

    build = pipeline.build
    if rank == 1:
        pipeline.build = refuse
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eager = fresh(fallback="eager")(inputs(1))
    pipeline.build = build
    found["refusal"] = " ".join(str(each.message) for each in caught)
    found["error"] = (eager - Layers(rank).double()(inputs(1).double())).abs().max().item()

    # A rank with other inputs builds while the other launches: that gives up, and its next call meets the build.
    step = fresh()
    step(inputs(0))
    own = torch.cat([inputs(0)] * 2) if rank == 0 else inputs(0)
    found["other inputs"] = [said_by(step, own) for _ in range(1 + rank)]
    found["after that"] = said_by(step, inputs(0)) if rank == 0 else ""  # its own launch was not made
    found["again"] = torch.equal(step(inputs(0)), right)
    return found


@pytest.mark.slow
def test_ranks_that_differ_are_told_in_what(tmp_path: Path) -> None:
    for rank, found in enumerate(run(2, disagreements, tmp_path, str(tmp_path), seconds=200)):
        assert found["cached"], "a rank that finds its build does as one that makes it"
        for what, name in [
            ("version", "a version of torch_mpk"),
            ("option", "option 'verify'"),
            ("isa", "an instruction set"),
            ("model", "a number or size of exchanges"),
        ]:
            assert f"rank {1 - rank} of group 0 has {name} that differs from rank {rank}'s" in found[what]
        assert found["verified"] and found["again"]
        assert "of no use here" in found["refusal"] and found["error"] < 1e-5
        assert rank == 1 or "rank 1 of group 0 could not build its part" in found["refusal"]
        *before, last = found["other inputs"]
        assert "RankLostError" in last
        if rank == 0:
            assert "rank 1 has aborted" in found["after that"]
            assert "rank 0 has come to compare builds, but rank 1 to begin anew after an error" in last
        else:
            assert "rank 1 has come to begin anew after an error, but rank 0 to compare builds" in last
            assert "waited for rank 0 in all_reduce" in before[0]
