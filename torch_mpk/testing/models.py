"""Full-size models with random weights, from the public configurations: real shapes without a download."""

import copy
from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    GemmaConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)


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


def _qwen2_5(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=151936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=151643,
        eos_token_id=151645,
    )


def _llama_3_2(hidden_size: int, num_layers: int, num_heads: int, head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden_size,
        intermediate_size=8192,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=8,
        head_dim=head_dim,
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


def _phi_3_mini_4k() -> Phi3Config:
    return Phi3Config(
        vocab_size=32064,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=32000,
        pad_token_id=32000,
    )


def _gemma_2b() -> GemmaConfig:
    return GemmaConfig(
        vocab_size=256000,
        hidden_size=2048,
        intermediate_size=16384,
        num_hidden_layers=18,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
    )


def _granite_3_2b() -> GraniteConfig:
    return GraniteConfig(
        vocab_size=49155,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=40,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attention_multiplier=0.015625,
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        residual_multiplier=0.22,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def _olmoe_1b_7b() -> OlmoeConfig:
    return OlmoeConfig(
        vocab_size=50304,
        hidden_size=2048,
        intermediate_size=1024,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=False,
        tie_word_embeddings=False,
        eos_token_id=50279,
        pad_token_id=1,
    )


def _qwen3_30b_a3b() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        bos_token_id=151643,
        eos_token_id=151645,
    )


def _gpt_oss_20b() -> GptOssConfig:
    return GptOssConfig(
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=24,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        sliding_window=128,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        num_local_experts=32,
        num_experts_per_tok=4,
        tie_word_embeddings=False,
        eos_token_id=200002,
        pad_token_id=199999,
    )


def _deepseek_v2_lite() -> DeepseekV2Config:
    return DeepseekV2Config(
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=27,
        first_k_dense_replace=1,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=163840,
        rms_norm_eps=1e-6,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        tie_word_embeddings=False,
        bos_token_id=100000,
        eos_token_id=100001,
    )


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen2.5-0.5b": lambda: _qwen2_5(896, 4864, 24, 14),  # biases
    "qwen2.5-1.5b": lambda: _qwen2_5(1536, 8960, 28, 12),
    "qwen3-0.6b": lambda: _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": lambda: _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": lambda: _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": lambda: _qwen3(4096, 12288, 36, 32, tied=False),
    "qwen3-14b": lambda: _qwen3(5120, 17408, 40, 40, tied=False),
    "qwen3-32b": lambda: _qwen3(5120, 25600, 64, 64, tied=False),
    "llama-1b": lambda: _llama_3_2(2048, 16, 32, 64),
    "llama-3.2-3b": lambda: _llama_3_2(3072, 28, 24, 128),
    "phi-3-mini": _phi_3_mini_4k,  # head size 96, fused projections
    "gemma-2b": _gemma_2b,  # head size 256, one key head
    "granite-3-2b": _granite_3_2b,  # an odd vocabulary
    "olmoe-1b-7b": _olmoe_1b_7b,  # 64 experts, of which a row chooses 8
    "qwen3-30b-a3b": _qwen3_30b_a3b,  # 128 experts
    "gpt-oss-20b": _gpt_oss_20b,  # experts with biases, 2,880 columns, sinks
    "deepseek-v2-lite": _deepseek_v2_lite,  # latent attention, a shared expert
}


def keep_layers(config: PreTrainedConfig, num_layers: int) -> None:
    """Cuts a configuration to its first layers, with each of its lists that has an entry for every layer."""
    for name, each in list(vars(config).items()):
        if isinstance(each, list) and len(each) == config.num_hidden_layers:
            setattr(config, name, each[:num_layers])
    config.num_hidden_layers = min(num_layers, config.num_hidden_layers)


def random_model(
    config: PreTrainedConfig, device: torch.device | str, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> PreTrainedModel:
    """A causal language model in eval mode with random weights, made on the device: on a GPU 8B take seconds."""
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def random_sharded_model(
    config: PreTrainedConfig, device: torch.device | str, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> PreTrainedModel:
    """The same, with its weights shared out to all processes by the model's own plan: each makes its part. Collective.
    The head has weights of its own. A seed's weights are those of bfloat16, whatever the dtype.

    The process group is made where there is none, for the environment that ``torchrun`` sets.
    """
    from torch.distributed.tensor import DTensor
    from transformers.distributed import DistributedConfig

    config = copy.deepcopy(config)
    config.tie_word_embeddings = False
    cls = AutoModelForCausalLM._model_mapping[type(config)]
    plan, _, meshes = cls.prepare_distribute_model(DistributedConfig(tp_plan="auto"), device_map=None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = cls.maybe_distribute_model(model, plan, meshes)
    own = torch.Generator(device).manual_seed(seed + 1 + torch.distributed.get_rank())
    common = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                drawn = torch.empty(local.shape, dtype=torch.bfloat16, device=device)
                if "Norm" in type(module).__name__:
                    drawn.fill_(1)
                else:
                    drawn.normal_(std=0.02, generator=own if isinstance(parameter, DTensor) else common)
                drawn = drawn.to(dtype)
                if isinstance(parameter, DTensor):
                    drawn = DTensor.from_local(
                        drawn,
                        parameter.device_mesh,
                        parameter.placements,
                        run_check=False,
                        shape=parameter.shape,
                        stride=parameter.stride(),
                    )
                setattr(module, name, torch.nn.Parameter(drawn, requires_grad=False))
    for module in model.modules():  # what is computed of the configuration
        if hasattr(module, "inv_freq"):
            fresh = type(module)(config).to(device)
            module.inv_freq, module.original_inv_freq = fresh.inv_freq, fresh.inv_freq
    return model.eval()
