"""A quantised weight as a matrix of 16 bits, for products of many rows."""

import torch

from torch_mpk.errors import TaskError
from torch_mpk.registry import task
from torch_mpk.registry.stream_traits import StreamTraits
from torch_mpk.tasks.quantized_linear import (
    E2M1,
    E4M3,
    check_format,
    check_tables,
    dequantised,
    offsets_of,
    scales_of,
    word_rows,
)

RESULTS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


_NO_TABLES = dict.fromkeys(("column_groups", "codebook", "scale_code", "scale_scale", "scale_offset"))
_PLAIN = {"zero": None, **_NO_TABLES}
_WORDS = {"weight": torch.int32, "weight_scale": torch.float16, "zero": torch.int32, **_NO_TABLES, "K": 96, "A": 24,
          "B": 3, "Z": 3, "block_rows": 1, "block_columns": 32, "columns": 96, "dtype": "float16"}  # fmt: skip


@task(
    "weight[W, P], weight_scale[A, B], zero[Z, B]?, column_groups[K]?: int32 < B, codebook[C]?: float32, "
    "scale_code[D]?: float32, scale_scale[S]?: float32, scale_offset[O]?: float32 -> matrix[N, K]",
    role="stream",
    traits=StreamTraits(loaded=(), any_strides=("weight", "weight_scale", "zero")),
    samples=[
        {"W": 80, "P": 320, "A": 1, "B": 3, "weight": E4M3, "weight_scale": torch.float32, **_PLAIN,
         "block_rows": 128, "block_columns": 128, "columns": 320, "dtype": "bfloat16"},
        {"W": 33, "P": 100, "A": 33, "B": 1, "weight": torch.int8, "weight_scale": torch.bfloat16, **_PLAIN,
         "block_rows": 1, "block_columns": 0, "columns": 100, "dtype": "float16"},
        {"W": 48, "P": 128, "A": 48, "B": 2, "Z": 48, "weight": torch.int8, "weight_scale": torch.bfloat16, **_PLAIN,
         "zero": torch.bfloat16, "block_rows": 1, "block_columns": 128, "columns": 256, "dtype": "bfloat16"},
        {"W": 24, "P": 12, **_WORDS},
        {"W": 3, "P": 96, **_WORDS},
        {"W": 24, "P": 12, **_WORDS, "column_groups": torch.int32},
        {"W": 24, "P": 48, "A": 24, "B": 3, "weight": E2M1, "weight_scale": torch.float8_e8m0fnu, **_PLAIN,
         "block_rows": 1, "block_columns": 32, "columns": 96, "dtype": "bfloat16"},
        {"W": 24, "P": 64, "A": 24, "B": 2, "C": 16, "D": 256, "S": 3, "O": 1, "weight": torch.uint8,
         "weight_scale": torch.uint8, "zero": None, "column_groups": None, "block_rows": 1, "block_columns": 64,
         "scale_block": 16, "columns": 128, "dtype": "bfloat16"},
    ],
)  # fmt: skip
def dequantise(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    column_groups: torch.Tensor | None = None,
    codebook: torch.Tensor | None = None,
    scale_code: torch.Tensor | None = None,
    scale_scale: torch.Tensor | None = None,
    scale_offset: torch.Tensor | None = None,
    *,
    block_rows: int,
    block_columns: int,
    columns: int,
    dtype: str,
    scale_block: int = 0,
) -> torch.Tensor:
    """The matrix w of ``quantized_linear``, N x ``columns``, computed in fp32 and rounded once to ``dtype``.

    Raises TaskError when ``dtype`` is neither bfloat16 nor float16, or operands' dtypes or sizes do not fit each other.
    """
    if dtype not in RESULTS:
        raise TaskError(f"dequantise: dtype is {dtype!r}, expected {' or '.join(RESULTS)}")
    nested = scale_code, scale_scale, scale_offset
    check_format("dequantise", columns, weight, weight_scale, zero, block_rows, block_columns)
    check_tables("dequantise", weight, weight_scale, zero, column_groups, codebook, nested, scale_block)
    scale = scales_of(weight_scale, nested, scale_block)
    offsets = offsets_of(zero, weight, scale, columns, torch.float32)
    blocks = block_rows or len(weight) * word_rows(weight, columns), block_columns or columns
    matrix = dequantised(weight, scale, *blocks, torch.float32, columns, offsets, column_groups, codebook)
    return matrix.to(RESULTS[dtype])
