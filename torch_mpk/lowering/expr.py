"""Scalar expressions: what a virtual tensor's element is, as a function of its index.

Expressions are interned, so equal ones are the same object: ``is`` compares them and a program built from them has no
common subexpressions. int64 sums and products by constants are kept as one flat ``affine`` expression, so that
addresses become strides and index arithmetic made by composed views cancels.

Integers wrap. Sums and products stay equal modulo 2**64 however they are rearranged, so those of values are rearranged
like those of addresses. Quotients, remainders and comparisons do not: they are simplified only where ``bounds`` prove
that no sum in them wraps. Coordinates have bounds, and so has what is made of them; a value that is loaded has those of
its dtype alone.
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
# Quantised weights have these, with which programs compute nothing.
STORED = (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)

Interval = tuple[int, int]  # the least and the largest value, both included

_WORDS = 2**64  # how many values an int64 has
_SIZE_LIMIT = 2**40  # more elements than any tensor has: the bound of a dimension that is known only at run time


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Expr:
    """One scalar operation; ``attr`` holds a constant's value, a dimension, a scalar's number or what a load reads."""

    __slots__ = ("__weakref__", "args", "attr", "dtype", "interval", "key", "op")
    _interned: WeakValueDictionary[tuple, Expr] = WeakValueDictionary()
    _keys = itertools.count()

    op: str
    dtype: torch.dtype
    args: tuple[Expr, ...]
    attr: Any  # by op
    key: int  # creation order: gives sums a canonical order
    interval: Interval | None  # its bounds, once somebody asked for them

    @classmethod
    def make(cls, op: str, dtype: torch.dtype, args: Sequence[Expr] = (), attr: object = None) -> Expr:
        args = tuple(args)
        key = (op, dtype, args, repr(attr) if isinstance(attr, float) else attr)
        found = cls._interned.get(key)
        if found is None:
            found = cls()
            found.op, found.dtype, found.args, found.attr, found.key = op, dtype, args, attr, next(cls._keys)
            found.interval = None
            cls._interned[key] = found
        return found

    def __repr__(self) -> str:
        inner = ", ".join(map(repr, self.args))
        return f"{self.op}:{dtype_name(self.dtype)}({inner}{'' if self.attr is None else f' #{self.attr}'})"


def const(value: bool | float, dtype: torch.dtype) -> Expr:
    """A constant, rounded or wrapped to dtype. Like eager's, an int64 is rounded once, not to a double before."""
    if dtype in FLOATS:
        is_word = isinstance(value, int) and _wrapped(value) == value
        number = torch.tensor(value, dtype=INT64) if is_word else torch.tensor(float(value), dtype=torch.float64)
        value = number.to(dtype).item()
    elif dtype == BOOL:
        value = bool(value)
    else:
        low, high = dtype_bounds(dtype)
        value = (int(value) - low) % (high - low + 1) + low
    return Expr.make("const", dtype, (), value)


def index(dim: int, size: int) -> Expr:
    """The point's coordinate along a domain dimension."""
    return const(0, INT64) if size == 1 else Expr.make("index", INT64, (), (dim, size))


def size(number: int, within: Interval) -> Expr:
    """The call's scalar argument number ``number``, known to lie ``within`` an interval."""
    return Expr.make("size", INT64, (), (number, within))


def scalar_bounds(low: int | None, high: int | None, is_dimension: bool) -> Interval:
    """Of a call's scalar, by what tracing knows of it."""
    least, largest = dtype_bounds(INT64)
    largest = _SIZE_LIMIT if is_dimension else largest
    return least if low is None else low, largest if high is None else min(high, largest)


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


