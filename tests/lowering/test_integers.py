"""Integers wrap and divide as eager's do, near the ends of their ranges, too: on devices and in emulated kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.lowering.harness import capture, check, clone, run
from tests.thinned import thinned
from torch_mpk import lowering
from torch_mpk.errors import MpkWarning
from torch_mpk.lowering import expr as E
from torch_mpk.lowering.lowerer import Lowerer
from torch_mpk.testing.emulator import emulate

MOST, LEAST = 2**63 - 1, -(2**63)

WRAPPING: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[int]]] = {
    "nested quotients": (lambda i: (i // 2**40) // 2**40, [-7, 5]),
    "nested quotients of 2**66": (lambda i: (i // 2**33) // 2**33 % 7, [-7, MOST]),
    "nested quotients of 10**20": (lambda i: (i // 10**10) // 10**10, [MOST, LEAST]),
    "nested quotients of 2**63": (lambda i: (i // 2**31) // 2**32, [-1, 1, MOST, LEAST]),
    "nested quotients that fit": (lambda i: (i // 2**31) // 2**31, [-1, 1, MOST, LEAST]),
    "a successor": (lambda i: i < i + 1, [MOST, 3]),
    "a predecessor": (lambda i: i - 1 < i, [LEAST, 3]),
    "a difference": (lambda i: i - (i + 1) < 0, [MOST, 3]),
    "a negated number": (lambda i: -i <= 0, [LEAST, 3]),
    "a multiple's quotient": (lambda i: i * 4 // 4, [2**62, 7]),
    "a multiple's remainder": (lambda i: i * 6 % 3, [2**62, 7]),
    "a hash": (lambda i: (i * 50257 + 9) % 50257, [2**62, -3]),
    "a hash of a power of two": (lambda i: (i * 65536 + 9) % 65536, [2**62, -3]),
    "a whole again": (lambda i: i // 7 * 7 + i % 7, [MOST, LEAST, -3]),
    "the larger of a number and its successor": (lambda i: torch.maximum(i, i + 1), [MOST, 3]),
    "a counted multiple": (lambda i: torch.arange(4, device=i.device) * 2**62 + 0 * i >= 0, [0]),
    "a counted multiple of 2**64": (lambda i: torch.arange(4, device=i.device) * 2**32 * 2**32 + i, [5]),
    "a counted hash": (
        lambda i: (torch.arange(4, device=i.device) * 6364136223846793005 + i) // 3,
        [1442695040888963407],
    ),
}


@pytest.mark.parametrize("name", WRAPPING)
def test_values_wrap_where_addresses_would_be_simplified(name: str) -> None:
    fn, values = WRAPPING[name]
    check(fn, torch.tensor(values))


def test_a_number_of_a_call_wraps_too() -> None:
    def fn(x, i, n):
        if n < 2:  # so that tracing knows of a lower bound
            return F.linear(x, x), i
        return F.linear(x, x), i // n, i % n, i * n // 4, torch.arange(4) * n >= 0, (i + n) // n, i < n

    torch.compiler.reset()
    ours = torch.compile(fn, backend="mpk", options={"fallback": "error"}, dynamic=True)
    x, i = torch.randn(3, 16), torch.tensor([MOST, LEAST, -7, 5])
    with torch.inference_mode():
        for n in (7, 3, 2**62, 2**41, MOST):
            for got, want in zip(ours(x, i, n)[1:], fn(x, i, n)[1:], strict=True):
                assert torch.equal(got, want), n


def all_wrapping(x: torch.Tensor, weight: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    functions = [fn for fn, _ in WRAPPING.values()]
    return [F.linear(x, weight), *(fn(i) for fn, i in zip(functions, inputs, strict=True))]


def all_inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 16), torch.randn(8, 16), *(torch.tensor(values) for _, values in WRAPPING.values())]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has graphs that were captured on the CPU lowered as a GPU's."""
    meta = Lowerer.meta
    gpu = torch.device("cuda")
    monkeypatch.setattr(Lowerer, "meta", lambda self, val: dataclasses.replace(meta(self, val), device=gpu))


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    torch.testing.assert_close(got[0], want[0])
    for name, ours, eager in zip(WRAPPING, got[1:], want[1:], strict=True):
        assert torch.equal(ours, eager), f"{name}: {ours.tolist()}, expected {eager.tolist()}"


def test_values_wrap_beside_a_linear(device: torch.device) -> None:
    with device:
        inputs = [t.to(device) for t in all_inputs()]
        ours = torch.compile(all_wrapping, backend="mpk", options={"fallback": "error"})
        with torch.inference_mode():
            assert_same(ours(*inputs), all_wrapping(*inputs))


