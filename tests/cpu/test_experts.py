"""The CPU's routing and products of experts, in every tier, dtype and awkward shape."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.net import FLOATS, ISAS, TOLERANCE, Net, rms_error
from tests.quantized_formats import FORMATS, Format, operands
from tests.thinned import thinned
from torch_mpk import registry
from torch_mpk.tasks.quantized_expert_linear import quantized_expert_linear

# Rows, choices, experts, columns, depth.
SHAPES = [(1, 1, 1, 1, 1), (1, 8, 16, 40, 64), (5, 2, 3, 7, 33), (4, 4, 4, 130, 100), (64, 2, 3, 48, 31),
          (65, 1, 2, 96, 64), (200, 3, 5, 70, 97)]  # fmt: skip
CASES = [(shape, chosen) for shape in SHAPES for chosen in ("random", "one", "last")]


def chosen_ids(rows: int, choices: int, experts: int, chosen: str) -> torch.Tensor:
    """Distinct experts of each row at random, where there are enough; one expert for all; or the last ones alone."""
    if chosen == "random":
        return torch.rand(rows, max(experts, choices)).argsort(-1)[:, :choices].clamp(max=experts - 1)
    if chosen == "one":
        return torch.full((rows, choices), int(torch.randint(experts, ())))
    return torch.randint(max(0, experts - 2), experts, (rows, choices))


def product(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, is_transposed: bool, isa: str) -> torch.Tensor:
    net = Net()
    operands = {
        "x": net.input(x),
        "ids": net.input(ids),
        "transposed" if is_transposed else "weight": net.input(weight),
    }
    size = weight.shape[2] if is_transposed else weight.shape[1]
    net.node("expert_linear", **operands, y=net.output(torch.empty(*ids.shape, size, dtype=x.dtype)))
    [y] = net.run(isa=isa)
    return y


def exact(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    matrices = weight.double().mT if is_transposed else weight.double()
    return torch.stack([torch.einsum("cnk,ck->cn", matrices[i], row) for row, i in zip(x.double(), ids, strict=True)])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("is_transposed", [False, True], ids=["weight", "transposed"])
def test_products(isa: str, dtype: torch.dtype, is_transposed: bool) -> None:
    for (rows, choices, experts, n, k), chosen in CASES:
        x, weight = torch.randn(rows, choices, k).to(dtype), torch.randn(experts, n, k).to(dtype)
        weight = weight.mT.contiguous() if is_transposed else weight
        ids = chosen_ids(rows, choices, experts, chosen)
        y = product(x, ids, weight, is_transposed, isa)
        assert rms_error(y, exact(x, ids, weight, is_transposed)) < TOLERANCE[dtype], (rows, n, k, chosen)


@pytest.mark.parametrize("is_transposed", [False, True], ids=["weight", "transposed"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_strides(dtype: torch.dtype, is_transposed: bool) -> None:
    """One row of x for all choices, and matrices inside larger ones."""
    x = torch.randn(3, 60).to(dtype)[:, 4:54].unsqueeze(1).expand(3, 2, 50)
    weight = torch.randn(4, 70, 70).to(dtype)
    weight = weight[:, 3:53, 5:45] if is_transposed else weight[:, 5:45, 3:53]
    ids = torch.randint(4, (3, 4))[:, ::2]
    y = product(x, ids, weight, is_transposed, ISAS[-1])
    assert rms_error(y, exact(x, ids, weight, is_transposed)) < TOLERANCE[dtype]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [4, 64, 65])
@pytest.mark.parametrize("is_transposed", [False, True], ids=["weight", "transposed"])
def test_a_row_does_not_depend_on_the_others(isa: str, rows: int, is_transposed: bool) -> None:
    x, weight = torch.randn(rows, 2, 97).bfloat16(), torch.randn(6, 97, 97).bfloat16()
    ids = chosen_ids(rows, 2, 6, "random")
    others = torch.randn(rows, 2, 97).bfloat16()
    others[1] = x[1]
    all_its = ids[1].expand(rows, 2).contiguous()
    expected = product(x, ids, weight, is_transposed, isa)[1]
    assert torch.equal(product(others, all_its, weight, is_transposed, isa)[1], expected)


def test_ids_of_no_expert_give_zeros() -> None:
    x, weight, ids = torch.randn(2, 3, 8), torch.randn(4, 5, 8), torch.tensor([[0, 4, -1], [2**40, 3, -(2**63)]])
    y = product(x, ids, weight, False, ISAS[-1])
    is_there = (ids >= 0) & (ids < 4)
    torch.testing.assert_close(y[is_there], exact(x, ids.where(is_there, 0), weight, False)[is_there].float())
    assert not y[~is_there].any()


def stacked(sizes: tuple[int, int, int, int, int], of: Format, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, weights, their scales and zero points, of rows, choices, experts, columns and depth."""
    rows, choices, experts, n, k = sizes
    matrices = [operands((1, n, k), of, dtype) for _ in range(experts)]
    weights = [torch.stack(each) for i in (1, 2, 5) if (each := [t for m in matrices if (t := m[i]) is not None])]
    return [(torch.randn(rows, choices, k + -k % of.packed) * 3).to(dtype), *weights]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["blocks", "rows, int8", "groups, zero points added", "e2m1"])
