"""Code that finds values by their rank, on rows that are hard to tell apart."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from tests.thinned import thinned
from torch_mpk import registry
from torch_mpk.capture.graph import capture
from torch_mpk.lowering import lower
from torch_mpk.patterns import apply
from torch_mpk.task_kernel import kernel_of
from torch_mpk.testing.emulator import Order, aligned, emulate

Way = Order | Literal["cpu"]
COLUMNS = 3072  # more than all threads keep
CASES = thinned(
    [
        (torch.bfloat16, "forward", 32),
        (torch.bfloat16, "cpu", 32),
        (torch.float32, "cpu", None),
        (torch.float32, "reverse", 32),
        (torch.bfloat16, "shuffled", None),
        (torch.float32, "shuffled", 32),
    ],
    *(0, 1),
)


def rows(dtype: torch.dtype) -> torch.Tensor:
    flat = torch.full((COLUMNS,), 1.5)
    peaked = torch.randn(COLUMNS)
    peaked[torch.randint(COLUMNS, (3,))] += 30
    ties = torch.randn(COLUMNS).round()
    zeros = torch.where(torch.rand(COLUMNS) < 0.5, 0.0, -0.0)
    one = torch.full((COLUMNS,), -torch.inf)
    one[torch.randint(COLUMNS, ())] = -2
    few = torch.randn(COLUMNS)
    few[torch.rand(COLUMNS) < 0.99] = -torch.inf
    tiny = torch.randn(COLUMNS) * 1e-42
    wide = torch.randn(COLUMNS) * 1e4
    return torch.stack([torch.randn(COLUMNS), flat, peaked, ties, zeros, one, few, tiny, wide]).to(dtype)


ODD = [torch.full((COLUMNS,), value) for value in (-torch.inf, torch.inf, torch.nan)]


def parts_of(name: str, x: torch.Tensor, size: int) -> list[torch.Tensor]:
    """The operands that spare reading all of a row."""
    parts = x.unflatten(-1, (-1, size))
    peaks = parts.amax(-1)
    if name == "nth_largest":
        return [peaks]
    finite = peaks.float().clamp(min=torch.finfo(torch.float32).min)
    return [peaks, (parts.float() - finite.unsqueeze(-1)).exp().sum(-1)]


def run(name: str, x: torch.Tensor, by_row: torch.Tensor, way: Way, size: int | None = None) -> list[torch.Tensor]:
    """The task's outputs by the code for the CPU, or as an emulated kernel makes them, in memory that was not zero."""
    operands = [x, by_row, *(parts_of(name, x, size) if size else [])]
    if way == "cpu":
        results = kernel_of(registry.get(name))(*operands)
        return [results] if isinstance(results, torch.Tensor) else list(results)
    operator, names = getattr(torch.ops.mpk, name), ", ".join(f"x{i}" for i in range(len(operands)))
    step = torch.fx.symbolic_trace(eval(f"lambda {names}: operator({names})", {"operator": operator}))
    lowered = lower(apply(capture(step, operands).graph_module))
    given = [aligned(t.numel() * t.itemsize).view(t.dtype).view(t.shape).copy_(t) for t in operands]
    made = [aligned(f.dtype.itemsize * len(x), 0xFF).view(f.dtype) for f in lowered.fresh]
    emulate(lowered.graph).launch(given, made, order=way, jitter=3)
    return [made[output.index] for output in lowered.outputs]


@pytest.mark.parametrize(("dtype", "way", "size"), CASES, ids=str)
def test_the_largest_by_rank(dtype: torch.dtype, way: Way, size: int | None) -> None:
    x = torch.cat([rows(dtype), torch.stack(ODD).to(dtype)])
    x[0, ::7] = torch.nan  # larger than all numbers, as PyTorch sorts
    for rank in (0, 1, 19, 400, COLUMNS - 1):
        n = torch.full((len(x),), rank)
        [found] = run("nth_largest", x, n, way, size)
        torch.testing.assert_close(found, registry.get("nth_largest").reference(x, n), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "way", "size"), CASES, ids=str)
def test_what_goes_is_the_least_and_has_no_more_than_its_part(dtype: torch.dtype, way: Way, size: int | None) -> None:
    x = rows(dtype)
    for part in (-0.5, 0.0, 1e-3, 0.1234, 0.77, 0.999, 1.5):
        check_nucleus(x, part, *run("nucleus", x, torch.full((len(x),), part), way, size))


def check_nucleus(x: torch.Tensor, part: float, least: torch.Tensor, first: torch.Tensor) -> None:
    ascending, order = x.cpu().double().sort(stable=True, dim=-1)
    probabilities = ascending.softmax(-1)
    for row, (value, index) in enumerate(zip(least.double().tolist(), first.tolist(), strict=True)):
        position = int((order[row] == index).nonzero())
        assert ascending[row, position] == value
        is_last = position == x.shape[1] - 1
        gone, more = probabilities[row, :position].sum().item(), probabilities[row, : position + 1].sum().item()
        assert position == 0 or gone <= part + 1e-5
        assert is_last or more > part - 1e-5


@pytest.mark.slow
def test_where_there_are_no_probabilities_nothing_goes() -> None:
    x = torch.stack(ODD)
    x[1, 1:] = 0
    for way, size in (("forward", None), ("forward", 64), ("cpu", None)):
        least, first = run("nucleus", x, torch.full((len(x),), 0.3), way, size)
        assert least.tolist() == [-torch.inf] * 3
        assert first.tolist() == [0] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("size", [None, 128])
def test_vocabularies_on_a_gpu(size: int | None) -> None:
    """Of random numbers, and of a few that are likely."""
    x = torch.randn(64, 151_936, device="cuda")
    x[::2, ::100] += 20
    rank, part = (torch.full((len(x),), number, device="cuda") for number in (19, 0.05))
    for name, by_row in (("nth_largest", rank), ("nucleus", part)):
        kernel, more = kernel_of(registry.get(name)), parts_of(name, x, size) if size else []
        results, again = (kernel(x, by_row, *more) for _ in range(2))
        if name == "nucleus":
            check_nucleus(x, 0.05, *results)
            assert all(map(torch.equal, results, again))
        else:
            assert torch.equal(results, x.topk(20).values[:, -1])
