"""Integers wrap and divide as eager's do, near the ends of their ranges, too: on devices and in emulated kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.lowering.harness import capture, check, clone, run
from torch_mpk import lowering
from torch_mpk.lowering import expr as E
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
    "a counted multiple": (lambda i: torch.arange(4) * 2**62 + 0 * i >= 0, [0]),
    "a counted multiple of 2**64": (lambda i: torch.arange(4) * 2**32 * 2**32 + i, [5]),
    "a counted hash": (lambda i: (torch.arange(4) * 6364136223846793005 + i) // 3, [1442695040888963407]),
}


@pytest.mark.parametrize("name", WRAPPING)
def test_values_wrap_where_addresses_would_be_simplified(name: str) -> None:
    fn, values = WRAPPING[name]
    check(fn, torch.tensor(values))


def all_wrapping(x: torch.Tensor, weight: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    functions = [fn for fn, _ in WRAPPING.values()]
    return [F.linear(x, weight), *(fn(i) for fn, i in zip(functions, inputs, strict=True))]


def all_inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 16), torch.randn(8, 16), *(torch.tensor(values) for _, values in WRAPPING.values())]


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


def test_bounds_are_those_of_the_dtype_where_a_sum_may_wrap() -> None:
    i = E.index(0, 4)
    assert E.bounds(E.imul(i, 2**62)) == (LEAST, MOST)
    assert E.bounds(E.imul(i, 2**60)) == (0, 3 * 2**60)
    assert E.imul(i, 2**64) is E.const(0, E.INT64)
    assert E.imul(i, 2**63) is E.imul(i, -(2**63))
