"""The gated activation of Llama's MLP."""

import torch
import torch.nn.functional as F

from torch_mpk.registry import task


@task(
    "gate[...], up[...] -> y[...]",
    role="pointwise",
    samples=[{"...": (1, 1, 96)}, {"...": (3, 40)}],
)
def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``; the activation and the product each round to the operands' dtype."""
    return F.silu(gate) * up
