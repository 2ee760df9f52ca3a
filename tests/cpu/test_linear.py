"""The CPU's linear against float64, in every tier, dtype and awkward shape."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.net import FLOATS, ISAS, TOLERANCE, Net, rms_error

SHAPES = [
    (1, 256, 40, False), (1, 257, 7, True), (3, 31, 65, True), (16, 128, 33, False), (5, 1, 1, True),
    (18, 100, 20, False), (7, 64, 3, True), (17, 1, 1, True), (33, 31, 65, True), (64, 128, 96, False),
    (600, 1100, 272, True), (48, 33, 20, True), (16, 97, 3, False), (80, 35, 40, False),
]  # fmt: skip


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> Net:
    net = Net()
    operands = {"x": net.input(x), "weight": net.input(weight), "bias": None if bias is None else net.input(bias)}
    net.node("linear", **operands, y=net.output(y))
    return net


def expected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("rows", "k", "n", "bias"), SHAPES)
def test_shapes(isa: str, dtype: torch.dtype, rows: int, k: int, n: int, bias: bool) -> None:
    x, weight = torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype)
    b = torch.randn(n).to(dtype) if bias else None
    [y] = linear(x, weight, b, torch.empty(rows, n, dtype=dtype)).run(isa=isa)
    assert rms_error(y, expected(x, weight, b)) < TOLERANCE[dtype]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_strided_operands(isa: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 200).to(dtype)[:, 3:123]
    weight = torch.randn(50, 130).to(dtype)[:, 1:121]
    whole = torch.zeros(4, 90, dtype=dtype)
    net = linear(x, weight, None, whole[:, 20:70])
    whole.zero_()
    net.compile(2, isa).run(net.inputs, net.outputs)
    assert rms_error(whole[:, 20:70], expected(x, weight, None)) < TOLERANCE[dtype]
    assert not whole[:, :20].any()
    assert not whole[:, 70:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_large_vocabulary_is_as_accurate_as_eager(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 96).to(dtype), torch.randn(151936, 96).to(dtype)
    net = linear(x, weight, None, torch.empty(2, 151936, dtype=dtype))
    [y] = net.run()
    exact = expected(x, weight, None)
    assert rms_error(y, exact) <= 1.1 * rms_error(torch.nn.functional.linear(x, weight), exact)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_same_bits_on_any_number_of_threads(isa: str, dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 515).to(dtype), torch.randn(301, 515).to(dtype)
    linear(x, weight, None, torch.empty(3, 301, dtype=dtype)).assert_same_bits(isa)


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_does_not_depend_on_the_batch(isa: str) -> None:
    x, weight = torch.randn(16, 96).bfloat16(), torch.randn(40, 96).bfloat16()
    [batch] = linear(x, weight, None, torch.empty(16, 40, dtype=x.dtype)).run(isa=isa)
    for r in (0, 6, 15):
        [alone] = linear(x[r : r + 1], weight, None, torch.empty(1, 40, dtype=x.dtype)).run(isa=isa)
        assert torch.equal(alone[0], batch[r])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_non_finite_values_spread_as_in_eager(isa: str, dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 70).to(dtype), torch.rand(9, 70).add(1).to(dtype)
    x[0, 69], weight[4, 2] = torch.inf, torch.nan
    [y] = linear(x, weight, None, torch.empty(2, 9, dtype=dtype)).run(isa=isa)
    eager = torch.nn.functional.linear(x, weight)
    assert torch.equal(y.isnan(), eager.isnan())
    assert torch.equal(y.isinf(), eager.isinf())


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa not in ("avx512_bf16", "amx")])  # which flush denormals
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_denormals_count(isa: str, dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal / 4
    x, weight = torch.full((1, 33), tiny).to(dtype), torch.ones(5, 33, dtype=dtype)
    [y] = linear(x, weight, None, torch.empty(1, 5, dtype=dtype)).run(isa=isa)
    torch.testing.assert_close(y, torch.full((1, 5), 33 * tiny).to(dtype), rtol=1e-2, atol=0)


def test_mixed_dtypes_are_refused() -> None:
    net = linear(torch.ones(1, 8), torch.ones(4, 8).half(), None, torch.empty(1, 4))
    with pytest.raises(ValueError, match=r"linear \(node\): weight is float16, expected x's dtype float32"):
        net.compile()


def test_an_inner_stride_is_refused() -> None:
    net = linear(torch.ones(8, 2).T, torch.ones(4, 8), None, torch.empty(2, 4))
    with pytest.raises(ValueError, match="x has inner stride 2, expected 1"):
        net.compile()
