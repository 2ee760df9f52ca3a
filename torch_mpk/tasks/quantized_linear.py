"""``linear`` whose weight is quantised: of 8 or 4 bits, with scales, read where it lies."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from torch_mpk.errors import TaskError
from torch_mpk.registry import task
from torch_mpk.registry.stream_traits import StreamTraits

E4M3 = torch.float8_e4m3fn
E2M1 = torch.float4_e2m1fn_x2  # whose elements are two numbers
# Elements of a row that an element of the storage has. Those with 4 bits have the first in their lowest bits. An int32
# that has one of each row has eight rows, as AWQ packs them: these are the places of rows 0 to 7.
PACKED = {E4M3: (1,), torch.int8: (1, 2), torch.uint8: (2,), E2M1: (2,), torch.int32: (8, 1)}
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_OFFSET = {torch.uint8: 8, torch.int32: 8}  # what codes of 4 bits are above their numbers, where they have no sign
ZEROS = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32)
_MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)  # of E2M1; codes from 8 on have a sign
LARGEST_E4M3 = torch.finfo(E4M3).max
LEAST_SCALE = 1e-12
MOST_ELEMENTS = 1 << 24  # elements of a weight that the reference has in full precision at a time


_TABLES = dict.fromkeys(("column_groups", "codebook", "scale_code", "scale_scale", "scale_offset"))
_FP8 = {"weight": E4M3, "weight_scale": torch.float32, "x_scale": None, "zero": None, **_TABLES}
_WORDS = {"weight": torch.int32, "weight_scale": torch.float16, "zero": torch.int32, "x_scale": None, **_TABLES,
          "bias": None, "K": 96, "A": 24, "B": 3, "Z": 3, "block_rows": 1, "block_columns": 32}  # fmt: skip


@task(
    "x[R, K], weight[W, P], weight_scale[A, B], bias[N]?, x_scale[1]?, zero[Z, B]?, "
    "column_groups[K]?: int32 < B, codebook[C]?: float32, scale_code[D]?: float32, scale_scale[S]?: float32, "
    "scale_offset[O]?: float32 -> y[R, N]",
    role="stream",
    traits=StreamTraits(
        loaded=("weight", "weight_scale", "zero", *_TABLES),
        staged=("x",),
        whole=("x",),
        boxed=("x",),
        takes_rows=("x",),
        joined_by="x",
        tiled_by="weight",
        hands_over=True,
        any_strides=("weight", "weight_scale", "zero"),
    ),
    samples=[
        {"R": 1, "K": 256, "N": 192, "W": 192, "P": 256, "A": 2, "B": 2, "bias": None, **_FP8,
         "block_rows": 128, "block_columns": 128, "x_columns": 128},
        {"R": 3, "K": 320, "N": 80, "W": 80, "P": 320, "A": 1, "B": 3, **_FP8,
         "block_rows": 128, "block_columns": 128, "x_columns": 128},
        {"R": 2, "K": 128, "N": 48, "W": 48, "P": 128, "A": 48, "B": 1, **_FP8, "weight_scale": torch.bfloat16,
         "block_rows": 1, "block_columns": 0, "x_columns": -1},
        {"R": 5, "K": 256, "N": 64, "W": 64, "P": 256, "A": 64, "B": 1, **_FP8, "weight": torch.int8,
         "block_rows": 1, "block_columns": 0},
        {"R": 4, "K": 100, "N": 33, "W": 33, "P": 100, "A": 1, "B": 1, **_FP8, "x_scale": torch.float32, "bias": None,
         "block_rows": 0, "block_columns": 0},
        {"R": 2, "K": 256, "N": 48, "W": 48, "P": 128, "A": 48, "B": 2, "Z": 48, **_FP8, "weight": torch.int8,
         "weight_scale": torch.bfloat16, "zero": torch.bfloat16, "block_rows": 1, "block_columns": 128},
        {"R": 3, "N": 24, "W": 24, "P": 12, **_WORDS},
        {"R": 3, "N": 24, "W": 3, "P": 96, **_WORDS},
        {"R": 2, "N": 24, "W": 24, "P": 12, **_WORDS, "column_groups": torch.int32},
        {"R": 3, "K": 320, "N": 48, "W": 48, "P": 160, "A": 48, "B": 10, **_FP8, "weight": E2M1,
         "weight_scale": torch.float8_e8m0fnu, "block_rows": 1, "block_columns": 32},
        {"R": 2, "K": 128, "N": 24, "W": 24, "P": 64, "A": 24, "B": 2, "C": 16, "D": 256, "S": 3, "O": 1,
         "weight": torch.uint8, "weight_scale": torch.uint8, "x_scale": None, "zero": None, "column_groups": None,
         "block_rows": 1, "block_columns": 64, "scale_block": 16},
    ],
)  # fmt: skip
def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    column_groups: torch.Tensor | None = None,
    codebook: torch.Tensor | None = None,
    scale_code: torch.Tensor | None = None,
    scale_scale: torch.Tensor | None = None,
    scale_offset: torch.Tensor | None = None,
    *,
    block_rows: int,
    block_columns: int,
    x_columns: int = 0,
    scale_block: int = 0,
) -> torch.Tensor:
    """``x @ w.T + bias``, where ``w[n, k] = number[n, k] * weight_scale[n // block_rows, k // block_columns]``.

    Numbers of 8 bits are those of ``weight``, which is float8_e4m3fn or int8, and P is K. Numbers of 4 bits stand two
    to a byte, or eight to an int32, the first in the lowest bits: int8 holds -8 to 7, P is K / 2; uint8, P is K / 2,
    and int32, P is K / 8, hold 0 to 15, of which 8 is taken; float4_e2m1fn_x2, P is K / 2, holds e2m1. W is N. An int32
    weight of W = N / 8 and P = K, an even number, has eight rows to a word instead, in AWQ's order: from the lowest
    bits, rows 0, 2, 4, 6, 1, 3, 5, 7.
    ``weight_scale`` is float32, bfloat16, float16 or float8_e8m0fnu. A block size of 0 means the whole dimension, and
    the last block of one may be smaller.

    ``zero`` belongs to integers, and has a value for each scale. Of a floating type it is added to the products
    of numbers and scales. Integers are taken from the numbers instead, and no 8 from those of 0 to 15; int32 has eight
    of them, of 4 bits, for eight blocks of rows that follow each other, in the order of rows of ``weight``'s words: Z
    is A / 8, rounded up.

    ``column_groups`` says which block of columns each column belongs to, in place of ``k // block_columns``, as GPTQ
    has it with act-order. It belongs to integers, too, and x is not quantised then.

    ``codebook`` has 16 numbers, which those of uint8 are looked up in, as bitsandbytes has them; the first of two
    stands in the high bits. Scales may be uint8, too, with all three of ``scale_code``, of 256 numbers,
    ``scale_scale`` and ``scale_offset``, of one: ``scale_code[byte] * scale_scale[p // scale_block] + scale_offset``,
    for the scale at place p in row-major order.

    With ``x_columns``, x is quantised, too: each row, in blocks of so many columns (-1: all of them), is divided by its
    scale s, the block's largest magnitude over 448, at least 1e-12, rounded to float8_e4m3fn, and multiplied by s
    again. With ``x_scale``, that is s for all of x, and what exceeds 448 then is 448. Sums are in fp32, or in fp64
    where x has it, rounded once.

    Raises TaskError when dtypes or sizes do not fit each other.
    """
    check_format("quantized_linear", x.shape[1], weight, weight_scale, zero, block_rows, block_columns)
    if x_scale is not None:
        x_columns = -1
    nested = scale_code, scale_scale, scale_offset
    check_tables("quantized_linear", weight, weight_scale, zero, column_groups, codebook, nested, scale_block)
    weight_scale = scales_of(weight_scale, nested, scale_block)
    if x_columns and (column_groups is not None or codebook is not None):
        raise TaskError("quantized_linear: x is quantised, which it is not beside column_groups or codebook")
    computed = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = quantise(x.to(computed), x_columns, x_scale) if x_columns else x.to(computed)
    bias = None if bias is None else bias.to(computed)
    word = word_rows(weight, x.shape[1])
    rows_of_weight = weight.shape[0] * word
    block_rows, block_columns = block_rows or rows_of_weight, block_columns or x.shape[1]
    offsets = offsets_of(zero, weight, weight_scale, x.shape[1], computed)
    step = block_rows * word
    height = max(MOST_ELEMENTS // max(x.shape[1], 1) // step, 1) * step
    if rows_of_weight <= height:
        matrix = dequantised(
            weight, weight_scale, block_rows, block_columns, computed, x.shape[1], offsets, column_groups, codebook
        )
        return F.linear(rows, matrix, bias).to(x.dtype)
    products = []
    for first in range(0, rows_of_weight, height):  # a whole number of blocks, and of words, at a time
        part = weight[first // word : (first + height) // word]
        blocks = slice(first // block_rows, (first + height) // block_rows)
        own = None if offsets is None else offsets[blocks]
        matrix = dequantised(
            part, weight_scale[blocks], block_rows, block_columns, computed, x.shape[1], own, column_groups, codebook
        )
        products.append(F.linear(rows, matrix))
    y = torch.cat(products, -1)
    return (y if bias is None else y + bias).to(x.dtype)


def quantise(x: torch.Tensor, columns: int, scale: torch.Tensor | None = None) -> torch.Tensor:
    """What ``quantized_linear`` makes of x, in x's dtype: float8_e4m3fn numbers times their scales."""
    size = x.shape[-1]
    columns = size if columns < 0 else min(columns, size)
    blocks = F.pad(x, (0, -size % max(columns, 1))).unflatten(-1, (-1, max(columns, 1)))
    if scale is None:
        scale = e4m3_scales(blocks)
    scale = scale.to(x.dtype)
    numbers = (blocks / scale).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3)
    return (numbers.to(x.dtype) * scale).flatten(-2)[..., :size]


def e4m3_scales(blocks: torch.Tensor) -> torch.Tensor:
    """The scale of each block along the last dimension, which stays with a size of 1."""
    largest = blocks.abs().amax(-1, keepdim=True)
    # PyTorch multiplies by the rounded reciprocal of a number on a GPU. It divides by a tensor, as kernels do.
    return (largest / largest.new_full((), LARGEST_E4M3)).clamp_min(LEAST_SCALE)


def dequantised(
    weight: torch.Tensor,
    scale: torch.Tensor,
    block_rows: int,
    block_columns: int,
    dtype: torch.dtype,
    columns: int | None = None,
    offsets: torch.Tensor | None = None,
    column_groups: torch.Tensor | None = None,
    codebook: torch.Tensor | None = None,
) -> torch.Tensor:
    """The matrix that weight and scale stand for.

    ``offsets``: what is added to each block; ``column_groups``: the block of each column; ``codebook``: the numbers of
    codes.
    """
    columns = weight.shape[1] if columns is None else columns
    shape = len(weight) * word_rows(weight, columns), columns

    def spread(blocks: torch.Tensor) -> torch.Tensor:
        each = blocks.to(dtype).repeat_interleave(block_rows, 0)[: shape[0]] if block_rows > 1 else blocks.to(dtype)
        if column_groups is not None:
            return each.index_select(1, column_groups)
        return each.repeat_interleave(block_columns, 1)[:, : shape[1]] if block_columns > 1 else each

    matrix = _numbers(weight, columns, codebook).to(dtype) * spread(scale)
    return matrix if offsets is None else matrix + spread(offsets)


def word_rows(weight: torch.Tensor, columns: int) -> int:
    """Rows that an element of the weight has, of a matrix of so many columns."""
    return len(PLACES) if weight.dtype == torch.int32 and weight.shape[-1] == columns else 1


def _numbers(weight: torch.Tensor, columns: int, codebook: torch.Tensor | None) -> torch.Tensor:
    if weight.dtype == E2M1:
        numbers = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)], device=weight.device)
        return numbers[_nibbles(weight.view(torch.uint8), 1, (0, 1))]
    if codebook is not None:
        return codebook[_nibbles(weight, 1, (1, 0))]
    if word_rows(weight, columns) > 1:
        return _nibbles(weight, 0, PLACES) - _OFFSET[weight.dtype]
    if weight.shape[1] == columns:
        return weight
    codes = _nibbles(weight, 1, range(2 * weight.element_size()))
    return codes - _OFFSET[weight.dtype] if weight.dtype in _OFFSET else (codes ^ 8) - 8


