"""nvcc as a subprocess: the compiler of choice where a CUDA toolkit is installed."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from .compiler import MIN_VERSION, Compiled, Compiler, CompilerNotFound
from .headers import cuda_roots


class Nvcc(Compiler):
    name = "nvcc"

    def __init__(self, path: str, version: str) -> None:
        self.path = path
        self.version = version
        self.identity = f"nvcc {version}"  # its headers are its toolkit's

    @staticmethod
    def find() -> Nvcc:
        """Raises CompilerNotFound, saying why, when no nvcc of ``MIN_VERSION`` or newer works here."""
        if shutil.which(os.environ.get("NVCC_CCBIN", "g++")) is None:
            raise CompilerNotFound("nvcc: needs a host compiler, and there is no g++ on PATH")
        rejected = []
        for path in filter(None, [shutil.which("nvcc"), *(shutil.which("nvcc", path=r / "bin") for r in cuda_roots())]):
            version = _version(path)
            if tuple(map(int, version.split("."))) >= MIN_VERSION:
                return Nvcc(path, version)
            rejected.append(f"{path} is version {version}")
        why = "; ".join(rejected) or "not on PATH, in CUDA_HOME or in /usr/local/cuda"
        raise CompilerNotFound(f"nvcc: {why}")

    def flags(self, arch: str, ptx: bool) -> list[str]:
        # -arch=sm_90a would also assemble for generic sm_90, which has neither wgmma nor setmaxnreg.
        number = arch.removeprefix("sm_")
        code = f"compute_{number}" if ptx else arch
        output = "-ptx" if ptx else "-cubin"
        return [output, "-gencode", f"arch=compute_{number},code={code}", "-std=c++17", "-O3", "-Xptxas", "-v"]

    def compile(self, source: Path, output: Path, flags: list[str], include_dirs: list[Path]) -> Compiled:
        includes = [f"-I{path}" for path in include_dirs]
        command = [self.path, *flags, *includes, source.name, "-o", output.name]
        # A path relative to the build's own directory, so that the image does not depend on where it was built.
        done = subprocess.run(
            command, cwd=source.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        return Compiled(done.returncode == 0, shlex.join(command), done.stdout)


@functools.cache
def _version(path: str) -> str:
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        text = ""
    found = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    return found[1] if found else "0.0.0"
