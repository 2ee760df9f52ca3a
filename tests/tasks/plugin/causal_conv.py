"""One step of a depthwise causal convolution: it reads the last positions from a state that it updates in place."""

import torch

from torch_mpk import task


@task(
    "x[B, C], state[B, C, K]!, weight[C, K] -> y[B, C]",
    tile={"B": 1, "C": 40},
    samples=[{"B": 1, "C": 64, "K": 4}, {"B": 3, "C": 100, "K": 3}],
)
def causal_conv(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``state`` holds the last K positions, the newest last: ``x`` is appended, and ``y`` is the sum of state * weight
    over them, in fp32."""
    state.copy_(torch.cat((state[..., 1:], x.unsqueeze(-1)), -1))
    return (state.float() * weight.float()).sum(-1).to(x.dtype)
