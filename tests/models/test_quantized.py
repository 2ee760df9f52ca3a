"""Models with quantised weights: one megakernel, and eager's logits. docs/weights.md says which formats there are."""

from __future__ import annotations

import copy
import sys
import tempfile
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig, StaticCache, TorchAoConfig
from transformers.integrations import compressed_tensors, finegrained_fp8

import torch_mpk
from tests.thinned import thinned
from torch_mpk.capture import substitutes
from torch_mpk.errors import ArgumentError, MissingTorchaoError, MpkWarning
from torch_mpk.quantize import groups_of, packed
from torch_mpk.tasks.quantized_linear import E4M3, quantized_linear
from torch_mpk.testing.quantized import Format, IntegerLinear, quantize_linears

SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 128, "head_dim": 64}  # fmt: skip
FORMATS: list[tuple[Format, dict[str, Any]]] = [
    ("fp8", {}),
    ("fp8", {"scale_fmt": "ue8m0", "weight_block_size": (64, 128)}),
    ("fp8", {"weight_block_size": None}),
    ("fp8", {"weight_block_size": None, "activation_scheme": "static"}),
    ("fp8", {"weight_block_size": (96, 128)}),  # of which q, k and v are no whole blocks, and stay in bfloat16
    ("fp8-rows", {}),
    ("int8", {}),
    ("int4", {}),
    ("int4", {"group": 32}),
]


def random_model() -> Any:
    return AutoModelForCausalLM.from_config(Qwen3Config(**SIZES), dtype=torch.bfloat16).eval()


def logits(model: Any, config: Qwen3Config, ids: torch.Tensor) -> torch.Tensor:
    cache = StaticCache(config, max_cache_len=8)
    with torch.inference_mode():
        return torch.cat([model(input_ids=token, past_key_values=cache).logits for token in ids.split(1, 1)], 1)


def by_definition(model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Eager logits, of linears that compute as the task's reference says."""
    with monkeypatch.context() as patched:
        patched.setattr(finegrained_fp8, "fp8_linear", substitutes.fp8_linear_of(finegrained_fp8))
        patched.setattr(compressed_tensors, "quantize_fp8_per_row", substitutes.quantize_fp8_per_row)
        patched.setattr(compressed_tensors, "_scaled_mm_rowwise", substitutes.scaled_mm_rowwise)
        patched.setattr(torch.ops.mpk, "quantized_linear", quantized_linear)
        return logits(model, model.config, ids)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize(("weights", "settings"), thinned(FORMATS, 0), ids=str)
def test_a_step_is_one_launch(weights: Format, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers' own quantisers; and weights that are loaded in place are those of the next step."""
    model, ids = quantize_linears(random_model(), weights, **settings), torch.randint(128, (2, 3))
    step = torch.compile(model, backend="mpk", options={"fallback": "error"})
    for _ in range(2):
        assert relative_error(logits(step, model.config, ids), by_definition(model, ids, monkeypatch)) < 0.02
        for parameter in model.parameters():
            if parameter.dtype in (E4M3, torch.int8):
                parameter.view(torch.int8).copy_(parameter.view(torch.int8).flip(0))


@pytest.mark.parametrize("implementation", thinned(["grouped_mm", "batched_mm", "eager"], 0))
def test_experts_are_one_launch(implementation: str) -> None:
    """Those of FP8Experts, on equal routes; eager calls have the task's definition where kernels cannot be fetched."""
    sizes = SIZES | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes), dtype=torch.bfloat16).eval()
    experts = quantize_linears(model, "fp8").model.layers[0].mlp.experts
    assert experts.gate_up_proj.dtype == experts.down_proj.dtype == E4M3
    model.set_experts_implementation(implementation)
    torch.compiler.reset()
    x, ids = torch.randn(5, 256).bfloat16(), torch.rand(5, 8).topk(2).indices
    weights = torch.rand(5, 2).bfloat16()
    run = torch.compile(experts, backend="mpk", options={"fallback": "error"})
    with torch.inference_mode():
        assert relative_error(run(x, ids, weights), experts(x, ids, weights)) < 0.02


