"""Hugging Face's engine with our attention and backend: each request gets what it gets alone."""

from __future__ import annotations

import gc
import runpy
import sys
import types
import warnings
import weakref
from contextlib import nullcontext
from copy import copy
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner

import torch_mpk.batching.engine
import torch_mpk.continuous_batching
from tests.continuous_batching.engine import (
    GREEDY,
    PAGE,
    SIZES,
    Load,
    alone,
    asynchronous_on_the_cpu,
    batched,
    managed,
    pages_in_use,
    planning_for_a_gpu,
    prompt_of,
    results,
    serving_model,
    sized,
)
from tests.thinned import thinned
from torch_mpk import _C
from torch_mpk.batching.step_inputs import HostInputs
from torch_mpk.continuous_batching import StepCompileConfig, config
from torch_mpk.errors import EngineError, MissingPackageError, MpkWarning, UnsupportedError
from torch_mpk.lowering import lowerer
from torch_mpk.runtime import cpu
from torch_mpk.runtime.segment import is_compiling_ahead


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
    ),
    ids=["groups of heads", "a key head a head", "one key head"],
)
def test_every_request_gets_what_it_gets_alone(arch: str, sizes: dict[str, Any]) -> None:
    model = serving_model(arch, **sizes)
    prompts = [prompt_of(length) for length in (5, 1, PAGE, 2 * PAGE + 3, 70, 7)]  # one is longer than a batch
    assert batched(model, prompts) == [alone(model, prompt, GREEDY.max_new_tokens) for prompt in prompts]


@pytest.mark.parametrize("page_size", thinned([5, 256]))
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


@pytest.mark.slow
@pytest.mark.usefixtures("empty_cache")
def test_a_build_a_power_of_two_and_none_as_requests_come_go_and_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    model = serving_model()
    load = Load(model, num_prompts=6, longest=40, shared=0)
    before = num_compiled()
    with managed(model, warmup=True, max_requests_per_batch=4) as manager:
        assert num_compiled() - before == 3  # traces: of one request, of several, and of steps with prompts
        load.run(manager, count=25, seconds=60)
        assert num_compiled() - before == 3
    load.check()
    parts = [(folder / "3.segments.txt").read_text() for folder in tmp_path.iterdir()]
    assert len(parts) == 6  # for 1, 2 and 4 requests, and for 16, 32 and 64 tokens
    for text in parts:  # each is one launch
        assert text.count("(ours)") == 1
        assert "(fallback)" not in text
        assert "argmax" in text
    for task in ("paged_attention", "varlen_attention"):
        assert sum(task in text for text in parts) == 3


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_warm_up_that_plans_all_sizes_first(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_mpk.batching.engine, "COMPILED", {"cpu"})
    ahead: list[bool] = []  # whether a segment was loaded while the sizes were planned
    thresholds: list[tuple[int, int, int]] = []  # of the garbage collector, as a warm-up goes on
    usual = gc.get_threshold()
    load, warm_up = cpu.load, torch_mpk.batching.engine.Runner._warm_up
    monkeypatch.setattr(cpu, "load", lambda *args: ahead.append(is_compiling_ahead()) or load(*args))
    monkeypatch.setattr(
        torch_mpk.batching.engine.Runner,
        "_warm_up",
        lambda *args: thresholds.append(gc.get_threshold()) or warm_up(*args),
    )
    gc.set_threshold(700, 10, 10)
    model = serving_model()
    prompts = [prompt_of(length) for length in (5, 20)]
    with (
        asynchronous_on_the_cpu(),
        managed(model, warmup=True, use_async_batching=asynchronous, max_blocks_per_request=7) as manager,
    ):
        num_loaded = len(ahead)
        names = [manager.add_request(prompt, max_new_tokens=8) for prompt in prompts]
        got = results(manager, len(names))
    after = gc.get_threshold()
    gc.set_threshold(*usual)
    assert thresholds == [(50_000, 20, 100)] * 2
    assert after == (700, 10, 10)
    assert not any(ahead)
    assert len(ahead) == num_loaded > 0  # none was left to a request
    assert [got[name].generated_tokens for name in names] == [alone(model, prompt, 8) for prompt in prompts]


