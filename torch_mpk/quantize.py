"""``torch_mpk.quantize``: a 16-bit model's linears in 8 or 4 bits, as torchao's tensors."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from torch_mpk.errors import ArgumentError, MissingTorchaoError

Model = TypeVar("Model", bound=torch.nn.Module)

GROUP = 128  # columns that share a scale, of 4 bits

# Of torchao.quantization, by format.
_CONFIGS = {"fp8": "Float8WeightOnlyConfig", "int8": "Int8WeightOnlyConfig"}


def quantize(model: Model, weights: str) -> Model:
    """Quantises the weights of a model's linears in place, as ``torchao.quantization.quantize_`` does.

    Linears keep their inputs as they are; the output embeddings, and whatever shares their weight, stay in full. With
    "int4" so do linears whose number of columns is no multiple of 128.

    Args:
        model: in eval mode, of bfloat16 or float16, on the device that it is to run on.
        weights: "fp8" for torchao's ``Float8WeightOnlyConfig()``, "int8" for its ``Int8WeightOnlyConfig()``, by row.
            "int4" for its ``Int4WeightOnlyConfig()``: scales and zero points for each 128 columns of a row. The same
            tensors are made here, since torchao makes them with a package for GPUs, ``mslk``. Where that is missing its
            eager products are those of the task.

    Returns:
        the model.

    Raises:
        ArgumentError: another format, or weights that are shared out to ranks.
        MissingTorchaoError: torchao cannot be imported.
    """
    if weights not in (*_CONFIGS, "int4"):
        raise ArgumentError(name="weights", expected="'fp8', 'int8' or 'int4'", value=repr(weights))
    try:
        from torchao import quantization
    except ImportError as error:
        raise MissingTorchaoError(name="quantize", package="torchao", version="0.18", found="none") from error
    if any(type(each.data).__name__ == "DTensor" for each in model.parameters()):
        expected = "a model whose weights are not shared out (from_pretrained shares out quantised ones itself)"
        raise ArgumentError(name="model", expected=expected, value=type(model).__name__)
    head = getattr(model, "get_output_embeddings", lambda: None)()

    def is_quantised(module: torch.nn.Module, _: str) -> bool:
        return isinstance(module, torch.nn.Linear) and (head is None or module.weight is not head.weight)

    if weights == "int4":
        _quantize_in_groups(model, is_quantised, quantization.Int4Tensor)
    else:
        quantization.quantize_(model, getattr(quantization, _CONFIGS[weights])(), filter_fn=is_quantised)
    return model


def _quantize_in_groups(model: torch.nn.Module, is_quantised: Any, tensor: Any) -> None:
    made: dict[torch.Tensor, torch.nn.Parameter] = {}  # of weights that several linears share, too
    for module in [module for module in model.modules() if is_quantised(module, "")]:
        weight: Any = module.weight
        if weight.shape[1] % GROUP == 0:
            if weight not in made:
                numbers, scale, zero = groups_of(weight.detach(), GROUP)
                quantised = tensor(packed(numbers), scale.T.contiguous(), zero.T.contiguous(), [1, GROUP], weight.shape)
                made[weight] = torch.nn.Parameter(quantised, requires_grad=False)
            module.weight = made[weight]


def groups_of(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers of -8 to 7, [N, K] in int8; and scales and what is added, [N, K / group], in the weight's dtype: a row's
    next ``group`` columns from their least to their largest in 15 equal steps."""
    groups = weight.float().unflatten(1, (-1, group))
    least, most = groups.amin(-1), groups.amax(-1)
    scale = (most - least).clamp_min(1e-6) / 15
    numbers = ((groups - least.unsqueeze(-1)) / scale.unsqueeze(-1)).round().clamp(0, 15) - 8
    return numbers.to(torch.int8).flatten(1), scale.to(weight.dtype), (least + 8 * scale).to(weight.dtype)


def packed(numbers: torch.Tensor) -> torch.Tensor:
    """Two neighbouring columns to a byte, the first in the low bits."""
    return numbers[:, ::2] & 15 | numbers[:, 1::2] << 4
