"""Another kernel of ``linear``, compiled outside the core against its headers, is chosen, proven, emulated and right.
No file of the core knows it or its fields. Each has a process of its own, since a kernel stays once it is loaded."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from torch_mpk import _C

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def compile_kernel(folder: Path, *flags: str) -> Path:
    core = Path(_C.__file__)
    library = folder / "elsewhere.so"
    compiler = (sysconfig.get_config_var("CXX") or "g++").split()[0]
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", *flags]
    command += [f"-I{ROOT}/csrc", f"-I{ROOT}/include", f'-DELSEWHERE_HEADER="{HERE}/elsewhere.cuh"']
    command += [str(HERE / "elsewhere.cpp"), f"-L{core.parent}", f"-l:{core.name}", f"-Wl,-rpath,{core.parent}"]
    subprocess.run([*command, "-Wl,--no-undefined", "-o", str(library)], check=True)
    return library


@pytest.mark.parametrize("flags", [(), ("-DANOTHER_FIELD",)], ids=["", "with another field"])
def test_a_kernel_elsewhere_is_chosen_proven_emulated_and_right(tmp_path: Path, flags: tuple[str, ...]) -> None:
    library = compile_kernel(tmp_path, *flags)
    fields = ["rows_at_once=2", *(["turns=1"] if flags else [])]
    command = [sys.executable, "-m", "tests.kernels.run_elsewhere", str(library), *fields]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
