"""float8 activations by given scales, and by their own: one launch, against the format's definition in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Linear

import torch_mpk
from tests.models.test_quantized import logits, random_model, relative_error
from tests.models.test_quantized_modules import Model
from tests.thinned import thinned
from torch_mpk.errors import MpkWarning
from torch_mpk.tasks.quantized_linear import E4M3, LARGEST_E4M3

ROWS, COLUMNS, BLOCK = 192, 256, 128


def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3).double() * scale


def largest(x: torch.Tensor, *block: int) -> torch.Tensor:
    """The scale of each block of the last dimensions; 0: all of it."""
    for dim, size in zip(range(-len(block), 0), block, strict=True):
        size = size or x.shape[dim]
        padded = torch.nn.functional.pad(x, (0, 0) * (-1 - dim) + (0, -x.shape[dim] % size))
        x = padded.abs().unflatten(dim, (-1, size)).amax(dim)
    return x / LARGEST_E4M3


def spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The scales of blocks of 128, of rows, or of all, for each element."""
    scale = scale.double().reshape(scale.shape if scale.dim() == 2 else (1, 1))
    for dim in (0, 1):
        if 1 < scale.shape[dim] < shape[dim]:
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, shape[dim])
    return scale.expand(shape)


def compressed(model: torch.nn.Module, weights: dict[str, Any], x: dict[str, Any] | None, **others: Any) -> Any:
    """A model in compressed-tensors' format, by that package; ``ignore`` is its configuration's."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import ModelCompressor

    kind = {"num_bits": 8, "type": "float"}
    scheme = {"weights": kind | weights, "input_activations": x and kind | x}
    groups = {"group_0": {"targets": ["Linear"], **scheme}}
    config = quantization.QuantizationConfig(config_groups=groups, **others)
    quantization.apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            blocks = {"tensor": (0, 0), "channel": (1, 0), "block": (BLOCK, BLOCK)}[weights["strategy"]]
            module.weight_scale.data.copy_(largest(module.weight.data.float(), *blocks).view_as(module.weight_scale))
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.01)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    return compressor


def of_compressed(weights: dict[str, Any], x: dict[str, Any] | None) -> Callable[[torch.nn.Linear], torch.nn.Module]:
    def made(linear: torch.nn.Linear) -> torch.nn.Module:
        model = Model(linear)
        compressed(model, weights, x)
        return model

    return made


def of_transformers(linear: torch.nn.Linear) -> torch.nn.Module:
    made = FP8Linear(COLUMNS, ROWS, None, "static", has_bias=True)
    made.weight_scale_inv.data = largest(linear.weight.data.float(), 0, 0)
    made.weight = torch.nn.Parameter((linear.weight.data.float() / made.weight_scale_inv).to(E4M3), requires_grad=False)
    made.activation_scale.data.fill_(0.01)
    made.bias = linear.bias
    return Model(made)


def of_torchao(linear: torch.nn.Linear) -> torch.nn.Module:
    prototype = pytest.importorskip("torchao.prototype.quantization.quant_api")
    from torchao.quantization import quantize_

    settings = {"act_quant_scale": torch.full((1, 1), 0.01), "set_inductor_config": False}
    quantize_(linear, prototype.Float8StaticActivationFloat8WeightConfig(**settings))
    return Model(linear)


def of_torchao_dynamic(linear: torch.nn.Linear, by: str = "PerRow") -> torch.nn.Module:
    """Makes the tensor that torchao's configuration makes where there is a GPU, for which it asks."""
    float8 = pytest.importorskip("torchao.quantization.quantize_.workflows.float8.float8_tensor")
    settings = {"granularity": getattr(float8, by)(), "mm_config": float8.Float8MMConfig()}
    of_x = float8.QuantizeTensorToFloat8Kwargs(**settings)
    weight = float8.Float8Tensor.from_hp(linear.weight.data, **settings, act_quant_kwargs=of_x)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    return Model(linear)


