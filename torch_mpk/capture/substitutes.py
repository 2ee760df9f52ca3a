"""Functions of other packages that Dynamo should not trace, and what it traces in their place.

Some load kernels of their own, which cannot be fetched everywhere, and which no graph of ours could hold; in others it
ends graphs. Calls outside of ``torch.compile`` stay as they are, but for those of FP8Linear, FP8Experts and torchao's
int4 tensors where there is no package with their kernels, and so nothing else to call. Other backends of the process
see an operator of ours that is a substitute, too.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_mpk.capture import (
    bitsandbytes_linears,
    compressed_linears,
    fp8_experts,
    gptqmodel_linears,
    quantized_experts,
    quantized_inputs,
    quantized_modules,
)
from torch_mpk.capture.expert_loops import replace_loops


def fp8_linear_of(module: Any) -> Callable[..., torch.Tensor]:
    """The substitute for a module's ``fp8_linear``. Nothing is imported where Dynamo traces: PyTorch 2.11 ends a graph
    there."""
    of_others = module.finegrained_fp8_linear
    is_ours, tell = quantized_modules.constants()

    def fp8_linear(
        input: torch.Tensor,  # noqa: A002 - transformers' name
        weight: torch.Tensor,
        weight_scale_inv: torch.Tensor,
        block_size: Sequence[int] | None = None,
        bias: torch.Tensor | None = None,
        activation_scale: torch.Tensor | None = None,
        allow_deepgemm: bool = True,
    ) -> torch.Tensor:
        """``fp8_linear`` of transformers, of e4m3 weights: activations are quantised by row and block of columns."""
        if weight.dtype != torch.float8_e4m3fn:
            if torch.compiler.is_compiling() and is_ours():
                tell("transformers.FP8Linear", f"it stores {weight.dtype}")
            return of_others(input, weight, weight_scale_inv, block_size, bias, activation_scale)
        rows, columns = (0, 0) if block_size is None else (block_size[0], block_size[1])
        y = torch.ops.mpk.quantized_linear(
            input.reshape(-1, input.shape[-1]),
            weight,
            weight_scale_inv if weight_scale_inv.dim() == 2 else weight_scale_inv.reshape(1, 1),
            bias,
            None if activation_scale is None else activation_scale.reshape(1).float(),
            block_rows=rows,
            block_columns=columns,
            x_columns=columns or -1,
        )
        return y.reshape(input.shape[:-1] + (weight.shape[0],))

    return fp8_linear


def quantize_fp8_per_row(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``CompressedTensorsFP8Linear`` of transformers does to x[R, K]: left to the product behind it."""
    return x, x.new_ones(x.shape[0])


def scaled_mm_rowwise(
    input: torch.Tensor,  # noqa: A002 - transformers' name
    weight: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Its product, of x as it was, weight[K, N] and scales [1, N]: activations are quantised by row."""
    x, scale = input.to(out_dtype), scale_b.reshape(-1, 1)
    return torch.ops.mpk.quantized_linear(x, weight.t(), scale, bias, block_rows=1, block_columns=0, x_columns=-1)


def _in_graphs(module: Any, **substitutes: Callable[..., Any]) -> None:
    """Has Dynamo trace these for the module's functions of the same names, if it has all of them."""
    if all(hasattr(module, name) for name in substitutes):
        for name, substitute in substitutes.items():
            torch.compiler.substitute_in_graph(getattr(module, name), skip_signature_check=True)(substitute)


def _substitute_fp8(module: Any) -> None:
    if not hasattr(module, "fp8_linear") or not hasattr(module, "finegrained_fp8_linear"):
        return
    if hasattr(module, "FP8GroupedLinear"):
        why = "it multiplies groups of columns apart"
        quantized_modules.take(module.FP8GroupedLinear, lambda linear: why if linear.weight.itemsize == 1 else "")
    fp8_linear = fp8_linear_of(module)
    _in_graphs(module, fp8_linear=fp8_linear)
    if not module.is_kernels_available():
        module.fp8_linear = fp8_linear
    if hasattr(module, "FP8ExpertsInterface"):
        fp8_experts.replace_products(module)


def _substitute_compressed(module: Any) -> None:
    _in_graphs(module, quantize_fp8_per_row=quantize_fp8_per_row, _scaled_mm_rowwise=scaled_mm_rowwise)


def _substitute_int4(module: Any) -> None:
    """Products with weights of ``Int4Tensor``, where the package is missing that torchao calls for them."""
    tensor = getattr(module, "Int4Tensor", None)
    if tensor is None or getattr(module, "int4_row_quantize_zp", None) is not None:
        return

    def linear(_: Any, __: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        return quantized_inputs.product_with(*args, **kwargs)

    tensor.implements_torch_function(torch.nn.functional.linear)(linear)
    tensor.implements(torch.ops.aten.linear.default)(linear)


def _substitute_experts(module: Any) -> None:
    replace_loops(module)
    quantized_experts.replace_products(module)


def _register_mxfp4(_: Any) -> None:
    importlib.import_module("torch_mpk.capture.mxfp4_experts")


def keep_weights(model: Any) -> None:
    """Leaves quantised weights as they are stored in eager calls, too, where their packages would write them anew."""
    compressed_linears.keep_stored(model)
    bitsandbytes_linears.keep_words(model)


def _left(*names: str) -> Callable[[Any], None]:
    return functools.partial(quantized_modules.leave, names=names, why="its format is not known")


# What is done to a module once it is imported, by its name.
_SUBSTITUTES: dict[str, Callable[[Any], None]] = {
    "transformers.integrations.finegrained_fp8": _substitute_fp8,
    "transformers.integrations.compressed_tensors": _substitute_compressed,
    "transformers.integrations.moe": _substitute_experts,
    "transformers.quantizers.auto": _register_mxfp4,
    "gptqmodel.nn_modules.qlinear": gptqmodel_linears.take_linears,
    "compressed_tensors.compressors.model_compressors.model_compressor": compressed_linears.take_compressor,
    "bitsandbytes.nn.modules": bitsandbytes_linears.take_linears,
    "torchao.quantization.quantize_.workflows.int4.int4_tensor": _substitute_int4,
    "hqq.core.quantize": _left("HQQLinear"),
    "optimum.quanto.nn.qlinear": _left("QLinear"),
    "sinq.sinqlinear_hf": _left("SINQLinear"),
    "transformers.integrations.bitnet": _left("BitLinear", "AutoBitLinear"),
    "transformers.integrations.eetq": _left("EetqLinear"),
    "transformers.integrations.fbgemm_fp8": _left("FbgemmFp8Linear"),
    "transformers.integrations.gemma_quant": _left("QuantizedLinear"),
    "transformers.integrations.higgs": _left("HiggsLinear"),
    "transformers.integrations.metal_quantization": _left("MetalLinear"),
    "transformers.integrations.nvfp4": _left("NVFP4Linear"),
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds these modules as the other finders do, and substitutes once they are imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in _SUBSTITUTES:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                _SUBSTITUTES[name](module)

            loader.exec_module = exec_module
        return spec


def install() -> None:
    """Has Dynamo trace the substitutes, of what is imported already and of what will be."""
    sys.meta_path.insert(0, _Finder())
    for name, substitute in _SUBSTITUTES.items():
        if name in sys.modules:
            substitute(sys.modules[name])
