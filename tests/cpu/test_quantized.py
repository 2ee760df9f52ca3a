"""The CPU's products with quantised weights, in every tier, format and awkward shape, against a float64 run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.cpu.net import FLOATS, ISAS, TOLERANCE, Net, rms_error
from tests.quantized_formats import FORMATS, Format, exact, operands
from tests.thinned import thinned
from torch_mpk.errors import TaskError
from torch_mpk.tasks import quantized_linear as definition
from torch_mpk.tasks.quantized_expert_linear import quantized_expert_linear
from torch_mpk.tasks.quantized_linear import E2M1, E4M3, PACKED, quantise, quantized_linear

# Rows of x, rows and columns of the weight.
SHAPES = [(1, 64, 256), (3, 37, 129), (17, 130, 300), (2, 5, 1), (5, 9, 40), (130, 17, 72)]


def run(given: list[torch.Tensor | None], of: Format, isa: str) -> torch.Tensor:
    x, weight, *_ = given
    assert x is not None and weight is not None
    net = Net()
    names = [operand.name for operand in quantized_linear.inputs]
    inputs = {name: net.input(t) for name, t in zip(names, given, strict=True) if t is not None}
    net.node("quantized_linear", of.attrs, **inputs, y=net.output(x.new_empty(len(x), len(weight) * of.word_rows)))
    return net.run(isa=isa)[0]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", thinned(FLOATS[:3], 0), ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_products(isa: str, dtype: torch.dtype, name: str) -> None:
    for shape in SHAPES:
        of = FORMATS[name]
        given = operands(shape, of, dtype)
        y = run(given, of, isa)
        if of.x_columns and given[0] is not None:  # in float64 another number of e4m3 may be the next one
            given[0], of = quantise(given[0].float(), of.x_columns), replace(of, x_columns=0)
        assert rms_error(y, exact(given, of)) < 1.2 * TOLERANCE[dtype], shape


@pytest.mark.parametrize("name", FORMATS)
def test_the_definition_takes_a_large_weight_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in SHAPES:
        given = operands(shape, FORMATS[name], torch.float64)
        whole = exact(given, FORMATS[name])
        with monkeypatch.context() as patch:
            patch.setattr(definition, "MOST_ELEMENTS", 1 << 10)
            torch.testing.assert_close(exact(given, FORMATS[name]), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("isa", ISAS)
def test_every_number_of_e4m3(isa: str) -> None:
    """NaN among them, which spoils its row alone; rows inside a larger matrix."""
    weight = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(1, 5)[:, 3:70].view(E4M3)
    given = [torch.eye(67)[:40], weight, torch.ones(16, 1), *[None] * 8]
    y = run(given, FORMATS["rows, int8"], isa)
    torch.testing.assert_close(y, weight.float()[:, :40].T.contiguous() + 0 * weight.float().sum(1), equal_nan=True)


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_does_not_depend_on_the_others(isa: str) -> None:
    for name in ("blocks", "columns of words", "words of rows", "columns in any order", "scales of scales"):
        of = FORMATS[name]
        for dtype in (torch.bfloat16, torch.float16):
            given = operands((40, 97, 200), of, dtype)
            assert given[0] is not None
            alone = [given[0][17:18].clone(), *given[1:]]
            assert torch.equal(run(alone, of, isa)[0], run(given, of, isa)[17]), name


@pytest.mark.parametrize("isa", ISAS)
def test_any_number_of_threads_gives_the_same_bits(isa: str) -> None:
    """They prepare x and take units on their own; two linears share their scratch."""
    net = Net()
    for name in ("blocks", "words of rows", "columns of words"):
        of = FORMATS[name]
        x, *weights = operands((5, 600, 128), of, torch.bfloat16)
        assert x is not None
        names = [operand.name for operand in quantized_linear.inputs][1:]
        inputs = {name: net.input(t) for name, t in zip(names, weights, strict=True) if t is not None}
        net.node("quantized_linear", of.attrs, x=net.input(x), **inputs, y=net.output(x.new_empty(5, 600)))
    net.assert_same_bits(isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["columns in any order", "words of rows in any order"])
def test_a_column_of_no_group_gives_nan(isa: str, name: str) -> None:
    given = operands((3, 24, 128), FORMATS[name], torch.float16)
    groups = given[6]
    assert groups is not None
    for group in (-1, 2, 2**31 - 1):
        groups[77] = group
        assert run(given, FORMATS[name], isa).isnan().all()


def test_what_does_not_fit_is_named() -> None:
    """Words of rows are of one matrix, of an even number of columns; tables have the sizes of their codes."""
    x, words, scale = torch.randn(1, 7), torch.zeros(2, 7, dtype=torch.int32), torch.ones(16, 1)
    with pytest.raises(TaskError, match="an even number of columns"):
        quantized_linear(x, words, scale, block_rows=1, block_columns=0)
    x, ids = torch.randn(1, 1, 8), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(TaskError, match="a single matrix"):
        quantized_expert_linear(x, ids, words.new_zeros(3, 2, 8), torch.ones(3, 16, 1), block_rows=1, block_columns=0)
    given = operands((1, 16, 64), FORMATS["e2m1"], torch.float32)
    for i, extra in ((5, torch.ones(16, 2)), (6, torch.zeros(64, dtype=torch.int32))):
        with pytest.raises(TaskError, match="expected .*integer"):
            quantized_linear(*given[:i], extra, *given[i + 1 :], **FORMATS["e2m1"].attrs)
    given = operands((1, 16, 64), FORMATS["scales of scales"], torch.float32)
    for i, message in ((7, "expected 16"), (8, "expected \\[256, 1, 1\\]")):
        wrong = [*given[:i], torch.ones(3), *given[i + 1 :]]
        with pytest.raises(TaskError, match=message):
            quantized_linear(*wrong, **FORMATS["scales of scales"].attrs)


def test_infinities_and_nan_of_x() -> None:
    for name, of in FORMATS.items():
        given = operands((3, 16, 256), of, torch.bfloat16)
        assert given[0] is not None
        given[0][0, 3], given[0][1, 4] = torch.inf, torch.nan
        assert torch.equal(run(given, of, ISAS[-1]).isfinite(), exact(given, of).isfinite()), name


@pytest.mark.slow
def test_random_formats_and_shapes() -> None:
    """Blocks that divide nothing, strides, and what is the last of a block."""
    for seed in range(400):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        rows, n, k = draw.randint(1, 40), draw.randint(1, 90), draw.randint(1, 400)
        storage, columns = draw.choice(list(PACKED.items()))
        packed = draw.choice(columns)
        k += -k % (2 if storage == torch.int32 and packed == 1 else packed)
        block_columns = draw.choice([0, 16, 32, 128, 1 if packed == 1 and storage != torch.int32 else 64, k])
        divisors = [0, -1, *(size for size in (1, 16, 64, 128) if not block_columns or size % block_columns == 0)]
        grouped = storage == torch.int32 and draw.random() < 0.3
        divisors = [0] if grouped else divisors if packed == 1 and storage != torch.int32 else [0, -1]
        points = [torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int32]
        of = Format(
            storage,
            draw.choice([torch.float32, torch.float16]),
            draw.choice([0, 1, 7, 16, 128]),
            block_columns,
            draw.choice(divisors),
            packed=packed,
            zero=None if storage in (E4M3, E2M1) else draw.choice([None, *points]),
            transposed=storage == torch.int32 and draw.random() < 0.5,
            grouped=grouped,
        )
        dtype = draw.choice(FLOATS[:3])
        given = operands((rows, n, k), of, dtype)
        y = run(given, of, draw.choice(ISAS)).double()
        # x rounded in float32, where others may be half way between two numbers of e4m3; sums in float64.
        x = given[0].float() if given[0] is not None else torch.empty(0)
        given[0] = quantise(x, of.x_columns).double() if of.x_columns else x.double()
        want = exact(given, replace(of, x_columns=0))
        _, weight, scale, bias, _, zero, groups, *tables = given
        assert bias is not None
        # Of what may cancel: numbers and zero points apart, where they are both there.
        parts = [
            exact(
                [torch.eye(k).double(), weight, scale, None, None, None, groups, *tables], replace(of, x_columns=0)
            ).T.abs()
        ]
        if zero is not None:
            whole = exact(
                [torch.eye(k).double(), weight, scale, None, None, zero, groups, *tables], replace(of, x_columns=0)
            ).T
            parts.append((whole - parts[0]).abs())
        sizes = given[0].abs() @ sum(parts).T + bias.double().abs()
        apart = (y - want).abs() / (want.abs() + 0.1 * sizes)
        assert apart.max() < 4 * TOLERANCE[dtype], (seed, apart.max(), dtype, of)
