"""Pointwise and reduce programs on the CPU: each operation, class of values, way of addressing memory."""

from __future__ import annotations

import math

import pytest
import torch

from tests.cpu.net import ISAS, Net, name_of
from torch_mpk import _C

STRUCTURAL = {"const", "index", "size", "load", "store", "cast", "where", "bit_cast"}
INTEGER = {"floordiv", "truncdiv", "remainder", "shl", "shr", "bit_and", "bit_or", "bit_xor"}
COMPARE = {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isnan"}
EVERYWHERE = {"add", "sub", "mul", "neg", "abs", "maximum", "minimum"}
UNARY = {"neg", "abs", "logical_not", "isnan"}
EAGER = {
    "sub": torch.sub, "bit_and": torch.bitwise_and, "bit_or": torch.bitwise_or, "bit_xor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift, "floordiv": torch.floor_divide,
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda a: torch.nn.functional.gelu(a, approximate="tanh"), "softplus": torch.nn.functional.softplus,
    "div": torch.div, "atan2": torch.atan2, "fmod": torch.fmod, "pow": lambda a, b: torch.pow(a.abs(), b),
}  # fmt: skip
ALL_DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
              torch.float16, torch.bfloat16, torch.float32, torch.float64]  # fmt: skip


def apply(op: str, args: list[torch.Tensor], out_dtype: torch.dtype, isa: str = "") -> torch.Tensor:
    """out = op(*args), element by element; the arguments broadcast."""
    args = torch.broadcast_tensors(*args)
    shape = list(args[0].shape)
    net, program = Net(), _C.Program(shape)
    reads = [net.input(t) for t in args]
    values = [program.emit("load", name_of(t.dtype), operand=i, strides=list(t.stride())) for i, t in enumerate(args)]
    if op == "pow":
        values[0] = program.emit("abs", name_of(args[0].dtype), [values[0]])
    value = program.emit(op, name_of(out_dtype), values)
    out = torch.empty(shape, dtype=out_dtype)
    program.emit("store", name_of(out_dtype), [value], operand=len(args), strides=list(out.stride()))
    net.program("pointwise", program, reads, [net.output(out)])
    [result] = net.run(isa=isa)
    return result


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        values = torch.randint(max(info.min, -9), 10, shape).to(dtype)
        values.view(-1)[:2] = torch.tensor([info.min, info.max], dtype=dtype)
        return values
    values = torch.randn(shape).mul(4).to(dtype)
    values.view(-1)[:9] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1, -1, 60000, 1e-7]).to(dtype)
    return values


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op", sorted(set(_C.op_names()) - STRUCTURAL))
def test_operations(op: str, isa: str) -> None:
    arity = 1 if op in UNARY or op not in EVERYWHERE | INTEGER | COMPARE | {"div", "pow", "atan2", "fmod"} else 2
    eager = EAGER.get(op) or getattr(torch, op)
    for dtype in ALL_DTYPES:
        if dtype.is_floating_point and op in INTEGER:
            continue
        if not dtype.is_floating_point and op not in INTEGER | COMPARE | EVERYWHERE:
            continue
        if dtype == torch.bool and op not in COMPARE | {"bit_and", "bit_or", "bit_xor"}:
            continue
        a, b = sample(dtype, 13, 41), sample(dtype, 41)
        b = b[torch.randperm(41)]
        if op in ("floordiv", "remainder", "truncdiv"):
            b = b.where(b != 0, 3)
        if op == "truncdiv" and dtype != torch.uint8:
            b = b.where(b != -1, 3)  # eager dies of the smallest integer by -1
        if op == "maximum" and dtype.is_floating_point:
            b[5] = torch.nan
        args = [a, b][:arity]
        out = apply(op, args, torch.bool if op in COMPARE else dtype, isa)
        wide = [t.double() if op not in COMPARE else t for t in args] if dtype.is_floating_point else args
        expected = eager(*wide).to(out.dtype)
        exact = not dtype.is_floating_point or op in COMPARE | EVERYWHERE
        # One rounding of a result that was right to about two units of the type it was computed in.
        eps = torch.finfo(dtype if dtype == torch.float64 else torch.float32).eps
        rtol = 0 if exact else max(torch.finfo(dtype).eps / 1.9, 8 * eps)
        atol = 0 if exact else 4 * eps + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        torch.testing.assert_close(
            out, expected, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, dtype=dtype: f"{dtype}: {m}"
        )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8])