class Steps:
    """Tokens of each request in each step that brings prompts, and those that it is padded to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: list[list[int]] = []
        self.sizes: set[int] = set()
        compute = ModelRunner.compute_batch

        def compute_batch(runner: ModelRunner, model: Any, batch_data: dict[str, Any]) -> None:
            if batch_data["block_table"] is None:
                lengths = batch_data["cu_seq_lens_q"].diff().tolist()
                self.tokens.append([n for n in lengths if n])
                self.sizes.add(batch_data["input_ids"].shape[1])
            compute(runner, model, batch_data)

        monkeypatch.setattr(ModelRunner, "compute_batch", compute_batch)


@pytest.mark.parametrize("window", thinned([None, 20], 1))
def test_prompts_of_several_requests_beside_tokens_of_others(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a layer of a window, whose keys go round in its pages, every step takes this way."""
    steps = Steps(monkeypatch)
    kinds: dict[str, Any] = {"num_layers": 2}
    if window:
        types = ["sliding_attention", "full_attention"]
        kinds |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1, "layer_types": types}
    model = serving_model(**kinds)
    load = Load(model, num_prompts=8, longest=70, shared=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MpkWarning)
        with managed(model, max_requests_per_batch=5) as manager:
            before = num_compiled()
            load.run(manager, count=30, cancelled=0.1, seconds=200)
            assert num_compiled() - before <= len(steps.sizes) + (0 if window else 4)
            cache = manager.batch_processor.cache
    load.check()
    assert pages_in_use(cache) == 0
    assert steps.sizes <= {16, 32, 64}
    assert any(len(lengths) > 2 and min(lengths) == 1 < max(lengths) for lengths in steps.tokens)
    assert any(sorted(lengths)[-2:-1] > [1] for lengths in steps.tokens)  # chunks of two prompts
    assert not window or any(max(lengths) == 1 for lengths in steps.tokens)


