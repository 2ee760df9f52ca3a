"""nvcc as a subprocess: the compiler of choice where a CUDA toolkit is installed."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

from torch_mpk.errors import CompileError
from torch_mpk.jit.compiler import MIN_VERSION, PREPROCESS, Compiled, Compiler, first_line, preprocess, run
from torch_mpk.jit.headers import cuda_roots
from torch_mpk.jit.manifest import Reading


class Nvcc(Compiler):
    name = "nvcc"
    variables = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")

    def __init__(self, path: str, version: str) -> None:
        self.path = path
        self.version = version
        # The host compiler preprocesses, so its macros are part of the source.
        self.identity = f"nvcc {version}, {first_line(_host_compiler(), '--version')}"

    @staticmethod
    def at(path: str) -> Nvcc:
        """Raises CompileError when there is no nvcc that works and is of ``MIN_VERSION`` or newer."""
        if shutil.which(os.environ.get("NVCC_CCBIN", "g++")) is None:
            raise CompileError("nvcc needs a host compiler, and there is no g++ on PATH")
        version = _version(path)
        if tuple(map(int, version.split("."))) < MIN_VERSION:
            raise CompileError(
                f"{path} is version {version}, torch_mpk needs {'.'.join(map(str, MIN_VERSION))} or newer"
            )
        return Nvcc(path, version)

    @staticmethod
    def find() -> Nvcc:
        """The first usable one of PATH, CUDA_HOME and /usr/local/cuda. Raises CompileError, saying why, without one."""
        paths = [shutil.which("nvcc"), *(shutil.which("nvcc", path=root / "bin") for root in cuda_roots())]
        reasons = []
        for path in filter(None, paths):
            try:
                return Nvcc.at(path)
            except CompileError as error:
                reasons.append(str(error))
        raise CompileError("; ".join(reasons) or "nvcc is not on PATH, in CUDA_HOME or in /usr/local/cuda")

    def flags(self, arch: str, ptx: bool) -> list[str]:
        # -arch=sm_90a would also assemble for generic sm_90, which has neither wgmma nor setmaxnreg.
        number = arch.removeprefix("sm_")
        code = f"compute_{number}" if ptx else arch
        output = "-ptx" if ptx else "-cubin"
        gencode = f"arch=compute_{number},code={code}"
        # Relaxed: device code calls constexpr functions that the host calls too.
        return [output, "-gencode", gencode, "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas", "-v"]

    def read(self, source: Path, flags: list[str], include_dirs: list[Path]) -> Reading:
        # nvcc's own -M preprocesses for the host too, where device code need not compile.
        includes = [f"-I{path}" for path in include_dirs]
        return preprocess([self.path, *flags, *includes, "-E", f"-Xcompiler={','.join(PREPROCESS)}"], source)

    def compile(self, source: Path, output: Path, flags: list[str], include_dirs: list[Path]) -> Compiled:
        includes = [f"-I{path}" for path in include_dirs]
        command = [self.path, *flags, *includes, source.name, "-o", output.name]
        # A path relative to the build's own directory, so that the image does not depend on where it was built.
        return run(command, source.parent)


def _host_compiler() -> str:
    named = os.environ.get("NVCC_CCBIN") or "gcc"
    return os.path.join(named, "gcc") if os.path.isdir(named) else named


@functools.cache
def _version(path: str) -> str:
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        text = ""
    found = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    return found[1] if found else "0.0.0"
