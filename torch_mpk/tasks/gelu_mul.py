"""The gated activation of Gemma's MLP."""

import torch
import torch.nn.functional as F

from torch_mpk.registry import task


@task(
    "gate[...], up[...] -> y[...]",
    role="pointwise",
    samples=[{"...": (1, 1, 96), "approximate": "tanh"}, {"...": (3, 40), "approximate": "none"}],
)
def gelu_mul(gate: torch.Tensor, up: torch.Tensor, *, approximate: str) -> torch.Tensor:
    """``gelu(gate) * up``, each rounding to the operands' dtype; ``approximate`` is "none" (erf) or "tanh"."""
    return F.gelu(gate, approximate=approximate) * up