def test_dividing_the_smallest_integer_by_minus_one_does_not_trap(dtype: torch.dtype) -> None:
    least = torch.iinfo(dtype).min
    a, b = torch.tensor([least, 5, -5], dtype=dtype), torch.tensor([-1, -1, -1], dtype=dtype)
    assert apply("floordiv", [a, b], dtype).tolist() == [least, -5, 5]
    assert apply("truncdiv", [a, b], dtype).tolist() == [least, -5, 5]
    assert apply("remainder", [a, b], dtype).tolist() == [0, 0, 0]


@pytest.mark.parametrize("op", ["floordiv", "truncdiv", "remainder"])
@pytest.mark.parametrize("size", [3, 1000])  # one block of points, and several
def test_a_divisor_of_zero_is_eagers_error(op: str, size: int) -> None:
    a, b = torch.full((size,), 5), torch.ones(size, dtype=torch.int64)
    apply(op, [a, b], torch.int64)
    b[-1] = 0
    with pytest.raises(RuntimeError, match="^ZeroDivisionError$"):
        apply(op, [a, b], torch.int64)


def test_an_unsigned_maximum_is_not_minus_one() -> None:
    a, b = torch.tensor([255, 7, 254], dtype=torch.uint8), torch.tensor([255, 255, 2], dtype=torch.uint8)
    assert apply("floordiv", [a, b], torch.uint8).tolist() == [1, 0, 127]
    assert apply("remainder", [a, b], torch.uint8).tolist() == [0, 7, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_abs_of_negative_zero_has_no_sign(dtype: torch.dtype) -> None:
    values = torch.tensor([-0.0, 0.0, -2.0, -torch.inf], dtype=dtype)
    assert torch.equal(torch.signbit(apply("abs", [values], dtype)), torch.zeros(4, dtype=torch.bool))


@pytest.mark.parametrize("isa", ISAS)
def test_exp_everywhere(isa: str) -> None:
    x = torch.cat([torch.linspace(-110, 95, 200001), torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, -1e30])])
    y = apply("exp", [x], torch.float32, isa)
    torch.testing.assert_close(y, x.double().exp().float(), rtol=2.5e-7, atol=1.5e-45, equal_nan=True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("source", ALL_DTYPES, ids=str)
def test_casts_equal_torch(source: torch.dtype, isa: str) -> None:
    x = sample(source, 600)
    for target in ALL_DTYPES:
        fits = x
        if source.is_floating_point and not target.is_floating_point:  # elsewhere the result is the platform's own
            fits = x.nan_to_num(0, 3, -3).clamp(0 if target == torch.uint8 else -100, 100).to(source)
        assert torch.equal(apply("cast", [fits], target, isa).nan_to_num(7), fits.to(target).nan_to_num(7)), target


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_survives_and_every_rounding_is_to_nearest_even(dtype: torch.dtype, isa: str) -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = apply("cast", [halves], torch.float32, isa)
    assert torch.equal(wide.nan_to_num(9e9), halves.float().nan_to_num(9e9))
    finite = halves[halves.isfinite()].float().sort().values
    between = torch.cat(
        [(finite[1:] + finite[:-1]) / 2, finite * (1 + 2**-20), torch.tensor([65519.9, 65520, 3.4e38, -torch.inf])]
    )
    assert torch.equal(apply("cast", [between], dtype, isa), between.to(dtype))
    assert apply("cast", [torch.tensor([torch.nan])], dtype, isa).isnan().all()


def test_mixed_classes_promote() -> None:
    i, f = torch.arange(-3, 4), torch.linspace(-2, 2, 7)
    assert torch.equal(apply("lt", [i, f], torch.bool), i < f)
    assert torch.equal(apply("mul", [i, f], torch.float32), i * f)
    assert torch.equal(apply("add", [i > 0, i], torch.int64), (i > 0) + i)
    assert torch.equal(apply("where", [i > 0, i, f], torch.float32), torch.where(i > 0, i, f))
    bits = torch.randint(-(2**31), 2**31, (13, 41), dtype=torch.int32)
    values = bits.view(torch.float32)
    assert torch.equal(apply("bit_cast", [bits], torch.float32).view(torch.int32), bits)
    assert torch.equal(apply("bit_cast", [values], torch.int32), bits)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [(), (1,), (255,), (256,), (257,), (3, 300), (5, 1, 7, 3), (2, 3, 4, 5, 6)])
