"""Random launches and random arguments, against Python's arithmetic and the signature as Python reads it."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_mpk import _C
from torch_mpk.errors import KernelSignatureError, TaskError
from torch_mpk.jit import kernel
from torch_mpk.signature import DTYPES, bind_dims

SIGNATURE = "x[M, K]: float32, out[1]!: int64"


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """The code of a function that stores an integer."""
    with pytest.MonkeyPatch.context() as context:
        context.setenv("TORCH_MPK_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))

        @kernel("void record(int64_t value, int64_t* out) {\n  *out = value;\n}", SIGNATURE, "record(M, out)")
        def record(x, out): ...

        return record.load((), 0)


def leaves():
    return st.one_of(st.sampled_from(["M", "K", "SIGN", "numel(x)"]), st.integers(0, 2**40).map(str))


def branches(children):
    binary = st.tuples(children, st.sampled_from(["+", "-", "*", "//", "%"]), children)
    calls = st.tuples(st.sampled_from(["cdiv", "min", "max"]), children, children)
    chosen = st.tuples(children, children, st.sampled_from(["==", "<", ">="]), children, children)
    return st.one_of(
        chosen.map(lambda t: f"({t[0]} if {t[1]} {t[2]} {t[3]} else {t[4]})"),
        binary.map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        calls.map(lambda t: f"{t[0]}({t[1]}, {t[2]})"),
        children.map(lambda t: f"(-{t})"),
    )


def positive(divisor):
    if divisor <= 0:
        raise ZeroDivisionError
    return divisor


class Int(int):
    """Python's integers with the core's rules: 64 bits, and divisors above 0."""

    def _checked(self):
        if not -(2**63) <= self < 2**63:
            raise OverflowError
        return Int(self)

    def __add__(self, other):
        return Int._checked(int(self) + int(other))

    def __sub__(self, other):
        return Int._checked(int(self) - int(other))

    def __mul__(self, other):
        return Int._checked(int(self) * int(other))

    def __neg__(self):
        return Int._checked(-int(self))

    def __floordiv__(self, other):
        return Int(int(self) // positive(int(other)))

    def __mod__(self, other):
        return Int(int(self) % positive(int(other)))


def evaluate(text, **names):
    """None where the launch must be refused."""
    wrapped = re.sub(r"\b(\d+)\b", r"Int(\1)", text)
    functions = {"cdiv": lambda a, b: Int(-(-int(a) // positive(int(b)))), "min": min, "max": max, "Int": Int}
    try:
        return int(eval(wrapped, functions | names))
    except (ZeroDivisionError, OverflowError):
        return None


@given(
    st.recursive(leaves(), branches, max_leaves=12), st.integers(0, 5), st.integers(1, 7), st.integers(-(2**62), 2**62)
)
def test_launch_expressions(record, text, rows, columns, sign):
    def recorded(x, out, *, SIGN: int): ...  # noqa: N803

    declaration = kernel("//\n", SIGNATURE, f"record({text}, out)")(recorded).declaration
    call = _C.JitKernel(declaration, lambda key, device: record, None)
    out = torch.full((1,), -77)
    names = {"M": Int(rows), "K": Int(columns), "SIGN": Int(sign), "numel": lambda x: x, "x": Int(rows * columns)}
    expected = evaluate(text, **names)
    if expected is None:
        with pytest.raises(KernelSignatureError, match="divides by|beyond 64 bits"):
            call(torch.zeros(rows, columns), out, SIGN=sign)
        expected = -77
    else:
        call(torch.zeros(rows, columns), out, SIGN=sign)
    assert out.item() == expected


@st.composite
def calls(draw):
    """Operands and tensors for them, of which about every sixth is drawn without a look at its operand."""
    sizes = {name: draw(st.integers(0, 3)) for name in "ABC"} | {"2": 2}
    sizes["..."] = draw(st.lists(st.integers(0, 3), max_size=2))
    common = draw(st.sampled_from(["float32", "bfloat16"]))
    drawn = []
    for _ in range(draw(st.integers(1, 3))):
        dims = draw(st.lists(st.sampled_from(["A", "B", "C", "2"]), max_size=2))
        leading = ["..."] * draw(st.booleans())
        strides = draw(st.booleans()) and not leading and dims
        dtype = draw(st.sampled_from(["", ": T", ": T=float32|bfloat16", ": float32", ": int64|float32"]))
        operand = f"[{', '.join(leading + dims)}{'; ' + ', '.join(['_'] * len(dims)) if strides else ''}]{dtype}"
        shape = [*(sizes["..."] if leading else []), *(sizes[dim] for dim in dims)]
        if draw(st.integers(0, 5)) == 0:
            shape = draw(st.lists(st.integers(0, 3), max_size=4))
        name = draw(st.sampled_from(["int64", "float64"])) if draw(st.integers(0, 9)) == 0 else common
        order = draw(st.permutations(range(len(shape)))) if draw(st.integers(0, 5)) == 0 else [*range(len(shape))]
        tensor = torch.zeros([shape[order.index(i)] for i in range(len(shape))], dtype=getattr(torch, name))
        drawn.append((operand, tensor.permute(order)))
    return drawn


@given(calls())
def test_arguments(record, given_):
    names = [f"x{i}" for i in range(len(given_))]
    signature = ", ".join(name + operand for name, (operand, _) in zip(names, given_))
    arguments = [tensor for _, tensor in given_]
    namespace: dict = {"__name__": __name__}
    exec(f"def f({', '.join(names)}, out): ...", namespace)
    declaration = kernel("//\n", f"{signature}, out[1]!: int64", "f(7, out)")(namespace["f"]).declaration
    call = _C.JitKernel(declaration, lambda key, device: record, None)
    assert fits(declaration, arguments) == accepts(call, arguments), signature


def accepts(call, arguments):
    out = torch.zeros(1, dtype=torch.int64)
    try:
        call(*arguments, out)
    except KernelSignatureError:
        assert out.item() == 0
        return False
    return out.item() == 7


def fits(declaration, arguments):
    bound: dict = {}
    for operand, tensor in zip(declaration.inputs, arguments):
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in (operand.dtypes or DTYPES):
            return False
        if operand.dtype_name and bound.setdefault(operand.dtype_name, name) != name:
            return False
        if not operand.strides and not tensor.is_contiguous():
            return False
    try:
        bind_dims("f", "", declaration.inputs[:-1], [tensor.shape for tensor in arguments], {})
    except TaskError:
        return False
    return True


def test_the_oracle_knows_cdiv():
    assert [evaluate(f"cdiv({a}, 4)") for a in range(9)] == [math.ceil(a / 4) for a in range(9)]
