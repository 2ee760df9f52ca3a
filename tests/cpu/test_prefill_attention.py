"""The CPU's attention of a prompt against its reference, in float64."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.net import FLOATS, ISAS, TOLERANCE, Net, rms_error
from torch_mpk.tasks.prefill_attention import prefill_attention as reference

NAMES = ("q", "k", "v", "mask", "limit", "sinks")

# batch, positions, heads, key heads, cache length, head size
SHAPES = [
    (1, 1, 4, 2, 40, 16),
    (2, 70, 6, 2, 150, 64),
    (3, 5, 3, 1, 64, 80),
    (1, 33, 2, 2, 33, 5),
    (1, 4, 200, 1, 9, 8),
]


def net_of(operands: dict[str, torch.Tensor | None], scale: float, style: str = "sdpa", softcap: float = 0.0) -> Net:
    net = Net()
    given = {n: None if operands.get(n) is None else net.input(operands[n]) for n in NAMES}
    y = net.output(torch.empty(*operands["q"].shape[:3], operands["v"].shape[3], dtype=operands["q"].dtype))
    net.node("prefill_attention", {"scale": scale, "style": style, "softcap": softcap}, **given, y=y)
    return net


def check(operands: dict[str, torch.Tensor | None], isa: str = "", softcap: float = 0.0) -> torch.Tensor:
    scale, dtype = operands["q"].shape[-1] ** -0.5, operands["q"].dtype
    wide = [t.double() if t is not None and t.is_floating_point() else t for t in map(operands.get, NAMES)]
    [y] = net_of(operands, scale, softcap=softcap).run(isa=isa)
    # The weights are rounded to q's dtype before they meet the values, and so is the result.
    assert rms_error(y, reference(*wide, scale=scale, softcap=softcap)) < 2 * TOLERANCE[dtype]
    return y


def operands_of(
    batch: int, positions: int, heads: int, groups: int, length: int, dim: int, dtype: torch.dtype
) -> dict[str, torch.Tensor | None]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(dtype)

    caches = {n: random(batch, groups, length, dim) for n in ("k", "v")}
    return {"q": random(batch, positions, heads, dim), **caches}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(isa: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    operands = operands_of(*shape, dtype)
    batch, positions, *_, length, _ = shape
    check(operands, isa)
    limited = {**operands, "limit": torch.randint(1, length + 2, (batch, positions))}
    check(limited, isa)
    sinks = torch.randn(operands["q"].shape[2]).to(dtype) + 2
    check({**limited, "v": torch.cat((operands["v"], operands["v"][..., :3]), -1), "sinks": sinks}, isa, softcap=1.5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_masks(isa: str, dtype: torch.dtype) -> None:
    operands = operands_of(2, 20, 6, 2, 200, 32, dtype)
    limit = torch.arange(100, 120).expand(2, -1)
    window = torch.arange(200) > limit[..., None] - 30
    shared = window[:, None].expand(-1, 6, -1, -1)  # whole tiles of keys that nobody attends to
    check({**operands, "mask": shared, "limit": limit}, isa)
    own = torch.rand(2, 6, 20, 200) < 0.5
    check({**operands, "mask": own}, isa)
    added = torch.where(own, torch.randn(2, 6, 20, 200), torch.finfo(torch.float32).min).to(dtype)
    check({**operands, "mask": added.clamp_min(torch.finfo(dtype).min), "limit": limit}, isa)


@pytest.mark.parametrize("isa", ISAS)
def test_positions_without_a_key(isa: str) -> None:
    operands = operands_of(1, 3, 2, 1, 80, 16, torch.float32)
    operands["limit"] = torch.tensor([[0, 70, -5]])
    y = check(operands, isa)
    assert not y[0, 0].any()
    [y] = net_of(operands, 0.25, "eager").run(isa=isa)
    assert y[0, 0].isnan().all()
    assert not y[0, 1].isnan().any()


@pytest.mark.parametrize("isa", ISAS)
def test_what_lies_behind_every_limit_is_not_read(isa: str) -> None:
    operands = operands_of(1, 20, 4, 2, 100, 16, torch.bfloat16)
    for cache in ("k", "v"):
        operands[cache][:, :, 60:] = torch.nan
    operands["limit"] = torch.arange(41, 61)[None]
    [y] = net_of(operands, 0.25).run(isa=isa)
    assert not y.isnan().any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_position_s_bits_depend_on_no_other(isa: str, dtype: torch.dtype) -> None:
    operands = operands_of(2, 80, 4, 2, 100, 32, dtype) | {"limit": torch.randint(1, 101, (2, 80))}
    net = net_of(operands, 0.2)
    net.assert_same_bits(isa)
    [whole] = net.run(isa=isa)
    part = {n: t[1:] if n in ("k", "v") else t[1:, 37:51] for n, t in operands.items()}
    [y] = net_of(part, 0.2).run(isa=isa)
    assert torch.equal(y, whole[1:, 37:51])


def test_strides() -> None:
    operands = operands_of(2, 7, 4, 2, 30, 16, torch.float32)
    wide = torch.randn(2, 4, 7, 40)
    operands["q"] = wide[..., 8:24].transpose(1, 2)
    operands["k"] = torch.randn(2, 30, 2, 16).transpose(1, 2)
    check(operands)


def test_a_limit_of_another_dtype_is_refused() -> None:
    operands = operands_of(1, 2, 2, 2, 8, 16, torch.float32) | {"limit": torch.ones(1, 2, dtype=torch.int32)}
    with pytest.raises(ValueError, match=r"prefill_attention \(node\): limit is int32, expected int64"):
        net_of(operands, 1.0).compile()
