"""Kernels that are compiled outside the core against its headers are chosen, proven, emulated and right: one of
``linear``, one of runs of two linears, and one that streams rows which the launch lists. No file of the core knows
them, their fields or the last one's task. Each has a process of its own, since a kernel stays once it is loaded."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from torch_mpk import _C

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def compile_kernel(folder: Path, name: str) -> Path:
    core = Path(_C.__file__)
    library = folder / f"{name}.so"
    compiler = (sysconfig.get_config_var("CXX") or "g++").split()[0]
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
    command += [f"-I{ROOT}/csrc", f"-I{ROOT}/include", f'-D{name.upper()}_HEADER="{HERE}/{name}.cuh"']
    command += [str(HERE / f"{name}.cpp"), f"-L{core.parent}", f"-l:{core.name}", f"-Wl,-rpath,{core.parent}"]
    subprocess.run([*command, "-Wl,--no-undefined", "-o", str(library)], check=True)
    return library


def run(program: str, library: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", f"tests.kernels.{program}", str(library), *arguments]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)


def test_a_kernel_of_linear_is_chosen_proven_emulated_and_right(tmp_path: Path) -> None:
    run("run_elsewhere", compile_kernel(tmp_path, "elsewhere"), "rows_at_once=2", "turns=1")


@pytest.mark.slow
def test_a_kernel_of_runs_is_chosen_proven_emulated_and_right(tmp_path: Path) -> None:
    run("run_pair", compile_kernel(tmp_path, "pair"))


@pytest.mark.slow
def test_a_kernel_streams_rows_that_the_launch_lists(tmp_path: Path) -> None:
    run("run_listed", compile_kernel(tmp_path, "listed"))
