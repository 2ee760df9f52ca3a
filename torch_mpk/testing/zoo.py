"""Models of many families, tiny: what of a call is one launch, what comes apart, and why.

``python -m torch_mpk.testing.zoo > docs/models.md`` writes the table down.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, StaticCache

from torch_mpk.capture.aliasing import is_scalar, is_view
from torch_mpk.capture.graph import capture, number_positions
from torch_mpk.dispatch.admission import check_call, check_graph
from torch_mpk.errors import DeclinedError, UnsupportedError
from torch_mpk.partition.segments import partition
from torch_mpk.patterns import apply
from torch_mpk.ranks.sharding import localise
from torch_mpk.testing.tiny import VOCAB_SIZE, random_ids

CACHE_LENGTH = 16
PROMPT_LENGTH = 4

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # spreads the logits, so that a wrong one shows
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_SLIDING = {"head_dim": 8, "sliding_window": 6, "num_hidden_layers": 2}
_MIXED_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
_GPT2_SIZES = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
_MAMBA = {"mamba_d_state": 8, "mamba_dt_rank": 4}
_MAMBA_2 = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_ssm": 64}
_MLA = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
_MLA |= {"v_head_dim": 8, "head_dim": 8}
# Of two layers the first is dense.
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
_ROUTED |= {"n_group": 2, "topk_group": 1, "num_hidden_layers": 2, "first_k_dense_replace": 1}


@dataclass(frozen=True)
class Decoder:
    """A Hugging Face causal language model, decoded over a static cache."""

    arch: str
    what: str  # sets it apart from a Llama
    config: Mapping[str, Any] = field(default_factory=dict)
    is_dense: bool = True  # expected to be one launch
    is_hybrid: bool = False  # has layers whose state is recurrent

    @property
    def slides(self) -> bool:
        return "sliding_window" in self.config

    def make(self) -> nn.Module:
        own_names = self.arch in ("gpt2", "gptj")
        sizes = _GPT2_SIZES | {"vocab_size": VOCAB_SIZE, "initializer_range": 0.2} if own_names else _SIZES
        config = AutoConfig.for_model(self.arch, **(sizes | dict(self.config)))
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@dataclass(frozen=True)
class Module:
    """Any other module, called with tensors."""

    what: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]  # of a batch size
    is_dense: bool = True


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, **parameters}}


def _hybrid(arch: str, what: str, config: Mapping[str, Any]) -> Decoder:
    return Decoder(arch, what, {"num_hidden_layers": 2, **config}, is_hybrid=True)


def _bert() -> nn.Module:
    sizes = {**_SIZES, "num_key_value_heads": None, "pad_token_id": 0}
    return _HiddenStates(AutoModel.from_config(AutoConfig.for_model("bert", **sizes)).eval())


def _vit() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = AutoConfig.for_model("vit", image_size=16, patch_size=8, initializer_range=0.2, **sizes)
    return _HiddenStates(AutoModel.from_config(config).eval())


class _HiddenStates(nn.Module):
    """An encoder whose only result is its last hidden states."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x).last_hidden_state


class AlibiDecoder(nn.Module):
    """One layer of a decoder whose attention is biased by distance (Press et al., arXiv:2108.12409).

    ``forward(x[B, H], position[1])`` appends to the module's own cache.
    """

    slopes: Tensor
    keys: Tensor
    values: Tensor

    def __init__(self, batch: int = 3, hidden: int = 32, heads: int = 4) -> None:
        super().__init__()
        size = hidden // heads
        self.norm, self.final_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, heads + 1))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, heads, CACHE_LENGTH, size))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        batch, heads, _, size = self.keys.shape
        q, k, v = (t.view(batch, heads, 1, size) for t in self.qkv(self.norm(x)).chunk(3, -1))
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        distance = torch.arange(CACHE_LENGTH, device=x.device) - position
        bias = (self.slopes[:, None] * distance).masked_fill(distance > 0, -torch.inf)
        attended = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=bias[None, :, None].to(x.dtype))
        x = x + self.out(attended.reshape(batch, heads * size))
        return x + self.down(F.gelu(self.up(self.final_norm(x))))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.LayerNorm(40), nn.Linear(40, 7), nn.Softmax(-1)).eval()


