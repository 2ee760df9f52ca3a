"""The CPU's attention over pages against its reference, in float64."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.net import FLOATS, ISAS, TOLERANCE, Net, rms_error
from torch_mpk.tasks.paged_attention import paged_attention as reference

NAMES = ("q", "k_new", "v_new", "k_pages", "v_pages", "block_table", "length", "sinks")

# rows, heads, groups, size of a page, pages of a row, head size
SHAPES = [
    (1, 4, 2, 16, 3, 16),
    (4, 7, 1, 16, 20, 64),
    (3, 16, 8, 100, 2, 128),
    (2, 2, 2, 4, 1, 5),
    (1, 3, 1, 256, 8, 80),
]


def net_of(operands: dict[str, torch.Tensor | None], scale: float, softcap: float = 0.0) -> Net:
    net = Net()
    y_shape = (*operands["q"].shape[:2], operands["v_pages"].shape[3])
    net.node("paged_attention", {"scale": scale, "softcap": softcap},
             **{n: None if operands.get(n) is None else net.input(operands[n]) for n in NAMES},
             y=net.output(torch.empty(y_shape, dtype=operands["q"].dtype)))  # fmt: skip
    return net


def wide(t: torch.Tensor | None) -> torch.Tensor | None:
    return t.double() if t is not None and t.dtype.is_floating_point else t


def check(operands: dict[str, torch.Tensor | None], isa: str = "", softcap: float = 0.0) -> torch.Tensor:
    scale, dtype = operands["q"].shape[-1] ** -0.5, operands["q"].dtype
    exact_operands = {n: wide(t.clone()) if t is not None else None for n, t in operands.items()}
    exact = reference(*map(exact_operands.get, NAMES), scale=scale, softcap=softcap)
    [y] = net_of(operands, scale, softcap).run(isa=isa)
    assert not y.isnan().any()
    assert rms_error(y, exact) < TOLERANCE[dtype]
    for pages in ("k_pages", "v_pages"):
        assert torch.equal(operands[pages].double(), exact_operands[pages])
    return y


def operands_of(
    rows: int, heads: int, groups: int, page_size: int, num_pages: int, dim: int, dtype: torch.dtype
) -> dict[str, torch.Tensor | None]:
    """Rows with pages of their own, in any order among others."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(dtype)

    all_pages = rows * num_pages + 3
    pages = {n: random(all_pages, page_size, groups, dim) for n in ("k_pages", "v_pages")}
    table = torch.randperm(all_pages, dtype=torch.int32)[: rows * num_pages].view(rows, num_pages)
    length = torch.randint(1, num_pages * page_size + 1, (rows,), dtype=torch.int32)
    new = {n: random(rows, groups, dim) for n in ("k_new", "v_new")}
    return {"q": random(rows, heads, dim), **new, **pages, "block_table": table, "length": length}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("rows", "heads", "groups", "page_size", "num_pages", "dim"), SHAPES)
def test_shapes(
    isa: str, dtype: torch.dtype, rows: int, heads: int, groups: int, page_size: int, num_pages: int, dim: int
) -> None:
    operands = operands_of(rows, heads, groups, page_size, num_pages, dim, dtype)
    check(operands, isa)
    full = torch.full_like(operands["length"], num_pages * page_size)
    check({**operands, "length": full}, isa)
    check({**operands, "k_new": None, "v_new": None}, isa)
    sinks = torch.randn(heads).to(dtype) + 2
    wider = {n: torch.cat((operands[n], operands[n][..., :3]), -1) for n in ("v_new", "v_pages")}
    check({**operands, **wider, "sinks": sinks}, isa, softcap=1.5)


def test_rows_may_share_pages_that_none_writes() -> None:
    operands = operands_of(4, 4, 2, 8, 3, 16, torch.float32)
    operands["block_table"][:, :2] = operands["block_table"][0, :2].clone()
    operands["length"] = torch.tensor([17, 20, 24, 18], dtype=torch.int32)
    check(operands)


