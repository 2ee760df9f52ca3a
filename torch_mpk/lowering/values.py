"""What a value of the captured graph is while it is lowered: a strided view of a buffer, or a function of an index.

Buffers are written in place, so a read names the version of the buffer it means: the number of writes issued before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import torch

from torch_mpk.errors import UnsupportedError
from torch_mpk.lowering import expr as E
from torch_mpk.lowering.expr import Expr

Size = int | Expr  # an Expr where the size is known only at run time
Index = Sequence[Expr]
Inner = Callable[[Index, Expr | None], Expr]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the strides address every element once and leave no gap."""
    step = 1
    for stride, extent in sorted((s, n) for s, n in zip(strides, shape, strict=False) if n != 1):
        if stride != step:
            return False
        step *= extent
    return True


def is_injective(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two indices share an element, as far as sorted strides tell."""
    reach = 0
    for stride, n in sorted((s, n) for s, n in zip(strides, shape, strict=False) if n != 1):
        if stride <= reach:
            return False
        reach += stride * (n - 1)
    return True


def is_static(shape: Iterable[Size]) -> TypeGuard[tuple[int, ...]]:
    return all(isinstance(n, int) for n in shape)


@dataclass(eq=False)
class Buffer:
    """Memory of the task graph. ``issued`` counts the program's writes so far, ``committed`` those already emitted."""

    name: str
    kind: str  # "input", "output", "workspace"
    index: int
    dtype: torch.dtype
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    issued: int = 0
    committed: int = 0
    pending: list = field(default_factory=list)
    is_loaded: bool = False  # whether a virtual tensor has ever read it, or stood for it
    falling: int | None = None  # the version of which each row is in falling order, NaN first

    @property
    def extent(self) -> int | None:
        """Elements from the first to one past the last; None when known only at run time."""
        if not is_static(self.shape) or not is_static(self.strides):
            return None
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=False))


@dataclass(frozen=True)
class Ref:
    """What a load reads: a buffer as it was after ``version`` writes."""

    buffer: Buffer
    version: int


class Value:
    dtype: torch.dtype
    shape: tuple[Size, ...]

    @property
    def has_falling_rows(self) -> bool:
        """Whether each row is known to be in falling order, NaN first."""
        return False

    @property
    def numel(self) -> int:
        if not is_static(self.shape):
            raise UnsupportedError(
                f"a tensor of shape {_shape_text(self.shape)}, which is known only at run time, needs memory"
            )
        return math.prod(self.shape)


def _shape_text(shape: Sequence[Size]) -> str:
    return "[" + ", ".join(str(n) if isinstance(n, int) else "?" for n in shape) + "]"


class View(Value):
    """A strided view of a buffer, always of its newest contents: what PyTorch calls an alias."""

    def __init__(self, buffer: Buffer, shape: Sequence[Size], strides: Sequence[Size], offset: Size = 0) -> None:
        self.buffer, self.dtype = buffer, buffer.dtype
        self.shape, self.strides, self.offset = tuple(shape), tuple(strides), offset

    @property
    def has_falling_rows(self) -> bool:
        whole = self.buffer.shape, self.buffer.strides, 0
        return self.buffer.falling == self.buffer.issued and (self.shape, self.strides, self.offset) == whole

    def address(self, idx: Index) -> Expr:
        address = E.as_index(self.offset)
        for i, stride in zip(idx, self.strides, strict=False):
            address = E.iadd(address, E.imul(i, stride))
        return address

    def mapped(self, shape: Sequence[Size], index_map: Callable[[Index], Index]) -> View | None:
        """This view through an index map, where that is again a strided view."""
        if not is_static(shape):
            return None
        address = self.address(index_map([E.index(d, n) for d, n in enumerate(shape)]))
        return strided(self.buffer, shape, address)


def strided(buffer: Buffer, shape: Sequence[int], address: Expr) -> View | None:
    """The view whose element ``index`` is at ``address``, where address is a sum of strides."""
    coefficients, offset = E.terms(address)
    strides = [0] * len(shape)
    for atom, c in coefficients.items():
        if atom.op != "index" or c < 0:
            return None
        strides[atom.attr[0]] = c
    natural = contiguous_strides(shape)
    return View(buffer, shape, [natural[d] if n == 1 else strides[d] for d, n in enumerate(shape)], offset)


