"""compressed-tensors' linears of packed or float8 weights, which are linears of PyTorch with other parameters."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from torch_mpk.capture.quantized_modules import constants, product
from torch_mpk.warn_once import warn

_E4M3 = torch.float8_e4m3fn


def take_compressor(module: Any) -> None:
    """compressed-tensors turns the weights that a model has been loaded with into 16 bits at the first call. This has
    calls that Dynamo traces for this backend leave them, if all linears are known here."""
    compressor = getattr(module, "ModelCompressor", None)
    if compressor is None or not hasattr(compressor, "add_decompress_hook"):
        return
    add_hook = compressor.add_decompress_hook
    is_ours, _ = constants()
    tell = torch.compiler.assume_constant_result(lambda why: warn(why))

    def add_decompress_hook(self: Any, model: Any) -> None:
        add_hook(self, model)
        hooks, number = model._forward_pre_hooks, model.ct_decompress_hook.id
        decompress = hooks[number]
        decompress_eagerly = torch.compiler.disable(decompress)

        def decompress_unless_known(model: Any, args: Any) -> None:
            if not torch.compiler.is_compiling() or not is_ours():
                decompress(model, args)
            elif model.dense_because:
                tell(f"{model.dense_because}, so compressed-tensors makes the model one of 16 bits")
                decompress_eagerly(model, args)

        hooks[number] = decompress_unless_known
        linears = {name: each for name, each in model.named_modules() if getattr(each, "quantization_scheme", None)}
        reasons = (f"{name} {why}" for name, each in linears.items() if (why := _refuses(each)))
        model.dense_because = next(reasons, "")
        for each in () if model.dense_because else linears.values():
            _take(each)

    compressor.add_decompress_hook = add_decompress_hook


def keep_stored(model: Any) -> None:
    """Leaves weights as they are in eager calls, too, which then run the operator's definition."""
    if hasattr(model, "ct_decompress_hook") and getattr(model, "dense_because", None) == "":
        model.ct_decompress_hook.remove()
        del model.ct_decompress_hook


def _refuses(module: Any) -> str:
    """``module``: of any class. Its parameters are there, but not their values."""
    scheme = module.quantization_scheme
    if torch.nn.Linear not in type(module).__mro__:
        return f"is of class {type(module).__qualname__}, expected Linear"
    if scheme.output_activations is not None:
        return "quantises its results as well"
    if scheme.weights is not None and hasattr(module, "weight_packed"):
        return _refuses_packed(module, scheme)
    if scheme.format in ("float-quantized", "naive-quantized") and module.weight.dtype == _E4M3:
        return _refuses_e4m3(scheme)
    return f"has format {getattr(scheme.format, 'value', scheme.format)}, expected pack-quantized or float-quantized"


def _refuses_packed(module: Any, scheme: Any) -> str:
    weights = scheme.weights
    if (weights.num_bits, weights.type) != (4, "int") or weights.strategy not in ("group", "channel"):
        return f"has {weights.num_bits} bits of {weights.type} by {weights.strategy}, expected int4 by group or channel"
    if scheme.input_activations is not None:
        return "quantises activations as well"
    if module.weight_packed.shape[1] * 8 != module.in_features:
        return f"has {module.in_features} columns, which are no whole words of eight"
    return ""


def _refuses_e4m3(scheme: Any) -> str:
    weights, x = scheme.weights, scheme.input_activations
    if weights.strategy not in ("tensor", "channel", "block") or not weights.symmetric:
        return f"has scales by {weights.strategy}, expected symmetric ones by tensor, channel or block"
    if x is None:
        return ""
    if (x.num_bits, x.type, x.symmetric, x.scale_dtype) != (8, "float", True, None):
        return f"quantises activations to {x.num_bits} bits of {x.type}, expected float8, symmetric"
    if (x.dynamic, x.strategy) not in ((False, "tensor"), (True, "token"), (True, "group")):
        way = "as they come" if x.dynamic else "by a given scale"
        return f"quantises activations {way} by {x.strategy}, expected by token or group, or by a tensor's scale"
    return ""


def _take(module: Any) -> None:
    known = module.forward.__func__
    weights, of_x = module.quantization_scheme.weights, module.quantization_scheme.input_activations
    rows, columns = 0 if weights.strategy == "tensor" else 1, weights.group_size if weights.strategy == "group" else 0
    if weights.strategy == "block":
        rows, columns = weights.block_structure
    x_columns = 0 if of_x is None else of_x.group_size if of_x.strategy == "group" else -1
    attrs = {"block_rows": rows, "block_columns": columns, "x_columns": x_columns}
    is_symmetric, has_x_scale = weights.symmetric, of_x is not None and not of_x.dynamic

    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.weight_packed if hasattr(self, "weight_packed") else self.weight
        if weight.dtype not in (torch.int32, _E4M3):
            return known(self, x)  # it has 16 bits by now
        scale = self.weight_scale if rows else self.weight_scale.reshape(1, 1)
        zero = None if is_symmetric else self.weight_zero_point
        x_scale = self.input_scale.reshape(1).float() if has_x_scale else None
        return product(x, self.out_features, weight, scale, self.bias, x_scale, zero, **attrs)

    module.forward = types.MethodType(forward, module)
