"""An elementwise task of any rank."""

import torch

from torch_mpk import task


@task(
    "gate[..., N], up[..., N] -> y[..., N]",
    tile={"N": 256},
    pattern=True,
    samples=[{"...": (1,), "N": 96}, {"...": (2, 3), "N": 700}],
)
def squared_relu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``relu(gate)^2 * up``, each product rounding to the operands' dtype."""
    return torch.relu(gate).square() * up