def _nibbles(packed: torch.Tensor, dim: int, places: Sequence[int]) -> torch.Tensor:
    """The 4-bit codes at these places of a matrix's elements, one after the other along ``dim``."""
    bits = torch.tensor([4 * place for place in places], dtype=torch.int32, device=packed.device)
    codes = packed.to(torch.int32).unsqueeze(-1) >> bits & 15
    return codes.movedim(-1, dim + 1).flatten(dim, dim + 1)


def scales_of(scale: torch.Tensor, nested: Sequence[torch.Tensor | None], block: int) -> torch.Tensor:
    """Scales as numbers; ``nested``: scale_code, scale_scale and scale_offset, or None thrice."""
    code, scale_of_scale, offset = nested
    if code is None or scale_of_scale is None or offset is None:
        return scale
    return code[scale.int()] * scale_of_scale.repeat_interleave(block)[: scale.numel()].view(scale.shape) + offset


def offsets_of(
    zero: torch.Tensor | None, weight: torch.Tensor, scale: torch.Tensor, columns: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """What zero points add to each block's numbers."""
    if zero is None:
        return None
    if zero.dtype.is_floating_point:
        return zero.to(dtype)
    has_word_rows = word_rows(weight, columns) > 1
    points = zero
    if zero.dtype == torch.int32:
        points = _nibbles(zero, 0, PLACES if has_word_rows else range(8))[: len(scale)]
    middle = _OFFSET.get(weight.dtype, 0) if weight.shape[1] != columns or has_word_rows else 0
    return (middle - points.to(dtype)) * scale.to(dtype)


def check_tables(
    task_name: str,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    column_groups: torch.Tensor | None,
    codebook: torch.Tensor | None,
    of_scales: Sequence[torch.Tensor | None],
    scale_block: int,
) -> None:
    """Checks what columns and scales look up. Raises TaskError."""
    if codebook is not None and (
        weight.dtype != torch.uint8 or zero is not None or column_groups is not None or len(codebook) != 16
    ):
        raise TaskError(
            f"{task_name}: codebook has {len(codebook)} numbers beside {weight.dtype} weights, expected 16, and uint8 "
            "weights without zero or column_groups"
        )
    if column_groups is not None and weight.dtype == E2M1:
        raise TaskError(f"{task_name}: column_groups beside weights of {weight.dtype}, expected integers")
    given = [len(table) for table in of_scales if table is not None]
    expected = [256, -(-scale.numel() // max(scale_block, 1)), 1] if scale.dtype == torch.uint8 else []
    if given != expected or (given and scale_block < 1):
        raise TaskError(
            f"{task_name}: scale_code, scale_scale and scale_offset have sizes {given} beside scales of "
            f"{scale.dtype} in blocks of {scale_block}, expected {expected}"
        )


def check_format(
    task_name: str,
    columns: int,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    zero: torch.Tensor | None,
    block_rows: int,
    block_columns: int,
) -> None:
    """Checks what a matrix is given by, or several that are stacked; x has ``columns``. Raises TaskError."""
    if weight.dtype not in PACKED:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in PACKED)
        raise TaskError(f"{task_name}: weight is {weight.dtype}, expected one of {expected}")
    *stack, rows, elements = weight.shape
    if all(elements * packed != columns for packed in PACKED[weight.dtype]):
        expected = " or ".join(f"K / {packed}" if packed > 1 else "K" for packed in PACKED[weight.dtype])
        raise TaskError(
            f"{task_name}: weight has {elements} columns of {weight.dtype}, expected {expected}, "
            f"where K is x's {columns}"
        )
    word = word_rows(weight, columns)
    if word > 1 and (stack or columns % 2):
        raise TaskError(
            f"{task_name}: weight has eight rows to an int32, which is for a single matrix of an even number of columns"
            f", given {[*stack, rows * word, columns]}"
        )
    rows *= word
    sizes = [-(-size // (block or max(size, 1))) for size, block in zip((rows, columns), (block_rows, block_columns))]
    if list(weight_scale.shape) != [*stack, *sizes]:
        raise TaskError(
            f"{task_name}: weight_scale is {list(weight_scale.shape)}, expected {[*stack, *sizes]} for a weight of "
            f"{[*stack, rows, columns]} in blocks of {block_rows} x {block_columns}"
        )
    if zero is None:
        return
    if weight.dtype in (E4M3, E2M1) or zero.dtype not in ZEROS:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in ZEROS)
        raise TaskError(f"{task_name}: zero is {zero.dtype}, expected one of {expected}, and integer weights")
    sizes[0] = -(-sizes[0] // 8) if zero.dtype == torch.int32 else sizes[0]
    if list(zero.shape) != [*stack, *sizes]:
        raise TaskError(
            f"{task_name}: zero is {list(zero.shape)}, expected {[*stack, *sizes]}, as many as there are scales"
        )