class Lazy(Value):
    """A virtual tensor: ``inner`` gives the expression of one element; loads in it happen where the predicate holds.

    It reads through ``sources``. Once realised it stands for ``view`` at ``version``: expressions read that version,
    while the node's own value is the view with whatever is written to it later. ``kept`` is a copy of the version, made
    when a write was about to replace it.
    """

    epoch = 0  # counts realisations: memoised expressions do not outlive one, since they would bypass the new buffer

    def __init__(
        self, dtype: torch.dtype, shape: Sequence[Size], sources: Sequence[Lazy], inner: Inner, cost: int = 1
    ) -> None:
        self.dtype, self.shape, self.sources, self.inner = dtype, tuple(shape), tuple(sources), inner
        self.cost: int = cost + sum(s.cost for s in self.sources)  # instructions of a program that computes it, at most
        self.label = ""  # of the node whose value it is
        self.eager_strides: tuple[int, ...] | None = None
        self.view: View | None = None
        self.version = 0
        self.kept: View | None = None
        self._memo: dict[tuple, Expr] = {}
        self._memo_epoch = -1

    def at(self, idx: Index, predicate: Expr | None) -> Expr:
        idx = tuple(
            E.const(0, E.INT64) if n == 1 and isinstance(n, int) else i for i, n in zip(idx, self.shape, strict=False)
        )
        if self.kept is not None:
            return E.load(Ref(self.kept.buffer, 0), self.dtype, self.kept.address(idx), predicate)
        if self.view is not None:
            return E.load(Ref(self.view.buffer, self.version), self.dtype, self.view.address(idx), predicate)
        if self._memo_epoch != Lazy.epoch:
            self._memo_epoch = Lazy.epoch
            self._memo.clear()
        key = (*idx, predicate)
        if key not in self._memo:
            self._memo[key] = self.inner(idx, predicate)
        return self._memo[key]

    def realised_as(self, view: View) -> None:
        self.view, self.version = view, view.buffer.issued
        view.buffer.is_loaded = True
        self.cost = 1
        Lazy.epoch += 1

    def kept_as(self, view: View) -> None:
        self.kept = view
        view.buffer.is_loaded = True
        Lazy.epoch += 1

    def refs(self) -> set[Ref]:
        """What evaluating it now would load."""
        found: set[Ref] = set()
        for lazy in self._reached():
            if lazy.kept is not None:
                found.add(Ref(lazy.kept.buffer, 0))
            elif lazy.view is not None:
                found.add(Ref(lazy.view.buffer, lazy.version))
            elif isinstance(lazy, Load):
                found.add(lazy.ref)
        return found

    def labels(self) -> list[str]:
        """Of the nodes that evaluating it now would compute, in the order in which they need each other."""
        return [lazy.label for lazy in self._reached() if lazy.label and not lazy._has_memory]

    @property
    def _has_memory(self) -> bool:
        return self.kept is not None or self.view is not None

    def _reached(self) -> list[Lazy]:
        """Itself and what it reads through, down to what has memory; sources come first."""
        seen: set[int] = set()
        found: list[Lazy] = []

        def visit(lazy: Lazy) -> None:
            if id(lazy) in seen:
                return
            seen.add(id(lazy))
            for source in () if lazy._has_memory else lazy.sources:
                visit(source)
            found.append(lazy)

        visit(self)
        return found


class Load(Lazy):
    """The contents of a view after a given number of writes to its buffer: by default all that are issued."""

    def __init__(self, view: View, version: int | None = None) -> None:
        self.ref = Ref(view.buffer, view.buffer.issued if version is None else version)
        view.buffer.is_loaded = True
        super().__init__(view.dtype, view.shape, (), lambda idx, p: E.load(self.ref, view.dtype, view.address(idx), p))


class Mapped(Lazy):
    """A virtual tensor through an index map: what a view operation makes of a virtual tensor."""

    def __init__(self, base: Lazy, shape: Sequence[Size], index_map: Callable[[Index], Index]) -> None:
        super().__init__(base.dtype, shape, (base,), lambda idx, p: base.at(index_map(idx), p), cost=0)
        self.base, self.index_map = base, index_map

    def repeats_innermost(self) -> bool:
        """Whether every element along the last dimension is the same one."""
        extent = self.shape[-1] if self.shape else 1
        if extent == 1 or not isinstance(extent, int):
            return False
        last = E.index(0, extent)
        idx = [*(E.const(0, E.INT64) for _ in self.shape[1:]), last]
        return all(last is not i and last not in E.terms(i)[0] for i in self.index_map(idx))

    @property
    def root(self) -> Lazy:
        base: Lazy = self.base
        while isinstance(base, Mapped):
            base = base.base
        return base
