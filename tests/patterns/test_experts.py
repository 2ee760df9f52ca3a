"""Experts, batched and grouped, become products without a sort or a copy of a weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations import moe

from tests.cpu.test_experts import chosen_ids
from tests.lowering.harness import run
from tests.patterns.rewriting import operands_of, rewritten, tasks_of
from torch_mpk.lowering import lower
from torch_mpk.patterns.rewriter import shape

FORWARD = {"batched": moe.batched_mm_experts_forward, "grouped": moe.grouped_mm_experts_forward}
EXPERTS, WIDTH, DEPTH = 5, 24, 16  # what bf16's grouped products take is of whole 16 bytes


class Experts(nn.Module):
    """What transformers' forms of experts read."""

    def __init__(self, is_transposed: bool, has_bias: bool, has_gate: bool, has_norm: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_experts, self._is_expert_parallel = EXPERTS, False
        self.is_transposed, self.has_bias = is_transposed, has_bias
        self.has_gate, self.has_post_expert_norm = has_gate, has_norm
        inner = 2 * WIDTH if has_gate else WIDTH

        def weight(n: int, k: int) -> torch.Tensor:
            return torch.randn(EXPERTS, *((k, n) if is_transposed else (n, k))).to(dtype) / k**0.5

        up, name = weight(inner, DEPTH), "gate_up_proj" if has_gate else "up_proj"
        setattr(self, name, up)
        self.down_proj = weight(DEPTH, WIDTH)
        setattr(self, f"{name}_bias", torch.randn(EXPERTS, inner).to(dtype) if has_bias else None)
        self.down_proj_bias = torch.randn(EXPERTS, DEPTH).to(dtype) if has_bias else None

    def act_fn(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x)

    def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x[..., ::2], x[..., 1::2]) if self.is_transposed else x.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=4)) * up

    def post_expert_norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)


def weights_of(experts: Experts) -> dict[str, torch.Tensor]:
    return {name: each for name, each in vars(experts).items() if isinstance(each, torch.Tensor)}


@pytest.mark.parametrize("form", FORWARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("is_transposed", "has_bias", "has_gate", "has_norm", "is_shared_out"),
    [(False, False, True, False, False), (True, True, True, False, True), (False, True, False, True, False)],
    ids=["gated", "transposed and shared out", "normed"],
)
def test_forms(
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    dtype: torch.dtype,
    is_transposed: bool,
    has_bias: bool,
    has_gate: bool,
    has_norm: bool,
    is_shared_out: bool,
) -> None:
    """Where whole experts are shared out to ranks, pairs of other ranks' have an id behind all, and no weight."""
    # As while Dynamo compiles.
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda x, weight, offs: weight.dtype == torch.bfloat16)
    experts = Experts(is_transposed, has_bias, has_gate, has_norm, dtype)
    experts._is_expert_parallel = is_shared_out
    names = list(weights_of(experts))

    def call(x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, *weights: torch.Tensor) -> Any:
        for name, weight in zip(names, weights, strict=True):
            setattr(experts, name, weight)
        return (FORWARD[form](experts, x, ids, scores),)

    given = list(weights_of(experts).values())

    def routed(chosen: str) -> list[torch.Tensor]:
        ids = chosen_ids(4, 3, EXPERTS + is_shared_out, chosen)
        scores = torch.rand(4, 3).masked_fill(ids == EXPERTS, 0).to(dtype)
        return [torch.randn(4, DEPTH).to(dtype), ids, scores, *given]

    # Sums of other sizes have another order, and rounding follows.
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    gm = rewritten(call, *routed("random"), also=[routed("one"), routed("last")], tolerance=tolerance)
    assert tasks_of(gm)["expert_linear"] == 2
    assert not [node for node in gm.graph.nodes if "sort" in str(node.target) or "grouped" in str(node.target)]
    first, second = operands_of(gm, "expert_linear")
    operand = "transposed" if is_transposed else "weight"
    assert {first[operand].op, second[operand].op} == {"placeholder"}  # read where it lies
    if not is_shared_out:  # else x has zeros, and ids others, pair by pair
        assert first["x"].meta["val"].stride(1) == 0  # a row of x for all its choices
        assert shape(second["x"]) == (4, 3, WIDTH)


