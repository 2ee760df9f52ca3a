"""What a declaration may say, and what is refused when it is made."""

import pytest
import torch

from torch_mpk.errors import KernelSignatureError
from torch_mpk.jit import kernel

SOURCE = "void f() {}\n"


def take(x): ...


def declare(signature, launch, function=take, **options):
    return kernel(SOURCE, signature, launch, **options)(function).declaration


def test_the_parts_of_a_signature():
    def f(x, index, mask, *, ALPHA: float, PDL: bool = True, T2: torch.dtype): ...  # noqa: N803

    signature = "x[..., K]: T=float16|bfloat16, index[B, 2; S, _]: int64, mask[B]? -> y[..., K]: T, z[B]: float32"
    with pytest.raises(
        KernelSignatureError, match=r"f: mask.dtype is known only where mask is given, which is optional"
    ):
        declare(signature, "f(x)", f)
    declared = declare(signature.replace("]? ->", "]?: bool ->"), "ns::f<T, K, PDL, T2, 7>(x, y, z, B * 2, ALPHA)", f)
    assert [str(operand) for operand in declared.operands] == [
        "x[..., K]",
        "index[B, 2; S, _]",
        "mask[B]?",
        "y[..., K]",
        "z[B]",
    ]
    tensors, attributes = "Tensor x, Tensor index, Tensor? mask=None", "float ALPHA, bool PDL=True, ScalarType T2"
    assert declared.schema == f"({tensors}, *, {attributes}) -> (Tensor, Tensor)"
    assert declared.slots == ["K", "T", "B", "S", "ALPHA", "PDL", "T2"]
    assert [declared.slots[slot] for slot in declared.key_slots] == ["K", "T", "PDL", "T2"]
    values = declared.decode((64, 7, 1, 4))
    assert values == {"K": 64, "T": "bfloat16", "PDL": True, "T2": "int32"}
    assert declared.launches[0].function_name(values) == "ns::f<mpk::bf16_t, 64, true, int32_t, 7>"


def test_a_launch_is_read_as_in_cuda():
    declared = declare("x[M, K]!", "f<<<(cdiv(M, 2) + 1, min(K, 4)), 32 * 4, -M % 3 + 4 * numel(x)>>>(x, 1)")
    (launch,) = declared.launches
    assert declared.is_cuda
    assert [e.text for e in launch.grid] == ["cdiv(M, 2) + 1", "min(K, 4)", "1"]
    assert [e.text for e in launch.block] == ["32 * 4", "1", "1"]
    assert not declare("x[M]!", "f<4>(x)").is_cuda


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        ("x[N] y[N]", r"cannot read 'y\[N\]'; write tensors as 'x\[M, K\]: float32'"),
        ("x", "cannot read 'x'"),
        ("x[N] -> y[N] -> z[N]", "more than one '->'"),
        ("x[N], x[N]", "two tensors have the same name"),
        ("x[N + 1]", "N is not an integer of the signature; those are none"),
        ("x[N + 1, N]", r"x's 'N \+ 1' needs N, which no required tensor in front of it has for itself"),
        ("x[N] -> y[numel(y)]: int8", r"y's 'numel\(y\)' needs numel\(y\), which no required tensor"),
        ("x[N, N / 2]", r"'N / 2' is not an integer: write // or cdiv\(a, b\)"),
        ("x[N~]", "x has a dimension 'N~', expected a name, a number, or an expression of them"),
        ("x[N]~", "x: '~' is for what is allocated and not returned"),
        ("x[N, ...]", r"x: '\.\.\.' can only stand first"),
        ("x[N, M; S]", "x needs as many strides as sizes"),
        ("x[..., N; 1, 1]", "x needs as many strides as sizes, and no"),
        ("x[N]: float33|int8", "x has dtype 'float33'; the dtypes are bool, uint8, .*did you mean 'float32'"),
        ("x[N]: int8=float32", "x has dtype 'int8' as a name; write T=float32"),
        ("x[N]: N", "x: a name stands for a size, and for a dtype or a tensor"),
        ("x[x]", "x: a name stands for a size, and for a dtype or a tensor"),
        ("x[N]?: int8 -> y[N]: int8", "no required input has y's size N"),
        ("x[N] -> y[M]: int8", "no required input has y's size M"),
        ("x[N] -> y[...]: int8", r"no required input has y's size \.\.\."),
        ("x[N] -> y[N]", "give y one dtype, or one that an input has"),
        ("x[N] -> y[N; 1]: int8", "y is allocated by the call"),
        ("z[N]", r"the function's parameters are \['x'\], the signature's tensors \['z'\]"),
    ],
)
def test_signatures_that_are_refused(signature, message):
    with pytest.raises(KernelSignatureError, match=rf"take: .*{message}"):
        declare(signature, "f(x)")


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ("f", "cannot read the launch 'f'; write it as"),
        ("f<<<1>>>(x)", "in <<< >>> must be grid, block"),
        ("f<<<(1, 1, 1, 1), 1>>>(x)", "have one to three dimensions"),
        ("f(x, N / 2)", r"'N / 2' is not an integer: write // or cdiv\(a, b\)"),
        ("f(x, N ** 2)", r"cannot read 'N \*\* 2' in the launch"),
        ("f(x, M)", "M is not an integer of the signature"),
        ("f(x, T)", "T is not an integer of the signature"),
        ("f(x, 1.5)", "cannot read '1.5'"),
        ("f(x, abs(N))", r"cannot read 'abs\(N\)' in the launch: the functions are cdiv\(a, b\), min"),
        ("f(x, numel(N))", r"cannot read 'numel\(N\)'"),
        ("f(x, min(N))", r"cannot read 'min\(N\)'"),
        ("f(x, num_sms)", r"pdl and num_sms are for CUDA: the launch has no <<<grid, block>>>"),
        ("f(x, N[)", "cannot read"),
        ("f(x)(N)", "cannot read"),
        ("f(x), f(N)", "cannot read"),
        ("f(x, n=N)", "cannot read"),
        ("f(x, {N})", r"cannot read .* in the launch: arguments are tensors, .* and structs with .* names: \{.n = N\}"),
        ("f<1>::g<2(x)", "cannot read the launch"),
        ("f<1>g(x)", "cannot read the launch"),
        (
            "f(x, [N])",
            r"cannot read '\[N\]' in the launch: it may have names of sizes, strides, and int and bool param",
        ),
        ("f(x); f<<<1, 1>>>(x)", "where one has <<<grid, block>>>, all must have it"),
        (";", "there must be a launch"),
        ("f(x, *N)", "cannot read"),
        ("f(x, 2 * 9223372036854775808)", "'9223372036854775808' is beyond 64 bits"),
    ],
)
def test_launches_that_are_refused(launch, message):
    with pytest.raises(KernelSignatureError, match=message):
        declare("x[N]: T", launch)


