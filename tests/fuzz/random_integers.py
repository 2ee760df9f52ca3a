"""Random programs of integers of every width, near the ends of their ranges: sums and products that wrap, quotients,
remainders, comparisons, shifts and hashes, and what turns them into addresses.

Like ``random_programs.Program``, any list of steps is a program. All results are compared bit for bit.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuzz.random_programs import Choices, Shortening, Step

DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
NUMBERS = (
    *(1, 2, 3, 5, 7, 10, 16, 100, 127, 128, 255, 256, 300, 32767, 32768, 50257, 65536, 2**31 - 1, 2**31, 2**32, 2**33),
    *(2**40, 10**10, 10**18, 2**61 + 1, 2**62, 2**63 - 1, 6364136223846793005, 0x5851F42D4C957F2D, 3037000499),
)
COLUMNS = 8
MAX_ELEMENTS = 200


@dataclass(frozen=True)
class IntegerProgram(Shortening):
    rows: int
    dtypes: tuple[torch.dtype, ...]  # of the integer inputs
    steps: tuple[Step, ...]
    results: tuple[int, ...]  # which values are returned

    is_exact = True

    @classmethod
    def draw(cls, rng: random.Random, max_steps: int = 8) -> IntegerProgram:
        steps = tuple(
            Step(rng.randrange(len(KINDS)), rng.randrange(8), rng.randrange(16), rng.getrandbits(60))
            for _ in range(rng.randint(1, max_steps))
        )
        dtypes = tuple(rng.choice((torch.int64, *DTYPES)) for _ in range(3))
        return cls(rng.choice((1, 2, 3, 5)), dtypes, steps, (0, *(rng.randrange(16) for _ in range(rng.randint(0, 3)))))

    @property
    def may_divide_by_zero(self) -> bool:
        return any(KINDS[step.kind] is checked_division for step in self.steps)

    @property
    def input_names(self) -> list[str]:
        return ["x", "weight", *(f"integers{i}" for i in range(len(self.dtypes)))]

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> list[Tensor]:
        rng = random.Random(seed)
        floats = [[rng.randint(-2, 2) for _ in range(n * COLUMNS)] for n in (2, 5)]
        tensors = [torch.tensor(numbers, dtype=torch.float32).view(-1, COLUMNS) for numbers in floats]
        for number, dtype in enumerate(self.dtypes):
            shape = [(self.rows, COLUMNS), (COLUMNS,), (self.rows, 1)][number % 3]
            numbers = [_number(rng, dtype) for _ in range(torch.Size(shape).numel())]
            tensors.append(torch.tensor(numbers, dtype=dtype).view(shape))
        return [tensor.to(device) for tensor in tensors]

    def run(self, x: Tensor, weight: Tensor, *integers: Tensor, noise: torch.Generator | None = None) -> list[Tensor]:
        values = [*integers, torch.arange(COLUMNS, device=x.device)]
        quotients = []  # returned, since what nobody reads is not computed, and raises nothing
        for step in self.steps:
            a, b = values[-1 - step.first % len(values)], values[step.second % len(values)]
            result = KINDS[step.kind](a, b if _fit(a, b) else a, Choices(step.choices))
            if KINDS[step.kind] is checked_division:
                quotients.append(result)
            if 0 < result.numel() <= MAX_ELEMENTS and result.dim() <= 3:
                values.append(result)
        return [F.linear(x, weight), *(values[-1 - i % len(values)] for i in self.results), *quotients]

    def _smaller(self):
        for i in reversed(range(len(self.steps))):
            yield dataclasses.replace(self, steps=self.steps[:i] + self.steps[i + 1 :])
        for i in range(len(self.results) if len(self.results) > 1 else 0):
            yield dataclasses.replace(self, results=self.results[:i] + self.results[i + 1 :])

    def __str__(self) -> str:
        return f"{self!r}\n{[KINDS[step.kind].__name__ for step in self.steps]}"


def _number(rng: random.Random, dtype: torch.dtype) -> int:
    """Small, at an end of the range or somewhere in it, or next to a power of two."""
    info = torch.iinfo(dtype)
    kind = rng.randrange(6)
    if kind < 2:
        number = rng.randint(-9, 9)
    elif kind == 2:
        number = rng.choice((info.min, info.max)) + rng.randint(-2, 2)
    elif kind == 3:
        number = rng.randint(info.min, info.max)
    else:
        number = rng.choice((-1, 1)) * 2 ** rng.randrange(info.bits) + rng.randint(-1, 1)
    return (number - info.min) % 2**info.bits + info.min


def _fit(a: Tensor, b: Tensor) -> bool:
    fits = all(m in (n, 1) or n == 1 for m, n in zip(a.shape[::-1], b.shape[::-1], strict=False))
    return fits and torch.broadcast_shapes(a.shape, b.shape).numel() <= MAX_ELEMENTS


def _integer(a: Tensor) -> Tensor:
    return a if a.dtype in DTYPES else a.to(torch.int64)


def _constant(c: Choices) -> int:
    """A number other than 0: programs divide by 0 in ``checked_division`` only."""
    number = c.of(NUMBERS) + c.below(3) - 1 or 4
    return min(number, 2**63 - 1) if c.below(4) else -number


def _divisor(c: Choices, a: Tensor) -> int:
    """Not 0 in a's dtype, whether it wraps or not."""
    number = _constant(c)
    return number if number % 2 ** torch.iinfo(a.dtype).bits else 3


