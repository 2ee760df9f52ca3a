"""Hugging Face's engine with our attention and backend: each request gets what it gets alone."""

from __future__ import annotations

import runpy
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import ContinuousBatchingConfig, GenerationConfig

import torch_mpk.continuous_batching
from tests.continuous_batching.engine import (
    GREEDY,
    PAGE,
    SIZES,
    Load,
    alone,
    batched,
    managed,
    planned_for_a_gpu,
    prompt_of,
    serving_model,
    sized,
)
from tests.thinned import thinned
from torch_mpk import _C
from torch_mpk.continuous_batching import StepCompileConfig
from torch_mpk.errors import EngineError, MissingPackageError, MpkWarning, UnsupportedError
from torch_mpk.lowering import lowerer


def num_compiled() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("arch", "sizes"),
    thinned(
        [
            ("qwen3", {"num_layers": 2}),
            ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
            ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
        ],
        0,
        2,
    ),
    ids=["groups of heads", "a key head a head", "one key head"],
)
def test_every_request_gets_what_it_gets_alone(arch: str, sizes: dict[str, Any]) -> None:
    model = serving_model(arch, **sizes)
    prompts = [prompt_of(length) for length in (5, 1, PAGE, 2 * PAGE + 3, 70, 7)]  # one is longer than a batch
    assert batched(model, prompts) == [alone(model, prompt, GREEDY.max_new_tokens) for prompt in prompts]


