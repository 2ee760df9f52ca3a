"""The processors by which sampling keeps the most likely tokens: what is lifted, and what must not be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingTopKLogitsWarper,
    ContinuousBatchingTopPLogitsWarper,
)
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.patterns.rewriting import rewritten, tasks_of
from tests.thinned import thinned

ROWS, VOCABULARY = 4, 300
Processor = Callable[..., torch.Tensor]


def top_k(scores: torch.Tensor) -> torch.Tensor:
    return TopKLogitsWarper(20)(None, scores)


def top_p(scores: torch.Tensor) -> torch.Tensor:
    return TopPLogitsWarper(0.8)(None, scores)


def min_p(scores: torch.Tensor) -> torch.Tensor:
    return MinPLogitsWarper(0.1)(None, scores)


def top_k_by_request(scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return ContinuousBatchingTopKLogitsWarper(TopKLogitsWarper(20))(scores, numbers)


def top_p_by_request(scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return ContinuousBatchingTopPLogitsWarper(TopPLogitsWarper(0.8))(scores, numbers)


K = torch.tensor([1, 20, VOCABULARY, 7], dtype=torch.int32)
P = torch.tensor([0.9, 0.05, 0.5, 1.0]).view(torch.int32)


def logits(kind: str) -> torch.Tensor:
    scores = torch.randn(ROWS, VOCABULARY) * 3
    if kind == "coarse":  # as a model in bfloat16 gives them, with many that are equal
        scores = scores.mul(4).round().div(4)
    elif kind == "few":
        scores[:, 5:] = -torch.inf
    return scores


@pytest.mark.parametrize("kind", thinned(["fine", "coarse", "few"], 1))
@pytest.mark.parametrize(
    ("processor", "numbers", "tasks"),
    [
        (top_k, (), {"nth_largest": 1}),
        (top_p, (), {"nucleus": 1}),
        (lambda scores: top_p(top_k(scores)), (), {"nth_largest": 1, "nucleus": 1}),
        (min_p, (), {}),  # which lower to reductions
        (top_k_by_request, (K,), {"nth_largest": 1}),
        (top_p_by_request, (P,), {"nucleus": 1}),
    ],
    ids=["top-k", "top-p", "both", "min-p", "top-k by request", "top-p by request"],
)
def test_processors_become_tasks(
    processor: Processor, numbers: tuple[torch.Tensor, ...], tasks: dict[str, int], kind: str
) -> None:
    scores = logits(kind)
    assert tasks_of(rewritten(lambda *args: (processor(*args),), scores, *numbers)) == tasks
    weight = torch.randn(8, 8)

    def step(scores: torch.Tensor, *numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return processor(scores, *numbers), torch.nn.functional.linear(weight, weight)  # worth a launch

    compiled = torch.compile(step, backend="mpk", options={"fallback": "error"}, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(scores, *numbers)[0], processor(scores, *numbers), rtol=0, atol=0)


def keeps_two(scores: torch.Tensor) -> torch.Tensor:
    return TopPLogitsWarper(0.8, min_tokens_to_keep=2)(None, scores)


def shows_the_order(scores: torch.Tensor) -> torch.Tensor:
    values, order = torch.sort(scores)
    gone = values.softmax(-1).cumsum(-1) <= 0.2
    before = gone.sum(-1, keepdim=True)
    gone[..., -1:] = False
    return gone.scatter(-1, order, gone) & (order < before)


def of_another(scores: torch.Tensor) -> torch.Tensor:
    return scores < torch.topk(scores, 5)[0][..., -2, None]


def smallest(scores: torch.Tensor) -> torch.Tensor:
    return scores < torch.topk(scores, 5, largest=False)[0][..., -1, None]


def ascending(scores: torch.Tensor) -> torch.Tensor:
    rank = torch.zeros(ROWS, 1, dtype=torch.int64)
    return torch.sort(scores, dim=-1)[0].gather(-1, rank)


def of_integers(scores: torch.Tensor) -> torch.Tensor:
    large = (scores * 1e12).long()
    return large < torch.topk(large, 5)[0][..., -1, None]


@pytest.mark.parametrize("function", [of_integers, keeps_two, shows_the_order, of_another, smallest, ascending])
def test_something_else(function: Processor) -> None:
    tasks = tasks_of(rewritten(lambda scores: (function(scores),), logits("fine")))
    assert not {"nth_largest", "nucleus"} & tasks.keys()
