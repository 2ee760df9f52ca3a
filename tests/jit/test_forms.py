"""What a declaration can say beyond tensors and a launch: computed sizes, conditions, structs, several launches."""

import importlib
import math
import os
import sys

import pytest
import torch

from torch_mpk.errors import CompileForbiddenError, KernelSignatureError
from torch_mpk.jit import kernel, module


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as context:
        context.setenv("TORCH_MPK_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


PAIRS = """
void pairs(const float* x, const float* bias, float* y, float* z, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = x[2 * i] + x[2 * i + 1] + (bias ? bias[i] : 0);
  for (int64_t i = 0; i < n; i++) z[i] = 1;
}
"""


@kernel(
    PAIRS,
    "x[M, N]: float32, bias[M * N // 2]?: float32 -> y[M, N // 2]: float32, z[cdiv(numel(x), 2) * TIMES]: float32",
    "pairs(x, bias, y, z, M * N // 2)",
    require=["N % 2 == 0 and TIMES >= 1", "M == 0 or N // M < 100"],
)
def pairs(x, bias, *, TIMES: int = 1): ...  # noqa: N803


def test_sizes_are_computed():
    x, bias = torch.randn(3, 8), torch.randn(12)
    y, z = pairs(x, bias)
    assert torch.equal(y, x[:, ::2] + x[:, 1::2] + bias.view(3, 4))
    assert z.shape == (12,)
    with pytest.raises(
        KernelSignatureError, match=r"bias has size 5 in dimension 0, expected M \* N // 2 = 12, with M=3, N=8"
    ):
        pairs(x, torch.randn(5))
    with pytest.raises(KernelSignatureError, match=r"z would have the size .* = -12, with numel\(x\)=24, TIMES=-1"):
        negative(x.view(-1), TIMES=-1)


@kernel(PAIRS, "x[N]: float32 -> y[N]: float32, z[cdiv(numel(x), 2) * TIMES]: float32", "pairs(x, x, y, z, N // 2)")
def negative(x, *, TIMES: int): ...  # noqa: N803


def test_computed_sizes_under_torch_compile():
    traced = torch.compile(lambda x: pairs(x, None, TIMES=2), backend="aot_eager", fullgraph=True, dynamic=True)
    for rows, columns in [(3, 8), (5, 4), (2, 6)]:
        x = torch.randn(rows, columns)
        y, z = traced(x)
        assert torch.equal(y, x[:, ::2] + x[:, 1::2]) and z.shape == (rows * columns,)
    with torch._subclasses.FakeTensorMode(), pytest.raises(KernelSignatureError, match=r"M \* N // 2=5, but .*=12 was"):
        pairs(torch.empty(3, 8), torch.empty(5))
    torch.library.opcheck(pairs.op, (torch.ones(3, 8), None))


def test_conditions_name_the_values():
    with pytest.raises(KernelSignatureError, match=r"pairs: requires N % 2 == 0 and TIMES >= 1, but N=7, TIMES=1 \("):
        pairs(torch.ones(3, 7), None)
    with pytest.raises(KernelSignatureError, match="requires M == 0 or N // M < 100, but M=1, N=200"):
        pairs(torch.ones(1, 200), None)
    assert pairs(torch.ones(0, 2), None)[0].shape == (0, 1)  # the first side decides, and nothing is divided by 0
    with torch._subclasses.FakeTensorMode(), pytest.raises(KernelSignatureError, match="requires N % 2 == 0 and.*N=7"):
        pairs(torch.empty(3, 7), None)


@pytest.mark.slow
def test_a_float_is_a_template_argument_of_either_type():
    @kernel(
        """
        template <class T> struct Filled {
          template <float kA, double kB> static void run(T* y, double* z) { *y = kA; *z = kB; }
        };
        """,
        "x[1]: T=float32|float64 -> y[1]: T, z[1]: float64",
        "Filled<T>::run<A, A>(y, z)",
    )
    def filled(x, *, A: float = math.inf): ...  # noqa: N803

    x = torch.zeros(1)
    for value in (0.1, 1, -math.inf, 1e-300):
        y, z = filled(x, A=value)
        assert z.item() == value and y.item() == torch.tensor(value).item()
    assert filled(x, A=math.nan)[1].isnan()
    assert filled(x)[1].item() == math.inf
    assert torch.compile(lambda x: filled(x)[1], backend="aot_eager", fullgraph=True)(x).item() == math.inf


def test_a_struct_is_filled_by_its_fields_names():
    @kernel(
        """
        struct Params { const float* __restrict__ input; int n; struct { double alpha; bool on; } by; float* output; };
        void run(Params p, int64_t unused) {
          for (int i = 0; i < p.n; i++) p.output[i] = p.by.on ? -1 : p.input[i] * float(p.by.alpha) + unused;
        }
        """,
        "x[N]: float32 -> y[N]: float32",
        "run({.input = x, .n = N, .by = {.alpha = alpha}, .output = y}, N - 5)",
    )
    def run(x, *, alpha: float): ...

    x = torch.randn(9)
    assert torch.equal(run(x, alpha=0.5), x * 0.5 + 4)


def test_integers_that_a_parameter_cannot_hold_are_refused():
    source = "\nvoid take(float* x, unsigned m, bool is_long, unsigned long n, int64_t any) { *x = float(m + n); }"

    @kernel(source, "x[M]!: float32", "take(x, M + A, M - 1, M + A, A)")
    def take(x, *, A: int): ...  # noqa: N803

    x = torch.zeros(2)
    for given, value, what in [(-3, -1, "unsigned"), (2**32, 2**32 + 2, "unsigned")]:
        message = rf"take: 'M \+ A' is {value}, which parameter 2 \({what}\) cannot hold: declare it int64_t"
        with pytest.raises(KernelSignatureError, match=message):
            take(x, A=given)
    with pytest.raises(KernelSignatureError, match=r"'M - 1' is 2, which parameter 3 \(a bool\) cannot hold"):
        take(torch.zeros(3), A=1)
    take(x, A=2**31)
    assert x[0].item() == 2**32  # and 4, which a float32 does not have


def test_launches_run_one_after_the_other_over_scratch_memory():
    @kernel(
        """
        void partial(const float* x, float* part, int64_t rows, int64_t n) {
          for (int64_t i = 0; i < rows; i++) { part[i] = 0; for (int64_t j = 0; j < n; j++) part[i] += x[i * n + j]; }
        }
        void total(const float* part, float* y, int64_t rows, float* again) {
          *y = 0; for (int64_t i = 0; i < rows; i++) *y += part[i]; *again = *y;
        }
        """,
        "x[M, N]: float32 -> part[M]~: float32, y[1]: float32, again[1]~: float32",
        "partial(x, part, M, N); total(part, y, M, again)",
    )
    def summed(x): ...

    x = torch.arange(12.0).view(3, 4)
    assert summed(x).tolist() == [66]
    assert torch.compile(summed, backend="aot_eager", fullgraph=True)(x).tolist() == [66]


def test_kernels_of_a_module_are_compiled_once_and_share_its_variables():
    both = module("static int total;\nvoid add(int n) { total += n; }\nvoid get(int* x) { *x = total; }")

    @both.kernel("x[N]: int32", "add(N)")
    def add(x): ...

    @both.kernel("x[N]: int32 -> y[1]: int32", "get(y)")
    def get(x): ...

    assert add.compile() == get.compile()
    x = torch.zeros(7, dtype=torch.int32)
    add(x), add(x)
    assert get(x).item() == 14


def test_an_edited_source_is_compiled_anew(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "plus.cpp"
    (tmp_path / "plus.py").write_text(
        "from torch_mpk import jit\n"
        "@jit.kernel('plus.cpp', 'x[1]: int32 -> y[1]: int32', 'plus(x, y)')\n"
        "def plus(x): ...\n"
    )

    def edit(value):
        source.write_text(f"void plus(const int* x, int* y) {{ *y = *x + {value}; }}\n")
        os.utime(source, (0, 0))

    edit(1)
    plus = importlib.import_module("plus")
    x = torch.zeros(1, dtype=torch.int32)
    compiled = torch.compile(lambda x: torch.ops.mpk_jit.__getattr__(plus.plus.name)(x), backend="aot_eager")
    assert (plus.plus(x).item(), compiled(x).item()) == (1, 1)
    edit(2)
    plus.plus.reload()
    assert (plus.plus(x).item(), compiled(x).item()) == (2, 2)
    edit(3)
    importlib.reload(plus)
    assert (plus.plus(x).item(), compiled(x).item()) == (3, 3)
    del sys.modules["plus"]


def test_a_forbidden_compile_says_what_to_call(monkeypatch):
    @kernel("template <class T, int N> void f(const T*) {}\n", "x[M]: T", "f<T, STEP>(x)")
    def forbidden(x, *, STEP: int = 4): ...  # noqa: N803

    monkeypatch.setenv("TORCH_MPK_FORBID_COMPILE", "1")
    call = r"call forbidden.compile\(T=torch.float64, STEP=4\) once without it"
    with pytest.raises(CompileForbiddenError, match=f"kernel forbidden [0-9a-f]+ is not in .*: {call}"):
        forbidden(torch.zeros(2, dtype=torch.float64))


def test_a_profiler_shows_calls_by_name():
    x = torch.randn(3, 8)
    pairs(x, None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pairs(x, None)
    assert [e.count for e in profile.key_averages() if e.key == "mpk.jit pairs"] == [1]
