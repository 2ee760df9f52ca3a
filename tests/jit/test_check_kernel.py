"""What the commands for single kernels say of kernels that are wrong in one way each, and of right ones."""

from __future__ import annotations

import enum
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torch_mpk import jit
from torch_mpk.__main__ import main
from torch_mpk.errors import KernelSignatureError
from torch_mpk.jit.samples import dtype_choices
from torch_mpk.testing import bench, check_kernel
from torch_mpk.testing.check_kernel import check_kernels, check_on_device, samples_of
from torch_mpk.testing.checker import Findings


class By(enum.IntEnum):
    ONE = 1
    TWO = 2


DOUBLES = "for (int64_t i = 0; i < n; i++) y[i] = 2 * x[i];"
WRONG = {  # in one way each: the code, and what is said of it
    "writes_behind": (f"{DOUBLES} y[n] = 1;", "y: the code writes memory 0 bytes behind its end"),
    "reads_behind": (
        f"{DOUBLES} y[0] += 0 * *(volatile const float*)&x[n];",
        "x: the code reads memory 0 bytes behind its end",
    ),
    "changes_x": (f"{DOUBLES} const_cast<float*>(x)[0] = 7;", "x is changed: mark what is written with '!'"),
    "forgets_one": (DOUBLES.replace("= 0", "= 1"), "forgets_one y: Tensor-likes are not close"),
    "takes_eights": (DOUBLES.replace("n;", "n / 8 * 8;"), r"with N=1: takes_eights y: Tensor-likes are not close"),
    "never_ends": (f'while (n != 3) asm volatile(""); {DOUBLES}', "it has not ended within 2 s"),
}
SIGNATURE = "x[N]: float32 -> y[N]: float32"
RIGHT = """
void gathers(const float* x, int64_t columns, int64_t stride, const int64_t* index, float* y, int64_t rows) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j++) y[i * columns + j] = x[index[i] * stride + j];
}
void adds(float* y, const float* x, float* part, int64_t n, int by) {
  for (int64_t i = 0; i < n; i++) part[i] = by * (x ? x[i] : 1);
  for (int64_t i = 0; i < n; i++) y[i] += part[i];
}
"""


