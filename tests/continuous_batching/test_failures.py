"""What fails in the engine takes nothing else with it: a request that cannot be served, a step whose launch fails."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching.continuous_api import ModelRunner
from transformers.generation.continuous_batching.requests import RequestState

from tests.continuous_batching.engine import (
    PAGE,
    alone,
    asynchronous_on_the_cpu,
    check_that_it_serves,
    faulty_steps,
    managed,
    pages_in_use,
    prompt_of,
    raising,
    results,
    serving_model,
)
from tests.runtime_cuda.conftest import fake, fake_library, simulated  # noqa: F401  (fixtures)
from tests.runtime_cuda.fake_driver import Fake
from tests.runtime_cuda.test_launch import abort
from tests.thinned import thinned
from torch_mpk import continuous_batching
from torch_mpk.batching import sizes
from torch_mpk.errors import MegakernelTimeout, RequestError, UnsupportedError
from torch_mpk.testing.tiny import VOCAB_SIZE

SEVERAL = GenerationConfig(num_return_sequences=3, max_new_tokens=4, do_sample=True, eos_token_id=-1)


REFUSED: list[tuple[list[Any], str]] = [
    ([], "it has no tokens"),
    ([1, VOCAB_SIZE], f"token id {VOCAB_SIZE} is not in [0, {VOCAB_SIZE})"),
    ([-1, 1], "token id -1 is not in"),
    ([1, "2"], "its token ids must be integers: 'str'"),
    ([1, 0.5], "its token ids must be integers: 'float'"),
    ([1] * (12 * PAGE + 1), f"its {12 * PAGE + 1} tokens are more than the {12 * PAGE} that the cache holds"),
]


def stall(driver: Fake) -> None:
    """As if the latest launch had given up."""
    abort(driver, {})


def test_requests_that_cannot_be_served_are_refused_and_others_go_on() -> None:
    model = serving_model()
    prompts = [prompt_of(4 + i) for i in range(len(REFUSED))]
    expected = [alone(model, prompt, 6) for prompt in prompts]
    names = []
    with managed(model, num_blocks=12, compile_prompts=False) as manager:
        for number, ((tokens, _), prompt) in enumerate(zip(REFUSED, prompts)):
            names.append(manager.add_request([np.int64(token) for token in prompt], max_new_tokens=6))
            manager.add_request(tokens, request_id=f"bad {number}", max_new_tokens=6)
        found = results(manager, 2 * len(REFUSED))
        processor = manager.batch_processor
    assert pages_in_use(processor.cache) == 0
    assert [found[name].generated_tokens for name in names] == expected
    assert [found[name].error for name in names] == [None] * len(names)
    for number, (tokens, reason) in enumerate(REFUSED):
        with pytest.raises(RequestError, match=f"^request bad {number}: {re.escape(reason)}") as info:
            processor.check_request(RequestState(f"bad {number}", tokens))
        assert found[f"bad {number}"].error == str(info.value)
        assert found[f"bad {number}"].generated_tokens == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*runs a part of this graph eagerly")
def test_each_sequence_of_a_refused_request_is_answered() -> None:
    model = serving_model()
    with managed(model, generation_config=SEVERAL, options={"fallback": "eager"}) as manager:
        [name] = manager.add_requests([[VOCAB_SIZE]])
        found = results(manager, 3)
        manager.add_requests([[1, 2]])
        assert [output.error for output in results(manager, 3).values()] == [None] * 3
    assert found.keys() == {name, f"{name}__child#0", f"{name}__child#1"}
    assert all("is not in" in str(output.error) for output in found.values())


def test_a_request_that_outgrows_the_cache_fails_alone() -> None:
    model = serving_model()
    long, short = prompt_of(3 * PAGE), prompt_of(5)
    everything = alone(model, long, 3 * PAGE)
    with managed(model, num_blocks=5, max_blocks_per_request=16, compile_prompts=False) as manager:
        name = manager.add_request(long, max_new_tokens=3 * PAGE)
        others = [manager.add_request(short, max_new_tokens=20) for _ in range(4)]
        found = results(manager, 5)
        assert [found[other].generated_tokens for other in others] == [alone(model, short, 20)] * 4
        check_that_it_serves(manager, model)
    assert re.search(rf"it has come to {5 * PAGE} tokens, and the cache holds {5 * PAGE}", str(found[name].error))
    tokens = found[name].generated_tokens
    assert tokens == everything[: len(tokens)]
    assert len(tokens) > PAGE


@pytest.mark.parametrize(
    ("error", "when"),
    thinned(
        [
            (MegakernelTimeout("stalled"), "before"),
            (torch.OutOfMemoryError("no room"), "behind"),
            (torch.OutOfMemoryError("no room"), "before"),
            (MegakernelTimeout("stalled"), "behind"),
        ],
    ),
    ids=repr,
)
def test_a_step_that_fails_takes_its_requests_with_it(error: Exception, when: str) -> None:
    model = serving_model()
    prompts = [prompt_of(4 + i) for i in range(5)]  # of which two are in a step
    expected = [alone(model, prompt, 12) for prompt in prompts]
    with faulty_steps({(when, 7): raising(error)}), managed(model, max_requests_per_batch=2) as manager:
        names = [manager.add_request(prompt, max_new_tokens=12) for prompt in prompts]
        found = results(manager, len(prompts))
        failed = [name for name in names if found[name].error is not None]
        assert 1 <= len(failed) <= 2
        check_that_it_serves(manager, model)
    for name, tokens in zip(names, expected):
        output = found[name]
        if name in failed:
            assert output.error == str(error)
            assert 0 < len(output.generated_tokens) < 12
            assert output.generated_tokens == tokens[: len(output.generated_tokens)]
        else:
            assert output.generated_tokens == tokens


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*runs a part of this graph eagerly")
def test_every_sequence_of_a_request_in_a_step_that_fails_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are yet to be made of it, too."""
    model = serving_model()
    compute_batch, errors = ModelRunner.compute_batch, [MegakernelTimeout("stalled")]

    def faulty(self: ModelRunner, *args: Any) -> None:
        if errors:
            raise errors.pop()
        compute_batch(self, *args)

    monkeypatch.setattr(ModelRunner, "compute_batch", faulty)
    with managed(model, generation_config=SEVERAL, options={"fallback": "eager"}) as manager:
        manager.add_requests([prompt_of(4)])
        assert [output.error for output in results(manager, 3).values()] == ["stalled"] * 3
        manager.add_requests([prompt_of(4)])
        assert [output.error for output in results(manager, 3).values()] == [None] * 3


