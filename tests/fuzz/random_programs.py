"""Random programs in the style of models, and random abuse of them.

A program is a list of steps, each some small integers, that choose an operation and its operands among the values made
so far. Any list is a program, so one that fails can be shortened by dropping steps.

Inputs are small whole numbers, and so are the results of most operations: they have the same bits in whatever order
they are computed, and are compared bit for bit. What a division, a root or an exponential gives is *inexact*: such
values meet continuous operations only. How far two right implementations may differ in them is measured, by evaluating
the program with noise: each inexact result is shifted by a few units in its last place.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_ELEMENTS = 3000
MAX_RANK = 5
ULPS = 4  # of noise
VOCAB_SIZE = 19
LIMIT = 9  # magnitudes that operations keep to


@dataclass(frozen=True)
class Sizes:
    batch: int
    hidden: int
    inner: int
    groups: int
    heads: int
    head_size: int
    length: int


@dataclass(frozen=True)
class Step:
    kind: int
    first: int
    second: int
    choices: int  # read digit by digit


class Shortening:
    """A program that says which of its parts may go (``_smaller``)."""

    def shortened(self, fails: Callable[[Any], bool]) -> Any:
        """The program with fewer steps, results and odd layouts that still fails."""
        best = self
        tried = True
        while tried:
            tried = False
            for smaller in best._smaller():
                if fails(smaller):
                    best, tried = smaller, True
                    break
        return best


@dataclass(frozen=True)
class Program(Shortening):
    sizes: Sizes
    dtype: torch.dtype
    layouts: tuple[int, ...]  # how each input lies in memory
    steps: tuple[Step, ...]
    results: tuple[int, ...]  # which values are returned

    is_exact = False  # whether every right implementation has the same bits
    may_divide_by_zero = False

    @classmethod
    def draw(cls, rng: random.Random, max_steps: int = 14) -> Program:
        groups = rng.choice((1, 2, 3))
        sizes = Sizes(
            batch=rng.choice((1, 1, 2, 3)),
            hidden=rng.choice((4, 5, 8, 16, 17, 33, 64)),
            inner=rng.choice((3, 8, 24, 31)),
            groups=groups,
            heads=groups * rng.choice((1, 2, 3)),
            head_size=rng.choice((2, 6, 8, 16)),
            length=rng.choice((1, 5, 7, 16, 33)),
        )
        dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16))
        layouts = tuple(rng.randrange(12) for _ in INPUTS)
        steps = tuple(
            Step(rng.randrange(len(KINDS)), rng.randrange(8), rng.randrange(16), rng.getrandbits(30))
            for _ in range(rng.randint(1, max_steps))
        )
        if rng.random() < 0.9:  # a graph without a matrix product is not worth a launch
            last = rng.choice([i for i, kind in enumerate(KINDS) if kind in (linear, gated, attend)])
            steps += (Step(last, rng.randrange(3), 0, rng.getrandbits(30)),)
        results = (0, *(rng.randrange(32) for _ in range(rng.randint(0, 3))))
        return cls(sizes, dtype, layouts, steps, results)

    @property
    def input_names(self) -> list[str]:
        return list(INPUTS)

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> list[Tensor]:
        """Tensors to run the program on, in the order of ``INPUTS``. Some are views of larger memory."""
        generator = torch.Generator().manual_seed(seed)
        tensors: list[Tensor] = []
        for layout, make in zip(self.layouts, INPUTS.values(), strict=True):
            tensor = make(self, generator)
            tensors.append(_laid_out(tensor, layout).to(device) if layout else tensor.to(device))
        return [
            tensor if not layout else _laid_out(tensor, layout)
            for tensor, layout in zip(tensors, self.layouts, strict=True)
        ]

    def run(self, *inputs: Tensor, noise: torch.Generator | None = None) -> list[Tensor]:
        evaluation = _Evaluation(self, inputs, noise)
        for step in self.steps:
            evaluation.step(step)
        return [evaluation.values[-1 - i % len(evaluation.values)] for i in self.results]

    def _smaller(self):
        for i in reversed(range(len(self.steps))):
            yield dataclasses.replace(self, steps=self.steps[:i] + self.steps[i + 1 :])
        if len(self.results) > 1:
            for i in range(len(self.results)):
                yield dataclasses.replace(self, results=self.results[:i] + self.results[i + 1 :])
        if any(self.layouts):
            yield dataclasses.replace(self, layouts=(0,) * len(self.layouts))
            for i, layout in enumerate(self.layouts):
                if layout:
                    yield dataclasses.replace(self, layouts=(*self.layouts[:i], 0, *self.layouts[i + 1 :]))
        if self.dtype != torch.float32:
            yield dataclasses.replace(self, dtype=torch.float32)


# ---- inputs ----


def _floats(*dims: str) -> Callable[[Program, torch.Generator], Tensor]:
    def make(program: Program, generator: torch.Generator) -> Tensor:
        shape = [_size(program.sizes, dim) for dim in dims]
        return torch.randint(-2, 3, shape, generator=generator).to(program.dtype)

    return make


def _size(sizes: Sizes, dim: str) -> int:
    product = 1
    for name in dim.split("*"):
        product *= int(name) if name.isdigit() else getattr(sizes, name)
    return product


def _ints(bound: str, *dims: str) -> Callable[[Program, torch.Generator], Tensor]:
    def make(program: Program, generator: torch.Generator) -> Tensor:
        high = VOCAB_SIZE if bound == "vocab" else _size(program.sizes, bound)
        return torch.randint(0, high, [_size(program.sizes, dim) for dim in dims], generator=generator)

    return make


def _mask(program: Program, generator: torch.Generator) -> Tensor:
    mask = torch.randint(0, 2, (program.sizes.batch, 1, 1, program.sizes.length), generator=generator).bool()
    mask[..., 0] = True  # a row without a live key is a test of its own
    return mask


def _wide(program: Program, generator: torch.Generator) -> Tensor:
    return torch.randint(-2, 3, (program.sizes.hidden,), generator=generator).float()


INPUTS: dict[str, Callable[[Program, torch.Generator], Tensor]] = {
    "x": _floats("batch", "1", "hidden"),
    "y": _floats("batch", "hidden"),
    "wide": _wide,
    "scale": _floats("hidden"),
    "up": _floats("inner", "hidden"),
    "down": _floats("hidden", "inner"),
    "bias": _floats("inner"),
    "square": _floats("hidden", "hidden"),
    "q_weight": _floats("heads*head_size", "hidden"),
    "k_weight": _floats("groups*head_size", "hidden"),
    "v_weight": _floats("groups*head_size", "hidden"),
    "o_weight": _floats("hidden", "heads*head_size"),
    "k_cache": _floats("batch", "groups", "length", "head_size"),
    "v_cache": _floats("batch", "groups", "length", "head_size"),
    "cos": _floats("1", "head_size"),
    "sin": _floats("batch", "head_size"),
    "table": _floats("19", "hidden"),
    "ids": _ints("vocab", "batch", "1"),
    "slot": _ints("length", "1"),
    "counter": _ints("length"),
    "mask": _mask,
}
_FIXED = ("ids", "slot", "counter", "mask")  # nothing but a step that means it writes to them
_OFFERED = ("x", "y", "wide", "scale", "bias", "k_cache", "ids", "mask")  # the first values of a program


def _laid_out(tensor: Tensor, layout: int) -> Tensor:
    """The same values in another place: strided, transposed in memory, behind an offset, or dense (most often)."""
    if layout == 1 and tensor.dim():
        return tensor.repeat_interleave(2, -1)[..., ::2]
    if layout == 2 and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == 3 and tensor.dim():
        return torch.cat([tensor, tensor], 0)[tensor.shape[0] :]
    if layout == 4 and tensor.dim():
        return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]
    return tensor.clone()


# ---- evaluation ----


class Choices:
    def __init__(self, digits: int) -> None:
        self.digits = digits

    def below(self, n: int) -> int:
        self.digits, digit = divmod(self.digits, n)
        return digit

    def of(self, options):
        return options[self.below(len(options))]


class _Evaluation:
    """A program being run: on real tensors, or traced on fake ones."""

    def __init__(self, program: Program, inputs: tuple[Tensor, ...], noise: torch.Generator | None) -> None:
        self.sizes, self.dtype, self.noise = program.sizes, program.dtype, noise
        self.input = dict(zip(INPUTS, inputs, strict=True))
        self.values = [self.input[name] for name in _OFFERED]
        self.fixed = {self._storage(self.input[name]) for name in _FIXED}
        self.inexact: dict[int, torch.UntypedStorage] = {}  # kept, or another storage would get the same address

    def step(self, step: Step) -> None:
        a = self.values[-1 - step.first % len(self.values)]
        b = self.values[step.second % len(self.values)]
        result = KINDS[step.kind](self, a, b, Choices(step.choices))
        if 0 < result.numel() <= MAX_ELEMENTS and result.dim() <= MAX_RANK:
            self.values.append(result)

    @staticmethod
    def _storage(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def is_exact(self, *tensors: Tensor) -> bool:
        return all(self._storage(tensor) not in self.inexact for tensor in tensors)

    def made(self, result: Tensor, *sources: Tensor, exact: bool = True) -> Tensor:
        """A new result: inexact if it says so or a source is."""
        if (exact and self.is_exact(*sources)) or not result.is_floating_point():
            return result
        if self.noise is not None:
            unit = torch.rand(result.shape, generator=self.noise).to(result.device) * 2 - 1
            ulp = ULPS * torch.finfo(result.dtype).eps
            # sums of terms up to 64 in fp32, whatever they are rounded to
            result = (result + unit * (result.abs() * ulp + 2e-5)).to(result.dtype)
        self.inexact[self._storage(result)] = result.untyped_storage()
        return result

    def wrote(self, target: Tensor, *sources: Tensor, exact: bool = True) -> Tensor:
        if not (exact and self.is_exact(target, *sources)):
            self.inexact[self._storage(target)] = target.untyped_storage()
        return target

    def floating(self, a: Tensor) -> Tensor:
        return a if a.is_floating_point() else a.to(self.dtype)

    def numeric(self, a: Tensor) -> Tensor:
        return a.to(self.dtype) if a.dtype == torch.bool else a

    def rows(self, a: Tensor, size: int) -> Tensor:
        """a, of the program's dtype, with a last dimension of ``size``: cut or padded."""
        a = self.floating(a)
        if a.dtype != self.dtype:
            cast = a.to(self.dtype)
            a = self.made(cast, a)
        if not a.dim():
            return a.expand(1, size)
        if a.shape[-1] == size:
            return a
        return a[..., :size] if a.shape[-1] > size else self.made(F.pad(a, (0, size - a.shape[-1])), a)


