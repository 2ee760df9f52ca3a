"""``quantized_linear`` of an x whose columns are in the order of words of weights already, as batches have it on
Hopper."""

import torch
import torch.nn.functional as F

from torch_mpk.errors import TaskError
from torch_mpk.registry import task
from torch_mpk.registry.stream_traits import StreamTraits
from torch_mpk.tasks.order_columns import original_order
from torch_mpk.tasks.quantized_linear import check_format, dequantised, offsets_of

_INT4 = {"weight": torch.int8, "x_sums": torch.float32, "block_rows": 1, "block_columns": 128}


@task(
    "x[R, K], x_sums[R, S], weight[N, P], weight_scale[A, B], bias[N]?, zero[Z, B]? -> y[R, N]",
    role="stream",
    traits=StreamTraits(
        loaded=("weight", "weight_scale", "zero"),
        staged=("x",),
        whole=("x",),
        boxed=("x",),
        joined_by="x",
        tiled_by="weight",
        hands_over=True,
        any_strides=("weight", "weight_scale", "zero"),
    ),
    samples=[
        {"R": 9, "K": 256, "S": 2, "N": 48, "P": 128, "A": 48, "B": 2, "Z": 48, "bias": None, **_INT4},
        {"R": 3, "K": 512, "S": 2, "N": 24, "P": 256, "A": 24, "B": 1, "zero": None, **_INT4, "block_columns": 0},
    ],
)  # fmt: skip
def ordered_linear(
    x: torch.Tensor,
    x_sums: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    *,
    block_rows: int,
    block_columns: int,
) -> torch.Tensor:
    """Computes ``quantized_linear`` of 4-bit weights and zero points. ``order_columns`` has made x and x_sums.

    ``x_sums[r, s]`` is the sum of columns ``s * K / S`` to ``(s + 1) * K / S - 1``, which have one scale. Zero points
    are multiplied by it. Kernels multiply numbers that are above what they stand for, and take that away times these
    sums, so other sums than those of x have no meaning. The result's sums are in fp32, rounded once. A GPU's kernels
    take sums that stand side by side for all rows of x, as a schedule lays them out: a call by itself has none.
    Raises TaskError when dtypes or sizes do not fit each other.
    """
    size, groups = x.shape[1], x_sums.shape[1]
    check_format("ordered_linear", size, weight, weight_scale, zero, block_rows, block_columns)
    columns = block_columns or size
    if weight.shape[1] == size or x_sums.dtype != torch.float32 or size % groups or columns % (size // groups):
        raise TaskError(
            f"ordered_linear: weight has {weight.shape[1]} columns of {weight.dtype}, x_sums is {x_sums.dtype} of "
            f"{groups} sums of {size} columns, expected 4-bit weights, and float32 sums of equal parts of blocks of "
            f"{columns} columns"
        )
    rows = block_rows or weight.shape[0]
    matrix = dequantised(weight, weight_scale, rows, columns, torch.float32, size)
    y = F.linear(original_order(x).float(), matrix, None if bias is None else bias.float())
    offsets = offsets_of(zero, weight, weight_scale, size, torch.float32)
    if offsets is not None:
        of_rows = offsets.repeat_interleave(rows, 0)[: weight.shape[0]]
        y += F.linear(x_sums, of_rows.repeat_interleave(columns * groups // size, 1)[:, :groups])
    return y.to(x.dtype)
