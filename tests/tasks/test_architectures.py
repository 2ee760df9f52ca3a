"""Code of tasks for one architecture is chosen by the name of its folder, or refused by it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from torch_mpk import registry
from torch_mpk.errors import KernelSignatureError, TaskError, UnsupportedError
from torch_mpk.jit import compile_cuda, kernel
from torch_mpk.testing.tasks import Calls, samples_of

DECLARATION = """
import torch
from torch_mpk import task

@task("x[R, H] -> y[R, H]", samples=[{{"R": 2, "H": 64}}])
def {name}(x: torch.Tensor) -> torch.Tensor:
    return x * 2
"""

CODE = """
#include "torch_mpk/device/tile.cuh"
namespace mpk::tasks::{name} {{
template <class V>
inline constexpr int kSharedBytes = 0;
template <class V, class Threads, class T>
MPK_DEVICE void compute(Threads& threads, const typename V::Tile& tile, uint8_t* shared, const T* x, T* y) {{
  {own}
  for (int i = threads.rank; i < V::kH; i += Threads::kSize) y[i] = cast<T>(to_float(x[i]) * 2.0f);
}}
}}
"""
OF_SM_100A = 'asm volatile("tcgen05.fence::before_thread_sync;");'  # which no other architecture's assembler takes


@pytest.fixture
def declare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A task with device code in the folders of these names; "" is beside its Python file."""
    monkeypatch.syspath_prepend(tmp_path)

    def declare(name: str, *folders: str, own: str = "") -> registry.Task:
        (tmp_path / f"{name}.py").write_text(DECLARATION.format(name=name))
        for folder in folders:
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{name}.cuh").write_text(CODE.format(name=name, own=own if folder else ""))
        return getattr(importlib.import_module(name), name)

    return declare


def program(task: registry.Task, arch: int):
    return Calls(samples_of([task], torch.float32)).program(arch)


def test_code_is_chosen_by_the_device(declare, tmp_path: Path) -> None:
    task = declare("chosen_for_test", "", "sm80", "sm100", "small")
    assert {*task.headers} == {80, 100}
    for arch, folder, compiled_for in [
        (80, "sm80/", 80),
        (86, "sm80/", 80),  # whose kernels are generated for 8.0
        (90, "", 90),
        (100, "sm100/", 100),
        (103, "sm100/", 103),  # of the same generation
        (120, "", 120),
    ]:
        made = program(task, arch)
        assert f'#include "{tmp_path}/{folder}chosen_for_test.cuh"' in made.source
        assert made.source.count("chosen_for_test.cuh") == 1
        assert made.arch == compiled_for
        assert task.header_for(arch) == f"{tmp_path}/{folder}chosen_for_test.cuh"


def test_an_architecture_without_code_is_refused_with_those_that_have_some(declare) -> None:
    task = declare("without_for_test", "sm90", "sm100")
    assert [program(task, arch).arch for arch in (90, 100)] == [90, 100]
    for arch in (80, 120):
        with pytest.raises(UnsupportedError) as caught:
            program(task, arch)
        expected = (
            f"no device code for sm_{arch}, only for sm_90, sm_100: write sm{arch}/without_for_test.cuh, or "
            "without_for_test.cuh for all others"
        )
        assert expected in str(caught.value)


@pytest.mark.parametrize("folder", ["sm95", "sm_100", "sm100a", "SM90", "compute_90"])
def test_a_folder_of_no_known_architecture_is_refused(declare, folder: str) -> None:
    name = f"unknown_{folder.lower()}_for_test"
    known = "sm80, sm86, sm87, sm88, sm89, sm90, sm100, sm103, sm110, sm120, sm121"
    with pytest.raises(TaskError, match=f"{name}.cuh is for no architecture that is known: folders .* are {known}$"):
        declare(name, "", folder)
    assert name not in [task.name for task in registry.tasks()]


def test_code_for_blackwell_may_use_what_blackwell_alone_has(declare, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(tmp_path / "cache"))
    made = program(declare("blackwell_for_test", "", "sm100", own=OF_SM_100A), 100)
    cubin = compile_cuda(made.source, made.arch)
    assert (cubin.kind, cubin.kernels) == ("cubin", ("torch_mpk_kernel",))


def test_a_kernel_is_compiled_for_an_architecture_that_is_known() -> None:
    def scaled(x): ...

    declared = kernel("\n__global__ void scaled(float* x) { *x *= 2; }", "x[1]!: float32", "scaled<<<1, 1>>>(x)")(
        scaled
    )
    with pytest.raises(KernelSignatureError, match="compile for arch=95: known are 80, 86, 87, 88, 89, 90, 100"):
        declared.compile(arch=95)
