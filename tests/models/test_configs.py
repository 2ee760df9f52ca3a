"""The models of the benchmarks are the public ones, and a decode step of each is one segment."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from tests.thinned import thinned
from torch_mpk.testing.decode import copy_cache, decode_logits, in_float32, prefill
from torch_mpk.testing.models import CONFIGS, keep_layers, random_model

# As the model cards say; shared embeddings count once.
MILLIONS_OF_PARAMETERS = {
    "qwen2.5-0.5b": 494.0,
    "qwen2.5-1.5b": 1543.7,
    "qwen3-0.6b": 596.0,
    "qwen3-1.7b": 1720.6,
    "qwen3-4b": 4022.5,
    "qwen3-8b": 8190.7,
    "qwen3-14b": 14768.3,
    "qwen3-32b": 32762.1,
    "llama-1b": 1235.8,
    "llama-3.2-3b": 3212.7,
    "phi-3-mini": 3821.1,
    "gemma-2b": 2506.2,
    "granite-3-2b": 2533.5,
    "olmoe-1b-7b": 6919.2,
    "qwen3-30b-a3b": 30532.1,
    "gpt-oss-20b": 20914.8,
    "deepseek-v2-lite": 15706.5,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_has_the_size_of_the_public_model(name: str) -> None:
    model = random_model(CONFIGS[name](), "meta")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(MILLIONS_OF_PARAMETERS[name], rel=1e-3)


@pytest.mark.parametrize(
    "name", thinned(["qwen2.5-0.5b", "phi-3-mini", "gemma-2b", "granite-3-2b"], 0)
)  # one per architecture
def test_a_layer_with_the_model_s_head_size_is_one_segment(name: str) -> None:
    config = CONFIGS[name]()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    config.num_attention_heads, config.num_key_value_heads = 2, min(2, config.num_key_value_heads)
    config.hidden_size, config.intermediate_size, config.vocab_size = 2 * head_dim, 160, 97
    config.pad_token_id, config.initializer_range = None, 0.2
    keep_layers(config, 1)
    model = random_model(config, "cpu", torch.float32)
    step = torch.compile(model, backend="mpk", options={"fallback": "error"})
    tokens = torch.randint(97, (2, 9))
    cache, _ = prefill(model, tokens[:, :6], 16)
    expected = decode_logits(model, copy_cache(cache, config), tokens[:, 6:])
    torch.testing.assert_close(decode_logits(step, cache, tokens[:, 6:]), expected, rtol=1e-4, atol=1e-4)


def test_all_heads_of_gpt_oss_over_a_long_cache_are_one_segment() -> None:
    """Attention that is no task would be more multiplications than a plain sum may be."""
    config = CONFIGS["gpt-oss-20b"]()
    config.hidden_size, config.intermediate_size, config.vocab_size, config.num_local_experts = 64, 32, 97, 4
    config.initializer_range, config.sliding_window, config.pad_token_id = 0.2, 8, None
    keep_layers(config, 2)
    model = random_model(config, "cpu", torch.float32)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_()
    step = torch.compile(model, backend="mpk", options={"fallback": "error"})
    tokens = torch.randint(97, (3, 12))
    cache, _ = prefill(model, tokens[:, :11], 1024)
    expected = decode_logits(model, copy_cache(cache, config), tokens[:, 11:])
    torch.testing.assert_close(decode_logits(step, cache, tokens[:, 11:]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("arch", "sizes"), [("gpt2", {}), ("gptj", {"n_embd": 1024, "n_head": 4})])
def test_a_layer_of_real_width_is_one_segment(arch: str, sizes: dict[str, int]) -> None:
    """Products and attention that are no tasks would be too large for plain sums."""
    ends = {"bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(arch, n_layer=1, vocab_size=97, n_positions=2048, **ends, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    step = torch.compile(model, backend="mpk", options={"fallback": "error"})
    tokens = torch.randint(97, (3, 6))
    cache, _ = prefill(model, tokens[:, :5], 2048)
    expected = decode_logits(model, copy_cache(cache, config), tokens[:, 5:])
    torch.testing.assert_close(decode_logits(step, cache, tokens[:, 5:]), expected, rtol=1e-4, atol=1e-4)


def test_a_model_in_float32_is_what_a_copy_would_be() -> None:
    config = CONFIGS["gpt-oss-20b"]()
    config.hidden_size, config.intermediate_size, config.vocab_size = 64, 32, 97
    config.sliding_window, config.pad_token_id = 8, None
    keep_layers(config, 2)
    model, tokens = random_model(config, "cpu"), torch.randint(97, (2, 9))
    cache, _ = prefill(model, tokens[:, :6], 16)
    expected = decode_logits(copy.deepcopy(model).float(), copy_cache(cache, config, torch.float32), tokens[:, 6:])
    before = copy.deepcopy(model.state_dict())
    with in_float32(model):
        assert torch.equal(decode_logits(model, copy_cache(cache, config, torch.float32), tokens[:, 6:]), expected)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "gpt-oss-20b"])
def test_the_first_layers_of_a_model_are_all_that_its_cache_has(name: str) -> None:
    config, whole = CONFIGS[name](), CONFIGS[name]()
    keep_layers(config, 3)
    assert (config.num_hidden_layers, config.layer_types) == (3, whole.layer_types[:3])
    assert len(StaticCache(config=config, max_cache_len=16).layers) == 3
    keep_layers(whole, 1000)
    assert whole.to_dict() == CONFIGS[name]().to_dict()
