"""The largest of each row and where they are, as routers choose experts."""

import torch

from torch_mpk.registry import task


@task(
    "x[..., N] -> values[..., K], ids[..., K]: int64",
    samples=[
        {"...": (1,), "N": 64, "num": 1},
        {"...": (2, 3), "N": 128, "num": 8},
        {"...": (5,), "N": 7, "num": 7},
    ],
)
def topk(x: torch.Tensor, *, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``num`` largest of each row, in descending order, and their indices.

    NaN is larger than all numbers. Of equal elements those with the lowest indices are taken, as by ``torch.topk`` on
    CUDA. Each element is compared with each other of its row, so this is for short rows.
    """
    if not x.is_floating_point() or not 1 <= num <= x.shape[-1]:
        raise TypeError(f"topk: num={num} of {x.dtype}[..., {x.shape[-1]}], expected floats, and 1 to N of them")
    values, ids = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :num].contiguous(), ids[..., :num].contiguous()