@pytest.fixture(scope="module")
def findings() -> Findings:
    code = [f"void {name}(const float* x, float* y, int64_t n) {{ {body} }}" for name, (body, _) in WRONG.items()]
    module = jit.module("\n".join([*code, RIGHT]))

    def wrong(name: str) -> jit.Kernel:
        def reference(x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        reference.__name__ = name
        samples = [{"N": 3 if name == "never_ends" else 16}]
        return module.kernel(SIGNATURE, f"{name}(x, y, N)", require="N > 0", samples=samples)(reference)

    kernels = [wrong(name) for name in WRONG]

    @module.kernel(SIGNATURE, "forgets_one(x, y, N)", samples=[{"N": 16}])
    def says_nothing(x):
        """Twice x."""

    @module.kernel(
        "x[M, K; S, 1]: float32, index[R]: int64 -> y[R, K]: float32",
        "gathers(x, K, S, index, y, R)",
        samples=[{"M": 4, "K": 5, "R": 7, "index": 4}],
        require="M > 3",
    )
    def gathers(x, index):
        return x[index]

    @module.kernel(
        "y[..., N]!: float32, x[..., N]?: float32 -> part[N]~: float32",
        "adds(y, x, part, N, by)",
        samples=[{"...": (), "N": 5, "by": By.TWO}, {"...": (1,), "N": 4, "x": None}],
        require="numel(y) == N",
    )
    def adds(y, x=None, *, by: By = By.ONE):
        assert isinstance(by, By)
        y += by * (1 if x is None else x)

    return check_kernels([*kernels, says_nothing, gathers, adds], seconds=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(findings: Findings, name: str) -> None:
    said = [failure for failure in findings.failures if f"kernel {name}," in failure]
    pattern = rf"(?s){re.escape(__file__)}: kernel {name}, C\+\+ on the CPU, float32, sample \d .*{WRONG[name][1]}"
    assert any(re.match(pattern, failure) for failure in said), "\n".join(said)


@pytest.mark.slow
def test_right_kernels_pass_and_a_missing_reference_is_told(findings: Findings) -> None:
    print(*findings.failures, sep="\n")
    [failure] = [failure for failure in findings.failures if re.search("kernel (says_nothing|gathers|adds),", failure)]
    assert re.search("kernel says_nothing, reference, .* function returns NoneType, expected y: write there", failure)


FLOATS = "x[N]: T=float32|float64 -> y[N]: T"
CODE = "template <class T> void twice(const T* x, T* y, int64_t n) { for (int64_t i = 0; i < n; i++) y[i] = 2 * x[i]; }"


def twice(x: torch.Tensor) -> torch.Tensor:
    """Twice x."""
    return 2 * x


def test_samples_have_a_name_for_each_thing() -> None:
    for samples, match in [
        ([{"n": 4}], r"samples\[0\] has an unknown key 'n', expected N, x"),
        ({"N": 4}, r"samples=\{'N': 4\}, expected a list of dicts"),
    ]:
        with pytest.raises(KernelSignatureError, match=match):
            jit.kernel(CODE, FLOATS, "twice<T>(x, y, N)", samples=samples)(twice)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="kernel twice, reference, float32, .* a sample does not say N: {}"):
        check_kernel(jit.kernel(CODE, FLOATS, "twice<T>(x, y, N)", samples=[{}])(twice))
    with pytest.raises(KernelSignatureError, match="twice: there is nothing to check or time it with: declare samples"):
        check_kernel(jit.kernel(CODE, FLOATS, "twice<T>(x, y, N)")(twice))


@pytest.mark.slow
def test_code_that_does_not_compile_is_told_of_once() -> None:
    code = CODE.replace("2 * x[i]", "2 * z[i]")
    match = r"C\+\+ on the CPU, float32, sample 0 .*error: .*z.* was not declared"
    with pytest.raises(AssertionError, match=match) as error:
        check_kernel(jit.kernel(code, FLOATS, "twice<T>(x, y, N)", samples=[{"N": 3}])(twice))
    assert str(error.value).count("error:") == 1


def test_a_launch_that_no_gpu_has() -> None:
    cuda = jit.kernel("__global__ void twice() {}", FLOATS, "twice<<<1, N>>>(x, y)", samples=[{"N": 1025}])(twice)
    with pytest.raises(AssertionError, match="launch, float32, sample 0 .* the block is .*1025.*, expected 1 to"):
        check_kernel(cuda, archs=())


def test_a_kernel_for_another_device_is_not_timed() -> None:
    cuda = jit.kernel("__global__ void twice() {}", FLOATS, "twice<<<1, N>>>(x, y)", samples=[{"N": 3}])(twice)
    [timed] = bench.bench_kernel(cuda, [], torch.device("cpu"))
    assert str(timed).split() == ["-", "-", "-", "twice;", "not", "timed:", "it", "does", "not", "run", "on", "cpu"]
    assert timed.failure is None


def test_dtypes_of_several_tensors_are_combined() -> None:
    three = "float32|float16|bfloat16"
    two, all_three = f"x[N]: T={three}, y[N]: U={three}, z[N]: T", f"x[N]: {three}, y[N]: {three}, z[N]: {three}"
    for signature, num_choices in ((two, 9), (all_three, 3)):
        declared = jit.kernel("//\n", signature, "f(x)")(f)
        choices = [*dtype_choices(declared.declaration)]
        assert len({*map(str, choices)}) == len(choices) == num_choices
        assert all({choice[slot] for choice in choices} == {*three.split("|")} for slot in choices[0])
        assert [*dtype_choices(declared.declaration, ["float16"])] == [dict.fromkeys(choices[0], "float16")]


def f(x, y, z): ...


def test_memory_around_tensors_of_a_gpu_is_looked_at() -> None:
    """With a kernel of the CPU in its place."""
    code = CODE.replace("{ for", "{ if (n == 6) y[n] = 1; if (n == 5) y[-1] = 1; for")
    samples = [{"N": 4}, {"N": 5}, {"N": 6}]
    kernel = jit.kernel(code, FLOATS, "twice<T>(x, y, N)", samples=samples)(twice)
    right, before, behind = samples_of(kernel, samples, [torch.float64])
    check_on_device(right, "cpu")
    for sample, where in ((before, "before"), (behind, "behind")):
        with pytest.raises(AssertionError, match=f"y: the code writes memory {where} it"):
            check_on_device(sample, "cpu")


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Iterator[Path]:
    """The files of ``new-kernel``."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "fresh_kernel.py"
    main(["new-kernel", "fresh_kernel", "--dir", str(tmp_path)])
    assert capsys.readouterr().out.endswith(f"; check them with: python -m torch_mpk check-kernel {path}\n")
    yield path
    sys.modules.pop("fresh_kernel", None)


def test_a_new_kernel_is_timed(written: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # Inductor takes seconds
    command = ["bench-kernel", str(written), "--dtype", "float32", "--device", "cpu", "--rounds", "2"]
    main(command)
    first, header, *lines = capsys.readouterr().out.splitlines()
    assert first == "on cpu: medians in milliseconds, and as multiples of ours"
    assert header == bench.header()
    times = r" *\d+\.\d+ +\d+\.\d+ \(\d+\.\d\dx\) +\d+\.\d+ \(\d+\.\d\dx\) +"
    assert [re.sub(times, "", line) for line in lines] == [
        "fresh_kernel, float32, sample 0 {'R': 1, 'H': 96}",
        "fresh_kernel, float32, sample 1 {'R': 5, 'H': 1030, 'weight': None, 'eps': 0.01}",
    ]
    source = written.with_suffix(".cpp")
    source.write_text(source.read_text().replace("most + eps", "most"))
    match = r"^failed:\n.*fresh_kernel.py: kernel fresh_kernel, float32, sample 1 .*y: "
    with pytest.raises(SystemExit, match=match):
        main(command)


@pytest.mark.slow
def test_a_new_kernel_passes_its_check_and_its_test(written: Path, capsys: pytest.CaptureFixture) -> None:
    main(["check-kernel", str(written), "--dtype", "float16", "--arch", "90"])
    lines = capsys.readouterr().out.splitlines()
    assert "fresh_kernel: C++ on the CPU, float16: 12 samples pass" in lines
    compiled = r"fresh_kernel: compiled for sm_90, float16: \d+ registers, nothing spilled"
    assert any(re.fullmatch(compiled, line) for line in lines)
    assert lines[-1] == "1 kernels pass"
    tests = runpy.run_path(str(written.with_name("test_fresh_kernel.py")))
    tests["test_it_computes_what_its_reference_does"](torch.float16, "cpu")


def test_files_that_are_there_or_declare_none(written: Path, tmp_path: Path) -> None:
    (tmp_path / "none_for_test.py").write_text("from fresh_kernel import fresh_kernel\n")
    for command, match in [
        (
            ["new-kernel", "fresh_kernel", "--dir", str(tmp_path)],
            "NAME: expected one that is not taken, got .*fresh_kernel.py",
        ),
        (["new-kernel", "double"], "NAME: expected a name that C\\+\\+ has for nothing else, got double"),
        (["check-kernel", str(tmp_path / "none_for_test.py")], "none_for_test.py: it declares no kernels, expected"),
        (["bench-kernel", str(tmp_path / "gone.py")], "FILE: expected a Python file that declares kernels"),
    ]:
        with pytest.raises(SystemExit, match=match):
            main(command)
