"""What the ranks of a group have, side by side, on each of them."""

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torch_mpk.registry import task
from torch_mpk.registry.stream_traits import StreamTraits


@task(
    "x[..., N] -> y[..., M]",
    role="stream",
    header="torch_mpk/device/tasks/exchange.cuh",
    traits=StreamTraits(loaded=(), staged=("x",), hands_over=True),
    samples=[{"...": (1,), "N": 128, "ranks": 1, "group": ""}, {"...": (2, 3), "N": 64, "ranks": 1, "group": ""}],
)
def all_gather(x: torch.Tensor, *, ranks: int, group: str) -> torch.Tensor:
    """Columns of rank 0, then those of rank 1, and so on: M = ranks * N. ``group`` names a process group of
    torch.distributed."""
    if ranks == 1 or isinstance(x, FakeTensor):
        return torch.cat([x] * ranks, -1)
    functional = torch.ops._c10d_functional
    parts = functional.wait_tensor(functional.all_gather_into_tensor(x.flatten(), ranks, group)).view(ranks, *x.shape)
    return torch.cat(parts.unbind(), -1)