def _small(a: Tensor) -> Tensor:
    return a.clamp(-LIMIT, LIMIT)


def _broadcastable(a: Tensor, b: Tensor) -> bool:
    fits = all(m in (n, 1) or n == 1 for m, n in zip(a.shape[::-1], b.shape[::-1], strict=False))
    return fits and torch.broadcast_shapes(a.shape, b.shape).numel() <= MAX_ELEMENTS


def pointwise(e: _Evaluation, a: Tensor, b: Tensor, c: Choices) -> Tensor:
    a, b = e.numeric(a), e.numeric(b)
    if not _broadcastable(a, b):
        b = a
    k = c.below(9) - 4
    ops: list[Callable[[], Tensor]] = [
        lambda: _small(a + b),
        lambda: _small(a - b),
        lambda: _small(a * b),
        lambda: _small(a * b - 1),
        lambda: _small(torch.add(a, b, alpha=2)),
        lambda: _small(k - a),
        lambda: _small(a * k),
        lambda: torch.maximum(a, b),
        lambda: torch.minimum(a, b),
        lambda: -a,
        lambda: a.abs(),
        lambda: a.relu(),
        lambda: _small(a.pow(2)),
        lambda: a.clamp(min=k),
        lambda: a.clamp_max(k),
        lambda: e.floating(a) * 0.5,
        lambda: e.floating(a) / 2,
    ]
    return e.made(c.of(ops)(), a, b)


