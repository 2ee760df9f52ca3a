"""Prompts of many lengths by a build for each bucket, against eager."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._guards import tracing
from torch.nn import functional as F

from tests.lowering.harness import run as run_lowered
from tests.models.stepping import STRICT
from tests.models.test_prompts import GPU_SIZES, WINDOW, Prompting, compiled, new_cache
from tests.thinned import thinned
from torch_mpk import lowering
from torch_mpk.backend import pipeline
from torch_mpk.builds import background
from torch_mpk.capture.graph import capture
from torch_mpk.dispatch.buckets import Numbers, Prompt, bucket_of, chunks_of
from torch_mpk.errors import IndexRangeError, MpkWarning
from torch_mpk.generate import rewind
from torch_mpk.patterns import apply
from torch_mpk.testing.emulator import emulate
from torch_mpk.testing.tiny import random_ids, tiny_model


def marked(ids: torch.Tensor) -> torch.Tensor:
    """For Dynamo, of any length from the first call on."""
    torch._dynamo.maybe_mark_dynamic(ids, 1)
    return ids


def test_buckets_hold_their_prompts_and_are_few() -> None:
    for device, most, share in (("cuda", 10, 2), ("cpu", 32, 1.25)):
        sizes = [bucket_of(length, 8192, device) for length in range(1, 8193)]
        assert len(set(sizes)) == most
        assert all(length <= size <= max(length + 15, share * length) for length, size in enumerate(sizes, 1))
    assert [bucket_of(length, 100, "cuda") for length in (1, 16, 17, 65, 100)] == [16, 16, 32, 100, 100]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_chunks_are_the_prompt_and_fill_their_buckets(device: str) -> None:
    for length in range(1, 5000, 7):
        chunks = chunks_of(length, 2048, device)
        assert sum(chunks) == length
        assert all(bucket_of(chunk, 2048, device) == chunk for chunk in chunks[:-1])
    assert chunks_of(1030, 2048, "cuda") == [1024, 6]
    assert chunks_of(1000, 2048, "cuda") == [1000]


@pytest.mark.parametrize(
    ("batch", "lengths", "padding", "attention", "dtype", "kwargs"),
    thinned(
        [
            (3, [20, 33, 48], [0, 4, 18], "sdpa", torch.float32, {}),
            (3, [20, 33, 47, 48], [0, 4, 18], "eager", torch.bfloat16, {}),
            (2, [20, 31, 32, 17, 2], [3, 0], "sdpa", torch.float32, {"logits_to_keep": 1}),
            (2, [20, 33, 35, 3], [0, 3], "sdpa", torch.float32, {"logits_to_keep": 3}),
            (1, [7, 16, 15, 2, 1, 9], [0], "sdpa", torch.bfloat16, {}),
        ],
        0,
    ),
)
def test_a_prompt_in_a_bucket_is_eager_s(
    batch: int,
    lengths: list[int],
    padding: list[int],
    attention: str,
    dtype: torch.dtype,
    kwargs: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    prompting = Prompting(batch, padding, sum(lengths) + 3, tiny_model(attention=attention, dtype=dtype, num_layers=1))
    for length in lengths:
        prompting.take(length, **kwargs)
    first, *others = lengths
    alone = {first} | ({1} & {*others}) | ({3} & {*others} if kwargs.get("logits_to_keep") == 3 else set())
    built = {bucket_of(length, 8192, "cpu") for length in others if length not in alone}
    assert len(list(tmp_path.iterdir())) == len(alone) + len(built)


MIXED_LAYERS = {"num_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("padding", "attention", "dtype", "config", "kwargs"),
    thinned(
        [
            ([0, 3], "sdpa", torch.float32, MIXED_LAYERS, {}),
            ([0], "eager", torch.bfloat16, MIXED_LAYERS, {}),
            ([0, 0, 0], "sdpa", torch.bfloat16, {"num_layers": 1}, {"logits_to_keep": 1}),
        ],
        0,
    ),
)
def test_prompts_behind_a_full_window_share_buckets(
    padding: list[int],
    attention: str,
    dtype: torch.dtype,
    config: dict[str, Any],
    kwargs: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    model = tiny_model(attention=attention, dtype=dtype, **(WINDOW | {"sliding_window": 16} | config))
    prompting = Prompting(len(padding), padding, 300, model)
    prompting.take(20, **kwargs)  # fills the window
    for length in (24, 31, 32, 33, 24, 16, 15, 2):
        prompting.take(length, **kwargs)
    assert len(list(tmp_path.iterdir())) == 4  # the first length's, and buckets of 32, 48 and 16


@pytest.mark.parametrize(
    ("padding", "attention", "dtype", "config"),
    thinned(
        [
            ([0, 3], "sdpa", torch.float32, MIXED_LAYERS),
            ([0], "eager", torch.bfloat16, {"num_layers": 2}),
            ([0, 0, 0], "sdpa", torch.bfloat16, {"num_layers": 1}),
        ],
        0,
    ),
)
def test_prompts_that_fill_a_window_share_buckets(
    padding: list[int],
    attention: str,
    dtype: torch.dtype,
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However much of it a shorter prompt before them has filled."""
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    model = tiny_model(attention=attention, dtype=dtype, **(WINDOW | {"sliding_window": 24} | config))
    prompting = Prompting(len(padding), padding, 100, model)
    for held, length in ((10, 20), (7, 33), (23, 31), (5, 20), (17, 24), (8, 48), (20, 5)):
        for cache in prompting.caches:
            cache.reset()
        prompting.position = 0
        prompting.take(held, run=False)
        prompting.take(length)
    assert len(list(tmp_path.iterdir())) == 4  # the first length's, and buckets of 48, 32 and 16