def grouped(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """A sorted product of pairs, its permutation, and that one's inverse."""
    in_order, order = torch.sort(ids)
    ends = torch.histc(in_order.float(), bins=len(weight), min=0, max=len(weight) - 1).cumsum(0, dtype=torch.int32)
    product = torch._grouped_mm(x[order], weight.transpose(1, 2), offs=ends)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return [product, order, inverse]


def _kept(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> Any:
    product, _, inverse = grouped(x, ids, weight)
    return product[inverse], product


def _mixed(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> Any:
    product, _, inverse = grouped(x, ids, weight)
    return ((product - product.mean(0, keepdim=True))[inverse],)


def _moved(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> Any:
    product, _, inverse = grouped(x, ids, weight)
    return (product.roll(1, 0)[inverse],)


def _by_position(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> Any:
    product, _, inverse = grouped(x, ids, weight)
    return ((product + torch.arange(len(ids)).unsqueeze(1))[inverse],)


def _written(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> Any:
    product, _, inverse = grouped(x, ids, weight)
    x.zero_()
    return (product[inverse],)


def _seen_in_halves(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> Any:
    product, _, inverse = grouped(x, ids, weight)
    half = product[:, :2]
    product.mul_(2)
    return (half[inverse],)


def _other_groups(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> Any:
    in_order, order = torch.sort(ids)
    ends = torch.histc(in_order.float(), bins=len(weight), min=0, max=len(weight)).cumsum(0, dtype=torch.int32)
    product = torch._grouped_mm(x[order], weight.transpose(1, 2), offs=ends)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return (product[inverse],)


def _of_other_ids(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> Any:
    in_order, order = torch.sort(ids)
    ends = torch.histc(in_order.float(), bins=len(weight), min=0, max=len(weight) - 1).cumsum(0, dtype=torch.int32)
    in_order.clamp_(max=1)
    product = torch._grouped_mm(x[order], weight.transpose(1, 2), offs=ends)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return (product[inverse],)


SORTED = [_kept, _mixed, _moved, _by_position, _written, _seen_in_halves, _other_groups, _of_other_ids]


def pairs() -> list[torch.Tensor]:
    return [torch.randn(6, 16).bfloat16(), torch.randint(EXPERTS, (6,)), torch.randn(EXPERTS, 8, 16).bfloat16()]


@pytest.mark.parametrize("function", SORTED)
def test_sorted_rows_that_something_else_depends_on_stay(function: Any) -> None:
    gm = rewritten(function, *pairs())
    assert not tasks_of(gm)["expert_linear"]


def test_pairs_without_rows_in_common() -> None:
    def function(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> Any:
        product, _, inverse = grouped(x, ids, weight)
        product.add_(1)
        return (product[inverse],)

    gm = rewritten(function, *pairs(), tolerance=2e-2)
    assert tasks_of(gm)["expert_linear"] == 1


def test_columns_of_a_batched_product_that_are_no_view_of_rows() -> None:
    gm = rewritten(lambda x, ids, weight: torch.bmm(weight[ids], x.unsqueeze(-1).relu()), *pairs(), tolerance=2e-2)
    assert tasks_of(gm)["expert_linear"] == 1


@pytest.mark.parametrize(("columns", "k", "found"), [(64, 8, 1), (1024, 1024, 1), (1025, 8, 0), (64, 1, 0)])
def test_topk_of_short_rows(columns: int, k: int, found: int) -> None:
    gm = rewritten(lambda x: tuple(x.topk(k)), torch.randn(3, columns))
    assert tasks_of(gm)["topk"] == found


def test_the_least_and_other_dimensions_are_no_topk() -> None:
    gm = rewritten(lambda x: (*x.topk(3, largest=False), *x.topk(2, 0)), torch.randn(5, 9))
    assert not tasks_of(gm)["topk"]


def test_the_maximum_of_sorted_scores_is_their_first() -> None:
    """For the softmax of a router's choice; not along another dimension, nor once something has written to them."""
    x = torch.randn(7, 32).bfloat16()
    x[0, 3], x[1], x[2, 2], x[3, :4] = torch.nan, -torch.inf, torch.inf, 5
    x[4, :3] = torch.tensor([0.0, -0.0, 0.0])

    def written(x: torch.Tensor) -> Any:
        return (torch.softmax(x.topk(4)[0].neg_(), -1),)

    def check(function: Any, has_maximum: bool) -> None:
        lowered = lower(rewritten(function, x))
        assert ("amax" in {node.attrs.get("op") for node in lowered.graph.nodes}) == has_maximum
        [got], [expected] = run(lowered, [x]), function(x)
        torch.testing.assert_close(got, expected, equal_nan=True)

    check(lambda x: (torch.softmax(x.topk(4)[0], -1),), False)
    check(lambda x: (torch.softmax(x.topk(4)[0], -1, dtype=torch.float32),), False)
    check(lambda x: (torch.softmax(x.topk(4)[0], 0),), True)
    check(written, True)
