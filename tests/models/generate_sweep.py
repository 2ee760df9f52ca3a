"""``torch_mpk.generate`` against Hugging Face's ``generate`` for every class of transformers that generates text.

Each class is made small from its own default configuration. The result for each is ``equal``, the same tokens;
``refused``, an ``ArgumentError`` that says why; ``not made``, where no small configuration constructs or where Hugging
Face's own ``generate`` fails; or ``WRONG``. ``python -m tests.models.generate_sweep [names]`` prints the table.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import torch_mpk
import torch_mpk.backend
from torch_mpk.errors import ArgumentError

_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
)
VOCAB_SIZE = 96
_TEXT_IDS = 64  # prompts have none of the ids above, where special tokens are
PROMPT_LENGTH = 7
NEW_TOKENS = 8
CASES = tuple(itertools.product((1, 3), (False, True)))  # rows, and whether they are padded

# By the name of a field, wherever it stands in a configuration.
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "tgt_vocab_size", "src_vocab_size", "decoder_vocab_size"), VOCAB_SIZE),
    **dict.fromkeys(("vocab_size_per_layer_input",), VOCAB_SIZE),
    **dict.fromkeys(
        (
            *(
                "hidden_size",
                "d_model",
                "n_embd",
                "dim",
                "embed_dim",
                "embedding_size",
                "word_embed_proj_dim",
                "emb_dim",
            ),
            *("lru_width", "embedding_dim", "output_dim", "out_hidden_size", "text_hidden_size", "projection_dim"),
            *("encoder_hidden_size", "cross_attention_hidden_size", "attention_hidden_size", "hidden_size_global"),
            *("projector_hidden_size", "input_embedding_size", "output_embedding_size", "backbone_hidden_size"),
            *("num_features", "vision_output_dim", "projection_hidden_size", "vision_hidden_size", "dim_model_base"),
            *("adapter_out_dim", "patch_embed_hidden_size"),
        ),
        32,
    ),
    **dict.fromkeys(
        (
            *("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "dff", "dim_ff", "n_inner"),
            *("ffn_hidden_size", "feed_forward_size", "mlp_dim", "intermediate_size_mlp", "dense_intermediate_size"),
            *("shared_intermediate_size", "expert_ffn_hidden_size", "d_inner", "mamba_d_ssm"),
        ),
        64,
    ),
    **dict.fromkeys(
        (
            *("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
            *("shared_experts_intermediate_size", "kv_lora_rank", "adapter_rank", "hidden_size_per_layer_input"),
            *("gated_norm_rank", "router_hidden_size", "adapter_in_dim"),
        ),
        16,
    ),
    **dict.fromkeys(
        (
            *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
            *("num_decoder_layers", "num_encoder_layers", "speech_encoder_layers", "t2u_encoder_layers"),
            *("t2u_decoder_layers", "depth", "num_global_layers", "conf_num_hidden_layers", "num_blocks", "layers"),
            *("num_layers_per_stack", "resampler_depth"),
        ),
        2,
    ),
    **dict.fromkeys(
        (
            *("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "attention_heads"),
            *("decoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"),
            *("swa_num_attention_heads", "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"),
            *("num_sliding_attention_heads", "linear_num_heads", "conf_num_attention_heads"),
        ),
        4,
    ),
    **dict.fromkeys(("linear_num_key_heads", "mamba_n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(
        (
            *("head_dim", "swa_head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
            *("linear_key_head_dim", "linear_value_head_dim", "index_head_dim", "state_size", "mamba_d_state"),
            *("ssm_state_size", "attention_head_size", "kv_channels", "linear_head_dim", "dim_head"),
        ),
        8,
    ),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim", "qk_head_dim", "global_head_dim"), 16),
    **dict.fromkeys(
        (
            *("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
            *("mamba_dt_rank", "time_step_rank", "rotary_dim", "pe_dim"),
        ),
        4,
    ),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group", "topk_group"), 1),
    "q_lora_rank": 24,
    "index_n_heads": 32,  # fewer would often be all below 0, and their keys tie
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 64),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size"), 5),
    **dict.fromkeys(("index_topk", "chunk_size", "mamba_chunk_size"), 4),
    **dict.fromkeys(("laurel_rank", "d_rel"), 4),
    **dict.fromkeys(("initializer_range", "init_std", "initializer_std"), 0.2),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FEW_HEADS = ("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads", "num_query_groups", "kv_n_heads")
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_THREE_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_MROPE = {"text_config": {"rope_parameters": _THREE_AXES}}
_MROPE_OF_16 = {"text_config": {"rope_parameters": _THREE_AXES | {"mrope_section": [4, 2, 2]}, "hidden_size": 64}}
_LAYERS = {"num_hidden_layers": 3}
# Where a class's own validation, or its arithmetic, wants other values; merged over the small ones. ``...`` takes one
# away.
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "BailingHybridForCausalLM": {
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "qk_head_dim": ...,
        "num_key_value_heads": 4,
        "linear_head_dim": ...,
        "linear_num_heads": ...,
        "num_expert_group": 1,
        "topk_group": 1,
    },
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "BeamForCausalLM": {"rope_parameters": ...},
    "BltForCausalLM": {"encoder_hash_byte_group_vocab": 50},
    "CohereCompassForCausalLM": {"rope_parameters": ...},
    "CohereCompassForConditionalGeneration": {"text_config": {"rope_parameters": ...}},
    "DbrxForCausalLM": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}, "num_key_value_heads": 2},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2, "qk_head_dim": ..., "first_k_dense_replace": 1},
    "Dots1ForCausalLM": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "attention_layers": ..., "window_size": 5},
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    **dict.fromkeys(("Glm46VForConditionalGeneration", "Glm4vForConditionalGeneration"), _MROPE_OF_16),
    **dict.fromkeys(("GlmOcrForConditionalGeneration",), _MROPE_OF_16),
    "Glm4vMoeForConditionalGeneration": {
        "text_config": {"rope_parameters": _THREE_AXES | {"partial_rotary_factor": 0.5}, "hidden_size": 64}
    },
    "GraniteMoeHybridForCausalLM": _HYBRID,
    "HrmTextForCausalLM": {"num_hidden_layers": ...},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 8},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 8},
    "HunYuanVLForConditionalGeneration": {"text_config": {"head_dim": 8}},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mamba2ForCausalLM": {"head_dim": 16, "n_groups": 2},
    "MinistralForCausalLM": {"head_dim": 8},
    "Mistral4ForCausalLM": {"head_dim": 16, "qk_head_dim": ...},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "NemotronHForCausalLM": {"layers_block_type": ["linear_attention", "full_attention", "mlp"], "n_groups": 2},
    **dict.fromkeys(("PaddleOCRVLForConditionalGeneration", "Qwen2VLForConditionalGeneration"), _MROPE),
    **dict.fromkeys(("Qwen2_5_VLForConditionalGeneration",), _MROPE),
    "Qwen4ExpForCausalLM": _HYBRID,
    "RecurrentGemmaForCausalLM": _LAYERS,
    "ReformerModelWithLMHead": {
        "is_decoder": True,
        "axial_pos_shape": (8, 8),
        "axial_pos_embds_dim": (16, 16),
        "attn_layers": ("local", "lsh"),
        "num_hidden_layers": ...,
        "num_buckets": 4,
    },
    "Step3p7ForConditionalGeneration": {"text_config": {"sliding_window": 5}},
    "XmodForCausalLM": {"default_language": "en_XX", "is_decoder": True},
    "Zamba2ForCausalLM": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_query_groups": 4,
        "kv_channels": ...,
        "n_mamba_heads": 4,
        "hybrid_layer_ids": ...,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
    },
    "ZambaForCausalLM": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"],
    },
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "xLSTMForCausalLM": {"hidden_size": 64, "embedding_dim": 64, "num_blocks": 2},
    "ChameleonForConditionalGeneration": {"vocabulary_map": {"<image>": 90}},
    "Emu3ForConditionalGeneration": {"vocabulary_map": {"<image>": 90}},
    "Qwen2_5OmniThinkerForConditionalGeneration": _MROPE,
    "MoshiForCausalLM": {"audio_vocab_size": 32},
}


# Decoders that are refused: no static cache suits them.
REFUSED = {
    *("CpmAntForCausalLM", "DeepseekV4ForCausalLM", "GPTNeoForCausalLM", "GitForCausalLM", "Inkling2ForCausalLM"),
    *("Inkling2ForConditionalGeneration", "InklingForCausalLM", "MiniMaxForCausalLM", "MptForCausalLM"),
    *("OpenAIGPTLMHeadModel", "PaliGemmaForConditionalGeneration", "ProphetNetForCausalLM", "RwkvForCausalLM"),
    *("ReformerModelWithLMHead", "XLMWithLMHeadModel", "XLNetLMHeadModel"),
}
# No small configuration constructs, or Hugging Face's own generate fails on ids alone, as where an image has to come.
WITHOUT_SMALL = {
    "BeamForCausalLM",
    "Blip2ForConditionalGeneration",
    "BlipForConditionalGeneration",
    "BltForCausalLM",
    "CohereCompassForCausalLM",
    "CohereCompassForConditionalGeneration",
    "DeepseekOcr2ForConditionalGeneration",
    "DiffusionGemmaForBlockDiffusion",
    "Dots3NoteForCausalLM",
    "Dots3NoteForConditionalGeneration",
    "Emu3ForConditionalGeneration",
    "Ernie4_5_VLMoeForConditionalGeneration",
    "FastVlmForConditionalGeneration",
    "FunAsrNanoForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4AssistantForCausalLM",
    "Gemma4UnifiedAssistantForCausalLM",
    "Glm5NextForConditionalGeneration",
    "Granite4VisionForConditionalGeneration",
    "GraniteSpeechForConditionalGeneration",
    "GraniteSpeechPlusForConditionalGeneration",
    "HunYuanVLForConditionalGeneration",
    "IdeficsForVisionText2Text",
    "InklingForConditionalGeneration",
    "InstructBlipForConditionalGeneration",
    "InstructBlipVideoForConditionalGeneration",
    "JanusForConditionalGeneration",
    "Kosmos2ForConditionalGeneration",
    "KyutaiSpeechToTextForConditionalGeneration",
    "Molmo2ForConditionalGeneration",
    "MoonshineStreamingForConditionalGeneration",
    "MuseSparkForConditionalGeneration",
    "MusicgenForCausalLM",
    "MusicgenMelodyForCausalLM",
    "Nemotron3_5TranscribeForConditionalGeneration",
    "NemotronH_Omni_Reasoning_V3",
    "PI0ForConditionalGeneration",
    "PerceptionLMForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    "Qwen4ExpForCausalLM",
    "Qwen4ExpForConditionalGeneration",
    "VibeVoiceAsrForConditionalGeneration",
    "VibeVoiceForConditionalGeneration",
    "VoxtralRealtimeForConditionalGeneration",
    "xLSTMForCausalLM",
}


def names() -> list[str]:
    """Lists every class of the mappings. No model is imported, which takes some seconds for all."""
    listed = (
        models
        for mapping in _MAPPINGS
        for kind, models in getattr(modeling_auto, f"{mapping}_NAMES").items()
        if kind in CONFIG_MAPPING_NAMES
    )
    return sorted({name for models in listed for name in ([models] if isinstance(models, str) else models)})


def classes_of(name: str) -> tuple[type[PreTrainedConfig], type[PreTrainedModel]]:
    """A model's configuration and itself."""
    model = getattr(transformers, name)
    return model.config_class, model


