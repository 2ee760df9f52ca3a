"""``expert_linear`` whose weights are quantised as those of ``quantized_linear``, read where they lie."""

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torch_mpk.registry import task
from torch_mpk.registry.stream_traits import StreamTraits
from torch_mpk.tasks.quantized_linear import E2M1, E4M3, check_format, quantized_linear

_FP8 = {"weight": E4M3, "weight_scale": torch.float32, "zero": None}
_BLOCKS = {"block_rows": 128, "block_columns": 128, "x_columns": 128}


@task(
    "x[R, C, K], ids[R, C]: int64 < E, weight[E, N, P], weight_scale[E, A, B], zero[E, Z, B]? -> y[R, C, N]",
    role="stream",
    traits=StreamTraits(loaded=("ids",), any_strides=("weight_scale", "zero")),
    samples=[
        {"R": 2, "C": 3, "E": 4, "N": 192, "K": 256, "P": 256, "A": 2, "B": 2, **_FP8, **_BLOCKS},
        {"R": 5, "C": 2, "E": 3, "N": 37, "K": 100, "P": 100, "A": 1, "B": 1, **_FP8, **_BLOCKS},
        {"R": 3, "C": 2, "E": 4, "N": 48, "K": 256, "P": 128, "A": 48, "B": 2, "Z": 48, "weight": torch.int8,
         "weight_scale": torch.bfloat16, "zero": torch.bfloat16, "block_rows": 1, "block_columns": 128},
        {"R": 5, "C": 2, "E": 3, "N": 32, "K": 320, "P": 160, "A": 32, "B": 10, "weight": E2M1,
         "weight_scale": torch.float8_e8m0fnu, "zero": None, "block_rows": 1, "block_columns": 32},
        {"R": 9, "C": 1, "E": 2, "N": 32, "K": 64, "P": 64, "A": 32, "B": 1, "weight": torch.int8,
         "weight_scale": torch.float32, "zero": None, "block_rows": 1, "block_columns": 0},
    ],
)  # fmt: skip
def quantized_expert_linear(
    x: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    block_rows: int,
    block_columns: int,
    x_columns: int = 0,
) -> torch.Tensor:
    """``y[r, c] = w[ids[r, c]] @ x[r, c]``, where ``w[e]`` is what ``quantized_linear`` makes of ``weight[e]``,
    ``weight_scale[e]`` and ``zero[e]``. Dtypes, packing, blocks and ``x_columns`` are its own, too.

    R rows choose C experts each, of E; an id of no expert gives zeros. Where the product is the first of an expert, its
    C rows of x are one, at stride 0. An expert's weight is read once for all rows that chose it.

    Raises TaskError when dtypes or sizes do not fit each other.
    """
    attrs = {"block_rows": block_rows, "block_columns": block_columns}
    check_format("quantized_expert_linear", x.shape[2], weight, weight_scale, zero, **attrs)
    y = torch.zeros((*ids.shape, weight.shape[1]), dtype=x.dtype, device=x.device)
    if isinstance(ids, FakeTensor):  # which names no experts
        return y
    for expert in [each for each in ids.unique().tolist() if 0 <= each < len(weight)]:
        chosen = ids == expert
        operands = weight[expert], weight_scale[expert], None, None, None if zero is None else zero[expert]
        y[chosen] = quantized_linear.reference(x[chosen], *operands, **attrs, x_columns=x_columns)
    return y
