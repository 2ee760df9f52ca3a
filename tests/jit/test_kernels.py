"""Single kernels on the CPU: what they compute, what they refuse, and how PyTorch sees them."""

import copy
import ctypes
import dataclasses
import inspect
import multiprocessing
import os
import pickle
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from torch_mpk import _C
from torch_mpk.errors import KernelCompileError, KernelSignatureError, OptionError
from torch_mpk.jit import Cubin, Library, kernel


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as context:
        context.setenv("TORCH_MPK_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@kernel(
    """
    template <class T, int kTimes>
    void scaled(const T* x, const float* bias, T* y, int64_t rows, int columns, float alpha) {
      for (int64_t i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++)
          y[i * columns + j] = T(float(x[i * columns + j]) * alpha * kTimes + (bias ? bias[j] : 0));
    }
    """,
    "x[M, K]: T=float32|bfloat16|float16, bias[K]?: float32 -> y[M, K]: T",
    "scaled<T, TIMES>(x, bias, y, M, K, alpha)",
)
def scaled(x, bias, *, TIMES: int = 1, alpha: float = 1):  # noqa: N803
    """x times TIMES and alpha, plus bias."""


@kernel(
    """
    void accumulate(float* total, const float* x, int64_t row, int64_t n, int64_t m) {
      for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < m; j++) total[i * m + j] += x[i * row + j];
    }
    """,
    "total[N, M]!: float32, x[N, M; S, 1]: float32",
    "accumulate(total, x, S, N, M)",
)
def accumulate(total, x):
    """total += x, whose rows may be apart."""


@kernel(
    """
    void filled(const int64_t* like, int64_t* a, bool* b, int64_t n) {
      for (int64_t i = 0; i < n; i++) { a[i] = -like[i]; b[i] = like[i] > 0; }
    }
    """,
    "like[...]: int64 -> a[...]: int64, b[...]: bool",
    "filled(like, a, b, numel(like))",
)
def filled(like): ...


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dtype_and_numbers_of_python_are_template_arguments(dtype):
    x, bias = torch.randn(5, 7).to(dtype), torch.randn(7)
    assert torch.equal(scaled(x, bias, TIMES=3, alpha=0.5), (x.float() * 1.5 + bias).to(dtype))
    assert torch.equal(scaled(x, None, alpha=2), x * 2)
    assert torch.equal(scaled(x=x), x)
    assert (scaled.__name__, scaled.__doc__) == ("scaled", "x times TIMES and alpha, plus bias.")


def test_strides_are_bound_and_what_is_written_is_a_new_version():
    wide, total = torch.randn(3, 20), torch.zeros(3, 4)
    expected = wide[:, 5:9].clone()
    assert accumulate(total, wide[:, 5:9]) is None
    assert torch.equal(total, expected)
    assert (total._version, wide._version) == (1, 0)
    with torch.inference_mode():
        total = torch.zeros(3, 4)
        accumulate(total, wide[:, 5:9])
        assert torch.equal(total, expected)


def test_any_number_of_dimensions_and_several_results():
    for shape in ((), (3,), (2, 3, 4), (2, 0)):
        x = torch.randint(-9, 9, shape)
        a, b = filled(x)
        assert torch.equal(a, -x) and torch.equal(b, x > 0)