@pytest.mark.parametrize("page_size", thinned([5, 256], 0))
def test_pages_of_any_size(page_size: int) -> None:
    model = serving_model()
    prompts = [prompt_of(length) for length in (30, 3, 61)]
    expected = [alone(model, prompt, GREEDY.max_new_tokens) for prompt in prompts]
    settings = {"num_blocks": 600 // page_size, "max_blocks_per_request": 100 // page_size + 1}
    assert batched(model, prompts, page_size=page_size, **settings) == expected


def test_a_prefix_is_shared() -> None:
    model = serving_model()
    prefix = prompt_of(2 * PAGE)
    with managed(model) as manager:
        for tail in (3, 9, PAGE, 1):
            prompt = prefix + prompt_of(tail)
            name = manager.add_request(prompt, max_new_tokens=8)
            assert manager.get_result(name, timeout=60).generated_tokens == alone(model, prompt, 8)
        [allocator] = manager.batch_processor.cache.cache_allocators.values()
        # The first request's are found again; of the rest, pages that a request has filled are kept, too.
        assert 2 <= len(allocator.ledger.cached_blocks) < 4 * 3


def test_a_build_a_power_of_two_and_none_as_requests_come_go_and_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    model = serving_model()
    load = Load(model, num_prompts=6, longest=40, shared=0)
    before = num_compiled()
    with managed(model, warmup=True, max_requests_per_batch=4) as manager:
        assert num_compiled() - before == 3  # for 1, 2 and 4 rows
        load.run(manager, count=25, seconds=60)
        assert num_compiled() - before == 3
    load.check()
    parts = [(folder / "3.segments.txt").read_text() for folder in tmp_path.iterdir()]
    assert len(parts) == 3
    for text in parts:  # each is one launch
        assert text.count("(ours)") == 1
        assert "(fallback)" not in text
        assert "paged_attention" in text
        assert "argmax" in text


def test_engines_share_what_was_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = serving_model()
    prompts = [prompt_of(length) for length in (5, 9)]
    with managed(model, max_requests_per_batch=2) as manager:
        manager.add_request(prompts[0], max_new_tokens=4)
        assert manager.get_result(timeout=60).error is None
        monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
        assert batched(model, prompts[:1], max_requests_per_batch=2) == [alone(model, prompts[0], 24)]
        assert list(tmp_path.iterdir()) == []


def last_step_on_a_gpu(model: Any, rows: int, **settings: Any) -> _C.Schedule:
    """What an engine's step of so many requests would be there."""
    schedules = []

    def plan(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        schedules.append(planned_for_a_gpu(gm, inputs))
        return gm.forward

    step = StepCompileConfig(backend=plan, options=None)
    prompts = [prompt_of(3 + i) for i in range(rows)]
    batched(model, prompts, decode_compile_config=step, max_requests_per_batch=rows, **settings)
    return schedules[-1]


@pytest.mark.parametrize("rows", [1, 4])
def test_a_step_is_one_launch_on_a_gpu_too(rows: int) -> None:
    """And layers share their code, and none awaits another's writes: pages of all lie in one tensor."""
    schedule = last_step_on_a_gpu(serving_model("qwen3", num_layers=3, dtype=torch.bfloat16), rows)
    nodes = schedule.graph.nodes
    attention = [(p, job) for p in schedule.phases for job in p.jobs if nodes[job.body[0]].task == "paged_attention"]
    assert len(attention) == 3
    assert all(phase.waits == [] and job.loader_waits == [0] for phase, job in attention)
    assert [len(job.prologue) for _, job in attention] == [4, 4, 4]
    assert _C.generate_cuda(schedule).source.count("struct PagedAttention") == 1


def test_engines_with_caches_of_other_sizes_share_a_kernel() -> None:
    model = serving_model(num_layers=2, dtype=torch.bfloat16)
    small, large = (_C.generate_cuda(last_step_on_a_gpu(model, 2, num_blocks=blocks)) for blocks in (32, 77))
    assert small.source == large.source
    assert [m[2] for m in small.maps] != [m[2] for m in large.maps]  # rows that the copy engine may read


def test_sampling_falls_back_in_part_and_says_so() -> None:
    model = serving_model()
    drawing = GenerationConfig(max_new_tokens=6, do_sample=True, top_k=3, eos_token_id=-1)
    settings = sized({"fallback": "eager"}, max_requests_per_batch=2)
    with pytest.warns(MpkWarning, match="runs a part of this graph eagerly: .*topk"):
        outputs = model.generate_batch(
            [prompt_of(5)], generation_config=drawing, continuous_batching_config=settings, progress_bar=False
        )
    [output] = outputs.values()
    assert output.error is None
    assert len(output.generated_tokens) == 6


def test_where_attention_falls_back_all_is_right_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it has no code."""

    def refuse_attention(lx: Any, node: Any, args: Any, kwargs: Any) -> Any:
        if node.target.name == "paged_attention":
            raise UnsupportedError("it has no code here")
        return lower_task(lx, node, args, kwargs)

    lower_task = lowerer.lower_task
    monkeypatch.setattr(lowerer, "lower_task", refuse_attention)
    model = serving_model()
    prompts = [prompt_of(length) for length in (5, 20)]
    with pytest.warns(MpkWarning, match=r"a part of this graph eagerly: paged_attention from .*: it has no code here"):
        got = batched(model, prompts, options={"fallback": "eager"})
    assert got == [alone(model, prompt, GREEDY.max_new_tokens) for prompt in prompts]


def test_models_with_sliding_windows_run_eagerly_and_say_so() -> None:
    types = ["sliding_attention", "full_attention"]
    model = serving_model(
        num_layers=2, use_sliding_window=True, sliding_window=20, max_window_layers=1, layer_types=types
    )
    prompts = [prompt_of(length) for length in (5, 50, 19)]
    before = num_compiled()
    with pytest.warns(MpkWarning, match="no block tables for sliding_attention layers"):
        got = batched(model, prompts)
    assert got == [alone(model, prompt, GREEDY.max_new_tokens) for prompt in prompts]
    assert num_compiled() == before


def test_other_attentions_stay_as_they_are() -> None:
    model = serving_model(attention="sdpa")
    prompt, before = prompt_of(9), num_compiled()
    settings = ContinuousBatchingConfig(**SIZES, auto_switch_to_flash=False)
    [output] = model.generate_batch(
        [prompt], generation_config=GREEDY, continuous_batching_config=settings, progress_bar=False, warmup=False
    ).values()
    assert output.generated_tokens == alone(model, prompt, GREEDY.max_new_tokens)
    assert num_compiled() == before


def test_without_the_engine_it_is_an_error() -> None:
    model = serving_model()
    with pytest.raises(EngineError, match="set_attn_implementation"), torch.inference_mode():
        model(torch.tensor([prompt_of(4)]))


@pytest.mark.parametrize(
    ("module", "found"), [(None, "none"), (types.SimpleNamespace(__version__="5.17.0"), r"5\.17\.0")]
)
def test_an_older_transformers_is_an_error(module: Any, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", module)
    with pytest.raises(
        MissingPackageError, match=rf"needs transformers 5\.23 or newer, found {found}: install it with pip"
    ):
        runpy.run_path(torch_mpk.continuous_batching.__file__)
