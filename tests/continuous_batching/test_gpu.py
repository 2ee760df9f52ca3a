"""The engine on a GPU: each request gets what it gets alone, with CUDA graphs and asynchronous steps and without."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tests.continuous_batching.engine import (
    GREEDY,
    PAGE,
    Load,
    alone,
    batched,
    pages_in_use,
    prompt_of,
    serving_model,
    sized,
)
from torch_mpk.errors import MpkWarning
from torch_mpk.testing.decode import count_launches

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


@pytest.mark.parametrize("mode", MODES[1:], ids=MODE_NAMES[1:])
def test_requests_come_and_go_while_the_cache_is_too_small(mode: dict[str, bool]) -> None:
    model = serving_model(device="cuda")
    load = Load(model, seed=int(torch.randint(1000, ())), num_prompts=10, longest=40, shared=2 * PAGE)
    settings = sized(num_blocks=12, **mode)
    with model.continuous_batching_context_manager(
        generation_config=GREEDY, continuous_batching_config=settings, warmup=True
    ) as manager:
        load.run(manager, count=100, cancelled=0.1, seconds=60)
        cache = manager.batch_processor.cache
    load.check()
    assert pages_in_use(cache) == 0


@pytest.mark.parametrize("rows", [1, 3, 32])
def test_steps_in_bfloat16_run_to_the_end(rows: int) -> None:
    """Tokens hang on the order of sums here, and so on how many rows there are; every request has all of its own."""
    model = serving_model(num_layers=2, dtype=torch.bfloat16, device="cuda")
    sizes: dict[str, Any] = {"max_requests_per_batch": 32, "max_batch_tokens": 256, "num_blocks": 256}
    prompts = [prompt_of(3 + i) for i in range(rows)]
    first = batched(model, prompts, warmup=True, **sizes)
    assert all(len(tokens) == GREEDY.max_new_tokens for tokens in first)
    assert batched(model, prompts, warmup=True, **sizes) == first


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
        expected = torch.ops.mpk.paged_attention(q, k, k, *(t.clone() for t in pages), table, length, scale=0.2)
        torch.testing.assert_close(step(q, k), expected, rtol=1e-4, atol=1e-5)
        assert count_launches(lambda: step(q, k)) == 1
