"""``torch_mpk.quantize``: a 16-bit model's linears in 8 bits, by torchao."""

from __future__ import annotations

from typing import TypeVar

import torch

from torch_mpk.errors import ArgumentError, MissingTorchaoError

Model = TypeVar("Model", bound=torch.nn.Module)

# Of torchao.quantization, by format.
_CONFIGS = {"fp8": "Float8WeightOnlyConfig", "int8": "Int8WeightOnlyConfig"}


def quantize(model: Model, weights: str) -> Model:
    """Quantises the weights of a model's linears in place, by row, as ``torchao.quantization.quantize_`` does.

    Linears keep their inputs as they are; the output embeddings, and whatever shares their weight, stay in full.

    Args:
        model: in eval mode, of bfloat16 or float16, on the device that it is to run on.
        weights: "fp8" for torchao's ``Float8WeightOnlyConfig()``, "int8" for its ``Int8WeightOnlyConfig()``.

    Returns:
        the model.

    Raises:
        ArgumentError: another format.
        MissingTorchaoError: torchao cannot be imported.
    """
    if weights not in _CONFIGS:
        raise ArgumentError(name="weights", expected=" or ".join(map(repr, _CONFIGS)), value=repr(weights))
    try:
        from torchao import quantization
    except ImportError as error:
        raise MissingTorchaoError(name="quantize", package="torchao", version="0.18", found="none") from error
    head = getattr(model, "get_output_embeddings", lambda: None)()

    def is_quantised(module: torch.nn.Module, _: str) -> bool:
        return isinstance(module, torch.nn.Linear) and (head is None or module.weight is not head.weight)

    quantization.quantize_(model, getattr(quantization, _CONFIGS[weights])(), filter_fn=is_quantised)
    return model
