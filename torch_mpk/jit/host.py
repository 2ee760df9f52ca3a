"""C++ for the CPU to a shared library, by the machine's own compiler."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_mpk import _C
from torch_mpk.config import env
from torch_mpk.errors import NoHostCompilerError, OptionError
from torch_mpk.jit.compile import Build, build_once, hash_of
from torch_mpk.jit.compiler import Compiled, run
from torch_mpk.jit.headers import include_dir

_NAMES = ("c++", "g++", "clang++")
_FLAGS = [
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden"),
    # Each operation rounds once, as eager's do, and never -ffast-math: its start-up code flushes denormals for the
    # whole process.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    # Where only a static libstdc++ is installed, its symbols must not mix with the shared one torch has loaded.
    "-Wl,--exclude-libs,ALL",
]

# Highway wants to see AES beside AVX2, which processors of these tiers need not have.
_HIGHWAY = "-DHWY_DISABLE_PCLMUL_AES"
_AVX512 = ["-march=x86-64-v4", "-mprefer-vector-width=512", _HIGHWAY]
_TIERS = {
    "generic": [],
    "avx2": ["-march=x86-64-v3", _HIGHWAY],
    "avx512": _AVX512,
    "avx512_bf16": [*_AVX512, "-mavx512bf16"],
}


def compile_host(source: str, *, include_dirs: Sequence[Path] = (), flags: Sequence[str] = ()) -> Path:
    """Compile one C++20 translation unit to a shared library, and return its path in the cache.

    ``include_dirs`` are searched before torch_mpk's own headers, and ``flags`` come after the default ones. Symbols are
    hidden unless the source exports them: ``extern "C" __attribute__((visibility("default")))``. The library comes from
    the cache when the same source, flags, compiler and content of every included file, the system's too, were compiled
    before; modification times and paths play no part. The code runs on every processor of the architecture; with
    ``flags=tier_flags()`` it may use all that this machine has.

    Raises:
        NoHostCompilerError: there is none, or CXX names one that does not run.
        KernelCompileError, CompileForbiddenError, CacheError: see ``compile_cuda``.
    """
    compiler = HostCompiler.find()
    all_flags = [*_FLAGS, *flags]
    folders = [*include_dirs, include_dir()]
    build = Build(
        source_name="kernel.cpp",
        image_name="kernel.so",
        compiler=compiler.version,
        target="the CPU",
        key=lambda: hash_of(compiler.identity(all_flags), *all_flags, *compiler.read(source, all_flags, folders)),
        run=lambda path, image: compiler.compile(path, image, all_flags, folders),
    )
    return build_once(source, build).path / build.image_name


def host_tier() -> str:
    """The instruction set that CPU kernels are compiled for: TORCH_MPK_CPU_ISA, else the best this machine has."""
    tiers = _C.cpu_isas()
    chosen = env.cpu_isa or tiers[-1]
    if chosen not in tiers:
        raise OptionError(name="TORCH_MPK_CPU_ISA", expected=f"one of {', '.join(tiers)}", value=chosen)
    return chosen


def tier_flags() -> list[str]:
    """What lets the compiler use the instructions of ``host_tier()``."""
    return _TIERS[host_tier()]


@dataclass(frozen=True)
class HostCompiler:
    command: tuple[str, ...]  # several words with CXX="ccache g++"
    version: str  # the first line it prints about itself

    @staticmethod
    def find() -> HostCompiler:
        """The one that CXX names, else the first of c++, g++ and clang++ on PATH. Raises NoHostCompilerError."""
        named = os.environ.get("CXX")
        command = shlex.split(named) if named else next(([name] for name in _NAMES if shutil.which(name)), None)
        if not command:
            raise NoHostCompilerError(reason=f"none of {', '.join(_NAMES)} is on PATH")
        version = _version(*command)
        if not version:
            raise NoHostCompilerError(reason=f"{shlex.join(command)} --version does not run")
        return HostCompiler(tuple(command), version)

    def identity(self, flags: Sequence[str]) -> str:
        """Of the compiler; with -march=native also of the processor, as a cache may be shared by several machines."""
        if not any("native" in flag for flag in flags):
            return self.version
        macros = self._run([*flags, "-x", "c++", "-E", "-dM", os.devnull])
        return self.version + macros.stdout

    def read(self, source: str, flags: Sequence[str], include_dirs: Sequence[Path]) -> list[bytes]:
        """The source and every file it includes, in the order in which the compiler finds them; the source alone where
        it cannot tell, for then it will not compile."""
        listed = self._run([*flags, *_includes(include_dirs), "-x", "c++", "-M", "-"], input=source, cwd="/")
        rule = listed.stdout.replace("\\\n", " ") if listed.returncode == 0 else ""
        names = re.findall(r"(?:\\.|\S)+", rule)[1:]  # behind the target
        paths = [Path("/", re.sub(r"\\(.)", r"\1", name).replace("$$", "$")) for name in names if name != "-"]
        return [source.encode(), *(path.read_bytes() for path in paths)]

    def compile(self, source: Path, output: Path, flags: Sequence[str], include_dirs: Sequence[Path]) -> Compiled:
        # Names relative to the build's own directory, so that the image does not depend on where it was built.
        return run([*self.command, *flags, *_includes(include_dirs), source.name, "-o", output.name], source.parent)

    def _run(self, arguments: Sequence[str], **kwargs) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.command, *arguments], capture_output=True, text=True, errors="replace", **kwargs)


def _includes(folders: Sequence[Path]) -> list[str]:
    return [f"-I{Path(folder).resolve()}" for folder in folders]


@functools.cache
def _version(*command: str) -> str:
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else ""