X, BIAS = torch.ones(3, 4), torch.ones(4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X.double(), None), "x is float64, expected float16, bfloat16 or float32"),
        ((X.to(torch.complex64), None), "x is of a dtype that kernels do not take, expected"),
        ((X, torch.ones(5)), "bias has K=5 in dimension 0, but K=4 was bound by x"),
        ((X, X), r"bias has shape \(3, 4\), expected 1 dimension: bias\[K\]"),
        ((X.t(), None), r"x has strides \(1, 4\) for shape \(4, 3\), expected a contiguous tensor: pass x.contiguous"),
        ((None, BIAS), "x is missing"),
        ((), "x is missing"),
        ((X, None, X), "expected 2 tensors, got 3"),
        ((X.to_sparse(), None), r"x has layout torch.sparse_coo, expected a dense tensor: pass x.to_dense\(\)"),
        ((X, BIAS.to_sparse()), "bias has layout torch.sparse_coo, expected a dense tensor"),
        (([1, 2], None), r"x is \[1, 2\], expected a tensor"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(KernelSignatureError, match=rf"^scaled: {message}.* \(signature: x\[M, K\]: T=float32\|"):
        scaled(*arguments)


def test_keywords_that_do_not_fit():
    for keywords, message in [
        ({"TIMES": 1.5}, "TIMES is 1.5, expected an int"),
        ({"TIMES": 2**63}, "TIMES is 9223372036854775808, expected an int of 64 bits"),
        ({"alpha": "1"}, "alpha is '1', expected a float"),
        ({"beta": 1}, "there is no argument beta"),
        ({"x": X}, "x was given twice"),
    ]:
        with pytest.raises(KernelSignatureError, match=message):
            scaled(X, **keywords)


def test_more_of_what_does_not_fit():
    total, wide = torch.zeros(3, 4), torch.zeros(3, 8)
    with pytest.raises(KernelSignatureError, match="x has stride 2 in dimension 1, expected 1"):
        accumulate(total, wide[:, ::2])
    negated = torch.zeros(3, 4, dtype=torch.complex64).conj().imag
    with pytest.raises(KernelSignatureError, match="x has stride 2"):
        accumulate(total, negated)
    with pytest.raises(KernelSignatureError, match=r"x is a lazily negated view: pass x.resolve_neg\(\)"):
        accumulate(total[:1, :1], negated[:1, :1])
    with pytest.raises(KernelSignatureError, match="x requires grad, and a kernel has no backward"):
        accumulate(total, total.clone().requires_grad_())
    with torch.no_grad():
        accumulate(total, total.clone().requires_grad_())

    @kernel("void f(const void* x, int n) {}\n", "x[N, 2], y[N]", "f(x, N)")
    def f(x, y): ...

    with pytest.raises(KernelSignatureError, match="x has size 3 in dimension 1, expected 2"):
        f(torch.ones(4, 3), torch.ones(4))


def test_a_dtype_parameter_and_a_size_are_template_arguments():
    @kernel(
        "template <class To, int N, bool kNegate> void cast(const float* x, double* y) {\n"
        "  for (int i = 0; i < N; i++) y[i] = kNegate ? -double(To(x[i])) : double(To(x[i]));\n}",
        "x[N]: float32 -> y[N]: float64",
        "cast<TO, N, negate>(x, y)",
    )
    def cast(x, *, TO: torch.dtype, negate: bool = False, FROM: torch.dtype = torch.float32): ...  # noqa: N803

    x = torch.randn(6) * 9
    assert torch.equal(cast(x, TO=torch.int32), x.int().double())
    assert torch.equal(cast(x, TO=torch.bfloat16, negate=True), -x.bfloat16().double())
    with pytest.raises(KernelSignatureError, match="TO is missing"):
        cast(x)
    traced = torch.compile(lambda x: cast(x, TO=torch.int8), backend="aot_eager", fullgraph=True)
    assert torch.equal(traced(x), x.to(torch.int8).double())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_under_torch_compile(backend):
    def f(x, total):
        accumulate(total, scaled(x * 2, None, TIMES=2))
        return scaled(total, None) + 1

    compiled = torch.compile(f, backend=backend, fullgraph=True, dynamic=True)
    for rows in (3, 5):
        x, total = torch.randn(rows, 4), torch.randn(rows, 4)
        expected = total + x * 4
        assert torch.equal(compiled(x, total), expected + 1)
        assert torch.equal(total, expected)
    with pytest.raises(Exception, match="x requires grad, and a kernel has no backward"):
        compiled(torch.randn(3, 4, requires_grad=True), torch.zeros(3, 4))


def test_export_and_fake_tensors():
    class Net(torch.nn.Module):
        def forward(self, x):
            return scaled(x, None, TIMES=2)

    exported = torch.export.export(Net(), (torch.randn(3, 4),), strict=False)
    assert any(node.target is scaled.op for node in exported.graph.nodes)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(3, 4, dtype=torch.bfloat16))
        assert (scaled(fake).shape, scaled(fake).dtype) == ((3, 4), torch.bfloat16)
    assert scaled(fake).shape == (3, 4)  # outside the mode, as the tensor itself brings it
    with mode, pytest.raises(KernelSignatureError, match="bias has K=5, but K=4 was bound by x"):
        scaled(fake, torch.empty(5))
    assert scaled(torch.ones(3, 4, device="meta")).device.type == "meta"


