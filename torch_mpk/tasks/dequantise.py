"""A quantised weight as a matrix of 16 bits, for products of many rows."""

import torch

from torch_mpk.errors import TaskError
from torch_mpk.registry import task
from torch_mpk.registry.stream_traits import StreamTraits
from torch_mpk.tasks.quantized_linear import E4M3, check_format, matrix_of

RESULTS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@task(
    "weight[W, P], weight_scale[A, B], zero[Z, B]? -> matrix[N, K]",
    role="stream",
    traits=StreamTraits(loaded=(), any_strides=("weight", "weight_scale", "zero")),
    samples=[
        {"W": 80, "P": 320, "A": 1, "B": 3, "weight": E4M3, "weight_scale": torch.float32, "zero": None,
         "block_rows": 128, "block_columns": 128, "columns": 320, "dtype": "bfloat16"},
        {"W": 33, "P": 100, "A": 33, "B": 1, "weight": torch.int8, "weight_scale": torch.bfloat16, "zero": None,
         "block_rows": 1, "block_columns": 0, "columns": 100, "dtype": "float16"},
        {"W": 48, "P": 128, "A": 48, "B": 2, "Z": 48, "weight": torch.int8, "weight_scale": torch.bfloat16,
         "zero": torch.bfloat16, "block_rows": 1, "block_columns": 128, "columns": 256, "dtype": "bfloat16"},
        {"W": 24, "P": 12, "A": 24, "B": 3, "Z": 3, "weight": torch.int32, "weight_scale": torch.float16,
         "zero": torch.int32, "block_rows": 1, "block_columns": 32, "columns": 96, "dtype": "float16"},
        {"W": 3, "P": 96, "A": 24, "B": 3, "Z": 3, "weight": torch.int32, "weight_scale": torch.float16,
         "zero": torch.int32, "block_rows": 1, "block_columns": 32, "columns": 96, "dtype": "float16"},
    ],
)  # fmt: skip
def dequantise(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    block_rows: int,
    block_columns: int,
    columns: int,
    dtype: str,
) -> torch.Tensor:
    """The matrix w of ``quantized_linear``, N x ``columns``, computed in fp32 and rounded once to ``dtype``.

    Raises TaskError when ``dtype`` is neither bfloat16 nor float16, or operands' dtypes or sizes do not fit each other.
    """
    if dtype not in RESULTS:
        raise TaskError(f"dequantise: dtype is {dtype!r}, expected {' or '.join(RESULTS)}")
    check_format("dequantise", columns, weight, weight_scale, zero, block_rows, block_columns)
    matrix = matrix_of(weight, weight_scale, zero, columns, block_rows, block_columns, torch.float32)
    return matrix.to(RESULTS[dtype])