@pytest.mark.parametrize("most", thinned([12, 100], 0))
def test_the_largest_step_is_of_any_size(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, model = Steps(monkeypatch), serving_model()
    prompts = [prompt_of(length) for length in (5, 130, 40)]
    expected = [alone(model, prompt, GREEDY.max_new_tokens) for prompt in prompts]
    assert batched(model, prompts, max_batch_tokens=most, max_requests_per_batch=4, num_blocks=32) == expected
    assert max(steps.sizes) == most
    assert steps.sizes <= {12, 16, 32, 64, 100}


@pytest.mark.slow
def test_windows_longer_than_a_page_and_than_a_prompt() -> None:
    model = serving_model(
        num_layers=2,
        use_sliding_window=True,
        sliding_window=3 * PAGE + 1,
        max_window_layers=0,
        layer_types=["sliding_attention"] * 2,
    )
    prompts = [prompt_of(length) for length in (5, 150, 49, 20)]
    assert batched(model, prompts) == [alone(model, prompt, GREEDY.max_new_tokens) for prompt in prompts]


def prepared(inputs: ContinuousBatchingIOs) -> dict[str, Any]:
    """What a step is made of."""
    names = ("num_q_tokens", "max_kv_read", "num_request_in_batch", "use_block_table", "total_seqlen_q", "max_length_q")
    names += ("total_seqlen_k", "max_length_k", "requests_in_batch", "req_id_to_new_token_position")
    found = {name: copy(getattr(inputs, name)) for name in names}
    found |= {name: getattr(inputs, name).tolist() for name in ("_bulk_input_tensor", "block_table")}
    return found | {"states": [vars(future.state) | {} for future in inputs.requests_in_batch]}


@pytest.mark.slow
def test_steps_are_prepared_as_by_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, num_compared = HostInputs.prepare_batch_tensors, 0

    def both(inputs: HostInputs, requests_in_batch: list[Any], *args: Any, **kwargs: Any) -> None:
        nonlocal num_compared
        states = [future.state for future in requests_in_batch]
        before = [dict(vars(state)) for state in states]
        ContinuousBatchingIOs.prepare_batch_tensors(inputs, requests_in_batch, *args, **kwargs)
        expected = prepared(inputs)
        for state, attributes in zip(states, before, strict=True):
            vars(state).update(attributes)
        ours(inputs, requests_in_batch, *args, **kwargs)
        assert prepared(inputs) == expected
        num_compared += inputs.use_block_table

    monkeypatch.setattr(HostInputs, "prepare_batch_tensors", both)
    drawn = GenerationConfig(max_new_tokens=24, do_sample=True, top_k=5, eos_token_id=-1)
    with managed(serving_model(num_layers=2), generation_config=drawn, per_request_processors=True) as manager:
        for length in (3, 30, 1, 17, 40):
            manager.add_request(prompt_of(length), max_new_tokens=20)
        assert not any(output.error for output in results(manager, 5).values())
    assert num_compared > 10


def test_caches_of_the_memory_that_is_left_have_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a start with a little more or less of it finds what was built before; other engines have as many as fit."""
    sizes = []
    infer = PagedAttentionMemoryHandler.infer_max_batch_tokens_and_num_sectors

    def inferred(handler: PagedAttentionMemoryHandler) -> tuple[int, int]:
        rounded, all_that_fit = infer(handler), infer.__wrapped__(handler)
        sizes.append((rounded[1], all_that_fit[1]))
        return rounded

    monkeypatch.setattr(PagedAttentionMemoryHandler, "infer_max_batch_tokens_and_num_sectors", inferred)
    model = serving_model()
    for available in (20_000_000, 20_100_000):
        monkeypatch.setattr(PagedAttentionMemoryHandler, "get_available_memory", lambda handler, n=available: n)
        with managed(model, num_blocks=None):
            pass
    (few, fit), (few_too, more_fit) = sizes
    assert few == few_too and fit < more_fit
    assert fit * 31 / 32 < few <= fit
    model.set_attn_implementation("sdpa")
    others = ContinuousBatchingConfig(page_size=PAGE, max_batch_tokens=64)
    with model.continuous_batching_context_manager(
        generation_config=GREEDY, continuous_batching_config=others
    ) as manager:
        manager.add_request(prompt_of(3), max_new_tokens=2)
        assert manager.get_result(timeout=60).error is None
    assert sizes[2][0] == sizes[2][1]


@pytest.mark.slow
def test_engines_share_what_was_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = serving_model()
    prompts = [prompt_of(length) for length in (5, 9)]
    with managed(model, max_requests_per_batch=2) as manager:
        manager.add_request(prompts[0], max_new_tokens=4)
        assert manager.get_result(timeout=60).error is None
        monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
        assert batched(model, prompts[:1], max_requests_per_batch=2) == [alone(model, prompts[0], 24)]
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_engines_of_one_kind_share_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled for the second, and nothing stays of the first but its steps."""
    model = serving_model()
    runners: list[weakref.ref[Any]] = []
    compiled: list[int] = []
    of = torch_mpk.batching.engine.Runner.of

    def noted(*args: Any) -> Any:
        runner = of(*args)
        runners.append(weakref.ref(runner))
        return runner

    monkeypatch.setattr(torch_mpk.batching.engine.Runner, "of", noted)
    for _ in range(2):
        prompts = [prompt_of(length) for length in (5, 9)]
        assert batched(model, prompts) == [alone(model, prompt, 24) for prompt in prompts]
        compiled.append(num_compiled())
    assert compiled[0] == compiled[1] > 0
    gc.collect()
    assert [runner() for runner in runners] == [None, None]


def test_steps_of_few_kinds_of_engines_are_kept() -> None:
    model = torch.nn.Linear(1, 1)
    kinds = range(2 * torch_mpk.batching.engine.MAX_KINDS + 1)
    functions = [weakref.ref(torch_mpk.batching.engine.own_step(model, kind)) for kind in kinds]
    assert [function() is None for function in functions] == [kind == 0 for kind in kinds]
    assert torch_mpk.batching.engine.own_step(model, 1) is functions[1]()
    assert torch_mpk.batching.engine.own_step(torch.nn.Linear(1, 1), 1) is not functions[1]()


def last_step_on_a_gpu(model: Any, rows: int, **settings: Any) -> _C.Schedule:
    """What an engine's step of so many requests would be there."""
    step, schedules = planning_for_a_gpu()
    prompts = [prompt_of(3 + i) for i in range(rows)]
    batched(model, prompts, decode_compile_config=step, max_requests_per_batch=rows, **settings)
    return schedules[-1]


@pytest.mark.parametrize("rows", thinned([1, 4]))
def test_a_step_is_one_launch_on_a_gpu_too(rows: int) -> None:
    """And layers share their code, and none awaits another's writes: pages of all lie in one tensor."""
    schedule = last_step_on_a_gpu(serving_model("qwen3", num_layers=3, dtype=torch.bfloat16), rows)
    nodes = schedule.graph.nodes
    attention = [(p, job) for p in schedule.phases for job in p.jobs if nodes[job.body[0]].task == "paged_attention"]
    assert len(attention) == 3
    assert all(phase.waits == [] and job.loader_waits == [0] for phase, job in attention)
    assert [len(job.prologue) for _, job in attention] == [4, 4, 4]
    assert _C.generate_cuda(schedule).source.count("struct PagedAttention") == 1


def prompts_on_a_gpu(model: Any, **settings: Any) -> _C.Schedule:
    """What the one size of steps with prompts would be there."""
    step, schedules = planning_for_a_gpu()
    with patch.dict(torch_mpk.batching.engine.MIN_TOKENS, cpu=128):
        batched(model, [prompt_of(40), prompt_of(3)], varlen_compile_config=step, max_batch_tokens=256, **settings)
    [schedule] = schedules
    return schedule


@pytest.mark.slow
def test_engines_with_caches_of_other_sizes_share_a_kernel() -> None:
    model = serving_model(num_layers=2, dtype=torch.bfloat16)
    small, large = (_C.generate_cuda(last_step_on_a_gpu(model, 2, num_blocks=blocks)) for blocks in (32, 77))
    assert small.source == large.source
    assert [m[2] for m in small.maps] != [m[2] for m in large.maps]  # rows that the copy engine may read


@pytest.mark.slow
def test_with_prompts_they_do_too_and_layers_share_their_code() -> None:
    """Where a layer's keys and values begin, and how many there are, is no part of it."""
    kinds = []
    for num_layers, blocks in ((2, 64), (4, 77)):
        model = serving_model("qwen3", dtype=torch.bfloat16, num_layers=num_layers, head_dim=64)
        source = _C.generate_cuda(prompts_on_a_gpu(model, num_blocks=blocks)).source
        begin, end = source.index("\nstruct "), source.index("\nstruct Kernel ")  # which is the whole launch
        kinds.append(source[begin:end])
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("window", thinned([None, 20]))
def test_a_step_with_prompts_is_one_launch_on_a_gpu_too(window: int | None) -> None:
    """Layers of a kind share their code."""
    kinds: dict[str, Any] = {"num_layers": 3, "head_dim": 64}
    if window:
        types = ["sliding_attention", "full_attention", "sliding_attention"]
        kinds |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1, "layer_types": types}
    schedule = prompts_on_a_gpu(serving_model("qwen3", dtype=torch.bfloat16, **kinds))
    tasks = [node.task for node in schedule.graph.nodes]
    assert tasks.count("varlen_attention") == 3
    source = _C.generate_cuda(schedule).source
    assert source.count("struct VarlenAttention") == (2 if window else 1)


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


