"""The engine on a GPU: each request gets what it gets alone, with CUDA graphs and asynchronous steps and without."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.utils import stream_context

from tests.continuous_batching.engine import (
    GREEDY,
    PAGE,
    alone,
    batched,
    capture_by_transformers,
    captured_by,
    check_that_it_serves,
    faulty_steps,
    managed,
    prompt_of,
    raising,
    results,
    serving_model,
    sized,
)
from tests.models.test_cuda import ControlBlock
from torch_mpk import registry
from torch_mpk.errors import MegakernelTimeout, MpkWarning
from torch_mpk.testing.decode import count_launches, device_events

pytestmark = pytest.mark.gpu

MODES = [
    {"use_cuda_graph": False, "use_async_batching": False},
    {"use_cuda_graph": (False, True), "use_async_batching": False},
    {"use_cuda_graph": (False, True), "use_async_batching": True},
]
MODE_NAMES = ["plain", "graphs", "graphs, asynchronous"]


@pytest.mark.parametrize("mode", MODES, ids=MODE_NAMES)
@pytest.mark.parametrize("page_size", [PAGE, 5, 256])
def test_every_request_gets_what_it_gets_alone(page_size: int, mode: dict[str, bool]) -> None:
    model = serving_model(num_layers=2, device="cuda")
    prompts = [prompt_of(length) for length in (5, 1, PAGE, 2 * PAGE + 3, 70, 7)]
    sizes = {"num_blocks": 1200 // page_size, "max_blocks_per_request": 100 // page_size + 1}
    expected = [alone(model, prompt, GREEDY.max_new_tokens) for prompt in prompts]
    assert batched(model, prompts, page_size=page_size, **sizes, **mode) == expected


def lose_signals(runner: ModelRunner) -> None:
    """Of the launch to come, in the kernel of each number of rows: some workers seem never to end its first phase."""
    with stream_context(runner.inputs_and_outputs.compute_stream):
        for segment in runner.segments:
            torch.as_tensor(ControlBlock(segment.executable), device="cuda")[8] -= 9


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stalled_launch_fails_the_requests_in_flight(asynchronous: bool) -> None:
    model = serving_model(num_layers=2, device="cuda")
    mode = {"use_cuda_graph": False, "use_async_batching": asynchronous}
    prompts = [prompt_of(4 + i) for i in range(3)]
    expected = [alone(model, prompt, 16) for prompt in prompts]
    options = {"fallback": "error", "watchdog_seconds": 0.25}
    with faulty_steps({("before", 6): lose_signals}), managed(model, options=options, **mode) as manager:
        names = [manager.add_request(prompt, max_new_tokens=16) for prompt in prompts]
        found = results(manager, len(prompts))
        check_that_it_serves(manager, model)
    failed = [name for name in names if found[name].error is not None]
    assert failed
    for name, tokens in zip(names, expected):
        got = found[name].generated_tokens
        assert got == tokens[: len(got)]
        if name in failed:
            assert re.search("made no progress for 0.25 s(.|\n)*of phase 0 ", str(found[name].error))
            assert len(got) <= 6  # the prompt's, and those of five steps
        else:
            assert len(got) == 16


@pytest.mark.parametrize("when", ["before", "behind"])
@pytest.mark.parametrize("mode", MODES, ids=MODE_NAMES)
def test_a_step_that_fails_takes_its_requests_with_it(mode: dict[str, bool], when: str) -> None:
    model = serving_model(device="cuda")
    prompts = [prompt_of(4 + i) for i in range(5)]
    expected = [alone(model, prompt, 12) for prompt in prompts]
    fault = {(when, 20): raising(MegakernelTimeout("stalled"))}  # behind those of the warm-up
    with faulty_steps(fault), managed(model, warmup=True, max_requests_per_batch=2, **mode) as manager:
        names = [manager.add_request(prompt, max_new_tokens=12) for prompt in prompts]
        found = results(manager, len(prompts))
        check_that_it_serves(manager, model)
    assert any(found[name].error == "stalled" for name in names)
    for name, tokens in zip(names, expected):
        got = found[name].generated_tokens
        assert got == tokens[: len(got)]
        assert len(got) == 12 or found[name].error == "stalled"


@pytest.mark.parametrize("mode", MODES, ids=MODE_NAMES)
def test_what_fills_inputs_late_does_not_meet_the_first_step(
    mode: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device that others share: what the engine enqueues as it begins is not done when requests arrive."""
    fill = ContinuousBatchingIOs._reset_static_tensors

    def fill_late(inputs: ContinuousBatchingIOs, full_reset: bool = False) -> None:
        """Again and again, so that some of it comes between a step's inputs and the step."""
        if full_reset and inputs.device.type == "cuda":
            for _ in range(200):
                torch.cuda._sleep(1_000_000)  # cycles
                fill(inputs, full_reset)
        fill(inputs, full_reset)

    monkeypatch.setattr(ContinuousBatchingIOs, "_reset_static_tensors", fill_late)
    model = serving_model(device="cuda")
    with managed(model, warmup=True, **mode) as manager:
        check_that_it_serves(manager, model)


class Pool:
    """In a cycle, as that of an engine is."""

    def __init__(self) -> None:
        self.itself = self
        self.pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self.pool):
            self.memory = torch.zeros(1 << 20, device="cuda")