def _wrapped(value: int) -> int:
    """The int64 that equals value modulo 2**64."""
    return (value + _WORDS // 2) % _WORDS - _WORDS // 2


def _join_quotients(coefficients: dict[Expr, int]) -> tuple[dict[Expr, int], int]:
    """c * n * (x // n) + c * (x % n) = c * x. Returns the sum's terms and constant."""
    total = 0
    for atom, c in list(coefficients.items()):
        if atom.op != "remainder" or atom not in coefficients or not is_const(atom.args[1]):
            continue
        x, n = atom.args[0], int(atom.args[1].attr)
        quotient = floordiv(x, n)
        wanted = {t: _wrapped(q * c * n) for t, q in terms(quotient)[0].items()}
        if terms(quotient)[1] or not wanted or any(coefficients.get(t) != q for t, q in wanted.items()):
            continue
        for t in wanted:
            del coefficients[t]
        del coefficients[atom]
        whole, constant = terms(x)
        total += constant * c
        for t, q in whole.items():
            coefficients[t] = coefficients.get(t, 0) + q * c
    return {a: wrapped for a, c in coefficients.items() if (wrapped := _wrapped(c))}, total


def from_terms(coefficients: dict[Expr, int], constant: int) -> Expr:
    coefficients = {a: wrapped for a, c in coefficients.items() if (wrapped := _wrapped(c))}
    if any(a.op == "remainder" for a in coefficients):
        coefficients, joined = _join_quotients(coefficients)
        constant += joined
    constant = _wrapped(constant)
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


# ---- bounds ----


def dtype_bounds(dtype: torch.dtype) -> Interval:
    """Of an integer or bool dtype."""
    if dtype == BOOL:
        return 0, 1
    info = torch.iinfo(dtype)
    return info.min, info.max


def _is_within(inner: Interval, outer: Interval) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _sum_bounds(coefficients: dict[Expr, int], constant: int) -> Interval:
    """Of a sum of int64 expressions that does not wrap."""
    low = high = constant
    for atom, c in coefficients.items():
        ends = [c * end for end in bounds(atom)]
        low, high = low + min(ends), high + max(ends)
    return low, high


def is_exact(e: Expr) -> bool:
    """Whether an int64 expression is proven to be the sum of its terms, none of which wraps."""
    return e.op != "affine" or _is_within(_sum_bounds(*terms(e)), dtype_bounds(INT64))


def bounds(e: Expr) -> Interval:
    """An interval that holds every value of an expression of an integer dtype or bool."""
    if e.interval is None:
        known, possible = _known_bounds(e), dtype_bounds(e.dtype)
        e.interval = known if known is not None and _is_within(known, possible) else possible
    return e.interval


def _known_bounds(e: Expr) -> Interval | None:
    if e.op == "const":
        return int(e.attr), int(e.attr)
    if e.op == "index":
        return 0, e.attr[1] - 1
    if e.op == "size":
        return e.attr[1]
    if e.op == "affine":
        return _sum_bounds(*terms(e))
    if e.op == "where":
        (l1, h1), (l2, h2) = map(bounds, e.args[1:])
        return min(l1, l2), max(h1, h2)
    if e.op == "cast" and e.args[0].dtype not in FLOATS:
        return bounds(e.args[0])
    if e.op in ("floordiv", "remainder") and is_const(e.args[1]) and e.args[1].attr > 0:
        (low, high), n = bounds(e.args[0]), e.args[1].attr
        if e.op == "floordiv":
            return low // n, high // n
        return 0, min(n - 1, high) if low >= 0 else n - 1
    return None


# ---- quotients and remainders ----


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
    q, r = _split(x, n) if n > 0 and is_exact(x) else (const(0, INT64), x)
    if n <= 0 or not is_exact(r):
        return Expr.make("floordiv", INT64, (x, const(n, INT64)))
    low, high = bounds(r)
    if low >= 0 and high < n:
        return q
    if r.op == "floordiv" and is_const(r.args[1]) and 0 < r.args[1].attr < _WORDS // 2 // n:
        return iadd(q, floordiv(r.args[0], r.args[1].attr * n))
    return iadd(q, Expr.make("floordiv", INT64, (r, const(n, INT64))))


def remainder(x: int | Expr, n: int) -> Expr:
    x = as_index(x)
    if n == 1:
        return const(0, INT64)
    if n > 0 and (is_exact(x) or _WORDS % n == 0):  # wrapping changes no remainder of a power of two
        _, rest = _split(x, n)
        if is_exact(rest) or _WORDS % n == 0:
            x = rest
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


def _difference(a: Expr, b: Expr) -> Interval:
    """An interval that holds a - b, of which no bit is lost, for every value of two int64 expressions."""
    if a is b:
        return 0, 0
    if not (is_exact(a) and is_exact(b)):
        (l1, h1), (l2, h2) = bounds(a), bounds(b)
        return l1 - h2, h1 - l2
    coefficients, constant = terms(a)
    others, other_constant = terms(b)
    for atom, c in others.items():
        coefficients[atom] = coefficients.get(atom, 0) - c
    return _sum_bounds(coefficients, constant - other_constant)


def compare(op: str, a: Expr, b: Expr) -> Expr:
    """a op b for operands of one dtype."""
    if a.dtype == INT64 and b.dtype == INT64:
        low, high = _difference(a, b)
        true, false = _COMPARE_BOUNDS[op]
        if true(low, high):
            return const(True, BOOL)
        if false(low, high):
            return const(False, BOOL)
    return Expr.make(op, BOOL, (a, b))


def _extreme(op: str, a: Expr, b: Expr) -> Expr:
    """The larger or the smaller of two int64 expressions."""
    low, high = _difference(a, b)
    if low >= 0 or high <= 0:
        return a if (low >= 0) == (op == "maximum") else b
    return Expr.make(op, INT64, (a, b))


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


def _check_computed(dtype: torch.dtype) -> None:
    if dtype in STORED:
        raise UnsupportedError(f"dtype {dtype_name(dtype)} is taken as an operand of tasks, and not computed with")


def cast(e: Expr, dtype: torch.dtype) -> Expr:
    _check_computed(dtype)
    if e.dtype == dtype:
        return e
    if is_const(e) and (e.dtype not in FLOATS or dtype in (*FLOATS, BOOL) or _is_whole_part(e.attr, dtype)):
        return const(e.attr, dtype)
    return Expr.make("cast", dtype, (e,))


def _is_whole_part(value: float, dtype: torch.dtype) -> bool:
    """Whether an integer dtype has a float's whole part; else the processor says what the conversion gives."""
    low, high = dtype_bounds(dtype)
    return math.isfinite(value) and low <= int(value) <= high


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
        if op in ("maximum", "minimum"):
            return _extreme(op, *args)
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
    _check_computed(dtype)
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