@pytest.mark.parametrize(
    "settings", thinned([{}, {"compile_prompts": False}], 1), ids=["of prompts", "of single tokens"]
)
def test_a_step_whose_build_fails_takes_its_requests_with_it(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = serving_model()
    compile_graph, errors = sizes.compile_graph, [UnsupportedError("no kernel")]

    def faulty(*args: Any) -> Any:
        if errors:
            raise errors.pop()
        return compile_graph(*args)

    monkeypatch.setattr(sizes, "compile_graph", faulty)
    with managed(model, max_requests_per_batch=2, **settings) as manager:
        name = manager.add_request(prompt_of(4))
        assert re.search("no kernel", str(results(manager, 1)[name].error))
        check_that_it_serves(manager, model)


def test_after_another_error_the_engine_ends() -> None:
    """Nobody knows what it has left."""
    bug = {("before", 2): raising(ZeroDivisionError("a bug"))}
    with faulty_steps(bug), managed(serving_model(), compile_prompts=False) as manager:
        name = manager.add_request(prompt_of(4))
        assert results(manager, 1)[name].error == "a bug"
        manager._generation_thread.join(60)
        assert manager.add_request(prompt_of(4)) is None


def test_requests_wait_no_longer_once_all_that_filled_the_cache_are_cancelled() -> None:
    model = serving_model()
    with managed(model, compile_prompts=False) as manager:
        check_that_it_serves(manager, model)
        manager.batch_processor.scheduler.block_new_requests = True  # as evictions leave it
        check_that_it_serves(manager, model)


@pytest.fixture
def _eager_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that has no code for them; what simulates one is not seen to be one."""
    monkeypatch.setattr(continuous_batching, "_why_prompts_are_not_ours", lambda model_config: "they are tested apart")


@pytest.mark.usefixtures("_eager_prompts")
@pytest.mark.filterwarnings("ignore:.*runs prompts of continuous batching eagerly")
@pytest.mark.parametrize("asynchronous", thinned([False, True], 1))
def test_an_aborted_launch_fails_the_requests_in_flight(simulated: Fake, asynchronous: bool) -> None:  # noqa: F811
    """It is seen before anyone gets what it has left as tokens, and the kernel is as new."""
    with (
        asynchronous_on_the_cpu(),
        faulty_steps({("behind", 3): lambda runner: stall(simulated)}),
        managed(serving_model(), use_async_batching=asynchronous) as manager,
    ):
        names = [manager.add_request(prompt_of(4), max_new_tokens=9) for _ in range(2)]
        found = results(manager, 2)
        launches = simulated.num_launches
        errors = [found[name].error for name in names if found[name].error]
        assert errors
        assert all("made no progress for 10 s and was aborted" in error for error in errors)
        assert all(len(found[name].generated_tokens) <= 3 for name in names if found[name].error)
        later = manager.add_request(prompt_of(4), max_new_tokens=9)
        assert results(manager, 1)[later].error is None
        assert simulated.num_launches - launches in ((8, 9) if asynchronous else (8,))  # one may be in vain
        assert pages_in_use(manager.batch_processor.cache) == 0


@pytest.mark.usefixtures("_eager_prompts")
@pytest.mark.filterwarnings("ignore:.*runs prompts of continuous batching eagerly")
def test_other_models_launches_are_their_own(simulated: Fake) -> None:  # noqa: F811
    """Whose abort the engine does not take for its own."""

    @torch.compile(backend="mpk", options={"fallback": "error"})
    def other(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight)

    x, weight = torch.randn(1, 64), torch.randn(64, 64)
    with torch.inference_mode(), managed(serving_model()) as manager:
        other(x, weight)
        stall(simulated)
        name = manager.add_request(prompt_of(4), max_new_tokens=9)
        assert results(manager, 1)[name].error is None
        with pytest.raises(MegakernelTimeout):
            other(x, weight)