def test_other_things_that_are_refused():
    def untyped(x, *, alpha=1): ...

    def twice(x, *, N: int): ...  # noqa: N803

    with pytest.raises(KernelSignatureError, match="untyped: alpha must be annotated as int, float, bool, torch.dtype"):
        declare("x[N]", "f(x)", untyped)
    for annotation, default in [("int", "1.5"), ("float", "'x'"), ("bool", "1"), ("torch.dtype", "torch.complex64")]:
        namespace: dict = {"torch": torch}
        exec(f"def take(x, *, a: {annotation} = {default}): ...", namespace)
        with pytest.raises(KernelSignatureError, match=f"take: a is {default} by default, which is not what it is"):
            declare("x[N]", "f(x)", namespace["take"])
    with pytest.raises(KernelSignatureError, match="N is a parameter and a name of the signature"):
        declare("x[N]", "f(x)", twice)
    with pytest.raises(KernelSignatureError, match="cluster, cooperative, pdl and num_sms are for CUDA"):
        declare("x[N]", "f(x)", pdl=True)
    with pytest.raises(KernelSignatureError, match="have one to three dimensions"):
        declare("x[N]", "f<<<1, 1>>>(x)", cluster=(1, 1, 1, 2))
    with pytest.raises(KernelSignatureError, match=r"there is no file .*jit/missing.cuh; code would have a line break"):
        kernel("missing.cuh", "x[N]", "f<<<1, 1>>>(x)")(take)
    with pytest.raises(KernelSignatureError, match="<lambda>: a kernel needs a function with a name"):
        declare("x[N]", "f(x)", lambda x: None)
    names = [f"x{i}" for i in range(65)]
    namespace = {}
    exec(f"def many({', '.join(names)}): ...", namespace)
    with pytest.raises(KernelSignatureError, match="many: a kernel takes at most 64 tensors"):
        declare(", ".join(f"{name}[N]: int8" for name in names), "f(x0)", namespace["many"])
    for require, message in [("N = 4", "cannot read 'N = 4' in a condition"), ("N in x", "cannot read 'N in x'")]:
        with pytest.raises(KernelSignatureError, match=rf"{message}.*== != < <= > >=, these joined by and, or, not"):
            declare("x[N]", "f(x)", require=require)


def test_template_arguments_in_c():
    def f(x, *, A: float = 0.5, N2: int = -3): ...  # noqa: N803

    declared = declare(
        "x[K]: T=float32|float16", "a::B<T, c::D<N2, mpk::T>, (K > 2)>::run<A, K - N2, float(A * 2)>(x)", f
    )
    (launch,) = declared.launches
    assert (launch.path, launch.is_member) == (("a", "B", "run"), True)
    name = launch.function_name({"T": "float16", "A": 0.5, "N2": -3, "K": 7})
    number = "mpk::jit::Number{0x1.0000000000000p-1}"
    arguments = f"<{number}, 7 - (-3), float((0x1.0000000000000p-1) * 2)>"
    assert name == f"a::B<mpk::fp16_t, c::D<(-3), mpk::T>, (7 > 2)>::run{arguments}"
    assert "(-9223372036854775807 - 1)" in launch.function_name({"T": "float16", "A": 0.5, "N2": -(2**63), "K": 7})