@pytest.mark.parametrize("unused", [-1, -(2**31), 2**31 - 1])
def test_padded_rows_are_zeros_and_write_nothing(unused: int) -> None:
    operands = operands_of(4, 4, 2, 8, 3, 16, torch.bfloat16)
    operands["length"] = torch.tensor([20, 0, 5, 0], dtype=torch.int32)
    operands["block_table"][1] = operands["block_table"][3] = unused
    operands["block_table"][2, 1:] = unused  # what a request has not been given yet
    y = check(operands)
    assert not y[1].any()
    assert not y[3].any()
    assert y[0].any()
    assert y[2].any()


@pytest.mark.parametrize("unused", [-1, 99])
def test_pages_that_there_are_not_are_passed_over(unused: int) -> None:
    operands = operands_of(2, 4, 2, 8, 4, 16, torch.float32)
    operands["length"] = torch.tensor([30, 29], dtype=torch.int32)
    operands["block_table"][0, 1] = unused
    operands["block_table"][1, 3] = unused  # where the new position would be
    check(operands)
    operands["length"] = torch.tensor([33, 2**31 - 1], dtype=torch.int32)  # more than the table has
    check(operands)


def test_what_lies_beyond_the_length_is_not_read() -> None:
    operands = operands_of(2, 4, 2, 16, 4, 16, torch.float32)
    operands["length"] = torch.tensor([21, 40], dtype=torch.int32)
    own = torch.zeros(operands["k_pages"].shape[:2], dtype=torch.bool)
    for table, length in zip(operands["block_table"], operands["length"].tolist(), strict=True):
        for position in range(length):
            own[table[position // 16], position % 16] = True
    for pages in ("k_pages", "v_pages"):
        operands[pages][~own] = torch.nan
    [y] = net_of(operands, 0.25).run()
    assert not y.isnan().any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_same_bits_on_any_number_of_threads(isa: str, dtype: torch.dtype) -> None:
    operands = operands_of(2, 4, 2, 16, 60, 32, dtype)
    operands["length"] = torch.tensor([801, 130], dtype=torch.int32)
    net_of(operands, 0.2).assert_same_bits(isa)


@pytest.mark.parametrize("page_size", [16, 256])
def test_a_row_has_the_same_bits_beside_any_others(page_size: int) -> None:
    operands = operands_of(4, 4, 2, page_size, 2048 // page_size, 32, torch.bfloat16)
    operands["length"] = torch.tensor([1801, 30, 2047, 1], dtype=torch.int32)
    [together] = net_of(operands, 0.2).run()
    whole = ("k_pages", "v_pages")
    for row in range(4):
        alone = {n: t if n in whole else t[row : row + 1].clone() for n, t in operands.items()}
        assert torch.equal(net_of(alone, 0.2).run()[0][0], together[row])


def test_pages_of_keys_and_values_in_turns() -> None:
    """As engines lay them out: of one buffer, or keys and values of a head side by side."""
    operands = operands_of(3, 4, 2, 8, 4, 16, torch.bfloat16)
    turns = torch.randn(2 * 15, 8, 2, 16).bfloat16()
    check({**operands, "k_pages": turns[::2], "v_pages": turns[1::2]})
    beside = torch.randn(15, 2, 8, 32).bfloat16().transpose(1, 2)
    check({**operands, "k_pages": beside[..., :16], "v_pages": beside[..., 16:]})


def test_the_same_bits_as_over_a_cache_in_one_piece() -> None:
    operands = operands_of(1, 4, 2, 64, 4, 32, torch.bfloat16)
    operands["length"] = torch.tensor([200], dtype=torch.int32)
    [y] = net_of(operands, 0.2).run()
    k, v = (operands[n][operands["block_table"][0].long()].flatten(0, 1).transpose(0, 1)[None].contiguous()
            for n in ("k_pages", "v_pages"))  # fmt: skip
    net = Net()
    net.node("attention", {"scale": 0.2, "style": "sdpa"}, q=net.input(operands["q"]), k_cache=net.input(k),
             v_cache=net.input(v), limit=net.input(torch.tensor([200])),
             y=net.output(torch.empty_like(operands["q"])))  # fmt: skip
    assert torch.equal(net.run()[0], y)