def test_opcheck():
    torch.library.opcheck(scaled.op, (X, BIAS), {"TIMES": 2})
    torch.library.opcheck(accumulate.op, (torch.zeros(3, 4), X))
    torch.library.opcheck(filled.op, (torch.arange(6).view(2, 3),))


def test_a_wrong_source_is_the_compiler_s_error():
    def f(x): ...

    def compile_with(body, launch="f(x)"):
        kernel(f"{body}\n", "x[N]: float32", launch)(f)(torch.zeros(3))

    with pytest.raises(KernelCompileError, match=r"f in test_kernels.py:1:.* error: .*nonsense"):
        compile_with("void f(const float* x) { nonsense; }")
    with pytest.raises(KernelCompileError, match=r"parameter 1: x is float32 and only read, declare it const float\*"):
        compile_with("void f(float* x) {}")
    with pytest.raises(KernelCompileError, match="undefined reference to `missing"):
        compile_with("void missing(); void f(const float* x) { missing(); }")
    with pytest.raises(KernelCompileError, match="the launch passes 2 arguments"):
        compile_with("void f(const float* x) {}", "f(x, N)")


def test_what_a_kernel_finds_wrong_with_its_data_reaches_python():
    @kernel(
        """
        #include "torch_mpk/jit/check.h"
        void take(const float* x, const int64_t* index, float* y, int64_t n, int64_t m) {
          for (int64_t i = 0; i < m; i++) {
            if (index[i] == 77) throw std::out_of_range("row 77");
            mpk::check(index[i] >= 0 && index[i] < n, "take: index[", i, "] is ", index[i], ", and x has ", n, " rows");
            y[i] = x[index[i]];
          }
        }
        """,
        "x[N]: float32, index[M]: int64, y[M]!: float32",
        "take(x, index, y, N, M)",
    )
    def take(x, index, y): ...

    x, y = torch.randn(3), torch.zeros(2)
    take(x, torch.tensor([2, 0]), y)
    assert torch.equal(y, x[[2, 0]])
    version = y._version
    with pytest.raises(ValueError, match=r"take: index\[1\] is -1, and x has 3 rows"):
        take(x, torch.tensor([1, -1]), y)
    assert y[0] == x[1] and y._version > version  # written before it threw
    with pytest.raises(IndexError, match="row 77"):
        take(x, torch.tensor([0, 77]), y)


def write_kernel(folder: Path, value: int):
    (folder / "part.h").write_text(f"inline constexpr int kValue = {value};\n")
    os.utime(folder / "part.h", (0, 0))

    def edited(x): ...

    source = folder / "edited.cpp"
    source.write_text('#include "part.h"\nvoid edited(const int* x, int* y) { *y = *x + kValue; }\n')
    return kernel(source, "x[1]: int32 -> y[1]: int32", "edited(x, y)")(edited)


def test_an_edited_header_is_compiled_whatever_its_time(tmp_path):
    one = torch.ones(1, dtype=torch.int32)
    assert [write_kernel(tmp_path, value)(one).item() for value in (1, 5, 1)] == [2, 6, 2]


def run_in_process(folder, barrier, queue):
    barrier.wait()
    queue.put(write_kernel(Path(folder), 41)(torch.ones(1, dtype=torch.int32)).item())


