"""Scalar expressions: what a virtual tensor's element is, as a function of its index.

Expressions are interned, so equal ones are the same object: ``is`` compares them and a program built from them has no
common subexpressions. int64 sums and products by constants are kept as one flat ``affine`` expression, so that
addresses become strides and index arithmetic made by composed views cancels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from torch_mpk.errors import UnsupportedError

INT64 = torch.int64
BOOL = torch.bool
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (BOOL, torch.uint8, torch.int8, torch.int16, torch.int32, INT64, *FLOATS)

_SIZE_LIMIT = 2**40  # more elements than any tensor has: the assumed bound of a size that is known only at run time


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Expr:
    """One scalar operation; ``attr`` holds a constant's value, a dimension, a scalar's number or what a load reads."""

    __slots__ = ("__weakref__", "args", "attr", "dtype", "key", "op")
    _interned: WeakValueDictionary[tuple, Expr] = WeakValueDictionary()
    _keys = itertools.count()

    op: str
    dtype: torch.dtype
    args: tuple[Expr, ...]
    attr: Any  # by op
    key: int  # creation order: gives sums a canonical order

    @classmethod
    def make(cls, op: str, dtype: torch.dtype, args: Sequence[Expr] = (), attr: object = None) -> Expr:
        args = tuple(args)
        key = (op, dtype, args, repr(attr) if isinstance(attr, float) else attr)
        found = cls._interned.get(key)
        if found is None:
            found = cls()
            found.op, found.dtype, found.args, found.attr, found.key = op, dtype, args, attr, next(cls._keys)
            cls._interned[key] = found
        return found

    def __repr__(self) -> str:
        inner = ", ".join(map(repr, self.args))
        return f"{self.op}:{dtype_name(self.dtype)}({inner}{'' if self.attr is None else f' #{self.attr}'})"


def const(value: bool | float, dtype: torch.dtype) -> Expr:
    """A constant, rounded or wrapped to dtype."""
    if dtype in FLOATS:
        value = float(value)
        if dtype != torch.float64:
            value = torch.tensor(value, dtype=torch.float64).to(dtype).item()
    elif dtype == BOOL:
        value = bool(value)
    else:
        info = torch.iinfo(dtype)
        value = (int(value) - info.min) % (info.max - info.min + 1) + info.min
    return Expr.make("const", dtype, (), value)


def index(dim: int, size: int) -> Expr:
    """The point's coordinate along a domain dimension."""
    return const(0, INT64) if size == 1 else Expr.make("index", INT64, (), (dim, size))


def size(number: int) -> Expr:
    """The call's scalar argument number ``number``."""
    return Expr.make("size", INT64, (), number)


def as_index(value: int | Expr) -> Expr:
    return const(value, INT64) if isinstance(value, int) else value


def is_const(e: Expr, value: object = None) -> bool:
    return e.op == "const" and (value is None or e.attr == value)


# ---- int64 sums ----


def terms(e: Expr) -> tuple[dict[Expr, int], int]:
    """e as sum(coefficient * atom) + constant."""
    if e.op == "const":
        return {}, int(e.attr)
    if e.op == "affine":
        coefficients, constant = e.attr
        return dict(zip(e.args, coefficients, strict=False)), constant
    return {e: 1}, 0


def _join_quotients(coefficients: dict[Expr, int]) -> tuple[dict[Expr, int], int]:
    """c * n * (x // n) + c * (x % n) = c * x. Returns the sum's terms and constant."""
    total = 0
    for atom, c in list(coefficients.items()):
        if atom.op != "remainder" or atom not in coefficients or not is_const(atom.args[1]):
            continue
        x, n = atom.args[0], int(atom.args[1].attr)
        quotient = floordiv(x, n)
        wanted = {t: q * c * n for t, q in terms(quotient)[0].items()}
        if terms(quotient)[1] or not wanted or any(coefficients.get(t) != q for t, q in wanted.items()):
            continue
        for t in wanted:
            del coefficients[t]
        del coefficients[atom]
        whole, constant = terms(x)
        total += constant * c
        for t, q in whole.items():
            coefficients[t] = coefficients.get(t, 0) + q * c
    return {a: c for a, c in coefficients.items() if c}, total


