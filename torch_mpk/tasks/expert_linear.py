"""The matrix product of experts: each row of x meets the weight that its id names."""

import torch

from torch_mpk.registry import task
from torch_mpk.registry.stream_traits import StreamTraits


@task(
    "x[R, C, K], ids[R, C]: int64 < E, weight[E, N, K]?, transposed[E, K, N]? -> y[R, C, N]",
    tile={"R": 64, "N": 16},
    traits=StreamTraits(loaded=("ids",)),
    samples=[
        {"R": 1, "C": 2, "E": 4, "N": 48, "K": 64, "transposed": None},
        {"R": 5, "C": 3, "E": 8, "N": 37, "K": 50, "transposed": None},
        {"R": 3, "C": 2, "E": 5, "N": 40, "K": 33, "weight": None},
        {"R": 70, "C": 1, "E": 3, "N": 20, "K": 16, "weight": None},
    ],
)
def expert_linear(
    x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor | None = None, transposed: torch.Tensor | None = None
) -> torch.Tensor:
    """``y[r, c] = weight[ids[r, c]] @ x[r, c]``, or ``transposed[ids[r, c]].T @ x[r, c]``: one of the two is given.

    R rows choose C experts each, of E. Sums are in fp32, or in fp64 where x has it, rounded once. Where the product is
    the first of an expert, its C rows of x are one, at stride 0. An expert's weight is read where it lies, once for all
    rows that chose it.
    """
    if (weight is None) == (transposed is None):
        raise TypeError("expert_linear: expected weight or transposed, and not both")
    if weight is None:
        assert transposed is not None
        weight = transposed.mT
    # What is gathered at a time is no more than there are weights.
    rows, chosen = x.flatten(0, 1).split(len(weight)), ids.flatten().split(len(weight))
    products = [torch.bmm(weight[i], row.unsqueeze(-1)) for row, i in zip(rows, chosen, strict=True)]
    return torch.cat(products).reshape(*ids.shape, weight.shape[1])
