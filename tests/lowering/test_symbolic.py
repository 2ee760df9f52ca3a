"""Sizes known only at run time: one build holds for all of them, or the segment is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from tests.lowering.harness import run
from torch_mpk import lowering
from torch_mpk.errors import UnsupportedError

LENGTH = 12


def capture_symbolic(fn, *tensors: torch.Tensor, size: int) -> torch.fx.GraphModule:
    """fn(s, *tensors), where every dimension that equals ``size`` is the symbol s."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    symbol = env.create_symbol(size, ConstantSource("s"), dynamic_dim=DimDynamic.DYNAMIC)
    s = env.create_symintnode(symbol, hint=size)
    with mode:
        fakes = [torch.empty([s if n == size else n for n in t.shape], dtype=t.dtype) for t in tensors]
        return make_fx(fn, pre_dispatch=True, tracing_mode="real", _allow_non_fake_inputs=True)(s, *fakes)


def padded_mask(s, mask: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """As Hugging Face makes it: a 2-D mask padded to the cache's length, gathered and joined with causality."""
    full = F.pad(mask.to(torch.bool), [0, LENGTH - s])
    rows = torch.arange(2)[:, None, None, None]
    columns = torch.arange(LENGTH)[None, None, None]
    causal = columns <= position + torch.arange(1)[:, None]
    return (full[rows, columns] & causal).expand(2, 1, 1, LENGTH) * 1.0


def test_one_build_for_every_length_of_a_mask() -> None:
    mask = torch.randint(0, 2, (2, 5))
    module = capture_symbolic(padded_mask, mask, torch.tensor(4), size=5)
    assert {n.name: r for n in module.graph.nodes if (r := lowering.supports(n))} == {}
    lowered = lowering.lower(module)
    assert len(lowered.scalars) == 1
    for s in (2, 5, 9, LENGTH):
        mask, position = torch.randint(0, 2, (2, s)), torch.tensor(s - 1)
        (ours,) = run(lowered, [s, mask, position])
        assert torch.equal(ours, padded_mask(s, mask, position))


def test_reading_and_slicing_a_tensor_of_unknown_size() -> None:
    def fn(s, x):
        return x[:, :2] * 2, F.pad(x.transpose(0, 1), [0, 0, 0, LENGTH - s]).sum(0)

    module = capture_symbolic(fn, torch.randn(3, 5), size=5)
    lowered = lowering.lower(module)
    for s in (4, 7):
        x = torch.randint(-4, 5, (3, s)).float()
        for ours, eager in zip(run(lowered, [s, x]), fn(s, x), strict=True):
            assert torch.equal(ours, eager)


def test_the_larger_and_the_smaller_of_sizes() -> None:
    """As where a window begins that slides over a mask of unknown length."""

    def fn(s, position: torch.Tensor) -> torch.Tensor:
        first, last = torch.sym_max(s - 3, 0), torch.sym_min(s, 6)
        return torch.arange(LENGTH) + first <= position + last

    module = capture_symbolic(fn, torch.tensor(4), size=5)
    lowered = lowering.lower(module)
    for s in (2, 3, 6, 11):
        (ours,) = run(lowered, [s, torch.tensor(2)])
        assert torch.equal(ours, fn(s, torch.tensor(2)))


@pytest.mark.parametrize(
    "fn",
    [
        lambda s, x: x * 2,
        lambda s, x: x.sum(1),
        lambda s, x: x.add_(1).sum() * 0 + 1,
        lambda s, x: (x @ x.t())[0, 0],
        lambda s, x: x.reshape(-1)[:2],
    ],
)
def test_other_uses_are_refused(fn) -> None:
    module = capture_symbolic(fn, torch.randn(3, 5), size=5)
    with pytest.raises(UnsupportedError, match="run time"):
        lowering.lower(module)
