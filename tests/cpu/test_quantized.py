"""The CPU's products with quantised weights, in every tier, format and awkward shape, against a float64 run."""

from __future__ import annotations

import random

import pytest
import torch

from tests.cpu.net import FLOATS, ISAS, TOLERANCE, Net, rms_error
from tests.thinned import thinned
from torch_mpk.tasks.quantized_linear import E4M3, dequantised, quantise, quantized_linear

# Rows of x, rows and columns of the weight.
SHAPES = [(1, 64, 256), (3, 37, 129), (17, 130, 300), (2, 5, 1), (5, 9, 40)]
FORMATS = {
    "blocks": (E4M3, torch.float32, {"block_rows": 128, "block_columns": 128, "x_columns": 128}),
    "blocks, powers of two": (E4M3, torch.float8_e8m0fnu, {"block_rows": 16, "block_columns": 32, "x_columns": 64}),
    "rows, x by row": (E4M3, torch.bfloat16, {"block_rows": 1, "block_columns": 0, "x_columns": -1}),
    "rows, int8": (torch.int8, torch.float32, {"block_rows": 1, "block_columns": 0, "x_columns": 0}),
    "one, x given": (E4M3, torch.float32, {"block_rows": 0, "block_columns": 0, "x_columns": 0}),
}


def operands(shape: tuple[int, int, int], name: str, dtype: torch.dtype) -> list[torch.Tensor | None]:
    (rows, n, k), (storage, scale, attrs) = shape, FORMATS[name]
    is_int8 = storage == torch.int8
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8) if is_int8 else (torch.randn(n, k) * 2).to(E4M3)
    sizes = [-(-size // (attrs[block] or size)) for size, block in ((n, "block_rows"), (k, "block_columns"))]
    given = torch.tensor([0.01]) if name.endswith("given") else None
    x, bias = (torch.randn(rows, k) * 3).to(dtype), torch.randn(n).to(dtype)
    return [x, weight, (torch.rand(sizes) + 0.1).to(scale), bias, given]


def run(given: list[torch.Tensor | None], name: str, isa: str) -> torch.Tensor:
    x, weight, *_ = given
    assert x is not None and weight is not None
    net = Net()
    names = ("x", "weight", "weight_scale", "bias", "x_scale")
    inputs = {name: net.input(t) for name, t in zip(names, given, strict=True) if t is not None}
    net.node("quantized_linear", FORMATS[name][2], **inputs, y=net.output(x.new_empty(len(x), len(weight))))
    return net.run(isa=isa)[0]


def exact(given: list[torch.Tensor | None], name: str) -> torch.Tensor:
    wide = [t.double() if t is not None and i in (0, 3) else t for i, t in enumerate(given)]
    return quantized_linear(*wide, **FORMATS[name][2])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", thinned(FLOATS[:3], 0), ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_products(isa: str, dtype: torch.dtype, name: str) -> None:
    for shape in SHAPES:
        given = operands(shape, name, dtype)
        assert rms_error(run(given, name, isa), exact(given, name)) < 1.2 * TOLERANCE[dtype], shape


@pytest.mark.parametrize("isa", ISAS)
def test_every_number_of_e4m3(isa: str) -> None:
    """NaN among them, which spoils its row alone; rows inside a larger matrix."""
    weight = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(1, 5)[:, 3:70].view(E4M3)
    given = [torch.eye(67)[:40], weight, torch.ones(16, 1), None, None]
    y = run(given, "rows, int8", isa)
    torch.testing.assert_close(y, weight.float()[:, :40].T.contiguous() + 0 * weight.float().sum(1), equal_nan=True)


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_does_not_depend_on_the_others(isa: str) -> None:
    given = operands((40, 97, 200), "blocks", torch.bfloat16)
    assert given[0] is not None
    alone = [given[0][17:18].clone(), *given[1:]]
    assert torch.equal(run(alone, "blocks", isa)[0], run(given, "blocks", isa)[17])


def test_infinities_and_nan_of_x() -> None:
    for name in FORMATS:
        given = operands((3, 16, 256), name, torch.bfloat16)
        assert given[0] is not None
        given[0][0, 3], given[0][1, 4] = torch.inf, torch.nan
        assert torch.equal(run(given, name, ISAS[-1]).isfinite(), exact(given, name).isfinite()), name


@pytest.mark.slow
def test_random_formats_and_shapes() -> None:
    """Blocks that divide nothing, strides, and what is the last of a block."""
    for seed in range(2000):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        rows, n, k = draw.randint(1, 40), draw.randint(1, 90), draw.randint(1, 400)
        block_columns = draw.choice([0, 1, 16, 32, 128, k])
        divisors = [0, -1, *(size for size in (1, 16, 64, 128) if not block_columns or size % block_columns == 0)]
        attrs = {
            "block_rows": draw.choice([0, 1, 7, 16, 128]),
            "block_columns": block_columns,
            "x_columns": draw.choice(divisors),
        }
        FORMATS["random"] = (draw.choice([E4M3, torch.int8]), draw.choice([torch.float32, torch.float16]), attrs)
        dtype = draw.choice(FLOATS[:3])
        given = operands((rows, n, k), "random", dtype)
        y = run(given, "random", draw.choice(ISAS)).double()
        # x rounded in float32, where others may be half way between two numbers of e4m3; sums in float64.
        x = given[0].float() if given[0] is not None else torch.empty(0)
        given[0] = quantise(x, attrs["x_columns"]).double() if attrs["x_columns"] else x.double()
        FORMATS["random"] = (*FORMATS["random"][:2], attrs | {"x_columns": 0})
        want = exact(given, "random")
        _, weight, scale, bias, _ = given
        assert weight is not None and scale is not None and bias is not None
        blocks = attrs["block_rows"] or len(weight), attrs["block_columns"] or weight.shape[1]
        matrix = dequantised(weight, scale, *blocks, torch.float64)
        sizes = given[0].abs() @ matrix.abs().T + bias.double().abs()  # of what may cancel
        apart = (y - want).abs() / (want.abs() + 0.1 * sizes)
        assert apart.max() < 4 * TOLERANCE[dtype], (seed, apart.max(), dtype, FORMATS.pop("random"))
    FORMATS.pop("random")