def experts_of_torchao(weights: str) -> Any:
    """Experts as Transformers' quantiser has torchao make them. Of 4 bits torchao makes none without a GPU."""
    quantization = pytest.importorskip("torchao.quantization")
    sizes = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes), dtype=torch.bfloat16).eval()
    experts = model.model.layers[0].mlp.experts
    if weights == "int4":
        for name in ("gate_up_proj", "down_proj"):
            whole = getattr(experts, name).detach()
            numbers, scale, zero = (part.unflatten(0, whole.shape[:2]) for part in groups_of(whole.flatten(0, 1), 128))
            parts = packed(numbers.flatten(0, 1)).unflatten(0, whole.shape[:2]), scale.mT.contiguous(), zero.mT
            tensor = quantization.Int4Tensor(*parts, [1, 1, 128], whole.shape)
            setattr(experts, name, torch.nn.Parameter(tensor, requires_grad=False))
        return model
    config = {
        "int8": quantization.Int8WeightOnlyConfig(),
        "int8-groups": quantization.Int8WeightOnlyConfig(granularity=quantization.PerGroup(32)),
        "fp8": quantization.Float8WeightOnlyConfig(),
    }[weights]
    config = TorchAoConfig(quantization.FqnToConfig({r"re:.*\.experts\.(gate_up|down)_proj": config}))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config).eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "implementation"),
    [("int8", "eager"), ("int8-groups", "grouped_mm"), ("fp8", "batched_mm"), ("int4", "grouped_mm")],
)
def test_experts_of_torchao(weights: str, implementation: str) -> None:
    """Against the same experts in 16 bits: eager knows some of the products. Weights are loaded in place."""
    model = experts_of_torchao(weights)
    experts = model.model.layers[0].mlp.experts
    assert "torchao" in type(experts.down_proj).__module__
    model.set_experts_implementation(implementation)
    x, ids = torch.randn(5, 256).bfloat16(), torch.rand(5, 4).topk(2).indices
    chosen = torch.rand(5, 2).bfloat16()
    torch.compiler.reset()
    run = torch.compile(experts, backend="mpk", fullgraph=True, options={"fallback": "error"})
    for _ in range(2):
        dense = copy.deepcopy(experts)
        for name in ("gate_up_proj", "down_proj"):
            setattr(dense, name, torch.nn.Parameter(in_16_bits(getattr(experts, name)), requires_grad=False))
        with torch.inference_mode():
            assert relative_error(run(x, ids, chosen), dense(x, ids, chosen)) < 0.02
        experts.down_proj.qdata.copy_(experts.down_proj.qdata.flip(0))
        if weights == "int8-groups":
            experts.down_proj.zero_point.random_(-50, 50)


def in_16_bits(weight: Any) -> torch.Tensor:
    if type(weight).__name__ != "Int4Tensor":
        return weight.dequantize(torch.bfloat16)
    low, high = weight.qdata << 4 >> 4, weight.qdata >> 4
    numbers = torch.stack([low, high], -1).flatten(-2).unflatten(-1, (-1, 128)).float()
    return (numbers * weight.scale.mT.unsqueeze(-1) + weight.zero_point.mT.unsqueeze(-1)).flatten(-2).bfloat16()


@pytest.mark.slow
def test_other_experts_are_left_to_torchao() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    experts = experts_of_torchao("int8").model.layers[0].mlp.experts
    experts.down_proj.act_pre_scale = torch.ones(())
    x, ids, chosen = torch.randn(5, 256).bfloat16(), torch.rand(5, 4).topk(2).indices, torch.rand(5, 2).bfloat16()
    torch.compiler.reset()
    run = torch.compile(experts, backend="mpk")
    experts.config._experts_implementation = "eager"
    with torch.no_grad(), pytest.warns(MpkWarning, match="Qwen3MoeExperts in torchao's tensors .* scales activations"):
        torch.testing.assert_close(run(x, ids, chosen), experts(x, ids, chosen))
    assert isinstance(experts.down_proj, quantization.Int8Tensor)