@pytest.mark.usefixtures("on_a_gpu")
def test_values_wrap_in_a_gpus_kernel() -> None:
    inputs = all_inputs()
    lowered = lowering.lower(capture(all_wrapping, *clone(inputs)))
    kernel = emulate(lowered.graph)
    assert_same(run(lowered, inputs, lambda given, outputs, _: kernel.launch(given, outputs)), all_wrapping(*inputs))


def test_addresses_are_simplified_within_their_bounds() -> None:
    i, j = E.index(0, 1000), E.index(1, 16)
    at = E.iadd(E.imul(i, 16), j)
    assert E.floordiv(at, 16) is i
    assert E.remainder(at, 16) is j
    assert E.floordiv(E.floordiv(at, 16), 10) is E.floordiv(i, 10)
    assert E.iadd(E.imul(E.floordiv(i, 7), 7), E.remainder(i, 7)) is i
    assert E.is_const(E.compare("lt", i, E.iadd(i, j, 1)), None) is False  # j may be 0
    assert E.is_const(E.compare("le", i, E.iadd(i, j)), True)
    assert E.is_const(E.compare("lt", at, E.const(16000, E.INT64)), True)
    for op, expected in (("minimum", at), ("maximum", E.const(15999, E.INT64))):
        assert E.apply(op, E.INT64, at, E.const(15999, E.INT64)) is expected
        assert E.apply(op, E.INT64, at, E.const(15998, E.INT64)).op == op


def test_bounds_are_those_of_the_dtype_where_a_sum_may_wrap() -> None:
    i = E.index(0, 4)
    assert E.bounds(E.imul(i, 2**62)) == (LEAST, MOST)
    assert E.bounds(E.imul(i, 2**60)) == (0, 3 * 2**60)
    assert E.imul(i, 2**64) is E.const(0, E.INT64)
    assert E.imul(i, 2**63) is E.imul(i, -(2**63))


# ---- every width, near the ends of its range ----

DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SOME_AND_OTHERS = thinned([[torch.int64, torch.uint8], [torch.int32, torch.int16, torch.int8]], 0)


