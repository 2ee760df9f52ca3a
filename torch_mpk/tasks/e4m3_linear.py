"""``quantized_linear`` of an x that is quantised already, as prompts have it on Hopper."""

import torch

from torch_mpk.errors import TaskError
from torch_mpk.registry import task
from torch_mpk.registry.stream_traits import StreamTraits
from torch_mpk.tasks.quantized_linear import E4M3, dequantised

RESULTS = ("bfloat16", "float16")


@task(
    "x[R, K], x_scales[R, S], weight[N, K], weight_scale[A, B], bias[N]? -> y[R, N]",
    role="stream",
    traits=StreamTraits(
        loaded=("weight", "weight_scale"),
        staged=("x",),
        whole=("x",),
        boxed=("x",),
        joined_by="x",
        tiled_by="weight",
        hands_over=True,
        any_strides=("weight", "weight_scale"),
    ),
    samples=[
        {"R": 5, "K": 256, "S": 2, "N": 192, "A": 2, "B": 2, "x": E4M3, "x_scales": torch.float32, "weight": E4M3,
         "weight_scale": torch.float32, "bias": None, "block_rows": 128, "block_columns": 128, "x_columns": 128,
         "dtype": "bfloat16"},
        {"R": 3, "K": 128, "S": 1, "N": 48, "A": 48, "B": 1, "x": E4M3, "x_scales": torch.float32, "weight": E4M3,
         "weight_scale": torch.bfloat16, "bias": torch.float16, "block_rows": 1, "block_columns": 0, "x_columns": -1,
         "dtype": "float16"},
    ],
)  # fmt: skip
def e4m3_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    block_rows: int,
    block_columns: int,
    x_columns: int,
    dtype: str,
) -> torch.Tensor:
    """``x @ w.T + bias`` of float8_e4m3fn numbers and their scales, summed in fp32 and rounded once to ``dtype``.

    ``x[r, k]`` stands for the number times ``x_scales[r, k // x_columns]`` (-1: one scale for the row), and ``w`` for
    ``weight`` and ``weight_scale`` as in ``quantized_linear``. Both make of ``quantise_rows`` what it makes of x.
    Raises TaskError when a dtype is none of these.
    """
    if x.dtype != E4M3 or weight.dtype != E4M3 or dtype not in RESULTS:
        raise TaskError(
            f"e4m3_linear: x is {x.dtype}, weight is {weight.dtype}, dtype is {dtype!r}, expected {E4M3} twice, and "
            + " or ".join(RESULTS)
        )
    rows = dequantised(x, x_scales, 1, x_columns if 0 < x_columns < x.shape[1] else x.shape[1], torch.float32)
    blocks = block_rows or weight.shape[0], block_columns or weight.shape[1]
    y = torch.nn.functional.linear(rows, dequantised(weight, weight_scale, *blocks, torch.float32))
    return (y if bias is None else y + bias.to(y.dtype)).to(getattr(torch, dtype))