MODELS: dict[str, Decoder | Module] = {
    "Qwen2": Decoder("qwen2", "biases of q, k and v"),
    "Qwen3": Decoder("qwen3", "norms of q and k", {"head_dim": 8}),
    "Qwen2-MoE": Decoder(
        "qwen2_moe", "experts, a gated shared one", _EXPERTS | {"shared_expert_intermediate_size": 16}
    ),
    "Qwen3-MoE": Decoder("qwen3_moe", "experts", _EXPERTS | {"head_dim": 8}),
    "Qwen3-Next": _hybrid(
        "qwen3_next",
        "experts, gated delta rule",
        _EXPERTS
        | {"head_dim": 8, "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "OLMoE": Decoder("olmoe", "experts", _EXPERTS | {"intermediate_size": 16}),
    "Mixtral": Decoder("mixtral", "experts whose weights stay in float32", {"num_local_experts": 6}),
    "Llama 4": Decoder(
        "llama4_text",
        "every expert computed, one taken",
        {"head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 4, "interleave_moe_layer_step": 1},
    ),
    "Llama": Decoder("llama", ""),
    "Llama, linear rope": Decoder("llama", "positions scaled", _rope("linear", factor=2.0)),
    "Llama, dynamic rope": Decoder(
        "llama", "frequencies from the length so far", _rope("dynamic", factor=2.0), is_dense=False
    ),
    "Llama, yarn rope": Decoder(
        "llama", "frequencies blended", _rope("yarn", factor=2.0, original_max_position_embeddings=32)
    ),
    "Llama, longrope": Decoder(
        "llama",
        "frequencies chosen by the length so far",
        _rope(
            "longrope", factor=2.0, short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=32
        ),
    ),
    "Llama 3": Decoder(
        "llama",
        "low frequencies scaled",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "Mistral": Decoder("mistral", "sliding window", _SLIDING | {"num_hidden_layers": 1}),
    "Gemma 2": Decoder("gemma2", "logit soft-capping, post-norms, sliding window", _SLIDING | _MIXED_LAYERS),
    "Gemma 3": Decoder("gemma3_text", "two ropes, sliding window", _SLIDING | _MIXED_LAYERS),
    "OLMo 2": Decoder("olmo2", "norms behind attention and MLP"),
    "GPT-NeoX": Decoder("gpt_neox", "parallel blocks, LayerNorm, partial rotary", {"num_key_value_heads": 4}),
    "GPT-J": Decoder("gptj", "parallel blocks, interleaved rope", {"rotary_dim": 4}),
    "GPT-2": Decoder("gpt2", "learned positions, Conv1D"),
    "Phi": Decoder("phi", "parallel blocks, partial rotary", {"partial_rotary_factor": 0.5}),
    "StableLM": Decoder("stablelm", "LayerNorm, partial rotary"),
    "Falcon": Decoder("falcon", "parallel blocks, one key head"),
    "Nemotron": Decoder("nemotron", "squared ReLU"),
    "Cohere": Decoder("cohere", "parallel blocks, interleaved rope, scaled logits"),
    "Cohere 2": Decoder("cohere2", "layers without rope, sliding window", _SLIDING | _MIXED_LAYERS),
    "Granite": Decoder(
        "granite",
        "multipliers",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    ),
    "GLM-4": Decoder("glm4", "norms before and behind, interleaved rope", {"head_dim": 8}),
    "GLM-4-MoE": Decoder("glm4_moe", "experts in groups, a shared one", _ROUTED | {"head_dim": 8}),
    "Granite-MoE": Decoder("granitemoe", "experts, multipliers", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "DeepSeek-V2": Decoder("deepseek_v2", "experts, latent attention, complex rope", _MLA | _ROUTED),
    "DeepSeek-V3": Decoder("deepseek_v3", "experts in groups, latent attention", _MLA | _ROUTED),
    "gpt-oss": Decoder(
        "gpt_oss",
        "experts with biases and clamps, sinks",
        _SLIDING | {"num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "LFM2": _hybrid("lfm2", "short convolutions in place of attention", {"layer_types": ["conv", "full_attention"]}),
    "Jamba": _hybrid("jamba", "Mamba", _MAMBA | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}),
    "Jamba with experts": _hybrid(
        "jamba",
        "Mamba, experts",
        _MAMBA
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 6, "num_experts_per_tok": 2}
        | {"expert_layer_period": 2, "expert_layer_offset": 1},
    ),
    "Granite 4": _hybrid(
        "granitemoehybrid",
        "Mamba 2, multipliers",
        _MAMBA_2 | {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 64},
    ),
    "Falcon-H1": _hybrid("falcon_h1", "attention and Mamba 2 side by side", _MAMBA_2 | {"head_dim": 8}),
    "OLMo Hybrid": _hybrid("olmo_hybrid", "gated delta rule", {"layer_types": ["linear_attention", "full_attention"]}),
    "ALiBi": Module(
        "attention biased by distance", AlibiDecoder, lambda batch: (torch.randn(3, 32), torch.tensor([5]))
    ),
    "BERT": Module("an encoder", _bert, lambda batch: (random_ids(batch, 7),)),
    "ViT": Module("a vision encoder", _vit, lambda batch: (torch.randn(batch, 3, 16, 16),)),
    "MLP": Module("linear layers", _mlp, lambda batch: (torch.randn(batch, 24),)),
}


class DecodeSteps:
    """A batch being decoded on a static cache of its own; the first of several rows is padded on the left.

    The mask grows with every step, or is as long as the cache from the start: the cache hides what is still to come.
    """

    def __init__(self, model: nn.Module, prompt: Tensor, mask_grows: bool = False) -> None:
        self.mask_grows = mask_grows
        self.cache = StaticCache(config=model.config, max_cache_len=CACHE_LENGTH)
        self.mask = prompt.new_ones(len(prompt), prompt.shape[1] if mask_grows else CACHE_LENGTH)
        self.mask[0, : prompt.shape[1] // 2] = 0
        with torch.inference_mode():
            model(input_ids=prompt, past_key_values=self.cache, **self._kwargs())

    def step(self, run: Callable[..., Any], token: Tensor) -> Tensor:
        if self.mask_grows:
            self.mask = torch.cat([self.mask, torch.ones_like(token)], 1)
        return run(input_ids=token, past_key_values=self.cache, **self._kwargs()).logits

    def state(self) -> list[Tensor]:
        values = [value for layer in self.cache.layers for value in vars(layer).values()]
        recurrent = [t for value in values if isinstance(value, dict) for t in value.values()]
        return [t for t in (*values, *recurrent) if isinstance(t, Tensor)]

    def _kwargs(self) -> dict[str, Tensor]:
        return {"attention_mask": self.mask} if len(self.mask) > 1 else {}


# ---- coverage ----


@dataclass
class Coverage:
    """What of a call runs in megakernels."""

    graphs: int = 0  # of Dynamo's
    launches: int = 0
    nodes: int = 0  # that do work: neither views nor sizes
    ours: int = 0
    reasons: dict[str, None] = field(default_factory=dict)

    def add(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> None:
        """Counts a graph of Dynamo's in, as the backend would divide it."""
        self.graphs += 1
        if self.graphs == 2:
            self.reasons["the model branches on a tensor's value, where Dynamo ends a graph"] = None
        try:
            local = localise(gm, inputs)
            gm, inputs = (gm, inputs) if local is None else (local.gm, local.pick(inputs))
            numbers = number_positions(gm, inputs)
            check_call([value for i, value in enumerate(inputs) if i not in numbers])
            captured = capture(gm, inputs)
            check_graph(captured)
        except (UnsupportedError, DeclinedError) as error:
            self.reasons[_plain(str(error))] = None
            return
        with torch._guards.tracing(None):
            partitioned = partition(apply(captured.graph_module), min_segment_nodes=1)
        for segment in partitioned.segments:
            work = sum(
                node.op == "call_function" and not is_view(node) and not is_scalar(node)
                for node in segment.gm.graph.nodes
            )
            self.nodes += work
            if segment.ours:
                self.launches += 1
                self.ours += work
        self.reasons |= {_plain(fallback.why): None for fallback in partitioned.fallbacks}

    def row(self, name: str, what: str) -> str:
        share = f"{100 * self.ours // self.nodes} %" if self.nodes else "–"
        return f"| {name} | {what} | {self.launches} | {share} | {'; '.join(self.reasons)} |"


def _plain(reason: str) -> str:
    reason = re.sub(r"^\S+( from .*?)?: ", "", reason)  # the node's name and place
    return reason.replace("torch.ops.", "").replace("|", "/")


def see_graphs(
    entry: Decoder | Module,
    see: Callable[[torch.fx.GraphModule, list[Any]], None],
    *,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Calls ``see`` with Dynamo's graphs and their inputs: of one decode step, or of a module's call in float32."""

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        see(gm, inputs)
        return gm.forward

    torch.manual_seed(0)
    torch.compiler.reset()
    model = entry.make()
    with torch.inference_mode():
        if isinstance(entry, Decoder):
            model = model.to(dtype)
            run = torch.compile(model, backend=backend)
            DecodeSteps(model, random_ids(batch, PROMPT_LENGTH)).step(run, random_ids(batch, 1))
        else:
            torch.compile(model, backend=backend)(*entry.inputs(batch))


def coverage(entry: Decoder | Module, batch: int = 1) -> Coverage:
    """The coverage of one decode step, or of one call of a module."""
    found = Coverage()
    see_graphs(entry, found.add, batch=batch)
    return found


_PAGE = """# Models

What a call of each family's model is under `torch.compile(model, backend="mpk")`: how many launches, which share of
the graph's operations runs in them, and why the others do not. Where that is several launches, or not all, it is so
with `options={"min_segment_nodes": 1}`; by default only [where that is faster](options.md#min_segment_nodes) than the
whole call without us. Decoders are measured over one decode step on a static cache.
`python -m torch_mpk.testing.zoo > docs/models.md` writes this page, from tiny configurations on the CPU; the
tests compare every model here with eager PyTorch.

Experts: the implementations `grouped_mm`, which is the default, and `batched_mm`, which Hugging Face's `generate` takes
for steps on a GPU, become the same launch, which reads the weights of chosen experts where they lie. So does `eager`:
its loop over experts that were hit is traced as grouped products for this backend alone, with the sums of `grouped_mm`.
Where experts loop in code of their own, as JetMoE's and DBRX's do, Dynamo ends a graph in the loop, and a warning says
where.
Of equal scores the experts with the lowest indices are taken, as eager does on CUDA; on the CPU eager may take others.
Steps of all families of transformers that have this setting are one launch, but for five whose attention keeps them
from it: GLM-5 Next and Qwen 4 (it branches on values), Inkling 2, Unlimited-OCR and Zaya.

Latent attention: where transformers caches latents, as it does for DeepSeek-V2 and V3, GLM-4-MoE-Lite, GLM-MoE-DSA,
Kimi-Linear, Mistral 4 and others with the same attention, a decode step with `sdpa` reads the latents as keys and
values of all heads ([latents](internals/attention.md#latents)). Prompts, steps of several positions and `eager`
attention expand the latents, as the model says.

Linears whose weights are quantised, in FP8 or int8, change nothing of that: [quantised weights](weights.md).

| model | what sets it apart | launches | operations in them | why not the others |
|---|---|---|---|---|"""


def page() -> Iterator[str]:
    yield _PAGE
    for name, entry in MODELS.items():
        yield coverage(entry).row(name, entry.what)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        for line in page():
            print(line, flush=True)
