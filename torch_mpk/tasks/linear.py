"""``y = x @ weight.T + bias``: fp32 accumulation, one rounding at the end, bias added before it."""

import torch
import torch.nn.functional as F

from torch_mpk.registry import task
from torch_mpk.registry.stream_traits import StreamTraits


@task(
    "x[R, K], weight[N, K], bias[N]? -> y[R, N]",
    role="stream",
    traits=StreamTraits(
        loaded=("weight",),
        staged=("x",),
        whole=("x",),
        boxed=("x",),
        takes_rows=("x",),
        joined_by="x",
        tiled_by="weight",
        hands_over=True,
    ),
    samples=[
        {"R": 1, "K": 256, "N": 192, "bias": None},
        {"R": 3, "K": 128, "N": 80},
        {"R": 16, "K": 512, "N": 64, "bias": None},
    ],
)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, weight, bias)
