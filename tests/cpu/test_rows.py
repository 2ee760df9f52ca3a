"""rms_norm and rope against the operations of the eager graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.cpu.net import FLOATS, ISAS, TOLERANCE, Net, rms_error


def llama(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    wide = x.float() if x.dtype != torch.float64 else x
    normal = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normal if weight is None else weight * normal


def gemma(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    wide = x.float() if x.dtype != torch.float64 else x
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normal if weight is None else normal * (1.0 + weight.to(wide.dtype))).to(x.dtype)


def plain(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


STYLES = {"llama": llama, "gemma": gemma, "torch": plain}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("rows", "size", "weighted"), [(1, 1024, True), (5, 77, True), (3, 1, False), (70, 130, False)]
)
def test_rms_norm(isa: str, dtype: torch.dtype, style: str, rows: int, size: int, weighted: bool) -> None:
    x = torch.randn(rows, size + 3).mul(3).to(dtype)[:, 3:]
    weight = torch.randn(size).to(dtype) if weighted else None
    net = Net()
    operands = {"x": net.input(x), "weight": None if weight is None else net.input(weight)}
    net.node("rms_norm", {"eps": 1e-5, "style": style}, **operands, y=net.output(torch.empty(rows, size, dtype=dtype)))
    [y] = net.run(isa=isa)
    eager = STYLES[style](x, weight, 1e-5)
    wide = STYLES[style](x.double(), None if weight is None else weight.double(), 1e-5)
    # The sum's order differs from eager's, so single elements may round the other way.
    slack = TOLERANCE[torch.float64 if dtype == torch.float64 else torch.float32]
    assert rms_error(y, wide) <= 1.1 * rms_error(eager, wide) + slack
    net.assert_same_bits(isa)


def test_rms_norm_of_zeros_and_nan() -> None:
    x = torch.zeros(2, 64)
    x[1, 5] = torch.nan
    net = Net()
    net.node("rms_norm", {"eps": 1e-6, "style": "llama"}, x=net.input(x), y=net.output(torch.empty(2, 64)))
    [y] = net.run()
    assert not y[0].any()
    assert y[1].isnan().all()


def test_an_unknown_style_is_refused() -> None:
    net = Net()
    net.node("rms_norm", {"eps": 1e-6, "style": "t5"}, x=net.input(torch.ones(1, 4)), y=net.output(torch.empty(1, 4)))
    with pytest.raises(ValueError, match="style is 't5', expected 'llama', 'torch' or 'gemma'"):
        net.compile()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("batch", "heads", "dim"), [(1, 4, 128), (3, 5, 6), (2, 33, 64)])
def test_rope_equals_the_eager_graph(isa: str, dtype: torch.dtype, batch: int, heads: int, dim: int) -> None:
    x = torch.randn(batch, heads + 2, dim).to(dtype)[:, 1:-1]
    cos, sin = torch.randn(1, dim).to(dtype).expand(batch, dim), torch.randn(batch, dim).to(dtype)
    net = Net()
    operands = {"x": net.input(x), "cos": net.input(cos), "sin": net.input(sin)}
    net.node("rope", **operands, y=net.output(torch.empty(batch, heads, dim, dtype=dtype)))
    [y] = net.run(isa=isa)
    turned = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1)
    assert torch.equal(y, x * cos[:, None] + turned * sin[:, None])
