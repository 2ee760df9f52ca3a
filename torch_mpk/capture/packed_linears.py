"""compressed-tensors' linears of packed weights, which are linears of PyTorch with other parameters."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from torch_mpk.capture.quantized_modules import constants, product
from torch_mpk.warn_once import warn


def take_compressor(module: Any) -> None:
    """What compressed-tensors does with a model that has been loaded with packed weights: it turns them into 16 bits at
    the first call. Calls that Dynamo traces for this backend leave them packed, if all of them are known here."""
    compressor = getattr(module, "ModelCompressor", None)
    if compressor is None or not hasattr(compressor, "add_decompress_hook"):
        return
    add_hook, decompress = compressor.add_decompress_hook, compressor.decompress_model
    decompress_eagerly = torch.compiler.disable(decompress)
    is_ours, _ = constants()
    tell = torch.compiler.assume_constant_result(lambda why: warn(why))

    def add_decompress_hook(self: Any, model: Any) -> None:
        add_hook(self, model)
        linears = {name: each for name, each in model.named_modules() if getattr(each, "quantization_scheme", None)}
        reasons = (f"{name} {why}" for name, each in linears.items() if (why := _refuses_packed(each)))
        model.unpacked_because = next(reasons, "")
        for each in () if model.unpacked_because else linears.values():
            _take_packed(each)

    def decompress_model(self: Any, model: Any) -> None:
        if not torch.compiler.is_compiling() or not is_ours():
            return decompress(self, model)
        if not model.unpacked_because:
            return None
        tell(f"{model.unpacked_because}, so compressed-tensors makes the model one of 16 bits")
        return decompress_eagerly(self, model)

    compressor.add_decompress_hook, compressor.decompress_model = add_decompress_hook, decompress_model


def keep_packed(model: Any) -> None:
    """Leaves weights packed in eager calls, too, which then run the operator's definition."""
    if hasattr(model, "ct_decompress_hook") and getattr(model, "unpacked_because", None) == "":
        model.ct_decompress_hook.remove()
        del model.ct_decompress_hook


def _refuses_packed(module: Any) -> str:
    """``module``: of any class. Its parameters are there, but not their values."""
    scheme = module.quantization_scheme
    weights = scheme.weights
    if torch.nn.Linear not in type(module).__mro__:
        return f"is of class {type(module).__qualname__}, expected Linear"
    if weights is None or not hasattr(module, "weight_packed"):
        return f"has format {scheme.format}, expected pack-quantized"
    if (weights.num_bits, weights.type) != (4, "int") or weights.strategy not in ("group", "channel"):
        return f"has {weights.num_bits} bits of {weights.type} by {weights.strategy}, expected int4 by group or channel"
    if scheme.input_activations is not None or scheme.output_activations is not None:
        return "quantises activations as well"
    if module.weight_packed.shape[1] * 8 != module.in_features:
        return f"has {module.in_features} columns, which are no whole words of eight"
    return ""


def _take_packed(module: Any) -> None:
    known = module.forward.__func__
    weights = module.quantization_scheme.weights
    columns, is_symmetric = weights.group_size if weights.strategy == "group" else 0, weights.symmetric

    def forward(self: Any, x: Tensor) -> Tensor:
        if not hasattr(self, "weight_packed"):
            return known(self, x)  # it has 16 bits by now
        zero = None if is_symmetric else self.weight_zero_point
        operands = self.weight_packed, self.weight_scale, self.bias, None, zero
        return product(x, self.out_features, *operands, block_rows=1, block_columns=columns)

    module.forward = types.MethodType(forward, module)