def test_strides_and_broadcasts(shape: tuple[int, ...], isa: str) -> None:
    a = torch.randn(*shape, 2)[..., 0]
    b = torch.randn(shape[-1:]) if shape else torch.randn(())
    c = torch.randn(shape[::-1]).permute(tuple(reversed(range(len(shape)))))
    assert torch.equal(apply("add", [a, b], torch.float32, isa), a + b)
    assert torch.equal(apply("maximum", [c, a], torch.float32, isa), torch.maximum(c, a))


def test_a_program_without_points_does_nothing() -> None:
    assert apply("add", [torch.ones(0, 3), torch.ones(0, 3)], torch.float32).shape == (0, 3)


def test_gather_reads_nothing_where_its_predicate_is_false() -> None:
    table, ids = torch.randn(10, 40).bfloat16(), torch.tensor([3, -1, 9, 10**15])
    net, p = Net(), _C.Program([4, 40])
    reads = [net.input(table), net.input(ids)]
    row = p.emit("load", "int64", operand=1, strides=[1, 0])
    low = p.emit("ge", "bool", [row, p.emit("const", "int64", imm=0)])
    high = p.emit("lt", "bool", [row, p.emit("const", "int64", imm=10)])
    inside = p.emit("bit_and", "bool", [low, high])
    offset = p.emit("mul", "int64", [row, p.emit("const", "int64", imm=40)])
    value = p.emit("load", "bfloat16", [offset, inside], operand=0, strides=[0, 1])
    p.emit("store", "bfloat16", [value], operand=2, strides=[40, 1])
    net.program("pointwise", p, reads, [net.output(torch.empty(4, 40, dtype=torch.bfloat16))])
    [y] = net.run()
    assert torch.equal(y[[0, 2]], table[[3, 9]])
    assert not y[[1, 3]].any()


def test_scatter_writes_in_place_at_a_computed_row() -> None:
    cache, new = torch.zeros(3, 50, 8), torch.randn(3, 8)
    slot = torch.tensor([17])
    net, p = Net(), _C.Program([3, 8])
    value = p.emit("load", "float32", operand=0, strides=[8, 1])
    at = p.emit("load", "int64", operand=1, strides=[0, 0])
    fits = p.emit("lt", "bool", [at, p.emit("const", "int64", imm=50)])
    offset = p.emit("mul", "int64", [at, p.emit("const", "int64", imm=8)])
    p.emit("store", "float32", [value, offset, fits], operand=2, strides=[400, 1])
    rows = [
        ("in0", net.input(new), True, False),
        ("in1", net.input(slot), True, False),
        ("in2", net.input(cache), True, True),
    ]
    net.graph.add_node("pointwise", rows, {}, p, "kv write")
    net.run()
    assert torch.equal(cache[:, 17], new)
    assert cache.count_nonzero() == new.count_nonzero()
    slot.fill_(50)
    before = cache.clone()
    net.run()
    assert torch.equal(cache, before)


def test_sizes_and_indices() -> None:
    net, p = Net(), _C.Program([3, 300])
    row, column = p.emit("index", "int64", operand=0), p.emit("index", "int64", operand=1)
    scaled = p.emit("mul", "int64", [row, p.emit("size", "int64", operand=1)])
    p.emit("store", "int64", [p.emit("add", "int64", [scaled, column])], operand=0, strides=[300, 1])
    net.program("pointwise", p, [], [net.output(torch.empty(3, 300, dtype=torch.int64))])
    [y] = net.run(scalars=[5, 1000])
    assert torch.equal(y, torch.arange(3)[:, None] * 1000 + torch.arange(300))
    with pytest.raises(ValueError, match="run: got 1 scalars, expected 2"):
        net.run(scalars=[5])


