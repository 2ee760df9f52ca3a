"""``linear`` whose weight is quantised: in bytes, with scales, read where it lies."""

import torch
import torch.nn.functional as F

from torch_mpk.errors import TaskError
from torch_mpk.registry import task
from torch_mpk.registry.stream_traits import StreamTraits

E4M3 = torch.float8_e4m3fn
STORAGES = (E4M3, torch.int8)
LARGEST_E4M3 = torch.finfo(E4M3).max
LEAST_SCALE = 1e-12
_PIECE = 1 << 24  # elements of a weight that the reference has in full precision at a time


@task(
    "x[R, K], weight[N, P], weight_scale[A, B], bias[N]?, x_scale[1]? -> y[R, N]",
    role="stream",
    traits=StreamTraits(
        loaded=("weight", "weight_scale"),
        staged=("x",),
        whole=("x",),
        takes_rows=("x",),
        joined_by="x",
        tiled_by="weight",
        hands_over=True,
    ),
    samples=[
        {"R": 1, "K": 256, "N": 192, "P": 256, "A": 2, "B": 2, "weight": E4M3, "weight_scale": torch.float32,
         "bias": None, "x_scale": None, "block_rows": 128, "block_columns": 128, "x_columns": 128},
        {"R": 3, "K": 320, "N": 80, "P": 320, "A": 1, "B": 3, "weight": E4M3, "weight_scale": torch.float32,
         "x_scale": None, "block_rows": 128, "block_columns": 128, "x_columns": 128},
        {"R": 2, "K": 128, "N": 48, "P": 128, "A": 48, "B": 1, "weight": E4M3, "weight_scale": torch.bfloat16,
         "x_scale": None, "block_rows": 1, "block_columns": 0, "x_columns": -1},
        {"R": 5, "K": 256, "N": 64, "P": 256, "A": 64, "B": 1, "weight": torch.int8, "weight_scale": torch.float32,
         "x_scale": None, "block_rows": 1, "block_columns": 0},
        {"R": 4, "K": 100, "N": 33, "P": 100, "A": 1, "B": 1, "weight": E4M3, "weight_scale": torch.float32,
         "x_scale": torch.float32, "bias": None, "block_rows": 0, "block_columns": 0},
    ],
)  # fmt: skip
def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    *,
    block_rows: int,
    block_columns: int,
    x_columns: int = 0,
) -> torch.Tensor:
    """``x @ w.T + bias``, where ``w[n, k] = weight[n, k] * weight_scale[n // block_rows, k // block_columns]``.

    ``weight`` is float8_e4m3fn or int8, and P is K. ``weight_scale`` is float32, bfloat16, float16 or float8_e8m0fnu. A
    block size of 0 means the whole dimension, and the last block of one may be smaller. With ``x_columns``, x is
    quantised, too: each row, in blocks of so many columns (-1: all of them), is divided by its scale s, the block's
    largest magnitude over 448, at least 1e-12, rounded to float8_e4m3fn, and multiplied by s again. With ``x_scale``,
    that is s for all of x, and what exceeds 448 then is 448. Sums are in fp32, or in fp64 where x has it, rounded once.

    Raises TaskError when dtypes or sizes do not fit each other.
    """
    _check(x, weight, weight_scale, block_rows, block_columns)
    if x_scale is not None:
        x_columns = -1
    computed = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = quantise(x.to(computed), x_columns, x_scale) if x_columns else x.to(computed)
    bias = None if bias is None else bias.to(computed)
    block_rows, block_columns = block_rows or weight.shape[0], block_columns or weight.shape[1]
    height = max(_PIECE // max(weight.shape[1], 1) // block_rows, 1) * block_rows
    if weight.shape[0] <= height:
        return F.linear(rows, dequantised(weight, weight_scale, block_rows, block_columns, computed), bias).to(x.dtype)
    products = [
        F.linear(rows, dequantised(part, scales, block_rows, block_columns, computed))
        for part, scales in zip(weight.split(height), weight_scale.split(height // block_rows), strict=True)
    ]
    y = torch.cat(products, -1)
    return (y if bias is None else y + bias).to(x.dtype)


def quantise(x: torch.Tensor, columns: int, scale: torch.Tensor | None = None) -> torch.Tensor:
    """What ``quantized_linear`` makes of x, in x's dtype: float8_e4m3fn numbers times their scales."""
    size = x.shape[-1]
    columns = size if columns < 0 else min(columns, size)
    blocks = F.pad(x, (0, -size % max(columns, 1))).unflatten(-1, (-1, max(columns, 1)))
    if scale is None:
        scale = (blocks.abs().amax(-1, keepdim=True) / LARGEST_E4M3).clamp_min(LEAST_SCALE)
    scale = scale.to(x.dtype)
    numbers = (blocks / scale).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3)
    return (numbers.to(x.dtype) * scale).flatten(-2)[..., :size]


def dequantised(
    weight: torch.Tensor, scale: torch.Tensor, block_rows: int, block_columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """The matrix that weight and scale stand for."""
    rows, columns = weight.shape
    scales = scale.to(dtype).repeat_interleave(block_rows, 0)[:rows] if block_rows > 1 else scale.to(dtype)
    scales = scales.repeat_interleave(block_columns, 1)[:, :columns] if block_columns > 1 else scales
    return weight.to(dtype) * scales


def _check(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, block_rows: int, block_columns: int
) -> None:
    if weight.dtype not in STORAGES:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in STORAGES)
        raise TaskError(f"quantized_linear: weight is {weight.dtype}, expected {expected}")
    if weight.shape[1] != x.shape[1]:
        raise TaskError(f"quantized_linear: weight has {weight.shape[1]} columns, expected x's {x.shape[1]}")
    sizes = [-(-size // (block or max(size, 1))) for size, block in zip(weight.shape, (block_rows, block_columns))]
    if list(weight_scale.shape) != sizes:
        raise TaskError(
            f"quantized_linear: weight_scale is {list(weight_scale.shape)}, expected {sizes} for a weight of "
            f"{list(weight.shape)} in blocks of {block_rows} x {block_columns}"
        )
