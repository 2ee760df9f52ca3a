"""A step that draws its tokens: all of it is in the launch but the random numbers, and they are PyTorch's."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import GenerationConfig
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import GenerationOutput

from tests.continuous_batching.engine import managed, planning_for_a_gpu, prompt_of, results, serving_model
from tests.thinned import thinned
from torch_mpk.batching.engine import Runner
from torch_mpk.batching.request_draws import RequestDraws
from torch_mpk.continuous_batching import StepCompileConfig


def outputs(
    model: Any, prompt: list[int], seed: int, count: int, how: dict[str, Any], **settings: Any
) -> list[GenerationOutput]:
    """So many sequences of a prompt, which are in the same steps each time."""
    sampling = {"do_sample": True, "top_k": 0, "num_return_sequences": count, "max_new_tokens": 12, "eos_token_id": -1}
    torch.manual_seed(seed)
    with managed(model, generation_config=GenerationConfig(**sampling | how), **settings) as manager:
        manager.add_requests([prompt])
        found = results(manager, count)
    assert [output.error for output in found.values()] == [None] * count
    return [found[name] for name in sorted(found)]


def drawn(*args: Any, **settings: Any) -> list[list[int]]:
    return [output.generated_tokens for output in outputs(*args, **settings)]


def count_rows(runner: Any, padded: int) -> None:
    runner.num_rows = sum(future.has_new_token for future in runner.inputs_and_outputs.requests_in_batch)


def sample_rows(runner: Any, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
    vars(ModelRunner)["_sample"](runner, scores[:, : runner.num_rows], output_ids)


# The engine's own way, but for rows that only pad a step.
THEIRS = {"_renew_times": count_rows, "_sample": sample_rows}
EAGER = dict.fromkeys(
    ("decode_compile_config", "varlen_compile_config"), StepCompileConfig(backend="eager", options=None)
)

LIKELY = {"temperature": 0.7, "top_k": 20, "top_p": 0.9}  # much as models' own configurations have it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "how", "settings"),
    [(1, {}, {}), (3, {"temperature": 0.7}, {}), (3, LIKELY, {}), (3, LIKELY, {"per_request_processors": True})],
    ids=["as it is", "temperature", "the most likely", "the most likely, by request"],
)
@pytest.mark.usefixtures("empty_cache")
def test_tokens_are_those_of_multinomial(count: int, how: dict[str, Any], settings: dict[str, Any]) -> None:
    model = serving_model()
    prompt = prompt_of(5)
    with mock.patch.multiple(Runner, **THEIRS):
        one, other = (drawn(model, prompt, seed, count, how, **settings | EAGER) for seed in (1, 2))
    assert one != other
    before = counters["stats"]["unique_graphs"]
    assert drawn(model, prompt, 2, count, how, **settings) == other
    assert counters["stats"]["unique_graphs"] == before + 2, "a build each for prompts and single tokens"


@pytest.mark.parametrize(
    ("count", "settings", "num_reductions"),
    thinned(
        [
            (1, {}, 3 + 1),  # of a vocabulary's parts, and the choice
            (3, {"per_request_processors": True}, 3 + 1),
            (3, {"return_logprobs": True}, 3 + 1 + 2),  # and the largest, and the sum of all
        ],
    ),
)
def test_a_step_is_one_launch_on_a_gpu_too(count: int, settings: dict[str, Any], num_reductions: int) -> None:
    model = serving_model(dtype=torch.bfloat16)
    step, schedules = planning_for_a_gpu()
    drawn(model, prompt_of(5), 0, count, LIKELY, decode_compile_config=step, **settings)
    tasks = [node.task for node in schedules[-1].graph.nodes]
    assert tasks.count("reduce") == num_reductions
    assert tasks.count("nth_largest") == tasks.count("nucleus") == 1


GREEDY = {"do_sample": False, "num_return_sequences": None}


@pytest.mark.parametrize("how", thinned([pytest.param(GREEDY, id="greedy"), pytest.param(LIKELY, id="drawn")]))
def test_log_probabilities_are_the_engines(how: dict[str, Any]) -> None:
    count = 3 if how.get("do_sample", True) else 1
    run = functools.partial(outputs, serving_model(), prompt_of(5), 0, count, how, return_logprobs=True)
    with mock.patch.multiple(Runner, **THEIRS):
        theirs = run(**EAGER)
    for output, other in zip(run(), theirs, strict=True):
        assert output.generated_tokens == other.generated_tokens
        assert len(output.logprobs) == len(output.generated_tokens)
        torch.testing.assert_close(output.logprobs, other.logprobs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_what_dynamo_restores_in_another_thread_is_not_drawn_again() -> None:
    """Nor is anything drawn for rows that pad a step: their number hangs on which sizes are built."""
    run = functools.partial(drawn, serving_model(), prompt_of(5), 0, 3, {})
    expected, renew = run(), RequestDraws.renew

    def renew_anew(draws: RequestDraws, states: Any, rows: int) -> torch.Tensor:
        torch.manual_seed(0)
        return renew(draws, states, max(rows, 4))[:rows]

    with mock.patch.object(RequestDraws, "renew", renew_anew):
        assert run() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_steps_on_a_gpu_draw_anew(graphs: bool) -> None:
    """Replayed ones, too: of tokens that are all as likely hardly any comes twice."""
    model = serving_model(device="cuda")
    mode = {"use_cuda_graph": (False, graphs), "use_async_batching": graphs}
    flat = {"temperature": 1e4, "max_new_tokens": 24}
    for tokens in drawn(model, prompt_of(5), 0, 3, flat, **mode):
        assert len(set(tokens)) > 15