def test_quantised_products(isa: str, name: str) -> None:
    """With rows that choose as others do, ids of no expert among them; a row does not depend on the others."""
    of = FORMATS[name]
    for sizes in [(1, 8, 16, 40, 64), (5, 2, 3, 7, 33), (70, 2, 3, 130, 200)]:
        x, weight, scale, *zero = stacked(sizes, of, torch.bfloat16)
        for chosen in ("random", "one", "none"):
            ids = chosen_ids(*sizes[:3], "random" if chosen == "none" else chosen)
            if chosen == "none":
                ids.view(-1)[::2] = torch.tensor([-1, sizes[2]])[torch.randint(2, ids.view(-1)[::2].shape)]

            def run(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
                net, names = Net(), ("x", "ids", "weight", "weight_scale", "zero")
                given = {name: net.input(t) for name, t in zip(names, (x, ids, weight, scale, *zero))}  # noqa: B023
                y = net.output(x.new_empty(*ids.shape, weight.shape[1]))  # noqa: B023
                net.node("quantized_expert_linear", of.attrs, **given, y=y)
                return net.run(isa=isa)[0]

            y = run(x, ids)
            expected = quantized_expert_linear(x.double(), ids, weight, scale, *zero, **of.attrs)
            assert rms_error(y, expected) < 1.2 * TOLERANCE[torch.bfloat16], (sizes, chosen)
            assert torch.equal(run(x[-1:].clone(), ids[-1:].clone())[0], y[-1])


def scores(columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows with ties, infinities and NaN."""
    x = torch.randn(9, columns)
    x[1] = x[1].round()
    x[2] = 0.25
    x[3, ::3] = torch.nan
    x[4] = torch.nan
    x[5, ::2] = -torch.inf
    x[6, 1::2] = torch.inf
    x[7] = torch.where(torch.rand(columns) < 0.5, 0.0, -0.0)
    return x.to(dtype)


@pytest.mark.parametrize("isa", thinned(ISAS, len(ISAS) - 1))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("columns", "num"), [(1, 1), (7, 7), (64, 1), (128, 8), (333, 20), (1024, 1024)])
def test_topk(isa: str, dtype: torch.dtype, columns: int, num: int) -> None:
    x = scores(columns, dtype).view(3, 3, columns).transpose(0, 1)
    net = Net()
    values, ids = torch.empty(3, 3, num, dtype=dtype), torch.empty(3, 3, num, dtype=torch.int64)
    operands = [("x", net.input(x), True, False), ("values", net.output(values), False, True)]
    net.graph.add_node("topk", [*operands, ("ids", net.output(ids), False, True)], {"num": num}, None, "node")
    net.run(isa=isa)
    expected = registry.get("topk").reference(x, num=num)
    torch.testing.assert_close(values, expected[0], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ids, expected[1])
    if dtype != torch.float64:  # CUDA's order of equal elements is this, too; the CPU's values are the same
        torch.testing.assert_close(values, x.topk(num).values, rtol=0, atol=0, equal_nan=True)
