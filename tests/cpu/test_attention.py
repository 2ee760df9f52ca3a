"""The CPU's attention against its reference, in float64."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.net import FLOATS, ISAS, TOLERANCE, Net, rms_error
from torch_mpk.tasks.attention import attention as reference

NAMES = ("q", "k_new", "v_new", "slot", "k_cache", "v_cache", "mask", "limit", "sinks")


SHAPES = [(1, 4, 2, 40, 16), (2, 7, 1, 333, 64), (3, 16, 8, 70, 128), (1, 2, 2, 1, 5), (1, 3, 1, 1500, 80)]


def net_of(operands: dict[str, torch.Tensor | None], scale: float, style: str = "sdpa", softcap: float = 0.0) -> Net:
    net = Net()
    attrs = {"scale": scale, "style": style, "softcap": softcap}
    y_shape = (*operands["q"].shape[:2], operands["v_cache"].shape[3])
    net.node("attention", attrs, **{n: None if operands.get(n) is None else net.input(operands[n]) for n in NAMES},
             y=net.output(torch.empty(y_shape, dtype=operands["q"].dtype)))  # fmt: skip
    return net


def wide(t: torch.Tensor | None) -> torch.Tensor | None:
    return t.double() if t is not None and t.dtype.is_floating_point else t


def check(operands: dict[str, torch.Tensor | None], isa: str = "", softcap: float = 0.0) -> torch.Tensor:
    scale, dtype = operands["q"].shape[-1] ** -0.5, operands["q"].dtype
    exact_operands = {n: wide(t.clone()) if t is not None else None for n, t in operands.items()}
    exact = reference(*(exact_operands.get(n) for n in NAMES), scale=scale, softcap=softcap)
    [y] = net_of(operands, scale, softcap=softcap).run(isa=isa)
    assert not y.isnan().any()
    assert rms_error(y, exact) < TOLERANCE[dtype]
    for cache in ("k_cache", "v_cache"):
        assert torch.equal(operands[cache].double(), exact_operands[cache])
    return y


def operands_of(
    batch: int, heads: int, groups: int, length: int, dim: int, dtype: torch.dtype
) -> dict[str, torch.Tensor | None]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(dtype)

    caches = {n: random(batch, groups, length, dim) for n in ("k_cache", "v_cache")}
    new = {n: random(batch, groups, dim) for n in ("k_new", "v_new")}
    return {"q": random(batch, heads, dim), **caches, **new, "slot": torch.tensor([length // 2])}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("batch", "heads", "groups", "length", "dim"), SHAPES)
def test_shapes(isa: str, dtype: torch.dtype, batch: int, heads: int, groups: int, length: int, dim: int) -> None:
    operands = operands_of(batch, heads, groups, length, dim, dtype)
    check(operands, isa)
    check({**operands, "limit": torch.randint(1, length + 2, (batch,))}, isa)
    check({**operands, "k_new": None, "v_new": None, "slot": None}, isa)
    sinks = torch.randn(heads).to(dtype) + 2
    wider = {n: torch.cat((operands[n], operands[n][..., :3]), -1) for n in ("v_new", "v_cache")}
    check({**operands, **wider, "sinks": sinks}, isa, softcap=1.5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("length", [50, 700])
def test_masks(isa: str, dtype: torch.dtype, length: int) -> None:
    operands = operands_of(2, 6, 2, length, 32, dtype)
    keep = torch.rand(2, 6, length) < 0.3
    keep[:, :, 3] = True
    check({**operands, "mask": keep}, isa)
    check({**operands, "mask": keep[:, :1].expand(2, 6, length), "limit": torch.tensor([length, 5])}, isa)
    check({**operands, "mask": torch.randn(2, 6, length).to(dtype)}, isa)
    lowest = torch.finfo(dtype).min if dtype != torch.float64 else -1e300
    check({**operands, "mask": torch.zeros(2, 6, length, dtype=dtype).masked_fill(~keep, lowest)}, isa)
    check({**operands, "mask": torch.zeros(2, 6, length, dtype=dtype).masked_fill(~keep, -torch.inf)}, isa)
    row = torch.zeros(length, dtype=dtype).masked_fill(~keep[0, 0], lowest)
    check({**operands, "mask": row.expand(2, 6, length)}, isa)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("length", [20, 600])
def test_rows_without_a_live_key(dtype: torch.dtype, length: int) -> None:
    operands = operands_of(2, 4, 2, length, 16, dtype)
    keep = torch.ones(2, 4, length, dtype=torch.bool)
    keep[0, 1] = False
    assert not check({**operands, "mask": keep})[0, 1].any()
    lowest = torch.zeros(2, 4, length, dtype=dtype).masked_fill(~keep, torch.finfo(dtype).min)
    [y] = net_of({**operands, "mask": lowest}, 0.25).run()
    assert rms_error(y[0, 1], operands["v_cache"][0, 0].double().mean(0)) < 2 * TOLERANCE[dtype]  # the average
    assert not check({**operands, "limit": torch.tensor([0, 7])})[0].any()


@pytest.mark.parametrize("length", [20, 600])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("style", ["sdpa", "eager"])
def test_heads_without_a_key_give_what_their_form_gives(style: str, dtype: torch.dtype, length: int) -> None:
    operands = operands_of(2, 4, 2, length, 16, dtype)
    keep = torch.rand(2, 4, length) < 0.5
    keep[:, :, 1] = True
    keep[0, 1] = False
    added = torch.zeros(2, 4, length, dtype=dtype).masked_fill(~keep, -torch.inf)
    with_nan = added.clone()
    with_nan[1, 2, length // 2] = torch.nan
    forms = [{"mask": keep}, {"mask": added}, {"mask": with_nan}]
    forms += [{"limit": torch.tensor([0, 7])}, {"mask": added, "limit": torch.tensor([0, 7])}]
    for form in forms:
        wide_operands = {n: wide(t) for n, t in {**operands, **form}.items()}
        exact = reference(*(wide_operands.get(n) for n in NAMES), scale=0.25, style=style)
        [y] = net_of({**operands, **form}, 0.25, style).run()
        assert exact.isnan().any() == (style == "eager" or form.get("mask") is with_nan)
        torch.testing.assert_close(y.double(), exact, rtol=2e-2, atol=2e-2, equal_nan=True)


def test_masked_slots_are_not_read() -> None:
    operands = operands_of(1, 2, 1, 300, 16, torch.float32)
    keep = torch.zeros(1, 2, 300, dtype=torch.bool)
    keep[..., 100:200] = True
    for cache in ("k_cache", "v_cache"):
        operands[cache][:, :, :100] = torch.nan
        operands[cache][:, :, 200:] = torch.nan
    [y] = net_of({**operands, "mask": keep}, 0.25).run()
    assert not y.isnan().any()


@pytest.mark.parametrize("slot", [-1, 40, 2**40])
def test_a_slot_outside_the_cache_writes_nothing(slot: int) -> None:
    operands = operands_of(2, 4, 2, 40, 16, torch.float32)
    before = operands["k_cache"].clone()
    net_of({**operands, "slot": torch.tensor([slot])}, 0.25).run()
    assert torch.equal(before, operands["k_cache"])


@pytest.mark.parametrize(("limit", "slot"), [(3, 200), (0, 0), (700, 699)])
def test_a_slot_is_written_whatever_the_limit(limit: int, slot: int) -> None:
    operands = operands_of(1, 4, 2, 700, 16, torch.float32)
    check({**operands, "slot": torch.tensor([slot]), "limit": torch.tensor([limit])})
    assert torch.equal(operands["k_cache"][:, :, slot], operands["k_new"])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_same_bits_on_any_number_of_threads(isa: str, dtype: torch.dtype) -> None:
    operands = operands_of(1, 4, 2, 900, 32, dtype)
    net_of({**operands, "limit": torch.tensor([801])}, 0.2).assert_same_bits(isa)


def test_strided_caches() -> None:
    operands = operands_of(2, 4, 2, 50, 16, torch.bfloat16)
    for name in ("k_cache", "v_cache"):
        operands[name] = torch.randn(2, 50, 2, 24).bfloat16()[..., 4:20].transpose(1, 2)
    operands["q"] = torch.randn(2, 4, 40).bfloat16()[..., :16]
    check(operands)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_large_scores(dtype: torch.dtype) -> None:
    operands = operands_of(1, 2, 1, 128, 16, dtype)
    operands["q"] *= 30
    check(operands)
