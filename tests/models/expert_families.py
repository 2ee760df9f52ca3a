"""Every family of transformers whose experts' implementation can be set: tiny decoders with experts in their layers."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.modeling_outputs import CausalLMOutputWithPast

from torch_mpk.testing.tiny import VOCAB_SIZE
from torch_mpk.testing.zoo import DecodeSteps

EXPERTS, CHOSEN = 6, 2

# What configurations call it; each takes those that it has.
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "sliding_window": 32,  # longer than what is decoded
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), CHOSEN),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"), 16),
    "shared_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_layer_types": ["sparse", "sparse"],
    "mlp_only_layers": [],
    "enable_moe_block": True,
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


@dataclass(frozen=True)
class Family:
    """What is not as in most of them."""

    config: Mapping[str, Any] = field(default_factory=dict)
    decoder: str = ""  # the class, where no causal language model takes the configuration
    has_cache: bool = True  # that a decode step can read


_MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
_INDEXER |= {"indexer_budget": 8, "indexer_compress_ratio": 2}
_AXES = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": [1, 1, 2]}
_AXES = {"rope_parameters": _AXES}
_OTHERS = {
    "deepseek_ocr2": Family(decoder="DeepseekOcr2TextModel"),
    # A static cache has no other kind of its layers.
    "deepseek_v4": Family({"mlp_layer_types": ["hash_moe", "moe"], "layer_types": ["sliding_attention"] * 2}),
    "diffusion_gemma": Family(decoder="DiffusionGemmaEncoderTextModel"),
    "ernie4_5_vl_moe": Family({"moe_intermediate_size": [16, 16], **_AXES}, "Ernie4_5_VLMoeTextModel"),
    "glm4v_moe": Family(_AXES, "Glm4vMoeTextModel"),
    "glm5_next": Family({"qk_rope_head_dim": 0}, "Glm5NextTextModel"),
    "granitemoehybrid": Family({**_MAMBA, "layer_types": ["mamba", "attention"]}),
    "lfm2_moe": Family({"layer_types": ["conv", "full_attention"]}),
    "minimax": Family(has_cache=False),
    "mistral4": Family({"head_dim": 16}, "Mistral4Model"),
    "mistral_large4": Family(decoder="MistralLarge4TextModel"),
    "muse_spark": Family(decoder="MuseSparkTextModel"),
    "openai_privacy_filter": Family(decoder="OpenAIPrivacyFilterModel", has_cache=False),
    "qwen3_omni_moe": Family(decoder="Qwen3OmniMoeThinkerTextModel"),
    "qwen3_vl_moe": Family(decoder="Qwen3VLMoeTextModel"),
    "qwen4_exp": Family({**_INDEXER, "layer_types": ["linear_attention", "indexed_attention"]}),
    "unlimited_ocr": Family(decoder="UnlimitedOcrTextModel"),
    "zaya": Family({"num_experts_per_tok": 1}),
}


def families() -> list[str]:
    """Folders of transformers whose models decorate their experts."""
    files = (Path(inspect.getfile(transformers)).parent / "models").glob("*/modeling_*.py")
    return sorted({file.parent.name for file in files if "\n@use_experts_implementation" in file.read_text()})


@functools.cache
def _config(family: str) -> Any:
    made = CONFIG_MAPPING[f"{family}_text" if f"{family}_text" in CONFIG_MAPPING else family]
    default = made()
    known = vars(default).keys() | made.attribute_map.keys()
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    if "kv_lora_rank" in known:
        sizes |= _LATENT
    if "layer_types" in known and "linear_attention" in (default.layer_types or ()):
        sizes["layer_types"] = ["linear_attention", "full_attention"]
    return made(**{**sizes, **_OTHERS.get(family, Family()).config})


class _Decoder(nn.Module):
    """A model without a head, called as one with a head is."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self.set_experts_implementation = model.set_experts_implementation

    def forward(self, **kwargs: Any) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=self.model(**kwargs).last_hidden_state)


def make(family: str) -> nn.Module:
    torch.manual_seed(0)
    config, decoder = _config(family), _OTHERS.get(family, Family()).decoder
    if decoder:
        [file] = (Path(inspect.getfile(transformers)).parent / "models" / family).glob("modeling_*.py")
        module = importlib.import_module(f"transformers.models.{family}.{file.stem}")
        model: nn.Module = _Decoder(getattr(module, decoder)._from_config(config, dtype=torch.float32))
    else:
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, t in (*model.named_parameters(), *model.named_buffers()):
            is_router = t.ndim > 1 or "bias" in name
            if t.is_floating_point() and is_router and (t == t.flatten()[0]).all():  # all scores would be equal
                t.normal_(std=0.2)
    return model.eval()


class Calls:
    """Decode steps on a cache of their own, or whole sequences where a family has none that a step could read."""

    def __init__(self, family: str, model: nn.Module, prompt: Tensor) -> None:
        self.steps = DecodeSteps(model, prompt) if _OTHERS.get(family, Family()).has_cache else None
        self.ids = prompt

    def call(self, run: Callable[..., Any], token: Tensor) -> Tensor:
        if self.steps is not None:
            return self.steps.step(run, token)
        self.ids = torch.cat([self.ids[:, 1:], token], 1)
        return run(input_ids=self.ids, use_cache=False).logits