def test_pools_that_are_garbage_do_not_end_the_process() -> None:
    """One from before an engine's warm-up, and one that becomes garbage while it captures a graph."""
    engines = [serving_model(device="cuda") for _ in range(2)]
    pools = [Pool(), Pool()]
    seen = [weakref.ref(pool) for pool in pools]

    def capture(runner: ModelRunner, forward: Any, *args: Any) -> None:
        def forward_among_garbage(*batch: Any) -> None:
            pools.clear()
            gc.collect()
            forward(*batch)

        capture_by_transformers(runner, forward_among_garbage, *args)

    thresholds = gc.get_threshold()
    gc.set_threshold(50)
    try:
        pools.pop()
        for model in engines:
            with captured_by(capture), managed(model, warmup=True, **MODES[2]) as manager:
                check_that_it_serves(manager, model)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert [pool() for pool in seen] == [None, None]


@pytest.mark.parametrize("rows", [1, 3, 32])
def test_steps_in_bfloat16_run_to_the_end(rows: int) -> None:
    """Tokens hang on the order of sums here, and so on how many rows there are; every request has all of its own."""
    model = serving_model(num_layers=2, dtype=torch.bfloat16, device="cuda")
    sizes: dict[str, Any] = {"max_requests_per_batch": 32, "max_batch_tokens": 256, "num_blocks": 256}
    prompts = [prompt_of(3 + i) for i in range(rows)]
    first = batched(model, prompts, warmup=True, **sizes)
    assert all(len(tokens) == GREEDY.max_new_tokens for tokens in first)
    assert batched(model, prompts, warmup=True, **sizes) == first


@pytest.mark.parametrize("mode", MODES, ids=MODE_NAMES)
def test_a_step_more_is_one_kernel_more(mode: dict[str, bool]) -> None:
    """Where steps are not asynchronous the engine resets its own tensors in between, by kernels of PyTorch's."""
    model = serving_model(device="cuda")
    with model.continuous_batching_context_manager(
        generation_config=GREEDY, continuous_batching_config=sized(**mode), warmup=True
    ) as manager:

        def kernels(count: int) -> list[bool]:
            """Of three requests; True where a kernel is ours."""

            def answer() -> None:
                names = {manager.add_request(prompt_of(5), max_new_tokens=count) for _ in range(3)}
                while names:
                    output = manager.get_result(timeout=120)  # a step of a new size waits for its build
                    assert output is not None and output.error is None
                    names -= {output.request_id} if output.is_finished() else set()

            names = [event.name for event in device_events(answer)]
            return ["torch_mpk_kernel" in name for name in names if not name.startswith("Mem")]

        kernels(20)
        few, many = kernels(8), kernels(20)
        assert sum(many) - sum(few) == 12
        if mode["use_async_batching"]:
            assert len(many) - len(few) == 12


@pytest.mark.parametrize("mode", [*MODES, {"use_cuda_graph": True}], ids=[*MODE_NAMES, "graphs of prompts, too"])
@pytest.mark.parametrize("window", [None, 100])
def test_steps_with_prompts_are_ours_in_bfloat16(window: int | None, mode: dict[str, Any]) -> None:
    kinds: dict[str, Any] = {"num_layers": 2, "head_dim": 64, "dtype": torch.bfloat16, "device": "cuda"}
    if window:
        types = ["sliding_attention", "full_attention"]
        kinds |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1, "layer_types": types}
    model = serving_model(**kinds)
    sizes: dict[str, Any] = {"max_batch_tokens": 512, "num_blocks": 256, "max_blocks_per_request": 32}
    prompts = [prompt_of(length) for length in (3, 300, 40, 130, 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", MpkWarning)
        first = batched(model, prompts, warmup=True, **sizes, **mode)
        assert all(len(tokens) == GREEDY.max_new_tokens for tokens in first)
        assert batched(model, prompts, warmup=True, **sizes, **mode) == first


def test_varlen_attention_is_one_launch() -> None:
    q = torch.randn(128, 4, 64, device="cuda", dtype=torch.bfloat16)
    k, cache = q[:, :2].contiguous(), torch.randn(300, 2, 64, device="cuda", dtype=torch.bfloat16)
    read_index = torch.randperm(300, device="cuda")
    ends_q = torch.tensor([0, 70, 71, 90], dtype=torch.int32, device="cuda")
    ends_k = torch.tensor([0, 70, 171, 230], dtype=torch.int32, device="cuda")

    @torch.compile(backend="mpk", options={"fallback": "error"}, fullgraph=True, dynamic=False)
    def step(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.ops.mpk.varlen_attention(q, k, k, cache, cache, read_index, ends_q, ends_k, scale=0.125)

    with torch.inference_mode():
        expected = torch.ops.mpk.varlen_attention(q, k, k, cache, cache, read_index, ends_q, ends_k, scale=0.125)
        torch.testing.assert_close(step(q, k), expected, rtol=2e-2, atol=1e-2)
        assert count_launches(lambda: step(q, k)) == 1


def test_paged_attention_is_one_launch() -> None:
    q, k = torch.randn(3, 4, 32, device="cuda"), torch.randn(3, 2, 32, device="cuda")
    pages = [torch.randn(20, 16, 2, 32, device="cuda") for _ in range(2)]
    table = torch.randperm(20, device="cuda")[:12].view(3, 4).int()
    length = torch.tensor([40, 0, 17], dtype=torch.int32, device="cuda")

    @torch.compile(backend="mpk", options={"fallback": "error"}, fullgraph=True, dynamic=False)
    def step(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.ops.mpk.paged_attention(q, k, k, *pages, table, length, scale=0.2)

    with torch.inference_mode():
        expected = registry.get("paged_attention")(q, k, k, *(t.clone() for t in pages), table, length, scale=0.2)
        torch.testing.assert_close(step(q, k), expected, rtol=1e-4, atol=1e-5)
        assert count_launches(lambda: step(q, k)) == 1