def from_terms(coefficients: dict[Expr, int], constant: int) -> Expr:
    coefficients = {a: c for a, c in coefficients.items() if c}
    if any(a.op == "remainder" for a in coefficients):
        coefficients, joined = _join_quotients(coefficients)
        constant += joined
    if not coefficients:
        return const(constant, INT64)
    if constant == 0 and len(coefficients) == 1:
        ((atom, c),) = coefficients.items()
        if c == 1:
            return atom
    atoms = sorted(coefficients, key=lambda a: a.key)
    return Expr.make("affine", INT64, atoms, (tuple(coefficients[a] for a in atoms), constant))


def iadd(a: int | Expr, b: int | Expr, scale: int = 1) -> Expr:
    """a + scale * b in int64."""
    coefficients, constant = terms(as_index(a))
    other, other_constant = terms(as_index(b))
    for atom, c in other.items():
        coefficients[atom] = coefficients.get(atom, 0) + c * scale
    return from_terms(coefficients, constant + scale * other_constant)


def imul(a: int | Expr, b: int | Expr) -> Expr:
    a, b = as_index(a), as_index(b)
    (ca, ka), (cb, kb) = terms(a), terms(b)
    out = const(ka * kb, INT64)
    for atom, c in ca.items():
        out = iadd(out, from_terms({atom: c * kb}, 0))
    for atom, c in cb.items():
        out = iadd(out, from_terms({atom: c * ka}, 0))
    for x, c in ca.items():
        for y, d in cb.items():
            product = Expr.make("mul", INT64, sorted((x, y), key=lambda t: t.key))
            out = iadd(out, from_terms({product: c * d}, 0))
    return out


def bounds(e: Expr) -> tuple[float, float]:
    """An interval that holds every value of an int64 expression."""
    if e.op == "const":
        return e.attr, e.attr
    if e.op == "index":
        return 0, e.attr[1] - 1
    if e.op == "size":
        return 1, _SIZE_LIMIT
    if e.op == "affine":
        coefficients, constant = e.attr
        low = high = constant
        for atom, c in zip(e.args, coefficients, strict=False):
            lowest, highest = bounds(atom)
            low, high = low + min(c * lowest, c * highest), high + max(c * lowest, c * highest)
        return low, high
    if e.op == "remainder" and is_const(e.args[1]) and e.args[1].attr > 0:
        low, high = bounds(e.args[0])
        return 0, min(e.args[1].attr - 1, high) if low >= 0 else e.args[1].attr - 1
    if e.op == "floordiv" and is_const(e.args[1]) and e.args[1].attr > 0:
        low, high = bounds(e.args[0])
        n = e.args[1].attr
        return low if math.isinf(low) else low // n, high if math.isinf(high) else high // n
    if e.op == "where":
        (l1, h1), (l2, h2) = bounds(e.args[1]), bounds(e.args[2])
        return min(l1, l2), max(h1, h2)
    if e.op == "cast" and e.args[0].dtype == BOOL:
        return 0, 1
    return -math.inf, math.inf


