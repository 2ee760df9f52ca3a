"""Tasks that stand for the operations of their references: found whatever their numbers, where exact."""

from __future__ import annotations

import pytest
import torch
from rewriting import operands_of, rewritten, tasks_of

from torch_mpk import task
from torch_mpk.errors import TaskError


@task(
    "x[..., H], weight[H]? -> y[..., H]",
    pattern=True,
    samples=[{"...": (2,), "H": 8}, {"...": (2,), "H": 8, "weight": None}],
)
def mean_difference(
    x: torch.Tensor, weight: torch.Tensor | None = None, *, slope: float = 0.5, twice: bool = False
) -> torch.Tensor:
    wide = x.float()
    y = torch.atan(slope * wide - wide.mean(-1, keepdim=True))
    y = y if weight is None else y * weight
    return (y * 2 if twice else y).to(x.dtype)


def spelled_out(x, weight):
    wide = x.float()
    return ((weight * torch.atan(0.25 * wide - wide.mean(-1, keepdim=True))).to(x.dtype),)


def without_weight(x, weight):
    wide = x.float()
    return (torch.atan(2.5 * wide - wide.mean(-1, keepdim=True)).to(x.dtype) + weight,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("function", "slope"), [(spelled_out, 0.25), (without_weight, 2.5)])
def test_found_with_other_shapes_numbers_and_orders(function, slope, dtype):
    x, weight = torch.randn(1, 3, 40, dtype=dtype), torch.randn(40, dtype=dtype)
    gm = rewritten(function, x, weight)
    [operands] = operands_of(gm, "mean_difference")
    assert (operands["slope"], operands["twice"]) == (slope, False)
    assert ("weight" in operands) == (function is spelled_out)


def other_dimension(x, weight):
    wide = x.float()
    return ((weight * torch.atan(0.25 * wide - wide.mean(-2, keepdim=True))).to(x.dtype),)


def other_rounding(x, weight):
    wide = x.float()
    return (weight * torch.atan(0.25 * wide - wide.mean(-1, keepdim=True)).to(x.dtype),)


def other_operand(x, weight):
    wide = x.float()
    return ((weight * torch.atan(0.25 * wide - weight.float().mean(-1, keepdim=True))).to(x.dtype),)


def changed_in_between(x, weight):
    wide = x.float()
    y = torch.atan(0.25 * wide - wide.mean(-1, keepdim=True))
    weight.add_(1)
    return (weight * y).to(x.dtype), x.add_(1)


def changed_before_the_last_read(x, weight):
    wide = 0.25 * x.float()
    x.add_(1)
    return ((weight * torch.atan(wide - x.float().mean(-1, keepdim=True))).to(x.dtype),)


@pytest.mark.parametrize("function", [other_dimension, other_operand, changed_before_the_last_read])
def test_left_alone_where_it_would_differ(function):
    gm = rewritten(function, torch.randn(1, 3, 40), torch.randn(40))
    assert not tasks_of(gm)["mean_difference"]


def test_what_is_like_it_in_part_becomes_the_part():
    gm = rewritten(other_rounding, torch.randn(1, 3, 40).bfloat16(), torch.randn(40).bfloat16())
    [operands] = operands_of(gm, "mean_difference")
    assert "weight" not in operands
    rewritten(changed_in_between, torch.randn(1, 3, 40), torch.randn(40))


def test_a_signature_of_another_rank_is_no_match():
    @task("x[R, H] -> y[R, H]", pattern=True, samples=[{"R": 2, "H": 8}])
    def flat_sinc(x: torch.Tensor) -> torch.Tensor:
        return torch.sinc(x) * x

    for x, is_lifted in ((torch.randn(3, 4), True), (torch.randn(1, 3, 4), False)):
        gm = rewritten(lambda x: (torch.sinc(x) * x,), x)
        assert bool(tasks_of(gm)[flat_sinc.name]) == is_lifted


def test_what_a_pattern_cannot_stand_for():
    def updates(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with pytest.raises(TaskError, match="updates: pattern=True takes one output"):
        task("x[R, H]! -> y[R, H]", pattern=True, samples=[{"R": 1, "H": 1}])(updates)
