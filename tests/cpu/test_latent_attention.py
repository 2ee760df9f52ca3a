"""The CPU's attention over latents against its reference, in float64."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.net import FLOATS, ISAS, TOLERANCE, Net, rms_error
from torch_mpk.tasks.latent_attention import latent_attention

NAMES = ("q", "q_rope", "latent", "rope", "mask", "limit")


def check(operands: dict[str, torch.Tensor], isa: str = "") -> torch.Tensor:
    wide = {n: t.double() if t.is_floating_point() else t for n, t in operands.items()}
    exact = latent_attention.reference(*map(wide.get, NAMES), scale=0.125)
    net = Net()
    given = {n: None if operands.get(n) is None else net.input(operands[n]) for n in NAMES}
    net.node("latent_attention", {"scale": 0.125}, **given, y=net.output(torch.empty_like(operands["q"])))
    [y] = net.run(isa=isa)
    assert rms_error(y, exact) < TOLERANCE[operands["q"].dtype]
    return y


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 5, 24, 8, 33), (3, 20, 64, 16, 700), (8, 16, 130, 3, 90)])
def test_shapes(isa: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    batch, heads, size, rope, length = shape
    shapes = [(batch, heads, size), (batch, heads, rope), (batch, 1, length, size), (batch, 1, length, rope)]
    operands = {name: torch.randn(of).to(dtype) for name, of in zip(NAMES, shapes, strict=False)}
    limit = torch.randint(2, length + 9, (batch,))
    check(operands, isa)
    check({**operands, "limit": limit}, isa)
    check({**operands, "mask": torch.randn(batch, heads, length).to(dtype), "limit": limit}, isa)
    keep = torch.rand(batch, heads, length) < 0.5
    keep[0, 1] = False
    y = check({**operands, "mask": keep, "limit": limit}, isa)
    assert not y[0, 1].any()
    limit[0] = 0
    for name in ("latent", "rope"):  # nobody reads a free slot
        operands[name][0] = torch.nan
    assert not check({**operands, "limit": limit}, isa)[0].any()
