"""Requests of one engine that draw their tokens each in its own way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, MinPLogitsWarper
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList

from tests.continuous_batching.engine import (
    alone,
    asynchronous_on_the_cpu,
    managed,
    planning_for_a_gpu,
    prompt_of,
    results,
    serving_model,
)
from torch_mpk.batching.request_draws import RequestDraws
from torch_mpk.testing.tiny import VOCAB_SIZE

COUNT = 8
# Which makes the processors; requests say their own numbers.
HOW = GenerationConfig(
    do_sample=True, temperature=0.5, top_k=1, top_p=0.5, min_p=0.5, max_new_tokens=COUNT, eos_token_id=-1
)
FLAT = {"temperature": 100.0, "top_k": VOCAB_SIZE, "top_p": 1.0, "min_p": 0.0}  # nearly all tokens as likely
GREEDY = FLAT | {"temperature": 1.0, "greedy": True}


def answers(model: Any, requests: list[tuple[list[int], dict[str, Any]]], **settings: Any) -> list[list[int]]:
    """Of requests that come together."""
    with managed(model, generation_config=HOW, per_request_processors=True, **settings) as manager:
        names = [manager.add_request(prompt, **how) for prompt, how in requests]
        found = results(manager, len(names))
    assert [found[name].error for name in names] == [None] * len(names)
    return [found[name].generated_tokens for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_requests_of_a_step_draw_each_in_its_own_way(is_asynchronous: bool) -> None:
    model = serving_model()
    prompts = [prompt_of(length) for length in (5, 3, 7)]
    seeded, greedy, narrow = (prompts[0], FLAT | {"seed": 7}), (prompts[1], GREEDY), (prompts[2], FLAT | {"top_k": 1})
    requests = [seeded, greedy, narrow, (prompts[0], FLAT | {"seed": 8}), (prompts[0], FLAT)]
    if is_asynchronous:
        with asynchronous_on_the_cpu():
            got = answers(model, requests, use_async_batching=True)
    else:
        got = answers(model, requests)
    assert got[1:3] == [alone(model, prompt, COUNT) for prompt in prompts[1:]]
    assert len({tuple(tokens) for tokens in (got[0], got[3], got[4])}) == 3
    # The same seed draws the same tokens, whatever else is in its steps.
    assert answers(model, [(prompt_of(2), FLAT), seeded])[1] == got[0]


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_they_do_on_a_gpu(graphs: bool) -> None:
    """With CUDA graphs, too, which read the numbers where they are."""
    model = serving_model(device="cuda")
    mode = {"use_cuda_graph": (False, graphs), "use_async_batching": graphs}
    seeded, greedy = (prompt_of(5), FLAT | {"seed": 7}), (prompt_of(3), GREEDY)
    got = answers(model, [seeded, greedy, (seeded[0], FLAT), (seeded[0], FLAT)], **mode)
    assert got[1] == alone(model, greedy[0], COUNT)
    assert len({tuple(tokens) for tokens in (got[0], got[2], got[3])}) == 3
    assert answers(model, [(prompt_of(2), GREEDY), seeded], **mode)[1] == got[0]
    assert answers(model, [greedy, greedy], **mode) == [got[1]] * 2


def test_min_p_is_each_requests_own() -> None:
    scores = torch.randn(3, VOCAB_SIZE)
    processors = ContinuousBatchingLogitsProcessorList(
        LogitsProcessorList([MinPLogitsWarper(0.5)]), per_request_processors=True
    )
    numbers = torch.tensor([0.9, 0.2, 0.0])
    got = processors(torch.empty(0), scores, numbers.view(1, -1).view(torch.int32))
    for row, min_p in enumerate(numbers.tolist()):
        torch.testing.assert_close(got[row], MinPLogitsWarper(min_p)(None, scores[row : row + 1])[0])
    storage = torch.zeros(1, 3, dtype=torch.int32)
    processors.fill_defaults(storage)
    torch.testing.assert_close(storage.view(torch.float32), torch.full((1, 3), 0.5))


def test_an_unknown_way_is_the_requests_error() -> None:
    with managed(serving_model(), generation_config=HOW, per_request_processors=True) as manager:
        manager.add_request(prompt_of(3), **FLAT, typical_p=0.5)
        [output] = results(manager, 1).values()
    assert "typical_p" in str(output.error)


@pytest.mark.slow
def test_such_a_step_is_one_launch_on_a_gpu_too() -> None:
    step, schedules = planning_for_a_gpu()
    model = serving_model(dtype=torch.bfloat16)
    answers(model, [(prompt_of(5), FLAT)], decode_compile_config=step, return_logprobs=True)
    tasks = [node.task for node in schedules[-1].graph.nodes]
    assert tasks.count("nth_largest") == tasks.count("nucleus") == 1


def test_times_of_a_seed_depend_on_it_and_the_position_alone() -> None:
    class State:
        def __init__(self, position: int, **how: Any) -> None:
            self.position_offset, self.logit_processor_kwargs = position, how

    draws = RequestDraws(4, 4096, torch.device("cpu"))
    first = draws.renew([State(3, seed=1), State(3, seed=2), State(4, seed=1), State(4)], 4).clone()
    assert len({tuple(row.tolist()) for row in first}) == 4
    again = draws.renew([State(9), State(3, seed=1)], 2)
    assert torch.equal(again[1], first[0])
    for row in first:
        assert 0.9 < row.mean() < 1.1  # of an exponential distribution, 4,096 numbers: 1 and a 64th
        assert 0.85 < row.std() < 1.15
    assert torch.equal(draws.renew([State(1, greedy=True)], 2), torch.ones(2, 4096))
    mixed = draws.renew([State(1, greedy=True), State(1)], 2)
    assert torch.equal(mixed[0], torch.ones(4096)) and mixed[1].std() > 0.8
