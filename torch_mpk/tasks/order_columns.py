"""Rows of x, in the order of words of 4-bit weights, made once for all linears that read them."""

import torch

from torch_mpk.errors import TaskError
from torch_mpk.registry import task

COLUMNS = 32  # that are put in order together


@task(
    "x[R, S, C] -> ordered[R, S, C], sums[R, S]: float32",
    role="tile",
    tile={"R": 8, "S": 8},
    behind_rows=True,
    samples=[{"R": 3, "S": 2, "C": 128}, {"R": 9, "S": 1, "C": 320}, {"R": 2, "S": 17, "C": 64}],
)
def order_columns(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x, with columns in another order, and the sum of each block of C columns in fp32.

    In each 32 columns, column c comes to place ``c % 4 * 8 + c // 4``: a word of eight 4-bit weights becomes pairs of
    numbers whose columns are four apart. ``ordered_linear`` takes such an x; a schedule puts it in order once for all
    readers, behind what makes whole rows, or in a phase of its own.
    Raises TaskError when C is no multiple of 32.
    """
    if x.shape[-1] % COLUMNS:
        raise TaskError(f"order_columns: blocks have {x.shape[-1]} columns, expected a multiple of {COLUMNS}")
    words = x.unflatten(-1, (-1, COLUMNS // 4, 4))
    return words.transpose(-1, -2).flatten(-3), x.sum(-1, dtype=torch.float32)


def original_order(ordered: torch.Tensor) -> torch.Tensor:
    """The columns of ``order_columns`` where they were before."""
    return ordered.unflatten(-1, (-1, 4, COLUMNS // 4)).transpose(-1, -2).flatten(-3)