def test_constants_keep_their_registers() -> None:
    """A value that is the same at every point is computed once, and must survive the blocks."""
    x = torch.randn(2000)
    net, p = Net(), _C.Program([2000])
    value = p.emit("load", "float32", operand=0, strides=[1])
    for i in range(6):
        value = p.emit("add", "float32", [p.emit("abs", "float32", [value]), p.emit("const", "float32", imm=float(i))])
    p.emit("store", "float32", [value], operand=1, strides=[1])
    net.program("pointwise", p, [net.input(x)], [net.output(torch.empty(2000))])
    [y] = net.run()
    expected = x
    for i in range(6):
        expected = expected.abs() + i
    assert torch.equal(y, expected)


def reduce(op: str, x: torch.Tensor, out_dtype: torch.dtype, isa: str = "") -> Net:
    net, p = Net(), _C.Program(list(x.shape))
    p.emit("load", name_of(x.dtype), operand=0, strides=list(x.stride()))
    net.program("reduce", p, [net.input(x)], [net.output(torch.empty(x.shape[:-1], dtype=out_dtype))], {"op": op})
    return net


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op", ["sum", "mean", "amax", "amin", "prod", "argmax", "argmin", "any", "all"])
@pytest.mark.parametrize("shape", [(1,), (3, 300), (2, 20000), (4, 2, 5)])
def test_reductions(op: str, shape: tuple[int, ...], isa: str) -> None:
    for dtype in ALL_DTYPES:
        if not dtype.is_floating_point and (op == "mean" or (dtype == torch.bool and op.startswith("arg"))):
            continue
        x = torch.rand(shape).add(0.5).to(dtype) if dtype.is_floating_point else sample(dtype, *shape, 2)[..., 0]
        if op in ("any", "all"):
            x = (torch.rand(shape) < (0.999 if op == "all" else 0.001)).to(dtype)
        if op == "prod" and dtype.is_floating_point:
            x = x.clamp(0.99, 1.01) if shape[-1] < 1000 else x * 0 + 1
        wide = x.double() if dtype.is_floating_point else x
        expected = getattr(torch, op)(wide, -1)
        out_dtype = dtype if dtype.is_floating_point and expected.dtype == torch.float64 else expected.dtype
        [y] = reduce(op, x, out_dtype).run(isa=isa)
        expected = expected.to(out_dtype)
        if out_dtype.is_floating_point:
            eps = max(torch.finfo(dtype).eps / 1.9, 0 if dtype == torch.float64 else 1e-5)
            torch.testing.assert_close(y, expected, rtol=max(eps, 1e-13), atol=0)
        else:
            assert torch.equal(y, expected), dtype


@pytest.mark.parametrize("op", ["sum", "amax", "amin", "argmax", "argmin"])
@pytest.mark.parametrize("at", [0, 255, 256, 9000, 19999])
def test_a_nan_decides(op: str, at: int) -> None:
    x = torch.randn(2, 20000)
    x[1, at] = torch.nan
    if op.startswith("arg"):
        x[1, 19999] = torch.nan
    expected = getattr(torch, op)(x, -1)
    [y] = reduce(op, x, expected.dtype).run()
    torch.testing.assert_close(y[1], expected[1], equal_nan=True)


def test_argmax_takes_the_first_of_equals() -> None:
    x = torch.zeros(3, 30000).bfloat16()
    x[0, [77, 78, 25000]] = 5
    x[1, [8192, 29999]] = 1
    x[2] = -torch.inf
    [y] = reduce("argmax", x, torch.int64).run()
    assert y.tolist() == [77, 8192, 0]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op", ["sum", "prod", "argmax"])
def test_reductions_have_the_same_bits_on_any_number_of_threads(op: str, isa: str) -> None:
    x = torch.randn(3, 50000).mul(0.01).add(1)
    reduce(op, x, torch.int64 if op == "argmax" else torch.float32).assert_same_bits(isa)


@pytest.mark.parametrize(("op", "expected"), [("sum", 0.0), ("prod", 1.0), ("mean", math.nan)])
def test_reducing_nothing(op: str, expected: float) -> None:
    [y] = reduce(op, torch.empty(2, 0), torch.float32).run()
    torch.testing.assert_close(y, torch.full((2,), expected), equal_nan=True)
    with pytest.raises(ValueError, match="size 0, which has no extremum"):
        reduce("amax", torch.empty(2, 0), torch.float32).run()
