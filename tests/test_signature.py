"""Signatures of tasks and kernels are read once: what is wrong with one is said in the same words, and shown."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from torch_mpk import _C, jit, registry
from torch_mpk.errors import KernelSignatureError, MpkError, TaskError

DTYPES = "the dtypes are bool, uint8, int8, int16, int32, int64, float16, bfloat16, float32, float64"
TENSORS = "write tensors as 'x[M, K]: float32'"


def take(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def declare_task(signature: str) -> object:
    return registry.task(signature)(take)


def declare_kernel(signature: str) -> object:
    return jit.kernel("void take() {}\n", signature, "take(x)")(take)


def refused(declare: Callable[[str], object], signature: str) -> str:
    with pytest.raises(MpkError) as caught:
        declare(signature)
    assert isinstance(caught.value, TaskError if declare is declare_task else KernelSignatureError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("signature", "what", "place"),
    [
        ("x[R, H -> y[R]", f"cannot read 'x[R, H': a bracket is not closed; {TENSORS}", "[R, H"),
        ("x[R], z[H -> y[R]", f"cannot read 'z[H': a bracket is not closed; {TENSORS}", "[H"),
        ("x[R] y[R] -> y[R]", f"cannot read 'y[R]'; {TENSORS}", "y[R]"),
        ("x[R], -> y[R]", f"cannot read ','; {TENSORS}", ","),
        ("x[R]: float3 -> y[R]", f"x has dtype 'float3'; {DTYPES}; did you mean 'float32'?", "float3"),
        ("x[R]: int66 -> y[R]", f"x has dtype 'int66'; {DTYPES}; did you mean 'int64'?", "int66"),
        ("x[R]: complex64 -> y[R]", f"x has dtype 'complex64'; {DTYPES}", "complex64"),
        ("x[R]: fp32 -> y[R]", f"x has dtype 'fp32'; {DTYPES}", "fp32"),
        (f"x[R, {2**63}] -> y[R]", f"x has a dimension {2**63} beyond 64 bits", str(2**63)),
        ("x[R, ...] -> y[R]", "x: '...' can only stand first, among sizes", "..."),
        ("x[R] -> y[R] -> z[R]", "there is more than one '->'", "->"),
        ("x[R] -> y[R]!", "y is allocated by the call: it is contiguous and has no marks", "y[R]!"),
    ],
)
def test_both_say_what_is_wrong_and_where(signature: str, what: str, place: str) -> None:
    for declare in (declare_task, declare_kernel):
        said, text, pointer = refused(declare, signature).splitlines()
        assert said.removesuffix(" but '~'").startswith(f"take: {what}")
        assert text == f"    {signature}"
        begin = len(pointer) - pointer.count("^")
        assert text[begin : len(pointer)] == place
    assert "take" not in _C.task_names()


@pytest.mark.parametrize(
    ("declare", "signature", "what"),
    [
        (declare_task, "x[R] y[R]", "the signature needs one '->' between inputs and outputs"),
        (declare_task, "x[R; S] -> y[R]", "x has strides, which are for kernels alone"),
        (declare_task, "x[R]~ -> y[R]", "x: '~' is for kernels alone"),
        (declare_task, "x[R]: T=int8 -> y[R]", "x has dtype 'T=int8'; an operand of a task has one, or any"),
        (declare_task, "x[R // 2] -> y[R]", "x has a dimension 'R // 2', expected a name, a number or '...'"),
        (declare_kernel, "x[R,,H]", "x has a dimension '', expected a name, a number, or an expression of them"),
        (declare_kernel, "x[R]: int64 < R", "x has a bound, which is for tasks alone"),
        (declare_kernel, "x[R; 2+]", "x has a stride '2+', expected a name, a number, or an expression of them"),
    ],
)
def test_what_only_one_of_them_has(declare: Callable[[str], object], signature: str, what: str) -> None:
    assert refused(declare, signature).splitlines()[0] == f"take: {what}"


def test_other_names_of_dtypes_are_read() -> None:
    """``long`` is int64 to both; for a kernel it is no name for any dtype, as T is."""
    declared = jit.kernel("void take() {}\n", "x[R]: long", "take(x)")(take).declaration
    assert [operand.dtype for operand in declared.operands] == [torch.int64]
    assert registry.task("x[R]: half -> y[R]", samples=[{"R": 1}])(half_for_test).inputs[0].dtype is torch.float16


def half_for_test(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_an_unknown_key_of_a_sample_is_pointed_to() -> None:
    with pytest.raises(TaskError) as caught:
        registry.task("x[R] -> y[R]", samples=[{"R": 1, "RR": 2}])(take)
    said, text, pointer = str(caught.value).splitlines()
    assert said.startswith("take: samples[0] has an unknown key 'RR' (did you mean 'R'?), expected sizes, attributes")
    assert (text, pointer) == ("    {'R': 1, 'RR': 2}", "             ^^^^")


def test_a_sample_without_a_dimension_shows_the_operand() -> None:
    with pytest.raises(TaskError) as caught:
        registry.task("x[R, H] -> y[R]", samples=[{"R": 1}])(take)
    said, text, pointer = str(caught.value).splitlines()
    assert said.startswith("take: samples[0] does not say H of x, expected sizes, attributes and operands' dtypes for")
    assert (text, pointer) == ("    x[R, H] -> y[R]", "    ^^^^^^^")


def test_a_wrong_rank_is_the_same_error_of_a_task_and_of_a_kernel() -> None:
    """Which for a kernel is the core's, and under a tracer Python's."""
    task = registry.task("x[..., K] -> y[..., K]")(some_rank_for_test)
    kernel = jit.kernel("void take() {}\n", "x[..., K]: float32", "take(x)")(some_rank_for_test)
    messages = []
    for call, device in ((task, "cpu"), (kernel, "cpu"), (kernel.op, "meta")):
        with pytest.raises((TaskError, KernelSignatureError)) as caught:
            call(torch.empty((), device=device))
        messages.append(str(caught.value).split(" (signature")[0])
    assert {*messages} == {"some_rank_for_test: x has shape (), expected at least 1 dimension: x[..., K]"}


def some_rank_for_test(x: torch.Tensor) -> torch.Tensor:
    return x.clone()