def discrete(e: _Evaluation, a: Tensor, b: Tensor, c: Choices) -> Tensor:
    """Where a small difference of the operands may make a large one of the result."""
    if not e.is_exact(a, b):
        return pointwise(e, a, b, c)
    if not _broadcastable(a, b):
        b = a
    n = max(1, c.below(5))
    ops: list[Callable[[], Tensor]] = [
        lambda: a > b,
        lambda: a <= b,
        lambda: a == b,
        lambda: a != c.below(3),
        lambda: torch.where(a > b, a, b),
        lambda: e.numeric(a).masked_fill(b > 0, 3),
        lambda: (a > 0) & (b > 0),
        lambda: (a > 0) | (b > 1),
        lambda: ~(a > 0),
        lambda: torch.logical_xor(a, b),
        lambda: a.to(torch.int64) // n,
        lambda: a.to(torch.int64) % n,
        lambda: a.to(torch.int64) + b.to(torch.int64),
        lambda: a.to(torch.int32) * n,
        lambda: a.bool(),
        lambda: e.floating(a).floor(),
        lambda: torch.where(b > 0, a, n),
        lambda: a.to(torch.int64) & 3,
    ]
    return c.of(ops)()


def smooth(e: _Evaluation, a: Tensor, b: Tensor, c: Choices) -> Tensor:
    a = e.floating(a)
    ops: list[Callable[[], Tensor]] = [
        lambda: a.sigmoid(),
        lambda: a.tanh(),
        lambda: (a * 0.25).exp(),
        lambda: F.silu(a),
        lambda: F.gelu(a),
        lambda: F.gelu(a, approximate="tanh"),
        lambda: a.sin(),
        lambda: a.cos(),
        lambda: (a.abs() + 1).sqrt(),
        lambda: (a.abs() + 1).rsqrt(),
        lambda: (a.abs() + 1).log(),
        lambda: (a.abs() + 1).reciprocal(),
        lambda: a / 3,
        lambda: torch.erf(a),
        lambda: F.softplus(a),
        lambda: torch.tanh(a / 4) * 4,
        lambda: (a.abs() + 1).log1p() - a.tanh().expm1(),
        lambda: torch.atan2(a, a.abs() + 1),
    ]
    return e.made(_small(c.of(ops)()), a, exact=False)


