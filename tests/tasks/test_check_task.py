"""What ``python -m torch_mpk check-task`` says of device code that is wrong in one way each, and of right code."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from torch_mpk.__main__ import main
from torch_mpk.patterns import references
from torch_mpk.testing.check import Findings, check_task, check_tasks
from torch_mpk.testing.guarded import Check, run_checks

DECLARATIONS = """
import torch
from torch_mpk import task

SIZES = {"R": 3, "H": 50}

def flipped(name):
    def reference(x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1)
    reference.__name__ = name
    samples = [{"H": 50}, {"H": 60}] if name == "never_ends" else [{"H": 50}]
    return task("x[H] -> y[H]", samples=samples, header=f"{name}.cuh", pattern=name in LIFTED)(reference)

def summed(name):
    def reference(x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return (x.sum(0, dtype=torch.float32) * scale).to(x.dtype)
    reference.__name__ = name
    samples = [SIZES | {"scale": 2.0} if "scale" in name else SIZES]
    return task("x[R, H] -> y[H]", tile={"H": 16}, samples=samples, header=f"{name}.cuh", cpu=f"{name}.cuh")(reference)

@task("x[H]: float64 -> y[H]", samples=[{"H": 50}])
def computes_in_float(x: torch.Tensor) -> torch.Tensor:
    return x * x

@task("x[H]: float64 -> y[H]", samples=[{"H": 50}])
def computes_in_double(x: torch.Tensor) -> torch.Tensor:
    return x * x

@task("x[R, H] -> y[R, H]", samples=[SIZES], cpu="counts_threads.cuh")
def counts_threads(x: torch.Tensor) -> torch.Tensor:
    return (x.float() - x.float().mean(-1, keepdim=True)).to(x.dtype)

@task("x[R, R] -> y[R, R]", samples=[{"R": 4}], pattern=True)
def inverts(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(x)

@task("x[R, H] -> y[R, H]", samples=[SIZES])
def raises(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape[0], -1, 5).flatten(1)
"""

HEADER = """
#pragma once
#include "torch_mpk/device/tile.cuh"
namespace mpk::tasks::{name} {{
template <class V>
inline constexpr int kSharedBytes = {shared};
template <class V, class Threads, class T>
MPK_DEVICE void compute(Threads& threads, const typename V::Tile& tile, uint8_t* shared, const T* x, T* y) {{
{body}
}}
}}  // namespace mpk::tasks::{name}
"""

FLIP = """
  T* row = reinterpret_cast<T*>(shared);
  for (int i = threads.rank; i < V::kH; i += Threads::kSize) row[i] = x[i];
  threads.sync();
  for (int i = threads.rank; i < V::kH; i += Threads::kSize) y[i] = row[V::kH - 1 - i];
"""
SUM = """
  for (int i = threads.rank; i < tile.H.size; i += Threads::kSize) {
    float sum = 0;
    for (int r = 0; r < V::kR; r++) sum += to_float(x[r * V::X::stride(0) + i]);
    y[i] = cast<T>(sum * float(V::kScale));
  }
"""
BODIES = {
    "flips": FLIP,
    "misses_a_barrier": FLIP.replace("threads.sync();", ""),
    "reads_behind": FLIP.replace("row[i] = x[i]", "row[i] = x[i + 1] == T(7) ? T(0) : x[i]"),
    "reads_before": FLIP.replace("row[i] = x[i]", "row[i] = x[i - 1] == T(7) ? T(0) : x[i]"),
    "writes_behind": FLIP + "  if (threads.rank == 0) y[V::kH + 3] = x[0];",
    "reads_in_fours": FLIP.replace("x[i]", "x[i] + 0 * reinterpret_cast<const float4*>(x)->w"),
    "does_not_compile": FLIP.replace("threads.sync()", "threads.meet()"),
    "never_ends": FLIP + "  if (threads.rank < 40) threads.sync();",
    "sums_scaled": SUM,
    "misspells": SUM.replace("sum * ", "threads.sums(sum) * "),
    "needs_a_row": SUM.replace("sum = 0", "sum = to_float(x[i])").replace("r = 0", "r = 1"),
    "knows_no_strides": SUM.replace("V::X::stride(0)", "V::kH"),
    "ignores_scale": SUM.replace("V::kScale", "2"),
    "computes_in_float": """
  for (int i = threads.rank; i < V::kH; i += Threads::kSize) {
    const float v = to_float(x[i]);
    y[i] = v * v;
  }
""",
    "computes_in_double": "  for (int i = threads.rank; i < V::kH; i += Threads::kSize) y[i] = x[i] * x[i];",
    "counts_threads": """
  float sum = 0;
  for (int i = 0; i < V::kH; i++) sum += to_float(x[i]);
  const float mean = threads.sum(sum) / V::kH;
  for (int i = threads.rank; i < V::kH; i += Threads::kSize) y[i] = cast<T>(to_float(x[i]) - mean);
""",
}
RIGHT = ("flips", "sums_scaled", "computes_in_double")
NOT_LIFTED = "reads_before"
DIFFERS = "differs where threads run in reverse order .*does a barrier .* miss"
# Of each that is wrong: in which way, of which sample, and what is said of it.
WRONG = {
    "misses_a_barrier": ("device code with 32 threads", "", f"y {DIFFERS}"),
    "reads_behind": ("device code with 32 threads", "", "x: the code reads memory 0 bytes behind its end"),
    "reads_before": ("device code with 352 threads", "", "x: the code reads memory 4 bytes before it"),
    "writes_behind": ("device code with 32 threads", "", "y: the code writes memory 12 bytes behind its end"),
    "reads_in_fours": (
        "device code with 32 threads",
        "",
        "a GPU would trap: .* misaligned address",
    ),
    "never_ends": ("device code with 352 threads", "", "it has not ended within 8 s"),
    "needs_a_row": (r"C\+\+ on the CPU", "with zero rows", "x: the code reads memory .* bytes behind its end"),
    "knows_no_strides": ("C\\+\\+ on the CPU", "with strides", "mpk.knows_no_strides y: Tensor-likes are not close"),
    "ignores_scale": ("device code with 32 threads", "at the default attributes", "mpk.ignores_scale y: Tensor-likes"),
    "computes_in_float": ("device code with 32 threads", "", "mpk.computes_in_float y: Tensor-likes are not close"),
    "counts_threads": ("device code with 32 threads", "", "mpk.counts_threads y: Tensor-likes are not close"),
    "raises": ("reference", "with zero rows", "RuntimeError: cannot reshape tensor of 0 elements .*_to_check.py, line"),
}


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("tasks")
    flips = [name for name, body in BODIES.items() if "row[" in body]
    sums = [name for name, body in BODIES.items() if "kScale" in body or "float(2)" in body]
    lines = [f"LIFTED = 'flips', {NOT_LIFTED!r}", *(f"{name} = flipped({name!r})" for name in flips)]
    lines += [f"{name} = summed({name!r})" for name in sums]
    path = folder / "tasks_to_check.py"
    path.write_text(DECLARATIONS + "\n".join(lines))
    for name, body in BODIES.items():
        shared = "V::kH * sizeof(typename V::X::T)" if name in flips else "0"
        (folder / f"{name}.cuh").write_text(HEADER.format(name=name, body=body, shared=shared))
    sys.path.insert(0, str(folder))
    yield importlib.import_module("tasks_to_check")
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def findings(module) -> Findings:
    tasks = [getattr(module, name) for name in (*RIGHT, *WRONG)]
    with pytest.MonkeyPatch.context() as context:
        context.setenv("TORCH_MPK_COMPILER", "/nonexistent/nvcc")
        declare = references.declare_pattern
        context.setattr(references, "declare_pattern", lambda task: None if task.name == NOT_LIFTED else declare(task))
        return check_tasks(tasks, [torch.float32], seconds=8)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(findings: Findings, module, name: str) -> None:
    way, kind, what = WRONG[name]
    dtype = "float64" if name == "computes_in_float" else "float32"
    sample = rf"sample 0 {{.*}}{kind and ' '}{kind}"
    pattern = rf"(?s){module.__file__}: task {name}, {way}, {dtype}, {sample}: {what}"
    said = [failure for failure in findings.failures if f"task {name}," in failure]
    assert any(re.match(pattern, failure) for failure in said), "\n".join(said)
    assert not any("bug of torch_mpk" in failure for failure in said)


@pytest.mark.slow
def test_what_is_wrong_in_one_way_passes_in_others(findings: Findings) -> None:
    """Each bug shows where it is, and nowhere else."""
    for name in ("counts_threads", "ignores_scale"):
        assert not any(f"task {name}, C++" in failure and "with" in failure for failure in findings.failures)
    [only] = [failure for failure in findings.failures if "task never_ends" in failure]
    assert "352 threads" in only


@pytest.mark.slow
def test_what_is_right_passes(findings: Findings) -> None:
    assert not [failure for failure in findings.failures if any(f"task {name}," in failure for name in RIGHT)]


@pytest.mark.slow
def test_what_was_not_run_is_listed(findings: Findings) -> None:
    assert any("not compiled for CUDA, as there is no CUDA compiler" in line for line in findings.not_run)
    left = [line for line in findings.not_run if "task never_ends, device code with 352 threads" in line]
    assert [line.endswith("{'H': 60}: an earlier sample has not ended") for line in left] == [True]


@pytest.mark.slow
def test_a_pattern_that_is_not_taken(findings: Findings) -> None:
    [failure] = [failure for failure in findings.failures if "lifted from a model" in failure]
    assert f"task {NOT_LIFTED}, lifted from a model, float32, sample 0" in failure


def test_code_that_does_not_compile(module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_MPK_COMPILER", "/nonexistent/nvcc")
    where = "task does_not_compile, device code for sm_90 on the CPU, float32, sample 0"
    with pytest.raises(AssertionError, match=rf"{where} .*does_not_compile.cuh:\d+:\d+: error: .*meet"):
        check_task(module.does_not_compile, [torch.float32])


@pytest.mark.slow
def test_a_line_that_does_not_compile_is_told_of_once(module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_MPK_COMPILER", "/nonexistent/nvcc")
    findings = check_tasks([module.misspells], [torch.float32])
    [failure] = findings.failures
    assert re.search(
        r"task misspells, C\+\+ on the CPU, float32, sample 0 .*misspells.cuh:\d+:\d+: error: .*sums", failure
    )
    assert failure.count("error:") == 1
    way = "device code for sm_90 on the CPU"
    assert f"task misspells, {way}: not compiled, by what is among the failures" in findings.not_run


def test_why_a_model_is_not_taken(module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_MPK_COMPILER", "/nonexistent/nvcc")
    monkeypatch.setattr(references, "declare_pattern", lambda task: None)
    failures = check_tasks([module.inverts], [torch.float32]).failures
    [failure] = [failure for failure in failures if "lifted from a model" in failure]
    match = "task inverts, lifted from a model, .*: a model of the reference's operations is not taken: .*linalg_inv"
    assert re.search(match, failure)


def test_a_task_without_samples(tmp_path: Path) -> None:
    declaration = "@torch_mpk.task('x[R] -> y[R]')\ndef has_no_samples(x: torch.Tensor) -> torch.Tensor: return x + 1\n"
    (tmp_path / "no_samples.py").write_text(f"import torch, torch_mpk\n{declaration}")
    with pytest.raises(SystemExit, match="has_no_samples: there is nothing to check it with: declare samples"):
        main(["check-task", str(tmp_path / "no_samples.py")])


def test_a_file_without_tasks(tmp_path: Path) -> None:
    (tmp_path / "has_none.py").write_text("import torch\n")
    with pytest.raises(SystemExit, match="has_none.py: it declares no tasks, expected functions with @torch_mpk.task"):
        main(["check-task", str(tmp_path / "has_none.py")])


def test_checks_do_not_see_the_gpu_of_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA does not work in the child of a fork, and PyTorch saves the random state of every GPU that it sees."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def run() -> None:
        assert not torch.cuda.is_available()
        with torch.random.fork_rng(device_type="cuda"):
            torch.rand(1)

    (outcome,) = run_checks([Check(run, __file__)], seconds=60)
    assert outcome.failure is None
