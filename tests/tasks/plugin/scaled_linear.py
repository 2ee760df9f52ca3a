"""A product of rows with a matrix, whose rows are streamed through shared memory."""

import torch
import torch.nn.functional as F

from torch_mpk import task


@task(
    "x[B, K], weight[N, K], scale[N] -> y[B, N]",
    tile={"N": 6},
    stream="weight",
    cpu="scaled_linear.cuh",
    samples=[{"B": 2, "K": 256, "N": 100}, {"B": 1, "K": 5000, "N": 40}, {"B": 3, "K": 37, "N": 9}],
)
def scaled_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T * scale``, in fp32, rounded once."""
    return (F.linear(x.float(), weight.float()) * scale.float()).to(x.dtype)