@pytest.mark.slow
def test_tokens_are_generated() -> None:
    """The prompt eagerly, without the package that fetches kernels for it."""
    model, ids = quantize_linears(random_model(), "fp8"), torch.randint(128, (1, 5))
    tokens = torch_mpk.generate(model, ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert tokens.shape == (1, 9)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp8", "int8"])
def test_weights_of_torchao(weights: str) -> None:
    pytest.importorskip("torchao")
    model, ids = torch_mpk.quantize(random_model(), weights), torch.randint(128, (2, 3))
    assert type(model.lm_head.weight) is torch.nn.Parameter
    step = torch.compile(model, backend="mpk", options={"fallback": "error"})
    assert relative_error(logits(step, model.config, ids), logits(model, model.config, ids)) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("group", [0, 32])
def test_zero_points_of_int8_are_data(group: int) -> None:
    """The next call has zero points that were loaded in place. Eager products over whole rows leave them out."""
    quantization = pytest.importorskip("torchao.quantization")
    linear, x = torch.nn.Linear(128, 48).bfloat16(), torch.randn(3, 128).bfloat16()
    granularity = quantization.PerGroup(group) if group else quantization.PerRow()
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig(granularity=granularity))
    step = torch.compile(linear, backend="mpk", options={"fallback": "error"})
    with torch.inference_mode():
        for _ in range(2):
            linear.weight.zero_point.random_(-50, 50)
            assert relative_error(step(x), linear(x)) < 0.02


@pytest.mark.slow
def test_groups_of_4_bits_in_torchao_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no CPU multiplies eagerly: against the same numbers in linears of their own."""
    pytest.importorskip("torchao")
    model, ids = random_model(), torch.randint(128, (2, 3))
    defined = quantize_linears(copy.deepcopy(model), "int4")
    torch_mpk.quantize(model, "int4")
    assert type(model.lm_head.weight) is torch.nn.Parameter
    assert model.model.layers[0].mlp.down_proj.weight.qdata.shape == (256, 192)
    step = torch.compile(model, backend="mpk", options={"fallback": "error"})
    for _ in range(2):
        assert relative_error(logits(step, model.config, ids), by_definition(defined, ids, monkeypatch)) < 0.02
        for name, module in defined.named_modules():  # weights that are loaded in place are those of the next step
            if isinstance(module, IntegerLinear):
                module.weight.copy_(module.weight.flip(0))
                model.get_submodule(name).weight.qdata.copy_(module.weight)


@pytest.mark.slow
@pytest.mark.parametrize("group", [32, -1])
def test_words_of_gptq(group: int) -> None:
    """Of linears as gptqmodel loads them, against its own products."""
    gptq = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")
    model, ids = random_model(), torch.randint(128, (2, 3))
    for name, linear in [(n, m) for n, m in model.model.named_modules() if isinstance(m, torch.nn.Linear)]:
        sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
        made = gptq.TorchLinear(4, group, False, False, **sizes, register_buffers=True).eval()
        for words in (made.qweight, made.qzeros):
            words.random_(-(2**31), 2**31 - 1)
        made.scales.uniform_(0.002, 0.004)
        model.model.set_submodule(name, made)
    step = torch.compile(model, backend="mpk", options={"fallback": "error"})
    assert relative_error(logits(step, model.config, ids), logits(model, model.config, ids)) < 0.02


@pytest.mark.slow
def test_what_is_left_to_torchao_is_named() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model, ids = random_model(), torch.randint(128, (1, 1))
    quantization.quantize_(model.model, quantization.Int8DynamicActivationInt8WeightConfig())
    step = torch.compile(model, backend="mpk")
    with pytest.warns(MpkWarning, match=r"q_proj.weight is of class .*Int8Tensor.* it quantises activations as well"):
        assert relative_error(logits(step, model.config, ids), logits(model, model.config, ids)) < 0.02


def test_other_formats_are_refused_and_torchao_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(MissingTorchaoError, match="quantize needs torchao .* pip install torchao"):
        torch_mpk.quantize(torch.nn.Linear(2, 2), "fp8")
    with pytest.raises(ArgumentError, match="expected 'fp8', 'int8' or 'int4', got 'int3'"):
        torch_mpk.quantize(torch.nn.Linear(2, 2), "int3")