@pytest.mark.parametrize("window", thinned([None, 20], 1))
def test_prompts_that_are_not_ours_run_eagerly_and_say_so(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on other GPUs: of models with windows then every step."""
    monkeypatch.setattr(torch_mpk.continuous_batching, "_why_prompts_are_not_ours", lambda config: "it is not the day")
    kinds: dict[str, Any] = {"num_layers": 2}
    if window:
        types = ["sliding_attention", "full_attention"]
        kinds |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1, "layer_types": types}
    model = serving_model(**kinds)
    prompts = [prompt_of(length) for length in (5, 50, 19)]
    before = num_compiled()
    which = "every step, of which none takes block tables," if window else "prompts"
    with pytest.warns(MpkWarning, match=f"runs {which} of continuous batching eagerly: it is not the day"):
        got = batched(model, prompts)
    assert got == [alone(model, prompt, GREEDY.max_new_tokens) for prompt in prompts]
    assert (num_compiled() == before) == bool(window)


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("window", thinned([None, 20], 1))
def test_prompts_run_eagerly_where_that_is_asked_for(window: int | None) -> None:
    """Of models with windows then every step, which is said once; another engine does the same."""
    kinds = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0} if window else {}
    model = serving_model(**kinds)
    prompts = [prompt_of(length) for length in (5, 50)]
    settings = sized(compile_prompts=False)
    which = r"runs every step.* eagerly: config\(compile_prompts=False\) says so"
    for is_first in (True, False):
        before = num_compiled()
        with pytest.warns(MpkWarning, match=which) if window and is_first else nullcontext():
            outputs = model.generate_batch(
                prompts,
                generation_config=GREEDY,
                continuous_batching_config=settings,
                progress_bar=False,
                warmup=False,
            )
        got = sorted(output.generated_tokens for output in outputs.values())
        assert got == sorted(alone(model, prompt, GREEDY.max_new_tokens) for prompt in prompts)
        assert settings.varlen_compile_config is None
        assert (num_compiled() == before) == (bool(window) or not is_first)  # another engine takes over what there is


@pytest.mark.slow
def test_old_versions_build_all_sizes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch before 2.13, whose torch.compile takes no limit, and whose default is eight builds: here two, but in the
    engine's thread."""
    monkeypatch.setattr(torch_mpk.batching.engine, "COMPILE_TAKES_LIMITS", False)
    assert "recompile_limit" not in StepCompileConfig().to_dict()
    seen = []
    raise_limit = torch_mpk.batching.engine.raise_recompile_limit

    def raised() -> None:
        with torch._dynamo.config.patch(recompile_limit=2):
            raise_limit()
            seen.append(torch._dynamo.config.recompile_limit)

    monkeypatch.setattr(torch_mpk.batching.engine, "raise_recompile_limit", raised)
    [_] = batched(serving_model(), [prompt_of(3)])
    assert set(seen) == {torch_mpk.batching.engine.MAX_BUILDS}


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (8192, [128, 256, 512, 1024, 2048, 8192]),  # the engine's default
        (3000, [128, 256, 512, 1024, 2048, 3000]),
        (300, [128, 256, 300]),
        (100, [100]),
    ],
)
def test_sizes_of_steps_with_prompts_are_few(most: int, sizes: list[int]) -> None:
    runner = Mock(cb_config=config(), cache=Mock(max_batch_tokens=most, device="cuda"))
    assert torch_mpk.batching.engine.Runner.steps_of_prompts(runner) == sizes


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "why"),
    [
        ((8, 0), torch.bfloat16, 128, "that takes a GPU of compute capability 9.0"),
        ((9, 0), torch.float32, 128, "the model is in torch.float32, and that takes bfloat16 or float16"),
        ((9, 0), torch.float16, 84, "heads are of size 84, and that takes multiples of 8 up to 256"),
        ((9, 0), torch.float16, 80, None),
        ((9, 0), torch.float16, 64, None),
    ],
)
def test_which_gpus_take_prompts(
    capability: tuple[int, int], dtype: torch.dtype, size: int, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = serving_model(head_dim=size, dtype=dtype)
    assert torch_mpk.continuous_batching._why_prompts_are_not_ours(model.config) is None  # on a CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert torch_mpk.continuous_batching._why_prompts_are_not_ours(model.config) == why


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


def test_a_step_is_counted_before_its_tokens_are_handed_over() -> None:
    """Who has a reply finds all of its steps in the server's metrics."""
    processor = object.__new__(torch_mpk.batching.engine.Processor)
    said: list[str] = []
    processor.inputs_and_outputs = Mock(prepare_batch_update=lambda: ([],))
    processor.model_runner = Mock()
    processor.on_step, processor._step_begin = lambda seconds: said.append("step"), 1.0
    parent = torch_mpk.batching.engine.Processor.__mro__[1]
    with patch.object(parent, "update_batch", lambda self: said.append("tokens")):
        processor.update_batch()
    assert said == ["step", "tokens"] and processor._step_begin > 1
