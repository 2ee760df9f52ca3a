"""gpt-oss's experts in MXFP4, kept as their checkpoints store them: numbers of e2m1, two to a byte, and a scale of e8m0
for 32 columns of a row.

Transformers writes the bytes anew for a kernel of its own at load, or makes weights of 16 bits. Its registry of
quantisers is public, and a model's configuration names the one that loads it. ``METHOD`` names ours. It builds modules
whose parameters are the checkpoint's, byte by byte, and whose products are the task's operator, eagerly and for every
backend.

This is imported once Transformers' registry is, see ``substitutes.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from torch_mpk.errors import CheckpointError
from torch_mpk.tasks.quantized_linear import E2M1

METHOD = "mpk_mxfp4"
GROUP = 32  # columns of a scale


@register_quantization_config(METHOD)
class Mxfp4InPlaceConfig(QuantizationConfigMixin):
    """The configuration. Models are saved as the checkpoints that they came from, which anybody loads."""

    def __init__(self, modules_to_not_convert: list[str] | None = None, **_: Any) -> None:
        self.quant_method = METHOD
        self.modules_to_not_convert = modules_to_not_convert

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": "mxfp4", "modules_to_not_convert": self.modules_to_not_convert}


class Mxfp4Experts(torch.nn.Module):
    """E experts of gpt-oss. ``NAME_blocks`` is uint8[E, N, K / 32, 16] while it is loaded and float4_e2m1fn_x2
    [E, N, K / 2] from then on, the same bytes; ``NAME_scales``, of as many, float8_e8m0fnu[E, N, K / 32]."""

    def __init__(self, experts: Any) -> None:
        """``experts``: Transformers' module, of which the sizes are taken."""
        super().__init__()
        self.num_experts, self.alpha, self.limit = experts.num_experts, experts.alpha, experts.limit
        hidden, inner = experts.hidden_size, experts.intermediate_size
        for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            if columns % GROUP:
                raise CheckpointError(f"{name} has {columns} columns, expected whole blocks of {GROUP}")
            scales = torch.empty(self.num_experts, rows, columns // GROUP, dtype=torch.uint8)
            blocks = scales.new_empty(*scales.shape, GROUP // 2)
            self.register_parameter(f"{name}_blocks", torch.nn.Parameter(blocks, requires_grad=False))
            self.register_parameter(f"{name}_scales", torch.nn.Parameter(scales, requires_grad=False))
            bias = getattr(experts, f"{name}_bias")
            self.register_parameter(f"{name}_bias", torch.nn.Parameter(torch.empty_like(bias)))

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        """Takes x[R, H], ids[R, C] and weights[R, C]. Products, biases and gates are rounded as Transformers' are."""
        y = hidden_states.unsqueeze(1).expand(-1, router_indices.shape[1], -1)
        y = self._product("gate_up_proj", y, router_indices)
        gate, up = y[..., ::2].clamp(max=self.limit), y[..., 1::2].clamp(-self.limit, self.limit)
        y = self._product("down_proj", (up + 1) * (gate * torch.sigmoid(gate * self.alpha)), router_indices)
        return (y * routing_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)

    def _product(self, name: str, x: Tensor, ids: Tensor) -> Tensor:
        matrices = getattr(self, f"{name}_blocks"), getattr(self, f"{name}_scales")
        attrs = {"block_rows": 1, "block_columns": GROUP}
        return torch.ops.mpk.quantized_expert_linear(x, ids, *matrices, **attrs) + getattr(self, f"{name}_bias")[ids]

    def view_as_numbers(self, path: str) -> None:
        """Raises CheckpointError where parameters were not loaded, as Transformers notes of each, or are a share."""
        if getattr(self, "_is_expert_parallel", False):
            raise CheckpointError(f"{path} is shared out to ranks, expected all experts in one process")
        missing = [name for name, each in self.named_parameters() if not getattr(each, "_is_hf_initialized", False)]
        if missing:
            raise CheckpointError(f"the checkpoint lacks {', '.join(f'{path}.{name}' for name in missing)}")
        for name, each in self.named_parameters():
            if name.endswith("_blocks"):
                setattr(self, name, torch.nn.Parameter(each.flatten(2).view(E2M1), requires_grad=False))
            elif name.endswith("_scales"):
                setattr(self, name, torch.nn.Parameter(each.view(torch.float8_e8m0fnu), requires_grad=False))

    def as_bytes(self) -> dict[str, Tensor]:
        """The checkpoint's tensors of uint8, in the parameters' memory."""
        stored = {name: each.data.view(torch.uint8) for name, each in self.named_parameters() if each.itemsize == 1}
        shape = (-1, GROUP // 2)
        return {name: each.unflatten(2, shape) if name.endswith("_blocks") else each for name, each in stored.items()}


@register_quantizer(METHOD)
class Mxfp4InPlaceQuantizer(HfQuantizer):
    """Puts modules of this file in the place of gpt-oss's experts before weights are loaded."""

    requires_calibration = True  # it makes no checkpoints of others
    is_trainable = False
    is_compileable = True

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

        found = [name for name, module in model.named_modules() if isinstance(module, GptOssExperts)]
        if not found:
            raise CheckpointError(f"{type(model).__name__} has no experts of gpt-oss")
        with torch.device("meta"):
            for name in found:
                model.set_submodule(name, Mxfp4Experts(model.get_submodule(name)))
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        for name, module in model.named_modules():
            if isinstance(module, Mxfp4Experts):
                module.view_as_numbers(name)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = model.state_dict()
        for path, module in model.named_modules():
            if isinstance(module, Mxfp4Experts):
                tensors.update({f"{path}.{name}": each for name, each in module.as_bytes().items()})
        return tensors, {}

    def is_serializable(self) -> bool:
        return True
