"""Full-size models with random weights, from the public configurations: real shapes without a download."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config


def _qwen3(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=tied,
        bos_token_id=151643,
        eos_token_id=151645,
    )


def _llama_3_2_1b() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=True,
        bos_token_id=128000,
        eos_token_id=128001,
    )


CONFIGS = {
    "qwen3-0.6b": lambda: _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": lambda: _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-8b": lambda: _qwen3(4096, 12288, 36, 32, tied=False),
    "llama-1b": _llama_3_2_1b,
}


def random_model(
    config: PreTrainedConfig, device: torch.device | str, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> PreTrainedModel:
    """A causal language model in eval mode with random weights, made on the device: on a GPU 8B take seconds."""
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
