"""Prompts: many positions of several sequences, one launch, against eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import StaticCache

from tests.models.stepping import STRICT, assert_as_near
from tests.thinned import thinned
from torch_mpk.errors import IndexRangeError
from torch_mpk.generate import rewind
from torch_mpk.testing.tiny import random_ids, tiny_model

WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


def compiled(model: torch.nn.Module) -> Any:
    """That falls back nowhere, nor runs otherwise while it builds."""
    return torch.compile(model, backend="mpk", options=STRICT)


def new_cache(model: torch.nn.Module, batch: int, max_cache_len: int) -> StaticCache:
    """On the model's device, which a cache that a compiled call is the first to fill is not all on."""
    cache, config = StaticCache(config=model.config, max_cache_len=max_cache_len), model.config
    cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, model.dtype, model.device)
    return cache


class Prompting:
    """Ours, eager and an exact model, each with a cache of its own, that take the same chunks of a batch's prompts."""

    def __init__(self, batch: int, padding: list[int], max_cache_len: int, model: torch.nn.Module) -> None:
        self.model, self.exact = model, copy.deepcopy(model).to(WIDER[model.dtype])
        self.ours = compiled(model)
        self.caches = [new_cache(m, batch, max_cache_len) for m in (model, model, self.exact)]
        self.padding, self.position, self.batch = torch.tensor(padding, device=model.device), 0, batch

    @torch.inference_mode()
    def take(self, length: int, run: bool = True, **kwargs: Any) -> None:
        """``length`` more tokens of each sequence; ``run``: by ours, too, rather than eagerly."""
        end = self.position + length
        if self.padding.any():
            present = torch.arange(end, device=self.model.device) >= self.padding[:, None]
            kwargs |= {
                "attention_mask": present.long(),
                "position_ids": (present.long().cumsum(-1) - 1).clamp(min=0)[:, self.position :],
            }
        ids = random_ids(self.batch, length, self.model.device)
        models = (self.ours if run else self.model, self.model, self.exact)
        logits = [m(input_ids=ids, past_key_values=c, **kwargs).logits for m, c in zip(models, self.caches)]
        live = torch.arange(self.position, end, device=self.model.device) >= self.padding[:, None]
        assert_as_near(*(t[live[:, -t.shape[1] :]] for t in logits))
        for mine, theirs, exacts in zip(*(c.layers for c in self.caches), strict=True):
            counts = [torch.as_tensor(layer.cumulative_length) for layer in (mine, theirs)]
            assert torch.equal(*counts)
            assert_as_near(mine.keys, theirs.keys, exacts.keys)
            assert_as_near(mine.values, theirs.values, exacts.values)
        self.position = end


@pytest.mark.parametrize(
    ("batch", "lengths", "padding", "attention", "dtype", "config"),
    thinned(
        [
            (1, [40], [0], "sdpa", torch.bfloat16, {}),
            (3, [9, 20], [0, 4, 8], "sdpa", torch.float32, {}),
            (2, [9, 20], [3, 0], "eager", torch.bfloat16, {}),
            (2, [6, 20], [0, 5], "sdpa", torch.float32, WINDOW),
            (8, [2, 17], [0] * 8, "eager", torch.float32, {}),
            (2, [64], [0, 60], "sdpa", torch.float32, {}),
            (1, [1, 30, 1], [0], "sdpa", torch.float32, {}),
        ],
        0,
    ),
)
def test_a_prompt_is_eager_s(batch, lengths, padding, attention, dtype, config) -> None:
    prompting = Prompting(batch, padding, 64, tiny_model(attention=attention, dtype=dtype, **config))
    for length in lengths:
        prompting.take(length)


