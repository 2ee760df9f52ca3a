"""Models whose linears are quantised, made without a GPU and without packages that models do not need."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import FineGrainedFP8Config, PreTrainedModel

from torch_mpk.quantize import GROUP, groups_of, packed

Format = Literal["fp8", "fp8-rows", "int8", "int4"]
_ACTIVATION_SCALE = 0.01  # which a checkpoint has of calibration; of activations up to 4.48


class IntegerLinear(torch.nn.Module):
    """A linear of int8 weights with a scale for each row; or of 4 bits, in the groups of ``torch_mpk.quantize``."""

    def __init__(self, linear: torch.nn.Linear, bits: int, group: int = GROUP) -> None:
        super().__init__()
        weight = linear.weight.detach()
        zero = None
        if bits == 4:
            numbers, scale, zero = groups_of(weight, group)
            numbers = packed(numbers)
        else:
            scale = (weight.float().abs().amax(1, keepdim=True) / 127).clamp_min(1e-12)
            numbers = (weight.float() / scale).round().to(torch.int8)
        self.weight = torch.nn.Parameter(numbers, requires_grad=False)
        self.scale = torch.nn.Parameter(scale, requires_grad=False)
        self.zero = None if zero is None else torch.nn.Parameter(zero, requires_grad=False)
        self.bias = linear.bias
        self.block_columns = group if bits == 4 else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        operands = self.weight, self.scale, self.bias, None, self.zero
        rows = x.reshape(-1, x.shape[-1])
        y = torch.ops.mpk.quantized_linear(rows, *operands, block_rows=1, block_columns=self.block_columns)
        return y.reshape(*x.shape[:-1], -1)


def quantize_linears(model: PreTrainedModel, weights: Format, **config: Any) -> PreTrainedModel:
    """The model with quantised linears, but for its head: "fp8" as transformers' FP8Linear, and experts as its
    FP8Experts, by its own quantiser,
    "fp8-rows" as its CompressedTensorsFP8Linear, "int8" and "int4" as ``IntegerLinear``. ``config``: what
    FineGrainedFP8Config takes, such as ``scale_fmt``, or for "int4" the ``group``."""
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear and module is not head]
    if weights == "fp8-rows":
        for name in names:
            model.set_submodule(name, _scaled_by_row(model.get_submodule(name)))
        return model
    if weights in ("int8", "int4"):
        for name in names:
            model.set_submodule(name, IntegerLinear(model.get_submodule(name), int(weights[-1]), **config))
        return model
    from transformers.integrations.finegrained_fp8 import Fp8Quantize, replace_with_fp8_linear

    settings = FineGrainedFP8Config(**config)
    experts = [name for name, module in model.named_modules() if _has_plain_experts(name, module)]
    of_model = {name: model.get_submodule(name) for name in names + experts}
    kept = [name for name, module in model.named_modules() if module is head or name.endswith(".experts")]
    replace_with_fp8_linear(model, [name for name in kept if name not in experts], settings)
    quantise = Fp8Quantize(_Quantizer(settings))
    for name, linear in of_model.items():
        module = model.get_submodule(name)
        for weight in [weight for weight, value in linear.named_parameters() if value.dim() > 1]:
            made = quantise.convert({f"{name}.{weight}": getattr(linear, weight).detach()})
            setattr(module, weight, torch.nn.Parameter(made[f"{name}.{weight}"], requires_grad=False))
            scale = made.get(f"{name}.{weight}_scale_inv")  # none of what is not whole blocks, which stays as it is
            scale = None if scale is None else torch.nn.Parameter(scale, requires_grad=False)
            setattr(module, f"{weight}_scale_inv", scale)
            setattr(linear, weight, None)  # frees it, before the next one is quantised
        for scale in [each for each, _ in module.named_parameters() if each.endswith("activation_scale")]:
            given = torch.full_like(getattr(module, scale), _ACTIVATION_SCALE, device=model.device)
            setattr(module, scale, torch.nn.Parameter(given, requires_grad=False))
        if name in names:
            module.bias = linear.bias
    return model


def _has_plain_experts(name: str, module: Any) -> bool:
    """Whether FP8Experts holds such experts: without biases, a matrix's rows those of the result."""
    return name.endswith(".experts") and not (getattr(module, "has_bias", True) or module.is_transposed)


def _scaled_by_row(linear: torch.nn.Linear) -> torch.nn.Module:
    from transformers.integrations.compressed_tensors import CompressedTensorsFP8Linear, quantize_fp8_per_row

    with torch.device("meta"):
        made = CompressedTensorsFP8Linear(linear.in_features, linear.out_features, linear.bias is not None)
    weight, scale = quantize_fp8_per_row(linear.weight.detach())
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    made.weight_scale = torch.nn.Parameter(scale.unsqueeze(0), requires_grad=False)
    made.bias = linear.bias
    return made


class _Quantizer:
    """What transformers' quantising operation asks of a quantiser."""

    def __init__(self, quantization_config: FineGrainedFP8Config) -> None:
        self.quantization_config = quantization_config


def widened(model: PreTrainedModel) -> PreTrainedModel:
    """The model with 16-bit parameters and buffers in float32; quantised weights stay as they are."""
    for tensors in (model.parameters(), model.buffers()):
        for tensor in tensors:
            if tensor.dtype in (torch.bfloat16, torch.float16):
                tensor.data = tensor.data.float()
    return model
