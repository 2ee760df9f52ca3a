"""Architectures that torch_mpk was not made for run through the same call: right, whole or in parts."""

import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from torch_mpk.errors import MpkWarning
from torch_mpk.testing.tiny import random_ids

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

# architecture, what its configuration adds, whether all of a step is ours
ARCHITECTURES = [
    ("qwen2", {}, True),  # biases of q, k, v
    ("ministral", {"head_dim": 8, "sliding_window": 4}, True),  # a cache that slides
    (
        "gemma2",
        {
            "num_hidden_layers": 2,
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 4,
        },
        True,
    ),
    ("gpt_neox", {"num_key_value_heads": 4}, True),  # LayerNorm, rotates a part of each head
    ("cohere", {}, True),  # attention and MLP side by side, interleaved rope
    ("olmo2", {}, True),  # norms behind attention and MLP
    ("gpt2", {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}, False),  # learned positions, Conv1D
    ("mixtral", {"num_local_experts": 4}, False),  # experts
]


@pytest.mark.parametrize(("arch", "extra", "is_whole"), ARCHITECTURES, ids=[arch for arch, *_ in ARCHITECTURES])
def test_decode_equals_eager(device, arch, extra, is_whole):
    sizes = extra | {"vocab_size": 96} if arch == "gpt2" else SIZES | extra
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **sizes), dtype=torch.float32)
    model = model.eval().to(device)
    step = torch.compile(model, backend="mpk")
    prompt = random_ids(2, 3, device)
    caches = [StaticCache(config=model.config, max_cache_len=16) for _ in range(2)]
    with torch.inference_mode(), warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always", MpkWarning)
        for cache in caches:
            model(input_ids=prompt, past_key_values=cache)
        for _ in range(4):
            token = random_ids(2, 1, device)
            actual, expected = (
                run(input_ids=token, past_key_values=cache).logits
                for run, cache in zip((step, model), caches, strict=True)
            )
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert is_whole == all(warning.category is not MpkWarning for warning in record)
    for ours, eager in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(ours.keys, eager.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.values, eager.values, rtol=1e-4, atol=1e-4)
        assert ours.get_seq_length() == eager.get_seq_length() == 7