def arithmetic(a: Tensor, b: Tensor, c: Choices) -> Tensor:
    a, b = _integer(a), _integer(b)
    k = _constant(c)
    ops: list[Callable[[], Tensor]] = [
        lambda: a + b,
        lambda: a - b,
        lambda: a * b,
        lambda: a + k,
        lambda: k - a,
        lambda: a * k,
        lambda: a * k + _constant(c),
        lambda: torch.add(a, b, alpha=c.below(7) - 3 if a.dtype != torch.uint8 else c.below(3)),
        lambda: -a,
        lambda: a.abs(),
        lambda: ~a,
        lambda: a.sign(),
        lambda: a.relu(),
        lambda: a**2,
        lambda: a**3,
        lambda: torch.addcmul(a, a, b.to(a.dtype), value=2),
    ]
    return c.of(ops)()


def division(a: Tensor, b: Tensor, c: Choices) -> Tensor:
    """By numbers and tensors that are not 0."""
    a, b = _integer(a), _integer(b)
    k, m = _divisor(c, a), _divisor(c, a)
    # Eager's division that rounds toward zero kills the process where the smallest number is divided by -1.
    kept = torch.where((b == 0) | (b == -1), 3, b) if b.dtype != torch.uint8 else torch.where(b == 0, 3, b)
    wraps_to_minus_one = (k + 1) % 2 ** torch.iinfo(a.dtype).bits == 0
    ops: list[Callable[[], Tensor]] = [
        lambda: a // k,
        lambda: a % k,
        lambda: (a // k) // m,
        lambda: (a // k) % m,
        lambda: (a % k) // m,
        lambda: a * k // k,
        lambda: (a * k + b) // k,
        lambda: (a * k + m) % k,
        lambda: (a * m + b) % k,
        lambda: a // k * k + a % k,
        lambda: a // kept,
        lambda: a % kept,
        lambda: torch.remainder(k, kept),
        lambda: torch.fmod(a, kept),
        lambda: torch.fmod(a, k),
        lambda: torch.div(a, kept, rounding_mode="trunc"),
        lambda: torch.div(a, 3 if wraps_to_minus_one else k, rounding_mode="trunc"),
        lambda: torch.div(a, kept, rounding_mode="floor"),
    ]
    return c.of(ops)()


def checked_division(a: Tensor, b: Tensor, c: Choices) -> Tensor:
    """By what may be 0: then eager raises."""
    a, b = _integer(a), _integer(b)
    ops: list[Callable[[], Tensor]] = [lambda: a // b, lambda: a % b, lambda: torch.fmod(a, b), lambda: 7 % b]
    return c.of(ops)()


def bits(a: Tensor, b: Tensor, c: Choices) -> Tensor:
    a, b = _integer(a), _integer(b)
    k, count = _constant(c), c.below(72) - 4
    ops: list[Callable[[], Tensor]] = [
        lambda: a << count,
        lambda: a >> count,
        lambda: a << b,
        lambda: a >> b,
        lambda: count << b,
        lambda: torch.bitwise_left_shift(a, count),
        lambda: a & b,
        lambda: a | k,
        lambda: a ^ b,
        lambda: a ^ (a >> count),
        lambda: (a ^ (a >> count)) * k,
        lambda: (a << 5) + a + b,
        lambda: ((a * k) ^ b) % _divisor(c, a),
    ]
    return c.of(ops)()


def comparison(a: Tensor, b: Tensor, c: Choices) -> Tensor:
    a, b = _integer(a), _integer(b)
    k = _constant(c)
    ops: list[Callable[[], Tensor]] = [
        lambda: a < b,
        lambda: a <= b,
        lambda: a == b,
        lambda: a >= k,
        lambda: a != k,
        lambda: a < a + 1,
        lambda: a - 1 < a,
        lambda: a - b < 0,
        lambda: a + k > b,
        lambda: a * 2 >= a,
        lambda: -a <= 0,
        lambda: a < 2.5,
        lambda: a.float() >= b,
        lambda: (a < b) & (b < k),
        lambda: (a > b) ^ (a < k),
        lambda: a.bool() | (b == k),
    ]
    return c.of(ops)()


def choice(a: Tensor, b: Tensor, c: Choices) -> Tensor:
    a, b = _integer(a), _integer(b)
    low, high = sorted((c.below(200) - 100, c.below(300) - 100))
    room = a.dtype != torch.uint8 and high < 128
    ops: list[Callable[[], Tensor]] = [
        lambda: torch.maximum(a, b),
        lambda: torch.minimum(a, b),
        lambda: torch.where(a < b, a, b),
        lambda: torch.where(a > b, a * 2, b - 1),
        lambda: a.clamp(low, high) if room else a.clamp(0, 100),
        lambda: a.clamp_max(b),
        lambda: a.masked_fill(b < 0, c.below(100)),
        lambda: torch.cat([a, a // 2], -1) if a.dim() else a,
        lambda: torch.stack([a, a + 1]),
        lambda: a.flip(-1) - a,
    ]
    return c.of(ops)()


def conversion(a: Tensor, b: Tensor, c: Choices) -> Tensor:
    number = _integer(a)
    ops: list[Callable[[], Tensor]] = [
        lambda: a.to(c.of(DTYPES)),
        lambda: number.to(c.of(DTYPES)).to(torch.int64),
        lambda: number.bool(),
        lambda: number.float().to(c.of(DTYPES)),
        lambda: number.double().to(c.of(DTYPES)),
        lambda: (number / _divisor(c, number)).to(torch.int64),
        lambda: (number * 0.5).floor().to(torch.int32),
    ]
    return c.of(ops)()


def counted(a: Tensor, b: Tensor, c: Choices) -> Tensor:
    """Of coordinates, as addresses are."""
    a = _integer(a)
    n, k = a.shape[-1], _constant(c)
    i = torch.arange(n, device=a.device)
    m = c.below(5) + 1
    ops: list[Callable[[], Tensor]] = [
        lambda: i * k + a,
        lambda: i * k >= 0,
        lambda: (i * k) // m,
        lambda: (i * k + a) % m,
        lambda: (i * m + m - 1) // m,
        lambda: (i + k) // m // 3,
        lambda: i * k // k + i % m,
        lambda: torch.arange(n, dtype=torch.int8, device=a.device) * m + a,
        lambda: i.to(torch.int32) * (k % 2**31) + a,
        lambda: (i + k < i) | (a < i),
    ]
    return c.of(ops)()


def picked(a: Tensor, b: Tensor, c: Choices) -> Tensor:
    """Elements at places that are computed."""
    a, b = _integer(a), _integer(b).reshape(-1)
    flat = a.reshape(-1)
    n, k = flat.shape[0], _constant(c)
    ops: list[Callable[[], Tensor]] = [
        lambda: flat[(b % n).to(torch.int64)],
        lambda: flat[(b * k).to(torch.int64) % n],
        lambda: flat[(b * k).to(torch.int64) // 3 % n - n],
        lambda: F.embedding(b.to(torch.int64) % n, flat[:, None]),
        lambda: flat.gather(0, (b.to(torch.int64) ^ (b.to(torch.int64) >> 7)) % n),
        lambda: flat.reshape(n, 1).expand(n, 3).reshape(-1)[b.to(torch.int64) % (3 * n)],
        lambda: F.pad(flat, (1, 2), value=c.below(100)),
    ]
    return c.of(ops)()


def reduction(a: Tensor, b: Tensor, c: Choices) -> Tensor:
    dim = -1 - c.below(a.dim()) if a.dim() else -1
    number = _integer(a)
    ops: list[Callable[[], Tensor]] = [
        lambda: a.sum(dim),
        lambda: a.sum(),
        lambda: a.sum(dim, dtype=c.of(DTYPES)),
        lambda: a.cumsum(dim),
        lambda: a.cumsum(dim, dtype=c.of(DTYPES)),
        lambda: a.prod(dim) if a.dim() else a.prod(),
        lambda: number.amax(dim, keepdim=True),
        lambda: number.amin(),
        lambda: number.argmax(dim) if number.dim() else number,
        lambda: number.max(dim).values,
        lambda: (number > 1).any(),
        lambda: number.all(),
    ]
    return c.of(ops)()


def write(a: Tensor, b: Tensor, c: Choices) -> Tensor:
    """In place, on a copy."""
    a = _integer(a).clone()
    b = _integer(b)
    b = b if torch.broadcast_shapes(a.shape, b.shape) == a.shape else b.sum()
    b = b if torch.promote_types(a.dtype, b.dtype) == a.dtype else b.to(a.dtype)
    k, count = _divisor(c, a), c.below(12) - 2
    ops: list[Callable[[], Tensor]] = [
        lambda: a.add_(b),
        lambda: a.mul_(b).add_(k),
        lambda: a.sub_(b, alpha=2),
        lambda: a.remainder_(k),
        lambda: a.floor_divide_(k),
        lambda: a.bitwise_left_shift_(count),
        lambda: a.__irshift__(count),
        lambda: a.bitwise_xor_(b),
        lambda: a.neg_(),
        lambda: a.copy_(b),
        lambda: a.fill_(c.below(100)),
    ]
    return c.of(ops)()


def shape(a: Tensor, b: Tensor, c: Choices) -> Tensor:
    ops: list[Callable[[], Tensor]] = [
        lambda: a.reshape(-1),
        lambda: a.transpose(0, -1) if a.dim() else a,
        lambda: a[..., ::2] if a.dim() else a,
        lambda: a.reshape(-1)[:1],
        lambda: a.unsqueeze(0).expand(2, *a.shape),
        lambda: a.reshape(-1).repeat(2),
    ]
    return c.of(ops)()


KINDS = [
    arithmetic, arithmetic, arithmetic, arithmetic, division, division, division, division, checked_division, bits,
    bits, bits, comparison, comparison, choice, choice, conversion, conversion, counted, counted, picked, reduction,
    write, shape,
]  # fmt: skip