STATIC: dict[str, Any] = {"strategy": "tensor", "dynamic": False}
FORMATS: dict[str, tuple[Callable[[torch.nn.Linear], torch.nn.Module], int]] = {  # and a scale's columns of x
    "transformers-static": (of_transformers, 0),
    "compressed-static": (of_compressed({"strategy": "tensor"}, STATIC), 0),
    "torchao-static": (of_torchao, 0),
    "compressed-static-by-row": (of_compressed({"strategy": "channel"}, STATIC), 0),
    "compressed-dynamic": (of_compressed({"strategy": "channel"}, {"strategy": "token", "dynamic": True}), COLUMNS),
    "compressed-blocks": (
        of_compressed(
            {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
            {"strategy": "group", "group_size": BLOCK, "dynamic": True},
        ),
        BLOCK,
    ),
    "compressed-weights": (of_compressed({"strategy": "channel"}, None), -1),
    "torchao-dynamic": (of_torchao_dynamic, COLUMNS),
}


def parts_of(linear: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A linear's numbers, their scales, and that of x if it is given."""
    if type(linear) is FP8Linear:
        return linear.weight, linear.weight_scale_inv, linear.activation_scale
    if hasattr(linear.weight, "qdata"):
        return linear.weight.qdata, linear.weight.scale, getattr(linear.weight, "act_quant_scale", None)
    return linear.weight, linear.weight_scale, getattr(linear, "input_scale", None)


def by_definition(linear: Any, x: torch.Tensor, columns: int) -> torch.Tensor:
    numbers, scale, given = (None if part is None else part.detach() for part in parts_of(linear))
    x = x.double()
    if columns >= 0:
        own = given.double() if given is not None else largest(x, columns).repeat_interleave(columns, -1)
        x = rounded(x, own)
    return x @ (numbers.double() * spread(scale, numbers.shape)).t() + linear.bias.double()


@pytest.mark.parametrize("form", thinned(FORMATS, 0, 1, 2, 5))
def test_linears_are_one_launch(form: str) -> None:
    """Eager calls of compressed-tensors have weights of 16 bits. Scales and weights are data of the next call."""
    make, columns = FORMATS[form]
    model = make(torch.nn.Linear(COLUMNS, ROWS).bfloat16()).eval()
    [linear], x = model.layers, torch.randn(3, COLUMNS).bfloat16() * 2  # some of it beyond 4.48, where scales are given
    run = torch.compile(model, backend="mpk", fullgraph=True, options={"fallback": "error"})
    for _ in range(2):
        want = by_definition(linear, x, columns)
        with torch.inference_mode():
            error, of_eager = relative_error(run(x), want), relative_error(copy.deepcopy(model)(x), want)
        assert error < 0.003 and error <= 1.1 * of_eager
        numbers, scale, given = parts_of(linear)
        with torch.no_grad():
            numbers.view(torch.int8).copy_(numbers.view(torch.int8).flip(0))
            for each in (scale,) if given is None else (scale, given):
                each.mul_(1.5)
    assert parts_of(linear)[0].dtype == E4M3


@pytest.mark.slow
@pytest.mark.parametrize("x", [STATIC, {"strategy": "token", "dynamic": True}], ids=["static", "dynamic"])
def test_a_checkpoint_of_compressed_tensors_stays_float8(x: dict[str, Any], tmp_path: Path) -> None:
    """Loaded as Transformers does without further arguments. Eager calls make its weights 16 bits otherwise."""
    strategy = "tensor" if x is STATIC else "channel"
    made = random_model()
    compressor = compressed(made, {"strategy": strategy}, x, ignore=["lm_head"], format="float-quantized")
    made.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    dense, ids = copy.deepcopy(model), torch.randint(128, (2, 3))
    step = torch.compile(model, backend="mpk", options={"fallback": "error"})
    assert relative_error(logits(step, model.config, ids), logits(dense, model.config, ids)) < 0.05
    assert torch_mpk.generate(model, ids, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (2, 5)
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == E4M3
    assert dense.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16


REFUSED: list[tuple[dict[str, Any], dict[str, Any] | None, str]] = [
    ({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": True}, "quantises activations as they come by tensor"),
    ({"strategy": "channel"}, STATIC | {"type": "int"}, "quantises activations to 8 bits of int"),
    ({"strategy": "tensor", "type": "int"}, STATIC, "has format int-quantized, expected pack-quantized or float-quant"),
]


@pytest.mark.parametrize(("weights", "x", "why"), REFUSED, ids=[why for _, _, why in REFUSED])
def test_other_schemes_of_compressed_tensors_are_named(weights: dict[str, Any], x: dict[str, Any], why: str) -> None:
    model = Model(torch.nn.Linear(COLUMNS, ROWS).bfloat16())
    compressed(model, weights, x)
    assert model.dense_because.startswith(f"layers.0 {why}")


@torch.no_grad()
def test_torchaos_scales_of_all_activations_are_named() -> None:
    model = of_torchao_dynamic(torch.nn.Linear(COLUMNS, ROWS).bfloat16(), "PerTensor")
    with pytest.warns(MpkWarning, match=r"layers.0.weight is .*Float8Tensor.* by PerTensor\(\), expected by row or by"):
        torch.compile(model, backend="mpk")(torch.randn(3, COLUMNS).bfloat16())