@pytest.mark.slow
def test_several_processes_and_threads_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(4), context.Queue()
    workers = [context.Process(target=run_in_process, args=(tmp_path, barrier, queue)) for _ in range(4)]
    for worker in workers:
        worker.start()
    assert [queue.get(timeout=60) for _ in workers] == [42] * 4
    for worker in workers:
        worker.join()
    x, results = torch.randn(5, 7), []
    threads = [threading.Thread(target=lambda: results.append(scaled(x, None, TIMES=7))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(torch.equal(result, x * 7) for result in results)


def test_dlpack_is_declared_as_pytorch_has_it():
    root = Path(__file__).parents[2]
    includes = [f"-I{root / 'include'}", f"-I{Path(torch.__file__).parent / 'include'}"]
    source = Path(__file__).with_name("dlpack_abi.cpp")
    subprocess.run(["g++", "-std=c++20", "-fsyntax-only", *includes, source], check=True)


def test_a_kernel_is_copied_and_pickled_by_name_as_a_function_is():
    assert copy.deepcopy(scaled) is scaled
    assert pickle.dumps(scaled) == pickle.dumps(scaled)
    assert "scaled: x[M, K]: T=float32|bfloat16|float16, bias" in repr(scaled)
    assert list(inspect.signature(scaled).parameters) == ["x", "bias", "TIMES", "alpha"]


@pytest.mark.parametrize("tier", _C.cpu_isas())
def test_every_tier_of_this_machine(tier, monkeypatch):
    monkeypatch.setenv("TORCH_MPK_CPU_ISA", tier)

    @kernel(
        "void width(const float* x, float* y, int64_t n, int64_t* bytes) {\n"
        "#if defined(__AVX512BF16__)\n  *bytes = 65;\n#elif defined(__AVX512F__)\n  *bytes = 64;\n"
        "#elif defined(__AVX2__)\n  *bytes = 32;\n#else\n  *bytes = 16;\n#endif\n"
        "  for (int64_t i = 0; i < n; i++) y[i] = 3 * x[i];\n}",
        "x[N]: float32 -> y[N]: float32, bytes[1]: int64",
        "width(x, y, N, bytes)",
    )
    def width(x): ...

    x = torch.randn(1003)
    y, num_bytes = width(x)
    assert torch.equal(y, 3 * x)
    assert num_bytes.item() == {"generic": 16, "avx2": 32, "avx512": 64, "avx512_bf16": 65, "amx": 65}[tier]


def test_an_unknown_tier(monkeypatch):
    monkeypatch.setenv("TORCH_MPK_CPU_ISA", "avx1024")
    with pytest.raises(OptionError, match="TORCH_MPK_CPU_ISA: expected one of generic.*got 'avx1024'"):
        scaled.compile(T=torch.float32)


def test_compiling_ahead():
    library = scaled.compile(T=torch.bfloat16, TIMES=11)
    assert (library.kind, library.file.parent) == ("so", library.path)
    assert ctypes.CDLL(library.file)
    for values, message in [
        ({}, "compile takes T, TIMES: T is missing"),
        ({"T": torch.int8, "ALPHA": 3}, "compile takes T, TIMES: ALPHA is unknown"),
        ({"T": torch.float32, "arch": 90}, "a CUDA kernel is compiled for an arch, as in arch=90, and no other"),
    ]:
        with pytest.raises(KernelSignatureError, match=message):
            scaled.compile(**values)


def test_both_kinds_of_compiled_code_say_what_they_are():
    common = {"kind", "key", "path", "compiler", "seconds"}
    for kind in (Cubin, Library):
        assert common <= {field.name for field in dataclasses.fields(kind)}


def test_kernels_that_differ_are_different_operators():
    def f(x): ...

    def g(x, *, A: int = 1): ...  # noqa: N803

    g.__name__ = "f"
    kernels = [
        kernel("void f(float*) {}\n", "x[N]!: float32", "f(x)", **options)(function)
        for function, options in [(f, {}), (g, {}), (f, {"flags": ["-DA"]}), (f, {"include_dirs": ["/"]}), (f, {})]
    ]
    assert len({each.op for each in kernels}) == 4
    assert kernels[0].op is kernels[4].op