# ---- small models ----


def is_encoder(name: str) -> bool:
    config, _ = classes_of(name)
    is_decoder = name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return not is_decoder and bool(small_config(config, name).is_encoder_decoder)


def small_config(kind: type[PreTrainedConfig], name: str = "") -> PreTrainedConfig:
    fields = _small_fields(kind())
    if name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and fields.get("is_decoder") is False:
        fields["is_decoder"] = True  # of a family that has encoders, too
    return kind(**_merged(fields, _EXCEPTIONS.get(name, {})))


def _merged(fields: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    merged = dict(fields)
    for key, value in others.items():
        merged[key] = _merged(fields[key], value) if isinstance(value, dict) and key in fields else value
        if value is ...:
            del merged[key]
    return merged


def _small_fields(config: PreTrainedConfig) -> dict[str, Any]:
    values = {key: value for key, value in vars(config).items() if not key.startswith("_")}
    ids = itertools.count(VOCAB_SIZE - 1, -1)
    small: dict[str, Any] = {}
    heads = next((values[key] for key in ("num_attention_heads", "n_head", "num_heads") if values.get(key)), None)
    for key, value in values.items():
        if isinstance(value, PreTrainedConfig):
            small[key] = {"model_type": value.model_type} | _small_fields(value)
        elif key in _FEW_HEADS and isinstance(value, int):
            small[key] = 1 if value == 1 else 4 if value == heads else 2
        elif key in _SMALL and value is not None and not isinstance(value, (list, tuple)):
            small[key] = _SMALL[key]
        elif key == "rope_parameters" and isinstance(value, dict):
            small[key] = _small_rope(value)
        elif key == "is_decoder":
            small[key] = value
        elif key.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            small[key] = next(ids)
    return small | _small_layers(values)


def _small_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    if any(isinstance(value, dict) for value in parameters.values()):
        return {key: _small_rope(value) for key, value in parameters.items()}
    small = {"rope_type": "default", "rope_theta": 1e4} | {k: v for k, v in parameters.items() if v is not None}
    return small | ({"mrope_section": [2, 1, 1]} if "mrope_section" in small else {})


def _small_layers(values: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind, where a configuration lists kinds."""
    count = values.get("num_hidden_layers")
    lists = {
        key: list(value)
        for key, value in values.items()
        if isinstance(value, (list, tuple)) and isinstance(count, int) and len(value) == count and count > 2
    }
    if not lists:
        return {}
    kinds = [str(kind) for kind in zip(*lists.values(), strict=True)]
    kept = sorted({kinds.index(kind) for kind in kinds})[:4]
    if len(kept) == 1:
        kept.append(kept[0] + 1)
    return {key: [value[i] for i in kept] for key, value in lists.items()} | {"num_hidden_layers": len(kept)}


def small_model(name: str) -> PreTrainedModel:
    config_class, model_class = classes_of(name)
    torch.manual_seed(0)
    config = small_config(config_class, name)
    config._attn_implementation = None
    with torch.device("meta" if config.is_encoder_decoder and "CausalLM" not in name else "cpu"):
        model = model_class(config).eval()
    if model.generation_config is not None:
        for field in ("eos_token_id", "pad_token_id", "bos_token_id", "forced_eos_token_id", "forced_bos_token_id"):
            setattr(model.generation_config, field, None)
    if not model.config.is_encoder_decoder:
        size = sum(parameter.numel() for parameter in model.parameters())
        if size > 30e6:
            raise ValueError(f"{size / 1e6:.0f} million weights are not small")
        _spread(model)
    return model


@torch.no_grad()
def _spread(model: PreTrainedModel) -> None:
    """Spreads logits, for a wrong one to show."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.2)


# ---- comparison ----


@dataclasses.dataclass
class Row:
    name: str
    result: str  # equal, refused, not made, WRONG
    why: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.result:9} {self.name:45} {self.seconds:5.1f} s  {self.why}"


@contextlib.contextmanager
def _graphs_run_eagerly() -> Iterator[None]:
    """Dynamo sees the step, and nothing is built of its graphs."""
    with mock.patch.object(torch_mpk.backend, "mpk", lambda gm, inputs, **kwargs: gm.forward):
        yield


def compare(
    name: str, cases: Iterable[tuple[int, bool]] = CASES, num_built: int = 1, num_traced: int = len(CASES)
) -> Row:
    """Of the first ``num_built`` cases the step's graph is built, and of ``num_traced`` it is traced; the rest call the
    model as these do, without Dynamo, in a third of the time."""
    start = time.perf_counter()
    try:
        model = small_model(name)
    except Exception as error:
        return Row(name, "not made", _line(error), time.perf_counter() - start)
    result, why = "equal", ""
    for i, (rows, is_padded) in enumerate(cases):
        how = torch.compiler.set_stance("force_eager") if i >= num_traced else contextlib.nullcontext()
        with how, contextlib.nullcontext() if i < num_built else _graphs_run_eagerly():
            result, why = _compare_case(model, rows, is_padded)
        torch.compiler.reset()
        if result != "equal":
            why = f"{rows} rows{', padded' if is_padded else ''}: {why}"
            break
    del model
    gc.collect()
    return Row(name, result, why, time.perf_counter() - start)


def _compare_case(model: PreTrainedModel, rows: int, is_padded: bool) -> tuple[str, str]:
    torch.manual_seed(rows)
    ids = torch.randint(3, _TEXT_IDS, (rows, PROMPT_LENGTH))
    mask = torch.ones_like(ids)
    if is_padded:
        mask[0, :3] = 0
    given = {"attention_mask": mask} if is_padded else {}
    if model.config.is_encoder_decoder:
        expected = None
    else:
        try:
            expected = model.generate(
                ids,
                **given,
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        except Exception as error:
            return "not made", f"Hugging Face's generate: {_line(error)}"
    try:
        actual = torch_mpk.generate(model, ids, NEW_TOKENS, do_sample=False, **given)
    except ArgumentError as error:
        return "refused", _line(error)
    except Exception as error:
        if "-v" in sys.argv:
            traceback.print_exc()
        return "WRONG", f"raw error: {_line(error)}"
    if expected is None:
        return "WRONG", "an encoder is not refused"
    return _judge(actual, expected)


def _judge(actual: torch.Tensor, expected: Any) -> tuple[str, str]:
    """Behind a near tie of two tokens, rows go different ways."""
    if actual.shape != expected.sequences.shape:
        return "WRONG", f"shape {list(actual.shape)}, not {list(expected.sequences.shape)}"
    for row, (ours, theirs) in enumerate(zip(actual, expected.sequences, strict=True)):
        differing = (ours != theirs).nonzero()
        if not len(differing):
            continue
        at = int(differing[0]) - PROMPT_LENGTH
        logits = expected.logits[at][row].float()
        margin = float(logits.max() - logits[ours[PROMPT_LENGTH + at]])
        if not logits.isfinite().all() or margin > 1e-3 * float(logits.abs().max()):
            return "WRONG", f"token {at} of row {row} differs, {margin:.3g} less likely"
    return "equal", ""


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("-v", action="store_true", help="print tracebacks")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th class, from the i-th on")
    parser.add_argument("--cases", type=int, default=len(CASES), help="so many, the last first")
    parser.add_argument("--built", type=int, default=1, help="cases whose graphs are built")
    parser.add_argument("--traced", type=int, default=len(CASES), help="cases that Dynamo traces")
    arguments = parser.parse_args()
    part, count = map(int, arguments.part.split("/"))
    chosen = arguments.names or names()[part::count]
    transformers.logging.set_verbosity_error()
    counts: Counter[str] = Counter()
    for name in chosen:
        row = compare(name, CASES[::-1][: arguments.cases], arguments.built, arguments.traced)
        counts[row.result] += 1
        print(row, flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