def _split(x: Expr, n: int) -> tuple[Expr, Expr]:
    """q, r with x = n * q + r, where r holds the terms that n does not divide."""
    coefficients, constant = terms(x)
    q = {a: c // n for a, c in coefficients.items() if c % n == 0}
    r = {a: c for a, c in coefficients.items() if c % n}
    return from_terms(q, constant // n), from_terms(r, constant % n)


def floordiv(x: int | Expr, n: int) -> Expr:
    x = as_index(x)
    if n == 1:
        return x
    if n <= 0:
        return Expr.make("floordiv", INT64, (x, const(n, INT64)))
    q, r = _split(x, n)
    low, high = bounds(r)
    if low >= 0 and high < n:
        return q
    if r.op == "floordiv" and is_const(r.args[1]) and r.args[1].attr > 0:
        return iadd(q, floordiv(r.args[0], r.args[1].attr * n))
    return iadd(q, Expr.make("floordiv", INT64, (r, const(n, INT64))))


def remainder(x: int | Expr, n: int) -> Expr:
    x = as_index(x)
    if n == 1:
        return const(0, INT64)
    if n > 0:
        _, x = _split(x, n)
        low, high = bounds(x)
        if low >= 0 and high < n:
            return x
    return Expr.make("remainder", INT64, (x, const(n, INT64)))


# ---- everything else ----

_COMPARE_BOUNDS = {  # of a - b: (certainly true, certainly false)
    "lt": (lambda low, high: high < 0, lambda low, high: low >= 0),
    "le": (lambda low, high: high <= 0, lambda low, high: low > 0),
    "gt": (lambda low, high: low > 0, lambda low, high: high <= 0),
    "ge": (lambda low, high: low >= 0, lambda low, high: high < 0),
    "eq": (lambda low, high: low == high == 0, lambda low, high: high < 0 or low > 0),
    "ne": (lambda low, high: high < 0 or low > 0, lambda low, high: low == high == 0),
}


def compare(op: str, a: Expr, b: Expr) -> Expr:
    """a op b for operands of one dtype."""
    if a.dtype == INT64 and b.dtype == INT64:
        low, high = bounds(iadd(a, b, -1))
        true, false = _COMPARE_BOUNDS[op]
        if true(low, high):
            return const(True, BOOL)
        if false(low, high):
            return const(False, BOOL)
    return Expr.make(op, BOOL, (a, b))


def logical_not(a: Expr) -> Expr:
    return const(not a.attr, BOOL) if is_const(a) else Expr.make("logical_not", BOOL, (a,))


def both(a: Expr | None, b: Expr | None) -> Expr | None:
    """a and b, where None is true."""
    if a is None or is_const(a, True) or a is b:
        return None if b is not None and is_const(b, True) else b
    if b is None or is_const(b, True):
        return a
    if is_const(a, False) or is_const(b, False):
        return const(False, BOOL)
    return Expr.make("logical_and", BOOL, (a, b))


def in_range(i: Expr, extent: int | Expr) -> Expr | None:
    """0 <= i < extent; None where it always holds."""
    return both(compare("ge", i, const(0, INT64)), compare("lt", i, as_index(extent)))


def where(condition: Expr, a: Expr, b: Expr) -> Expr:
    if is_const(condition):
        return a if condition.attr else b
    return a if a is b else Expr.make("where", a.dtype, (condition, a, b))


def cast(e: Expr, dtype: torch.dtype) -> Expr:
    if e.dtype == dtype:
        return e
    if is_const(e) and not (e.dtype in FLOATS and dtype not in FLOATS and not math.isfinite(e.attr)):
        return const(e.attr, dtype)
    return Expr.make("cast", dtype, (e,))


def apply(op: str, dtype: torch.dtype, *args: Expr) -> Expr:
    """An operation of pointwise_ops.h whose result has ``dtype``, simplified where that changes no bit."""
    if op in _COMPARE_BOUNDS:
        return compare(op, *args)
    if dtype == INT64 and all(a.dtype == INT64 for a in args):
        if op == "add":
            return iadd(args[0], args[1])
        if op == "sub":
            return iadd(args[0], args[1], -1)
        if op == "neg":
            return iadd(0, args[0], -1)
        if op == "mul":
            return imul(args[0], args[1])
        if op in ("floordiv", "remainder") and is_const(args[1]):
            return (floordiv if op == "floordiv" else remainder)(args[0], args[1].attr)
    if op == "mul" and dtype in FLOATS:
        for x, y in (args, args[::-1]):
            if is_const(y, 1.0) and x.dtype == dtype:
                return x
    if op == "logical_and":
        return both(*args) or const(True, BOOL)
    if op == "logical_not" and args[0].dtype == BOOL:
        return logical_not(args[0])
    return Expr.make(op, dtype, args)


def load(source: object, dtype: torch.dtype, address: Expr, predicate: Expr | None) -> Expr:
    if predicate is not None and is_const(predicate, False):
        return const(0, dtype)
    return Expr.make("load", dtype, (address,) if predicate is None else (address, predicate), source)


def unravel(linear: Expr, shape: Sequence[int | Expr]) -> list[Expr]:
    """The index of element ``linear`` of a contiguous tensor."""
    out: list[Expr] = []
    for extent in reversed(shape[1:]):
        if not isinstance(extent, int):
            raise UnsupportedError("a reshape of a tensor whose size is known only at run time")
        out.append(remainder(linear, extent))
        linear = floordiv(linear, extent)
    return [linear, *reversed(out)] if shape else []


def ravel(idx: Sequence[Expr], shape: Sequence[int | Expr]) -> Expr:
    linear = const(0, INT64)
    for i, extent in zip(idx, shape, strict=False):
        linear = iadd(imul(linear, extent), i)
    return linear