@pytest.mark.parametrize(
    ("batch", "attention", "dtype", "mask"),
    thinned(
        [
            (1, "eager", torch.float32, "left"),
            (2, "eager", torch.bfloat16, None),
            (3, "sdpa", torch.float32, "left"),
            (3, "sdpa", torch.bfloat16, "right"),
        ],
        0,
    ),
)
def test_prompts_that_are_scored_share_buckets(
    batch: int, attention: str, dtype: torch.dtype, mask: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cache: a position sees the prompt's own keys, as evaluations ask for likelihoods."""
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    model = tiny_model(attention=attention, dtype=dtype, num_layers=1)
    ours, exact, errors = compiled(model), copy.deepcopy(model).float(), (list[Any](), list[Any]())
    with torch.inference_mode():
        for length in (33, 40, 47, 20, 29, 34):
            present = torch.ones(batch, length, dtype=torch.int64)
            if mask is not None:
                present[0, slice(0, 3) if mask == "left" else slice(-3, None)] = 0
            given = {} if mask is None else {"attention_mask": marked(present)}
            ids = marked(random_ids(batch, length))
            logits = [run(input_ids=ids, use_cache=False, **given).logits for run in (ours, model)]
            if dtype == torch.float32:
                torch.testing.assert_close(*(each[present.bool()] for each in logits))
            expected = exact(input_ids=ids, use_cache=False, **given).logits
            for found, each in zip(errors, logits):
                found.append((each.float() - expected)[present.bool()])
    if dtype != torch.float32:  # as far from the exact result as eager
        assert torch.cat(errors[0]).norm() < 1.2 * torch.cat(errors[1]).norm()
    assert len(list(tmp_path.iterdir())) == 2  # buckets of 48 and of 32


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_to_a_sequence_s_own_keys_does_not_see_padding(
    is_causal: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    table, weight = torch.randn(96, 32), torch.randn(96, 32) / 6

    def function(ids: torch.Tensor) -> torch.Tensor:
        x = F.embedding(ids, table)
        for _ in range(2):
            q, k, v = F.linear(x, weight).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(2)
        return x

    ours = compiled(function)
    with torch.inference_mode():
        for length in (33, 40, 47, 20, 29, 34):
            ids = marked(random_ids(2, length))
            torch.testing.assert_close(ours(ids), function(ids))
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
def test_batches_of_several_sizes_have_buckets_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    model = tiny_model(dtype=torch.float32, num_layers=1)
    ours = compiled(model)
    with torch.inference_mode():
        for batch, length in ((1, 20), (2, 22), (3, 23), (2, 30), (3, 31), (3, 20)):
            ids = random_ids(batch, length)
            logits = [run(input_ids=ids, past_key_values=new_cache(model, batch, 64)).logits for run in (ours, model)]
            torch.testing.assert_close(*logits)
    assert len(list(tmp_path.iterdir())) == 3  # the first length's, and a bucket of 32 for two batches


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_same_prompt_has_the_same_bits_whatever_ran_between(device: str) -> None:
    model = tiny_model(dtype=torch.bfloat16, device=device, **GPU_SIZES)
    ours, cache = compiled(model), new_cache(model, 2, 128)
    ids = random_ids(2, 60, device)

    def run(length: int) -> torch.Tensor:
        rewind(cache, 0)
        return ours(input_ids=marked(ids[:, :length].clone()), past_key_values=cache).logits

    with torch.inference_mode():
        first = run(60)
        keys = cache.layers[0].keys.clone()
        for length in (60, 33, 49, 60):
            last = run(length)
        assert torch.equal(last, first)
        assert torch.equal(cache.layers[0].keys, keys)
        assert last.is_contiguous()


def emulated(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Runs prompts in a bucket of 64 on an emulated GPU."""
    captured = capture(gm, inputs, conditional=True)
    prompt = Prompt(captured, Numbers.of(captured).length)
    with tracing(None):
        lowered = lowering.lower(apply(prompt.graph(64).graph_module))
        kernel = emulate(lowered.graph, polled=True)
    return prompt.callable(lambda *args: run_lowered(lowered, args, kernel.launch))


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "is_padded"), [(2, True), (1, False)])
def test_the_kernel_of_a_bucket_is_eager_s_on_an_emulated_gpu(batch: int, is_padded: bool) -> None:
    model = tiny_model(dtype=torch.bfloat16, num_layers=1, **(GPU_SIZES | {"intermediate_size": 128}))
    ours = torch.compile(model, backend=emulated)
    caches = [new_cache(model, batch, 128) for _ in range(2)]
    present = torch.ones(batch, 93, dtype=torch.int64)
    present[0, :9] = not is_padded
    with torch.inference_mode():
        for begin, end in ((0, 40), (40, 93)):
            ids, kwargs = random_ids(batch, end - begin), {}
            positions = (present.cumsum(-1) - 1).clamp(min=0)[:, begin:end].clone()
            if is_padded:
                kwargs = {"attention_mask": present[:, :end].clone(), "position_ids": marked(positions)}
                torch._dynamo.maybe_mark_dynamic(kwargs["attention_mask"], 1)
            logits = [
                m(input_ids=marked(ids), past_key_values=c, **kwargs).logits for m, c in zip((ours, model), caches)
            ]
            live = present[:, begin:end].bool()
            torch.testing.assert_close(*(t[live] for t in logits), rtol=0.02, atol=0.1)
    for held in ("keys", "values", "cumulative_length"):
        torch.testing.assert_close(*(getattr(cache.layers[0], held) for cache in caches))


@pytest.mark.slow
@pytest.mark.parametrize("fills", [(8, 8, 8), (3, 6, 7)], ids=["full", "begun"])
def test_a_window_and_a_prompt_behind_it_are_eager_s_on_an_emulated_gpu(fills: tuple[int, ...]) -> None:
    table, weight = torch.randn(96, 128).bfloat16(), (torch.randn(128, 128) / 8).bfloat16()

    def function(ids: torch.Tensor, window: torch.Tensor, fill: int) -> torch.Tensor:
        x = F.linear(F.embedding(ids, table), weight)
        held = window[:, 1:] if fill == 8 else window[:, :fill]
        joined = torch.cat([held, x], 1)
        q, k = (t.unflatten(2, (2, 64)).transpose(1, 2) for t in (x, joined))
        window.copy_(joined[:, -8:])
        query, key = torch.arange(x.shape[1])[:, None] + held.shape[1], torch.arange(joined.shape[1])
        return F.scaled_dot_product_attention(q, k, k, (key <= query) & (key > query - 8))

    ours, windows = torch.compile(function, backend=emulated), [torch.randn(2, 8, 128).bfloat16()]
    windows.append(windows[0].clone())
    with torch.inference_mode():
        for length, fill in zip((40, 64, 3), fills):
            ids = marked(random_ids(2, length))
            results = [run(ids, window, fill) for run, window in zip((ours, function), windows)]
            torch.testing.assert_close(*results, rtol=0.02, atol=0.1)
            torch.testing.assert_close(*windows, rtol=0.02, atol=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "padding", "config"),
    [(1, [0], {}), (3, [0, 4, 60], {}), (8, [0, 1, 2, 3, 4, 5, 6, 60], {}), (1, [0], WINDOW), (2, [0, 60], WINDOW)],
)
def test_a_prompt_in_a_bucket_on_a_gpu_is_eager_s(
    batch: int, padding: list[int], config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    model = tiny_model(dtype=torch.bfloat16, device="cuda", **(GPU_SIZES | config))
    prompting = Prompting(batch, padding, 600, model)
    for length in (70, 127, 128, 129, 17, 66):
        prompting.take(length)
    assert len(list(tmp_path.iterdir())) == 4  # the first length's, and buckets of 128, 256 and 32


def test_a_full_cache_and_unknown_tokens_are_refused_before_anything_is_written() -> None:
    model = tiny_model(num_layers=1)
    ours, cache = compiled(model), new_cache(model, 2, 64)
    with torch.inference_mode():
        ours(input_ids=marked(random_ids(2, 40)), past_key_values=cache)
        before = cache.layers[0].keys.clone()
        with pytest.raises(IndexRangeError, match="full.*from 0 to 64, less how many there are, got 40"):
            ours(input_ids=marked(random_ids(2, 25)), past_key_values=cache)
        wrong = random_ids(2, 24)
        wrong[1, -1] = 96
        with pytest.raises(IndexRangeError, match="token ids from 0 to 95, got 96"):
            ours(input_ids=marked(wrong), past_key_values=cache)
        assert torch.equal(cache.layers[0].keys, before)
        assert cache.layers[0].cumulative_length == 40
        ours(input_ids=marked(random_ids(2, 24)), past_key_values=cache)
    assert cache.layers[0].cumulative_length == 64


@pytest.mark.slow
def test_more_positions_than_asked_for_run_eagerly_beside_those_in_buckets(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(dtype=torch.float32, num_layers=1)
    ours = torch.compile(model, backend="mpk", options={"max_positions": 24, "while_building": "wait"})
    with torch.inference_mode(), caplog.at_level(logging.INFO, "torch_mpk"):
        for length in (30, 20, 40, 24):
            ids = marked(random_ids(2, length))
            caches = [new_cache(model, 2, 64) for _ in range(2)]
            logits = [run(input_ids=ids, past_key_values=c).logits for run, c in zip((ours, model), caches)]
            torch.testing.assert_close(*logits)
    assert caplog.text.count("(prefill), where max_positions is 24") == 1


@pytest.mark.slow
def test_a_verified_prompt_in_a_bucket_is_right() -> None:
    model = tiny_model(dtype=torch.float32, num_layers=1)
    ours = torch.compile(model, backend="mpk", options=STRICT | {"verify": 1})
    with torch.inference_mode():
        for length in (20, 33, 40):
            ours(input_ids=marked(random_ids(2, length)), past_key_values=new_cache(model, 2, 64))


def test_prompts_run_eagerly_while_their_bucket_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    model = tiny_model(dtype=torch.float32, num_layers=1)
    options = {"fallback": "error", "while_building": "eager"}
    ours, num_built = torch.compile(model, backend="mpk", options=options), 0
    go_on, build = threading.Event(), pipeline.build
    monkeypatch.setattr(pipeline, "build", lambda *args: build(*args) if go_on.wait(60) else None)

    def take(length: int) -> None:
        ids = marked(random_ids(2, length))
        caches = [new_cache(model, 2, 64) for _ in range(2)]
        logits = [run(input_ids=ids, past_key_values=c).logits for run, c in zip((ours, model), caches)]
        torch.testing.assert_close(*logits)
        torch.testing.assert_close(*(cache.layers[0].keys for cache in caches))
        assert caches[0].layers[0].cumulative_length == length

    with torch.inference_mode():
        for lengths in ((40, 41), (20, 31), (1, 1)):  # two buckets, and a step
            go_on.clear()
            with contextlib.nullcontext() if num_built else pytest.warns(MpkWarning, match="in the background"):
                take(lengths[0])
            take(lengths[1])
            assert len(list(tmp_path.iterdir())) == num_built
            go_on.set()
            assert background.wait(60)
            num_built += 1
            assert len(list(tmp_path.iterdir())) == num_built
            take(lengths[1])


WEIGHT = torch.randn(96, 16)
KEYS = torch.randn(1, 2, 64, 8)
HELD = torch.randn(1, 5, 16)


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape[0], x.shape[1], 2, 8).transpose(1, 2)


def attend_to_itself(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True)


def scores(x: torch.Tensor, keys: torch.Tensor | None = None) -> torch.Tensor:
    return x @ (x if keys is None else keys).transpose(1, 2) / 64


def behind(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([HELD, x], 1)


def attend_to_a_window(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[1] + HELD.shape[1])
    mask = places <= torch.arange(x.shape[1])[:, None] + HELD.shape[1]
    return F.scaled_dot_product_attention(heads(x), heads(behind(x)), heads(behind(x)), mask)


def attend_from_the_first(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(heads(x), heads(behind(x)), heads(behind(x)), is_causal=True)


def write_behind(x: torch.Tensor) -> torch.Tensor:
    cache = KEYS.clone()
    return cache.index_copy_(2, torch.arange(x.shape[1]).flip(0) + 3, heads(x))


APART: dict[str, Callable[[torch.Tensor], Any]] = {
    "last": lambda x: (x[:, -1:], x[:, -2]),
    "first": lambda x: (x[:, 0], x[:, 0] * 2),
    "row of a table": lambda x: x + WEIGHT[: x.shape[1]],
    "gathered": lambda x: x + WEIGHT.T.contiguous().gather(0, (x[0] > 0).long()),
    "masked": lambda x: F.scaled_dot_product_attention(heads(x), KEYS, KEYS, torch.ones(x.shape[1], 64).bool()),
    "numbered": lambda x: x + torch.arange(x.shape[1])[:, None].float(),
    "scaled": lambda x: x * x.shape[1],
    "divided": lambda x: x.long() // 3,
    "stacked": lambda x: torch.stack([x, -x], -1).flatten(-2),
    "itself": attend_to_itself,
    "weights": lambda x: torch.softmax(scores(x), -1) @ x,
    "written": lambda x: KEYS.clone().index_copy_(2, torch.arange(x.shape[1]) + 3, heads(x)),
    "chosen": lambda x: WEIGHT[torch.arange(x.shape[1])],
    "behind a window": attend_to_a_window,
    "weights of a window": lambda x: torch.softmax(scores(x, behind(x)), -1) @ behind(x),
    "last of a window": lambda x: behind(x)[:, -24:],
}
MIXED: dict[str, Callable[[torch.Tensor], Any]] = {
    "cumsum": lambda x: x.cumsum(1),
    "mean": lambda x: x.mean(1),
    "softmax": lambda x: x.softmax(1),
    "flip": lambda x: x.flip(1),
    "second": lambda x: x[:, 1],
    "first, written": lambda x: x.clone()[:, 0].add_(1),
    "first ones": lambda x: x[:, :1],
    "rows from the second on": lambda x: x + WEIGHT[1 : x.shape[1] + 1],
    "rest": lambda x: x[:, 2:],
    "cat": lambda x: torch.cat([x, x], 1),
    "merged": lambda x: x.expand(2, -1, -1).reshape(-1, 16) + 1,
    "pad": lambda x: F.pad(x, (0, 0, 1, 0)),
    "pairs": lambda x: scores(x) @ x,
    "pairs of queries": lambda x: torch.softmax(scores(x), -2) @ x,
    "pairs turned": lambda x: torch.softmax(scores(x), -1).transpose(1, 2) @ x,
    "pairs summed": lambda x: torch.softmax(scores(x), -1).sum(-2),
    "pairs given back": lambda x: torch.softmax(scores(x), -1),
    "product": lambda x: x.transpose(1, 2) @ x,
    "backwards": write_behind,
    "norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "counter": lambda x: torch.arange(x.shape[1]).add_(1) * 2,
    "divisors": lambda x: 7 % (x.abs().long() + 1),  # a padded one may be 0, which raises on the CPU
    "window given back": behind,
    "window cut": lambda x: behind(x)[:, 1:][:, -4:],
    "window at the end": lambda x: torch.cat([x, HELD], 1)[:, -4:],
    "window counted from its first": attend_from_the_first,
    "keys of a window cut": lambda x: torch.softmax(scores(x, behind(x)), -1)[..., 1:] @ behind(x)[:, 1:],
}


@pytest.mark.parametrize("name", [*APART, *MIXED])
def test_what_mixes_positions_is_built_for_each_length(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def function(ids: torch.Tensor, weight: torch.Tensor) -> Any:
        x = F.linear(F.embedding(ids, WEIGHT), weight)
        return x + 1, (APART | MIXED)[name](x)

    ours = torch.compile(function, backend="mpk", options={"while_building": "wait", "min_segment_nodes": 1})
    with torch.inference_mode(), caplog.at_level(logging.INFO, "torch_mpk"):
        weight = torch.randn(16, 16) / 4  # keeps x near 1: sums of larger products differ by more, where they cancel
        for length in (20, 23, 33):
            ids = marked(random_ids(1, length))
            torch.testing.assert_close(ours(ids, weight), function(ids, weight))
    assert ("prompts cannot be padded" in caplog.text or "its sizes must satisfy" in caplog.text) == (name in MIXED)


BEGUN = torch.randn(1, 12, 16)


def attend_to_what_it_holds(x: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    joined = torch.cat([held, x], 1)
    mask = torch.arange(joined.shape[1]) <= torch.arange(x.shape[1])[:, None] + held.shape[1]
    return F.scaled_dot_product_attention(heads(x), heads(joined), heads(joined), mask)


BEHIND: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "seen": lambda x, n: attend_to_what_it_holds(x, BEGUN[:, :n]),
    "last": lambda x, n: torch.cat([BEGUN[:, :n], x], 1)[:, -20:],
    "weights": lambda x, n: (
        torch.softmax(scores(x, torch.cat([BEGUN[:, :n], x], 1)), -1) @ torch.cat([BEGUN[:, :n], x], 1)
    ),
}
ELSEWHERE: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "from the second on": lambda x, n: attend_to_what_it_holds(x, BEGUN[:, 1 : n + 1]),
    "every other": lambda x, n: attend_to_what_it_holds(x, BEGUN[:, : n + 1 : 2]),
    "at the end": lambda x, n: torch.cat([x, BEGUN[:, :n]], 1)[:, -20:],
    "given back": lambda x, n: torch.cat([BEGUN[:, :n], x], 1),
    "a copy": lambda x, n: attend_to_what_it_holds(x, BEGUN[:, :n] * 2),
    "of two sizes": lambda x, n: (
        attend_to_what_it_holds(x, BEGUN[:, :n]) + attend_to_what_it_holds(x, BEGUN.repeat(1, 2, 1)[:, :n])
    ),
    "twice": lambda x, n: torch.cat([BEGUN[:, :n], BEGUN[:, :n], x], 1)[:, -20:],
}


@pytest.mark.parametrize("name", [*BEHIND, *ELSEWHERE])
def test_what_a_begun_window_holds_stands_in_front(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def function(ids: torch.Tensor, weight: torch.Tensor, held: int) -> Any:
        x = F.linear(F.embedding(ids, WEIGHT), weight)
        return x + 1, (BEHIND | ELSEWHERE)[name](x, held)

    ours = torch.compile(function, backend="mpk", options={"while_building": "wait", "min_segment_nodes": 1})
    with torch.inference_mode(), caplog.at_level(logging.INFO, "torch_mpk"):
        weight = torch.randn(16, 16) / 4
        for length, held in ((20, 4), (23, 7), (33, 3), (24, 10)):
            ids = marked(random_ids(1, length))
            torch.testing.assert_close(ours(ids, weight, held), function(ids, weight, held))
    assert ("prompts cannot be padded" in caplog.text) == (name in ELSEWHERE)


def test_inputs_with_positions_may_be_neither_written_nor_returned(caplog: pytest.LogCaptureFixture) -> None:
    def write(ids: torch.Tensor) -> torch.Tensor:
        x = F.linear(F.embedding(ids, WEIGHT), WEIGHT)
        ids.add_(1)
        return x

    def give_back(ids: torch.Tensor) -> Any:
        return F.linear(F.embedding(ids, WEIGHT), WEIGHT), ids.view(-1)

    for function in (write, give_back):
        ours = torch.compile(function, backend="mpk", options={"while_building": "wait"})
        with torch.inference_mode(), caplog.at_level(logging.INFO, "torch_mpk"):
            for length in (20, 23):
                given = [marked(random_ids(1, length).clamp(max=90))]
                given.append(marked(given[0].clone()))
                torch.testing.assert_close(ours(given[0]), function(given[1]))
                assert torch.equal(*given)
    assert [caplog.text.count(why) for why in ("of what it writes", "prompts cannot be padded")] == [1, 1]