GPU_SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64, "max_position_embeddings": 1024}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "lengths", "padding", "attention", "dtype", "config"),
    [
        (1, [128], [0], "sdpa", torch.bfloat16, {}),
        (1, [300, 1, 70, 129], [0], "sdpa", torch.float16, {"head_dim": 128}),
        (3, [90, 33, 17], [0, 4, 80], "sdpa", torch.bfloat16, {}),
        (2, [100, 200], [3, 0], "eager", torch.bfloat16, {"num_key_value_heads": 1}),
        (8, [20, 40], [0, 1, 2, 3, 4, 5, 6, 19], "sdpa", torch.float16, {"num_key_value_heads": 4}),
        (2, [70, 50], [0, 60], "sdpa", torch.bfloat16, WINDOW),
        (1, [700], [0], "sdpa", torch.bfloat16, {}),
    ],
)
def test_a_prompt_on_a_gpu_is_eager_s(batch, lengths, padding, attention, dtype, config) -> None:
    torch.manual_seed(batch)
    model = tiny_model(attention=attention, dtype=dtype, device="cuda", **(GPU_SIZES | config))
    prompting = Prompting(batch, padding, sum(lengths) + 5, model)
    for length in lengths:
        prompting.take(length)


@pytest.mark.gpu
def test_a_prompt_on_a_gpu_has_the_same_bits_again_and_whatever_stands_beside_it() -> None:
    model = tiny_model(dtype=torch.bfloat16, device="cuda", **GPU_SIZES)
    ours, ids = compiled(model), random_ids(2, 90, "cuda")
    cache = new_cache(model, 2, 128)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        rewind(cache, 0)
        return ours(input_ids=ids, past_key_values=cache).logits

    with torch.inference_mode():
        first = logits(ids)
        assert all(torch.equal(logits(ids), first) for _ in range(20))
        others = torch.cat([ids[:1], random_ids(1, 90, "cuda")])
        assert torch.equal(logits(others)[0], first[0])


def test_a_prompt_continues_what_eager_began_and_steps_continue_it() -> None:
    prompting = Prompting(2, [0, 3], 64, tiny_model(dtype=torch.float32, num_layers=1))
    prompting.take(7, run=False)
    prompting.take(20)
    prompting.take(1)
    prompting.take(1)


@pytest.mark.parametrize("count", thinned([1, 3], 1))
def test_of_a_prompt_only_the_last_logits_may_be_wanted(count: int) -> None:
    Prompting(2, [0, 3], 64, tiny_model(dtype=torch.float32, num_layers=1)).take(20, logits_to_keep=count)


def test_a_prompt_that_the_cache_has_no_room_for_is_refused_before_anything_is_written() -> None:
    model = tiny_model(num_layers=1)
    cache = StaticCache(config=model.config, max_cache_len=24)
    ours = compiled(model)
    with torch.inference_mode():
        ours(input_ids=random_ids(2, 20), past_key_values=cache)
        before = cache.layers[0].keys.clone()
        with pytest.raises(IndexRangeError, match="full.*the first of 20 positions from 0 to 4, got 20"):
            ours(input_ids=random_ids(2, 20), past_key_values=cache)
    assert torch.equal(cache.layers[0].keys, before)


@st.composite
def prompts(draw: st.DrawFn) -> dict[str, Any]:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    batch = draw(st.integers(1, 8))
    # Every sequence has a token in each chunk: of positions before a sequence nothing is said.
    padding = draw(st.lists(st.integers(0, lengths[0] - 1), min_size=batch, max_size=batch))
    config = draw(st.sampled_from([{}, {}, WINDOW, {"num_key_value_heads": 1}, {"head_dim": 24}]))
    return {
        "lengths": lengths,
        "batch": batch,
        "padding": padding,
        "attention": draw(st.sampled_from(["sdpa", "eager"])),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "arch": draw(st.sampled_from(["qwen3", "llama"])) if not config else "qwen3",
        "config": config,
        "room": draw(st.integers(0, 40)),
        "seed": draw(st.integers(0, 2**31)),
    }


def check(case: dict[str, Any]) -> None:
    torch.compiler.reset()
    torch.manual_seed(case["seed"])
    model = tiny_model(case["arch"], attention=case["attention"], dtype=case["dtype"], num_layers=1, **case["config"])
    prompting = Prompting(case["batch"], case["padding"], sum(case["lengths"]) + case["room"], model)
    for length in case["lengths"]:
        prompting.take(length)


@pytest.mark.slow
@settings(max_examples=8)
@given(prompts())
def test_random_prompts(case: dict[str, Any]) -> None:
    check(case)
