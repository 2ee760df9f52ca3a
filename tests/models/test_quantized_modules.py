"""Linears of packages that quantise: in our launch, or named with a reason. Words are read where they lie."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import torch_mpk
from tests.models.bitsandbytes_linears import Linear4bit
from tests.models.gptqmodel_linears import AwqTorchLinear, MarlinLinear, TorchLinear
from tests.models.test_quantized import logits, random_model, relative_error
from torch_mpk.errors import MpkWarning


def error_of(linear: Any, dtype: torch.dtype = torch.bfloat16, **options: Any) -> float:
    """Of a compiled module's results, against its own, in float64."""
    x = torch.randn(3, linear.in_features).to(dtype)
    step = torch.compile(linear.eval(), backend="mpk", options=options)
    with torch.inference_mode():
        want = linear(x.double())
        return ((step(x) - want).norm() / want.norm()).item()


class Model(torch.nn.Module):
    def __init__(self, *linears: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(linears)
        self.in_features = linears[0].in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_each_class_and_reason_is_named_once() -> None:
    made = [
        TorchLinear((64, 64), 32),
        TorchLinear((64, 64), 32),
        MarlinLinear((64, 64), 32),
        MarlinLinear((64, 64), 32),
    ]
    made[1].bits = 3
    with pytest.warns(MpkWarning) as told:
        assert error_of(Model(*made)) < 0.01
    messages = [str(each.message) for each in told if "leaves linears" in str(each.message)]
    assert len(messages) == 2
    assert "TorchLinear to their package: it has 3 bits" in messages[0] and "(the first is layers.1)" in messages[0]
    assert "MarlinLinear to their package: its kernel" in messages[1] and "(the first is layers.2)" in messages[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_words_are_read_where_they_lie(dtype: torch.dtype) -> None:
    """Of GPTQ, by act-order too, and AWQ, in one launch, a bias of another dtype among them."""
    made = [
        TorchLinear((64, 64), 32),
        TorchLinear((64, 40), 32, desc_act=True),
        AwqTorchLinear((40, 48), 20),
        AwqTorchLinear((48, 64), 48),
    ]
    made[2].bias = torch.randn(48).half()
    assert error_of(Model(*made), dtype, fallback="error") < (1e-5 if dtype == torch.float32 else 0.01)


def test_columns_in_an_order_that_no_flag_tells() -> None:
    """A model of a class that was compiled for columns in order has them, and a model that was in order before others
    were loaded."""
    in_order, others = TorchLinear((64, 48), 32), TorchLinear((64, 48), 32, desc_act=True)
    others.desc_act = False
    assert error_of(in_order, torch.float32) < 1e-5
    assert error_of(others, torch.float32) < 1e-5
    in_order.load_state_dict(others.state_dict())
    assert error_of(in_order, torch.float32) < 1e-5


def test_numbers_of_a_table() -> None:
    """As bitsandbytes stores them, scales of scales among them, which more than a row shares."""
    made = Model(
        Linear4bit((128, 192)), Linear4bit((192, 320), nested=True), Linear4bit((320, 64), nested=True, block=32)
    )
    assert error_of(made, torch.float32, fallback="error") < 1e-5
    made.layers[1].compute_dtype, made.layers[1].compute_type_is_set = torch.bfloat16, True
    assert 1e-5 < error_of(made, torch.float32, fallback="error") < 0.01


def test_tables_that_are_left_to_their_package() -> None:
    made = [Linear4bit((96, 64)), Linear4bit((64, 64))]
    made[1].weight.quant_state.packing_format_for_cpu = True
    with pytest.warns(MpkWarning) as told:
        assert error_of(Model(*made)) < 0.01
    messages = [str(each.message) for each in told if "leaves linears" in str(each.message)]
    assert len(messages) == 2
    assert "its blocks of 64 are not whole in rows of 96 columns (the first is layers.0)" in messages[0]
    assert "an eager call on this processor has written its words anew" in messages[1]


@pytest.mark.slow
def test_linears_of_bitsandbytes() -> None:
    """Those of the package itself, in a model; what they stand for is computed by the package, too."""
    bnb = pytest.importorskip("bitsandbytes")
    model = random_model().bfloat16().eval()
    dense = copy.deepcopy(model)
    for name, linear in list(model.model.named_modules()):
        if isinstance(linear, torch.nn.Linear):
            made = bnb.nn.Linear4bit(linear.in_features, linear.out_features, False, torch.bfloat16, True, "nf4")
            options = {"requires_grad": False, "compress_statistics": True, "quant_type": "nf4", "module": made}
            made.weight = bnb.nn.Params4bit(linear.weight.data, **options)
            model.model.set_submodule(name, made.to("cpu").eval())
            weight = bnb.functional.dequantize_4bit(made.weight.data, made.weight.quant_state)
            dense.model.get_submodule(name).weight.data = weight
    ids = torch.randint(128, (2, 3))
    step = torch.compile(model, backend="mpk", options={"fallback": "error"})
    assert relative_error(logits(step, model.config, ids), logits(dense, model.config, ids)) < 0.02
    assert torch_mpk.generate(model, ids, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (2, 5)
    assert not hasattr(made.weight.quant_state, "packing_format_for_cpu")


def packed(folder: Path, symmetric: bool, group: int = 32, bits: int = 4) -> Any:
    """A model in the format of compressed-tensors, by that package, saved to a folder and still in memory."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import ModelCompressor

    model = random_model()
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}}
    config = quantization.QuantizationConfig(config_groups=groups, format="pack-quantized", ignore=["lm_head"])
    quantization.apply_quantization_config(model, config)
    for module in model.model.modules():
        if isinstance(module, torch.nn.Linear):
            most = module.weight.data.float().unflatten(1, (-1, group)).abs().amax(-1)
            module.weight_scale.data.copy_(most / (2 ** (bits - 1) - 0.5))
            if not symmetric:
                module.weight_zero_point.data.random_(-4, 4)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_weights_of_compressed_tensors_stay_packed(symmetric: bool, tmp_path: Path) -> None:
    """Loaded by transformers, which does not load zero points of this format: those stay in memory."""
    made = packed(tmp_path, symmetric)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval() if symmetric else made.eval()
    dense, ids = copy.deepcopy(model), torch.randint(128, (2, 3))
    step = torch.compile(model, backend="mpk", options={"fallback": "error"})
    assert relative_error(logits(step, model.config, ids), logits(dense, model.config, ids)) < 0.02
    assert torch_mpk.generate(model, ids, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (2, 5)
    projection = model.model.layers[0].self_attn.q_proj
    assert projection.weight_packed.shape == (256, 32) and not hasattr(projection, "weight")
    logits(model, model.config, ids)  # the definition: nothing is unpacked from now on
    assert not hasattr(projection, "weight")


@pytest.mark.slow
def test_an_engine_keeps_weights_as_they_are(tmp_path: Path) -> None:
    """A prompt runs eagerly, of compressed-tensors' weights and where bitsandbytes would write words anew."""
    engine = pytest.importorskip("torch_mpk.continuous_batching")
    packed(tmp_path, True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=engine.ATTENTION).eval()
    model.lm_head.support_avx512bf16_for_cpu = True
    sizes = {"page_size": 16, "num_blocks": 8, "max_batch_tokens": 16, "max_requests_per_batch": 1}
    settings = engine.config(compile_prompts=False, **sizes)
    greedy = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompt = torch.randint(128, (5,)).tolist()
    options = {"continuous_batching_config": settings, "progress_bar": False, "warmup": False}
    outputs = model.generate_batch([prompt], greedy, **options)
    [output] = outputs.values()
    assert output.error is None and len(output.generated_tokens) == 1
    projection = model.model.layers[0].self_attn.q_proj
    assert hasattr(projection, "weight_packed") and not hasattr(projection, "weight")
    assert not model.lm_head.support_avx512bf16_for_cpu


@pytest.mark.slow
def test_what_is_not_known_makes_a_packed_model_dense(tmp_path: Path) -> None:
    """As compressed-tensors does by itself."""
    why = packed(tmp_path, True, bits=8).dense_because
    assert why == "model.layers.0.self_attn.q_proj has 8 bits of int by group, expected int4 by group or channel"
