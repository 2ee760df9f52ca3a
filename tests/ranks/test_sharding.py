"""Graphs of local tensors that mean what Dynamo's graphs of DTensors mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_mpk.errors import UnsupportedError
from torch_mpk.ranks.sharding import localise

RANK, RANKS, ROWS = 1, 2, 6


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Of rank 1 of two, of which the other is not there."""
    dist.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def localised(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> fx.GraphModule:
    found = []

    def backend(gm: fx.GraphModule, inputs: list) -> Callable[..., object]:
        found.append(localise(gm, inputs).gm)
        return gm.forward

    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(*args)
    return found[0]


def calls(gm: fx.GraphModule) -> list[str]:
    return [getattr(node.target, "__name__", str(node.target)) for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("is_tensor", [True, False])
def test_a_scaled_embedding_is_summed(mesh: DeviceMesh, is_tensor: bool) -> None:
    """DTensor sums before it multiplies, and whoever takes the product takes all of it."""

    def scaled(ids, weight, scale):
        found = F.embedding(DTensor.from_local(ids, mesh, [Replicate()], run_check=False), weight)
        return (found * (scale if is_tensor else 3.0)).to_local()

    weight = DTensor.from_local(torch.randn(ROWS, 4), mesh, [Shard(0)], run_check=False)
    gm = localised(scaled, torch.arange(3), weight, torch.tensor(3.0))
    assert [name for name in calls(gm) if name in ("all_reduce", "mul")] == ["all_reduce", "mul"]


def test_a_rank_takes_its_columns_of_what_all_have(mesh: DeviceMesh) -> None:
    def split(x):
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(-1)]).to_local()

    x = torch.randn(3, 8)
    assert torch.equal(localised(split, x)(x)[0], x[:, 4:])


def test_what_dtensor_redistributes_on_its_own_is_refused(mesh: DeviceMesh) -> None:
    """An operator whose result is placed otherwise than the graph of local tensors has it."""

    def scaled(x, scale):
        return (DTensor.from_local(x, mesh, [Replicate()], run_check=False) * scale).to_local()

    def spoilt(gm: fx.GraphModule, inputs: list) -> Callable[..., object]:
        [product] = [node for node in gm.graph.nodes if "mul" in str(node.target)]
        whole = product.meta["example_value"]
        product.meta["example_value"] = DTensor.from_local(whole._local_tensor, mesh, [Shard(0)], run_check=False)
        with pytest.raises(UnsupportedError, match=r"its result is S\(0\) where torch_mpk makes it R"):
            localise(gm, inputs)
        return gm.forward

    with torch.no_grad():
        torch.compile(scaled, backend=spoilt, fullgraph=True)(torch.randn(3, 8), torch.tensor(2.0))
