"""The sum of what the ranks of a group have, on each of them."""

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torch_mpk.registry import task
from torch_mpk.registry.stream_traits import StreamTraits


@task(
    "x[..., N] -> y[..., N]",
    role="stream",
    header="torch_mpk/device/tasks/exchange.cuh",
    traits=StreamTraits(loaded=(), staged=("x",), joined_by="x", hands_over=True),
    samples=[{"...": (1,), "N": 128, "ranks": 1, "group": ""}, {"...": (2, 3), "N": 64, "ranks": 1, "group": ""}],
)
def all_reduce(x: torch.Tensor, *, ranks: int, group: str) -> torch.Tensor:
    """``sum(x of rank r for r in range(ranks))``, added in the order of the ranks in fp32, or in fp64 where x has it,
    and rounded once: so all ranks have the same bits. ``group`` names a process group of torch.distributed."""
    if ranks == 1 or isinstance(x, FakeTensor):
        return torch.clone(x, memory_format=torch.contiguous_format)
    functional = torch.ops._c10d_functional
    parts = functional.wait_tensor(functional.all_gather_into_tensor(x.flatten(), ranks, group)).view(ranks, *x.shape)
    total = parts[0].to(torch.promote_types(x.dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total.to(x.dtype)
