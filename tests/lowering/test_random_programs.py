"""Random programs of views, pointwise operations, indexing, reductions and in-place writes, against eager.

Values are small whole numbers, so every operation is exact and results are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Tensors = list[torch.Tensor]


def small(t: torch.Tensor) -> torch.Tensor:
    return t.clamp(-9, 9)


def writable(t: torch.Tensor) -> bool:
    return all(stride for stride, n in zip(t.stride(), t.shape, strict=True) if n > 1)


def broadcastable(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(m in (n, 1) or n == 1 for m, n in zip(a.shape[::-1], b.shape[::-1], strict=False))


def fitted(b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Something that broadcasts to a's shape and shares no memory with a: from b where that works."""
    fits = b.dim() <= a.dim() and all(m in (n, 1) for m, n in zip(b.shape[::-1], a.shape[::-1], strict=False))
    source = b if fits else b.sum()
    return source.clone() if source.untyped_storage()._cdata == a.untyped_storage()._cdata else source


def pointwise(a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    b = b if broadcastable(a, b) else a
    ops: list[Callable[[], torch.Tensor]] = [
        lambda: small(a + b),
        lambda: small(a * b - 1),
        lambda: torch.where(a > b, a, b * 0 + 2),
        lambda: torch.maximum(a, b),
        lambda: (a <= b).to(a.dtype) * 3,
        lambda: -a,
    ]
    return ops[k % len(ops)]()


def view(a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    dim = k % max(a.dim(), 1)
    if not a.dim():
        return a.expand(3)
    n = a.shape[dim]
    ops: list[Callable[[], torch.Tensor]] = [
        lambda: a.transpose(0, dim),
        lambda: a.reshape(-1),
        lambda: a.reshape(n, -1),
        lambda: a.narrow(dim, k % n, max(1, (n - k % n) // 2)),
        lambda: a.select(dim, k % n - n),
        lambda: a.unsqueeze(dim),
        lambda: a[None].expand(2, *a.shape),
        lambda: a.flip(dim),
        lambda: a.roll(k, dim),
        lambda: a.squeeze(),
        lambda: a[..., :: 1 + k % 2],
        lambda: a.permute(*reversed(range(a.dim()))),
        lambda: a.contiguous(),
        lambda: a.clone(),
    ]
    return ops[k % len(ops)]()


def index(a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    if not a.dim():
        return a
    dim = k % a.dim()
    n = a.shape[dim]
    where = b.reshape(-1)[:3].to(torch.int64) % n
    ops: list[Callable[[], torch.Tensor]] = [
        lambda: torch.cat([a, a.flip(dim)], dim),
        lambda: torch.nn.functional.pad(a, (1, k % 2), value=4.0),
        lambda: a.index_select(dim, where),
        lambda: a[where % a.shape[0] - a.shape[0]],
        lambda: torch.stack([a, a + 1], dim),
        lambda: torch.nn.functional.embedding(where, a.reshape(n, -1)),
    ]
    return ops[k % len(ops)]()


def reduce(a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    if not a.dim():
        return a
    dim = k % a.dim()
    ops: list[Callable[[], torch.Tensor]] = [
        lambda: small(a.sum(dim)),
        lambda: a.amax(dim, keepdim=True),
        lambda: small(a.sum()),
        lambda: a.amin(),
        lambda: (a > 0).any(dim).to(a.dtype),
        lambda: a.argmax(dim).to(a.dtype),
    ]
    return ops[k % len(ops)]()


def write(a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    if not writable(a):
        return a
    b = fitted(b, a)
    if a.dim() and k % 6 == 5:
        where = b.reshape(-1)[:1].to(torch.int64) % a.shape[0]
        a.index_copy_(0, where, torch.full_like(a[:1], 5))
        return a
    ops: list[Callable[[], torch.Tensor]] = [
        lambda: a.copy_(b),
        lambda: a.add_(b).clamp_(-9, 9),
        lambda: a.fill_(k % 5),
        lambda: a.masked_fill_(b > 0, 1.0),
        lambda: a.mul_(-1),
    ]
    return ops[k % 5]()


KINDS = [pointwise, pointwise, view, view, index, reduce, write, write]
STEP = st.tuples(st.integers(0, len(KINDS) - 1), st.integers(0, 15), st.integers(0, 15), st.integers(0, 40))


def run_recipe(recipe: list[tuple[int, int, int, int]], *inputs: torch.Tensor) -> Tensors:
    values = list(inputs)
    for kind, i, j, k in recipe:
        a, b = values[-1 - i % len(values)], values[j % len(values)]
        result = KINDS[kind](a, b, k)
        if 0 < result.numel() <= 400 and result.dim() <= 4:
            values.append(result)
    return values[len(inputs) :]


@settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEP, min_size=1, max_size=9))
def test_random_programs_are_bitwise_eager(recipe: list[tuple[int, int, int, int]]) -> None:
    torch.manual_seed(1)
    inputs = [torch.randint(-3, 4, shape).float() for shape in ((2, 3, 4), (3, 4), (4,))]
    check(lambda *args: run_recipe(recipe, *args), *inputs)
