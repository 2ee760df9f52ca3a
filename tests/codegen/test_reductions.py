"""Reductions as emulated kernels compute them: rows that warps take several at once, and rows of a whole worker."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.thinned import thinned
from torch_mpk.capture.graph import capture
from torch_mpk.lowering import lower
from torch_mpk.testing.emulator import aligned, emulate


def launched(step: Callable[..., Any], inputs: list[torch.Tensor], workers: int) -> list[torch.Tensor]:
    lowered = lower(capture(torch.fx.symbolic_trace(step), inputs).graph_module)
    given = [aligned(t.numel() * t.itemsize).view(t.dtype).view(t.shape).copy_(t) for t in inputs]
    made = [
        aligned(math.prod(fresh.shape) * fresh.dtype.itemsize, 0xFF).view(fresh.dtype).view(fresh.shape)
        for fresh in lowered.fresh
    ]
    emulate(lowered.graph, workers=workers).launch(given, made, jitter=1)
    return [made[output.index] for output in lowered.outputs]


def reductions(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.amax(-1), x.amin(-1), x.argmax(-1), x.argmin(-1), x.nan_to_num(1, 2, 3).sum(-1)


def reductions_of_integers(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.amax(-1), x.amin(-1), x.argmax(-1), x.argmin(-1), x.sum(-1)


# Rows of 1, 4 or 8 elements of a lane and of more, fewer rows than a warp takes at once, and rows that are left over.
SHAPES = [(1, 1), (3, 31), (150, 33), (77, 128), (400, 100), (90, 200), (41, 257), (5, 1024), (6, 1100)]


@pytest.mark.parametrize(("rows", "size"), thinned(SHAPES, 3))
@pytest.mark.parametrize("dtype", thinned([torch.float32, torch.bfloat16, torch.int64], 0), ids=str)
def test_rows_of_many_sizes(dtype: torch.dtype, rows: int, size: int) -> None:
    x = (10 * torch.rand(rows, size)).to(dtype)
    step = reductions if dtype.is_floating_point else reductions_of_integers
    if dtype.is_floating_point:
        x[::3, size // 2] = torch.nan
        x[1::3, -1] = torch.inf
        x[2::3] = -torch.inf
    for got, want in zip(launched(step, [x], 3), step(x), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def test_values_of_several_operands_with_a_branch() -> None:
    x, times, least = torch.randn(3, 1500), torch.rand(3, 1500), torch.tensor([[0.5], [-1.0], [3.5]])

    def step(x: torch.Tensor, times: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
        return (torch.where(x < least, -torch.inf, x / 0.7) - times.log()).argmax(-1)

    assert torch.equal(*launched(step, [x, times, least], 8), step(x, times, least))


@pytest.mark.slow
def test_a_cache_without_room_for_what_kernels_are_made_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCH_MPK_CACHE_GB", "0")
    x = torch.randn(3, 40)
    for _ in range(2):
        [got] = launched(lambda x: (x.amax(-1),), [x], 3)
        assert torch.equal(got, x.amax(-1))
