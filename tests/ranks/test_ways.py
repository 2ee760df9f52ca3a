"""Ranks of which one takes another way than the others: all go on, or each ends with an error that names the other."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks.team import run
from tests.ranks.test_processes import HIDDEN, Layers, compiled, inputs
from torch_mpk.runtime import team

SECONDS = 3.0  # of the watchdog: on a busy machine ranks are a second apart
WAITS = "rank 0 of group 4 waits for rank 1 to compare builds (in the world the ranks of group 4 are 2, 3)"


class Writer(Layers):
    """One that writes an input, too."""

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out.add_(1)
        return super().forward(x)


class Within(torch.nn.Module):
    """A sum over a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = x * 2
        dist.all_reduce(part, group=self.group)
        return part


def outcome(call: Callable[..., torch.Tensor], *args: torch.Tensor) -> tuple[str, str]:
    """The sum of what it returns or what it raises, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = f"{call(*args).sum().item():.4f}"
        except Exception as error:  # of Dynamo, around ours
            result = f"{type(error).__name__}: {error}"
    return result, " ".join(str(each.message) for each in caught)


def fresh(model: torch.nn.Module, **options: object) -> Callable[..., torch.Tensor]:
    torch.compiler.reset()
    return compiled(model, **{"fallback": "eager", "watchdog_seconds": SECONDS} | options)


def ways(rank: int, folder: str) -> dict[str, object]:
    found: dict[str, object] = {"right": outcome(Layers(rank).requires_grad_(False), inputs(0))[0]}
    with torch.set_grad_enabled(rank == 1):
        found["grad"] = outcome(fresh(Layers(rank)), inputs(0))
    with torch.no_grad():
        found |= in_inference(rank)
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/second", rank=rank, world_size=2)
        step = fresh(Layers(rank))
        found["second group"] = outcome(step, inputs(0))[0]
        if rank == 0:  # and rank 1 ends
            found["alone"] = [outcome(step, inputs(0))[0] for _ in range(2)]
    return found


def in_inference(rank: int) -> dict[str, object]:
    step, x, out = fresh(Writer(rank)), inputs(0), torch.zeros(2, HIDDEN)
    found: dict[str, object] = {"before": outcome(step, x, out)[0]}
    shared = torch.zeros(3, HIDDEN)
    found["overlap"] = outcome(step, shared[:2], shared[1:]) if rank == 1 else outcome(step, x, out)
    # Rank 0 has given up and comes to begin anew; rank 1 finds that it has only when it launches.
    found["after overlap"] = [outcome(step, x, out)[0] for _ in range(2)]
    found["sizes"] = outcome(fresh(Layers(rank)), torch.randn(2 + rank, HIDDEN))[0]
    os.environ["TORCH_MPK_DISABLE"] = str(rank)
    found["disabled"] = outcome(fresh(Within(dist.new_group([0, 1]))), x)
    os.environ["TORCH_MPK_DISABLE"] = "0"
    return found


@pytest.mark.slow
def test_a_rank_that_takes_another_way(tmp_path: Path) -> None:
    first, second = run(2, ways, tmp_path, str(tmp_path))
    for found in (first, second):
        right = found["right"]
        assert [found["grad"][0], found["before"], found["second group"]] == [right] * 3
        assert found["after overlap"][1] == right
        assert "RankLostError" in found["sizes"] and "a number or size of exchanges that differs" in found["sizes"]
        assert found["disabled"][0] == f"{4 * inputs(0).sum().item():.4f}"
    assert "rank 1 of group 0 could not build its part" in first["grad"][1] and "grad mode is on" in first["grad"][1]
    assert "waited for rank 1 in all_reduce" in first["overlap"][0]
    assert "rank 1 has come to run a call eagerly that torch_mpk cannot take" in second["overlap"][0]
    assert "but rank 0 to begin anew" in second["overlap"][0] and "share memory" in second["overlap"][1]
    assert "rank 0 has aborted" in second["after overlap"][0]
    assert "takes no part: TORCH_MPK_DISABLE is set there" in first["disabled"][1] and not second["disabled"][1]
    assert "waited for rank 1" in first["alone"][0] and "the process of rank 1 has ended" in first["alone"][1]


@torch.no_grad()
def in_a_mesh(rank: int, folder: str) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    step = fresh(Within(mesh["tensor"].get_group()), fallback="error")
    team.PATIENCE_SECONDS = 0.1
    deadline = time.monotonic() + 60
    while rank == 3 and WAITS not in Path(folder, "2.log").read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    found = [outcome(step, torch.full((1, 8), float(rank)))[0]]
    if rank == 3:
        time.sleep(2 * SECONDS)
    return [*found, outcome(step, torch.full((1, 8), float(rank)))[0]]


@pytest.mark.slow
def test_groups_of_a_mesh_exchange_by_themselves_and_errors_have_the_numbers_in_the_world(tmp_path: Path) -> None:
    results = run(4, in_a_mesh, tmp_path, str(tmp_path))
    assert WAITS in (tmp_path / "2.log").read_text()
    assert [first for first, _ in results] == ["16.0000", "16.0000", "80.0000", "80.0000"]
    (_, on_0), (_, on_1), (_, on_2), (_, on_3) = results
    assert [on_0, on_1] == ["16.0000", "16.0000"]
    assert on_3 == "80.0000"  # what the others have pushed is there
    assert "waited for rank 1 in all_reduce" in on_2 and "in the world the ranks of group" in on_2 and "2, 3)" in on_2