def extremes(dtype: torch.dtype) -> torch.Tensor:
    info = torch.iinfo(dtype)
    return torch.tensor([info.min, info.min + 1, info.max, info.max - 1, 0, 1, 2, 7, info.max // 3, info.min // 3])


def pairs(dtype: torch.dtype) -> list[torch.Tensor]:
    """Every extreme number with every other."""
    numbers = extremes(dtype).to(dtype)
    return [numbers[:, None].expand(-1, len(numbers)).reshape(-1).contiguous(), numbers.repeat(len(numbers))]


def every_operation(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    divisor = torch.where(b == 0, 3, b)
    towards_zero = torch.where((divisor == -1) if b.dtype != torch.uint8 else (b == 0), 3, divisor)  # kills eager
    counts = torch.arange(-3, 97, device=a.device).to(torch.int8)
    return [
        *(a + b, a - b, a * b, -a, a.abs(), ~a, a.sign(), a.relu(), a**2, a**3, torch.add(a, b, alpha=2)),
        *(a + 300, 300 - a, a * 1000003, a - 2**40, a // 77, a % 77, a // -3, a % -3, a // 300, a % 300),
        *(a // divisor, a % divisor, torch.fmod(a, divisor), torch.fmod(a, -3)),
        *(torch.div(a, towards_zero, rounding_mode=mode) for mode in ("trunc", "floor")),
        *(torch.div(a, 3, rounding_mode="trunc"), 100 % divisor, torch.addcmul(a, a, b, value=3)),
        *(a << counts.to(a.dtype), a >> counts.to(a.dtype), a << 3, a >> 3, a << 7, a >> 7, a << -1, a >> -1, a >> 70),
        *(3 << b, a << 300, a >> 300, a & b, a | b, a ^ b, a & 300, a ^ -1),
        *(a < b, a <= b, a == b, a < 300, a >= -200, a < a + 1, a * 2 >= a, a < 2.5, a == 2.0**63, a.float() <= b),
        *(torch.maximum(a, b), torch.minimum(a, b), a.clamp(3, 100), a.clamp(b, b + 1), torch.where(a < b, a, 5)),
        *(a.to(dtype) for dtype in DTYPES),
        *(a / 3, a.float(), a.double(), a.bool(), a.sum(), a.sum(dtype=a.dtype), a.prod(), a.cumsum(0), a.amax()),
        *(a.cumsum(0, dtype=torch.int8), a.amin(), a.argmax(), a.any(), a.all()),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width_is_eagers(dtype: torch.dtype) -> None:
    check(lambda a, b: tuple(every_operation(a, b)), *pairs(dtype))


def beside_a_linear(x: torch.Tensor, weight: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    results = [F.linear(x, weight)]
    for pair in zip(inputs[::2], inputs[1::2], strict=True):
        results += every_operation(*pair)
    return results


def widths(*dtypes: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(2, 16), torch.randn(8, 16), *(t for dtype in dtypes for t in pairs(dtype))]


def assert_all_equal(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    torch.testing.assert_close(got[0], want[0])
    for i, (ours, eager) in enumerate(zip(got[1:], want[1:], strict=True)):
        assert ours.dtype == eager.dtype
        assert torch.equal(ours, eager), f"result {i}: {ours.tolist()}, expected {eager.tolist()}"


@pytest.mark.parametrize("dtypes", SOME_AND_OTHERS)
def test_every_width_beside_a_linear_on_a_cpu(dtypes: list[torch.dtype]) -> None:
    torch.compiler.reset()
    inputs = widths(*dtypes)
    ours = torch.compile(beside_a_linear, backend="mpk", options={"fallback": "error"})
    with torch.inference_mode():
        assert_all_equal(ours(*inputs), beside_a_linear(*inputs))


@pytest.mark.parametrize("dtypes", SOME_AND_OTHERS)
@pytest.mark.usefixtures("on_a_gpu")
def test_every_width_in_a_gpus_kernel(dtypes: list[torch.dtype]) -> None:
    inputs = widths(*dtypes)
    lowered = lowering.lower(capture(beside_a_linear, *clone(inputs)))
    kernel = emulate(lowered.graph)
    got = run(lowered, inputs, lambda given, outputs, _: kernel.launch(given, outputs))
    assert_all_equal(got, beside_a_linear(*inputs))


# ---- divisors that are 0 ----

DIVISIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "floor": lambda a, b: a // b,
    "remainder": lambda a, b: a % b,
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "fmod": torch.fmod,
    "of a number": lambda a, b: torch.remainder(7, b),
    "that nobody reads": lambda a, b: (a // b)[:1],
    "that is not chosen": lambda a, b: torch.where(b == 0, a, a % b),
    "in a sum": lambda a, b: (a // b).sum(),
    "in a cumulative sum": lambda a, b: (a // b).cumsum(0),
    "in place": lambda a, b: a.clone().floor_divide_(b),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_a_call_that_divides_by_zero_raises_eagers_error(name: str) -> None:
    def model(x, weight, a, b):
        return F.linear(x, weight), DIVISIONS[name](a, b)

    torch.compiler.reset()
    ours = torch.compile(model, backend="mpk", options={"fallback": "error"})
    x, weight = torch.randn(2, 16), torch.randn(8, 16)
    dtype = DTYPES[list(DIVISIONS).index(name) % len(DTYPES)]
    a, b = torch.randint(0, 100, (300,)).to(dtype), torch.randint(1, 100, (300,)).to(dtype)
    with torch.inference_mode():
        assert torch.equal(ours(x, weight, a, b)[1], model(x, weight, a, b)[1])
        b[torch.randint(1, 300, ())] = 0
        for call in (model, ours):
            with pytest.raises(RuntimeError, match="^ZeroDivisionError$"):
                call(x, weight, a, b)
        b.clamp_(1)  # and the next call is right
        assert torch.equal(ours(x, weight, a, b)[1], model(x, weight, a, b)[1])


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: torch.cat([a // b, a, F.pad(a % b, (2, 3))]),
        lambda a, b: (a // b).expand(4, -1)[:, a.abs() % 5],
        lambda a, b: F.pad(a, (0, 4)) // F.pad(b, (0, 4), value=1),
    ],
)
def test_no_divisor_is_zero_where_there_is_no_element(fn: Callable) -> None:
    ours = torch.compile(lambda x, a, b: (F.linear(x, x), fn(a, b)), backend="mpk", options={"fallback": "error"})
    a, b = torch.randint(-9, 9, (5,)), torch.randint(1, 9, (5,))
    with torch.inference_mode():
        assert torch.equal(ours(torch.randn(4, 16), a, b)[1], fn(a, b))


@pytest.mark.parametrize("fn", [lambda a: a // 0, lambda a: a % 0, lambda a: a.to(torch.uint8) // 256])
def test_a_division_by_zero_is_left_to_eager(fn: Callable) -> None:
    ours = torch.compile(lambda x, a: (F.linear(x, x), fn(a)), backend="mpk", options={"fallback": "eager"})
    with (
        torch.inference_mode(),
        pytest.warns(MpkWarning, match="an integer division by zero"),
        pytest.raises(RuntimeError, match="ZeroDivisionError"),
    ):
        ours(torch.randn(4, 16), torch.arange(5))


@pytest.mark.usefixtures("on_a_gpu")
def test_a_gpus_quotients_by_zero_are_zero() -> None:
    def fn(x, a, b):
        return F.linear(x, x), *(divide(a, b) for divide in list(DIVISIONS.values())[:4]), F.pad(a // b, (3, 5)), a % 0

    x, (a, b) = torch.randn(4, 16), pairs(torch.int64)
    lowered = lowering.lower(capture(fn, x, a, torch.ones_like(b)))
    kernel = emulate(lowered.graph)
    _, *quotients, padded, rest = run(lowered, [x, a, b], lambda given, outputs, _: kernel.launch(given, outputs))
    floor, remainder, trunc, fmod = (quotient[b == 0] for quotient in quotients)
    assert not (floor.any() or remainder.any() or trunc.any() or rest.any())
    assert torch.equal(fmod, a[b == 0])  # less 0 times the quotient
    assert torch.equal(padded, F.pad(quotients[0], (3, 5)))


def test_the_least_number_by_minus_one() -> None:
    """Eager's rounding toward zero kills the process there."""
    ours = torch.compile(
        lambda x, a, b: (F.linear(x, x), torch.div(a, b, rounding_mode="trunc")),
        backend="mpk",
        options={"fallback": "error"},
    )
    for dtype in DTYPES[:4]:
        least = torch.iinfo(dtype).min
        with torch.inference_mode():
            _, quotient = ours(torch.randn(4, 16), torch.full((3,), least, dtype=dtype), torch.full((3,), -1).to(dtype))
        assert quotient.tolist() == [least] * 3


# ---- numbers that a dtype has no room for ----


@pytest.mark.parametrize(
    "fn",
    [
        lambda a: a.clamp(max=300),
        lambda a: a.masked_fill(a > 3, 300),
        lambda a: torch.where(a > 3, a, 300),
        lambda a: torch.full_like(a, 300),
        lambda a: torch.add(a, a, alpha=300),
        lambda a: F.pad(a, (0, 1), value=300),
        lambda a: a.index_fill(0, torch.tensor([0]), 300),
        lambda a: torch.addcmul(a, a, a, value=300),
    ],
)
def test_a_number_that_does_not_fit_is_eagers_error(fn: Callable) -> None:
    torch.compiler.reset()
    ours = torch.compile(lambda x, a: (F.linear(x, x), fn(a)), backend="mpk", options={"fallback": "eager"})
    a = torch.arange(8, dtype=torch.int8)
    with torch.inference_mode(), pytest.warns(MpkWarning, match="has no room"):
        try:
            expected = fn(a)
        except RuntimeError:
            with pytest.raises(RuntimeError, match="without overflow"):
                ours(torch.randn(4, 16), a)
        else:  # as of ``clamp`` since PyTorch 2.15
            assert torch.equal(ours(torch.randn(4, 16), a)[1], expected)


def test_floats_become_integers_as_eagers_do() -> None:
    def fn(x):
        return [x.to(dtype) for dtype in DTYPES] + [x.cumsum(0, dtype=torch.int8), torch.full_like(x, -1.5).byte()]

    x = torch.tensor([-1.5, -0.5, 300.7, -300.2, 3e9, -3e9, 1e19, -1e19, torch.nan, torch.inf, -torch.inf, 2.0**31])
    check(lambda x: tuple(fn(x)), x)
    inside = x[:4]
    lowered = lowering.lower(capture(lambda x: tuple(fn(x)), inside))
    kernel = emulate(lowered.graph)
    got = run(lowered, [inside], lambda given, outputs, _: kernel.launch(given, outputs))
    for ours, eager in zip(got, fn(inside), strict=True):
        assert torch.equal(ours, eager)


@pytest.mark.parametrize("operation", ["b % b", "torch.fmod(b, b)", "b.abs()", "x // 2"])
def test_what_is_no_integer_is_refused(operation: str) -> None:
    x, b = torch.randn(3), torch.tensor([True, False, True])
    graph = capture(lambda x, b: eval(operation, {"torch": torch, "x": x, "b": b}), x, b)
    reasons = [reason for node in graph.graph.nodes if (reason := lowering.supports(node))]
    assert len(reasons) == 1
