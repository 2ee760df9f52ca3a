"""A small gpt-oss whose experts are stored in MXFP4, as its publisher stores them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig

_NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SIZES = {"hidden_size": 320, "intermediate_size": 288, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 32,
         "num_key_value_heads": 2, "vocab_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2,
         "max_position_embeddings": 64, "initializer_range": 0.1, "layer_types": ["full_attention"]}  # fmt: skip


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of weight[E, K, N], by rounding to nearest below the power of two that the largest asks for."""
    groups = weight.float().mT.unflatten(2, (-1, 32))
    exponents = groups.abs().amax(-1).clamp_min(1e-30).log2().floor() - 2
    over = groups / torch.exp2(exponents).unsqueeze(-1)
    codes = (over.abs().unsqueeze(-1) - _NUMBERS).abs().argmin(-1) + 8 * (over < 0)
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8), (exponents + 127).to(torch.uint8)


def save_checkpoint(folder: Path, **sizes: Any) -> None:
    config = GptOssConfig(**(SIZES | sizes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "sinks" in name:
            parameter.data.normal_(std=0.1)
    model.config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    model.save_pretrained(folder)
    change_tensors(folder, _quantise_experts)


def _quantise_experts(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = quantised(tensors.pop(name))


def change_tensors(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: each.contiguous() for name, each in tensors.items()}, path, metadata={"format": "pt"})