def cast(e: _Evaluation, a: Tensor, b: Tensor, c: Choices) -> Tensor:
    ops: list[Callable[[], Tensor]] = [
        lambda: a.float(),
        lambda: a.to(torch.bfloat16),
        lambda: a.to(torch.float16),
        lambda: a.type_as(b) if e.is_exact(a) else a.to(e.dtype),
        lambda: a.to(e.dtype),
        lambda: a.to(torch.float32, copy=True),
        lambda: a.double(),
    ]
    return e.made(c.of(ops)(), a)


def view(e: _Evaluation, a: Tensor, b: Tensor, c: Choices) -> Tensor:
    if not a.dim():
        return a.expand(3)
    dim = c.below(a.dim())
    n = a.shape[dim]
    k = c.below(n)
    ops: list[Callable[[], Tensor]] = [
        lambda: a.transpose(0, dim),
        lambda: a.reshape(-1),
        lambda: a.reshape(n, -1),
        lambda: a.reshape(-1, n),
        lambda: a.narrow(dim, k, max(1, (n - k) // 2)),
        lambda: a.select(dim, k - n),
        lambda: a.unsqueeze(dim),
        lambda: a[None].expand(2, *a.shape),
        lambda: a.unsqueeze(1).expand(a.shape[0], 2, *a.shape[1:]).reshape(-1, *a.shape[1:]),
        lambda: a.squeeze(),
        lambda: a.squeeze(dim),
        lambda: a[..., :: 1 + c.below(2)],
        lambda: a.permute(*reversed(range(a.dim()))),
        lambda: a.contiguous(),
        lambda: a.chunk(2, dim)[-1],
        lambda: a.split(max(1, n // 2), dim)[0],
        lambda: a.unbind(dim)[k],
        lambda: a.unflatten(dim, (2, -1)) if n % 2 == 0 else a.flatten(),
        lambda: a.movedim(dim, 0),
        lambda: a[..., None],
        lambda: a.mT if a.dim() > 1 else a,
        lambda: a.view_as(a),
    ]
    result = c.of(ops)()
    if result.untyped_storage()._cdata == a.untyped_storage()._cdata:
        return result
    return e.made(result, a)


def index(e: _Evaluation, a: Tensor, b: Tensor, c: Choices) -> Tensor:
    if not a.dim():
        return e.made(a.clone(), a)
    dim = c.below(a.dim())
    n = a.shape[dim]
    ids = e.input["ids"] if not e.is_exact(b) else b
    where = ids.reshape(-1)[:3].to(torch.int64) % n
    k = c.below(4)
    ops: list[Callable[[], Tensor]] = [
        lambda: torch.cat([a, a.flip(dim)], dim),
        lambda: torch.cat([a.narrow(dim, n // 2, n - n // 2), a.narrow(dim, 0, max(1, n // 2))], dim),
        lambda: F.pad(a, (1, k % 2), value=4),
        lambda: a.index_select(dim, where),
        lambda: a[where % a.shape[0] - a.shape[0]],
        lambda: torch.stack([a, a], dim),
        lambda: F.embedding(where, a.reshape(n, -1)),
        lambda: a.gather(dim, torch.zeros_like(a, dtype=torch.int64).narrow(dim, 0, 1) + k % n),
        lambda: a.flip(dim),
        lambda: a.roll(k, dim),
        lambda: a.roll(k),
        lambda: a.repeat(*([1] * (a.dim() - 1)), 2),
        lambda: a.repeat_interleave(2, dim),
        lambda: a.tril() if a.dim() > 1 else a.clone(),
        lambda: a[..., where % a.shape[-1]],
        lambda: a.clone(),
    ]
    return e.made(c.of(ops)(), a)


def made_from_nothing(e: _Evaluation, a: Tensor, b: Tensor, c: Choices) -> Tensor:
    n = e.sizes.hidden
    ops: list[Callable[[], Tensor]] = [
        lambda: torch.arange(n, device=a.device).remainder(7),
        lambda: torch.full((e.sizes.batch, n), 2.0, dtype=e.dtype, device=a.device),
        lambda: torch.zeros_like(a),
        lambda: torch.ones(n, n, dtype=e.dtype, device=a.device).triu(1),
        lambda: torch.arange(e.sizes.length, device=a.device) <= e.input["slot"],
        lambda: a.new_full((3,), 1),
        lambda: torch.tensor(2.0, device=a.device).to(e.dtype),
    ]
    return c.of(ops)()


def reduce(e: _Evaluation, a: Tensor, b: Tensor, c: Choices) -> Tensor:
    a = e.numeric(a)
    if not a.dim():
        return a.sum()
    dim = c.below(a.dim())
    ops: list[Callable[[], Tensor]] = [
        lambda: e.made(_small(a.sum(dim)), a),
        lambda: e.made(_small(a.sum(-1, keepdim=True)), a),
        lambda: e.made(_small(a.sum()), a),
        lambda: e.made(_small(a.sum(dtype=torch.float32)), a),
        lambda: e.made(a.amax(dim, keepdim=True), a),
        lambda: e.made(a.amin(), a),
        lambda: e.made(a.max(dim).values, a),
        lambda: e.made(e.floating(a).mean(dim, keepdim=True), a, exact=False),
        lambda: e.made(_small(e.floating(a).var(dim, correction=0)), a, exact=False),
        lambda: e.made(e.floating(a).softmax(dim), a, exact=False),
        lambda: e.made(_small(e.floating(a).log_softmax(dim, torch.float32)), a, exact=False),
        lambda: e.made(_small(e.floating(a).logsumexp(dim)), a, exact=False),
        lambda: (a > 0).any(dim) if e.is_exact(a) else a.amax(dim),
        lambda: (a > -2).all() if e.is_exact(a) else a.amin(dim),
        lambda: a.argmax(dim) if e.is_exact(a) else a.amax(),
        lambda: a.min(dim).indices if e.is_exact(a) else a.amax(),
    ]
    result = c.of(ops)()
    return e.made(result, a) if result.is_floating_point() and e.is_exact(result) else result


def norm(e: _Evaluation, a: Tensor, b: Tensor, c: Choices) -> Tensor:
    x = e.rows(a, e.sizes.hidden)
    weight, bias, eps = e.input["scale"], e.input["y"][0], c.of((1e-5, 1e-6))

    def rms(gemma: bool) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (normed * (1.0 + weight.float())).type_as(x) if gemma else weight * normed.to(x.dtype)

    ops: list[Callable[[], Tensor]] = [
        lambda: rms(gemma=False),
        lambda: rms(gemma=False),
        lambda: rms(gemma=True),
        lambda: F.rms_norm(x, (x.shape[-1],), weight, eps),
        lambda: F.layer_norm(x, (x.shape[-1],), weight, bias, eps),
        lambda: F.layer_norm(x, (x.shape[-1],)),
    ]
    return e.made(_small(c.of(ops)()), x, weight, bias, exact=False)


def linear(e: _Evaluation, a: Tensor, b: Tensor, c: Choices) -> Tensor:
    x = e.rows(a, e.sizes.hidden)
    ops: list[Callable[[], Tensor]] = [
        lambda: F.linear(x, e.input["up"]),
        lambda: F.linear(x, e.input["up"], e.input["bias"]),
        lambda: F.linear(x, e.input["square"]),
        lambda: x @ e.input["square"].t(),
        lambda: x @ e.input["square"],
        lambda: F.linear(e.rows(a, e.sizes.inner), e.input["down"]),
        lambda: F.linear(x, e.input["table"]),
        lambda: torch.addmm(e.input["bias"], x.reshape(-1, x.shape[-1]), e.input["up"].t()),
        lambda: x @ x.mT if x.dim() > 1 else x,
    ]
    return e.made(_small(c.of(ops)()), x, *(e.input[n] for n in ("up", "down", "square", "bias", "table")))


def gated(e: _Evaluation, a: Tensor, b: Tensor, c: Choices) -> Tensor:
    x = e.rows(a, e.sizes.hidden)
    gate, up = F.linear(x, e.input["up"]), F.linear(x, e.input["up"], e.input["bias"])
    activation = c.of((F.silu, F.gelu, lambda t: F.gelu(t, approximate="tanh"), F.relu))
    hidden = _small(activation(_small(gate)) * _small(up))
    return e.made(_small(F.linear(e.made(hidden, x, exact=False), e.input["down"])), x, exact=False)


def attend(e: _Evaluation, a: Tensor, b: Tensor, c: Choices) -> Tensor:
    """A layer's attention over a static cache, as Hugging Face writes it."""
    s = e.sizes
    x = e.rows(a, s.hidden)
    x = x.reshape(-1, s.hidden)[:1].expand(s.batch, s.hidden) if x.numel() != s.batch * s.hidden else x
    x = x.reshape(s.batch, 1, s.hidden)

    def heads(weight: str) -> Tensor:
        out = e.made(_small(F.linear(x, e.input[weight])), x, e.input[weight])
        return out.view(s.batch, 1, -1, s.head_size).transpose(1, 2)

    q, k, v = heads("q_weight"), heads("k_weight"), heads("v_weight")
    if c.below(2):
        q, k = (e.made(_small(_rotated(t, e.input["cos"], e.input["sin"])), t) for t in (q, k))
    keys, values, slot = e.input["k_cache"], e.input["v_cache"], e.input["slot"]
    if c.below(4):
        position = slot if c.below(3) else (slot + 1) % s.length
        e.wrote(keys.index_copy_(2, position, k), k)
        e.wrote(values.index_copy_(2, position, v), v)
    else:
        position = slot
    causal = (torch.arange(s.length, device=x.device) <= position[:, None])[None, None].expand(s.batch, 1, 1, s.length)
    mask = c.of((causal, causal, e.input["mask"], None, causal & e.input["mask"]))
    if mask is not None and mask is not e.input["mask"] and mask is not causal:
        mask = mask | (torch.arange(s.length, device=x.device) == 0)
    if mask is not None and c.below(4) == 0:
        mask = torch.where(mask, 0.0, torch.finfo(e.dtype).min).to(e.dtype)
    grouped = s.heads == s.groups or c.below(2)
    scale = c.of((None, 0.25))
    if not grouped or s.heads != s.groups:
        repeated = [_repeated(t, s) for t in (keys, values)]
    else:
        repeated = [keys, values]
    if c.below(2) or mask is None or mask.dtype == torch.bool:
        by_op = s.heads != s.groups and c.below(2)
        k_all, v_all = (keys, values) if by_op else repeated
        out = F.scaled_dot_product_attention(q, k_all, v_all, attn_mask=mask, scale=scale, enable_gqa=bool(by_op))
    else:
        scores = torch.matmul(q, repeated[0].transpose(2, 3)) * (scale or 0.5) + mask
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        out = torch.matmul(F.dropout(weights, 0.0), repeated[1])
    out = e.made(_small(out), q, keys, values, exact=False).transpose(1, 2).reshape(s.batch, 1, -1)
    if c.below(2):
        e.input["counter"].add_(1)
    return e.made(_small(F.linear(out, e.input["o_weight"])), out)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None, None] + turned * sin[:, None, None]


def _repeated(t: Tensor, s: Sizes) -> Tensor:
    if s.heads == s.groups:
        return t
    n = s.heads // s.groups
    return t[:, :, None].expand(s.batch, s.groups, n, s.length, s.head_size).reshape(s.batch, s.heads, *t.shape[2:])


def _is_writable(e: _Evaluation, a: Tensor) -> bool:
    is_injective = all(stride for stride, n in zip(a.stride(), a.shape, strict=True) if n > 1)
    return is_injective and a.untyped_storage()._cdata not in e.fixed


def write(e: _Evaluation, a: Tensor, b: Tensor, c: Choices) -> Tensor:
    """In place, through whatever view a is. Inputs are among the targets."""
    if not _is_writable(e, a):
        a = e.input[c.of(("x", "y", "wide", "k_cache"))]
    if a.dtype == torch.bool:
        return a.logical_not_()
    source = b if b.dim() <= a.dim() and _broadcastable(a, b) else b.sum() if e.is_exact(b) else e.input["scale"][0]
    if torch.broadcast_shapes(source.shape, a.shape) != a.shape:
        source = e.input["scale"][0]
    if source.untyped_storage()._cdata == a.untyped_storage()._cdata:
        source = e.made(source.clone(), source)
    if not a.is_floating_point() and (source.is_floating_point() or source.dtype == torch.bool):
        source = e.input["ids"].sum() % 5  # nothing inexact becomes a whole number
    source = e.made(_small(e.numeric(source)), source)
    k = c.below(5)
    ops: list[Callable[[], Tensor]] = [
        lambda: a.copy_(source),
        lambda: a.add_(source).clamp_(-LIMIT, LIMIT),
        lambda: a.mul_(source).clamp_(-LIMIT, LIMIT),
        lambda: a.sub_(source, alpha=2).clamp_(-LIMIT, LIMIT),
        lambda: a.fill_(k),
        lambda: a.zero_(),
        lambda: a.mul_(-1),
        lambda: a.masked_fill_(e.input["ids"].sum() > k, 1),
    ]
    if a.dim():
        where = e.input["slot"] % a.shape[0]
        row = torch.full_like(a[:1], k)
        ops += [lambda: a.index_copy_(0, where, row), lambda: a.__setitem__(0, k) or a]  # type: ignore[func-returns-value]
        ops += [lambda: a.index_put_((where,), row), lambda: a[..., k % a.shape[-1] :].fill_(k)]
    c.of(ops)()
    return e.wrote(a, source)


def unsupported(e: _Evaluation, a: Tensor, b: Tensor, c: Choices) -> Tensor:
    """What torch_mpk leaves to PyTorch: the graph comes apart here."""
    a = e.floating(a)
    ops: list[Callable[[], Tensor]] = [
        lambda: e.made(_small(a.cumsum(-1) if a.dim() else a.clone()), a),
        lambda: e.made(a.sort(-1).values if a.dim() else a.clone(), a),
        lambda: e.made(torch.special.bessel_j0(a.float()).to(a.dtype), a, exact=False),
        lambda: e.made(a.topk(1, -1).values if a.dim() else a.clone(), a),
    ]
    return c.of(ops)()


KINDS = [
    pointwise, pointwise, pointwise, discrete, smooth, cast, view, view, view, index, index, made_from_nothing, reduce,
    reduce, norm, norm, linear, linear, linear, gated, attend, attend, write, write, write, unsupported,
]  # fmt: skip
