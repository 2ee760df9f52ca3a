"""C++ for the CPU to a shared library, by the machine's own compiler."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_mpk import _C
from torch_mpk.config import env
from torch_mpk.errors import ArgumentError, NoHostCompilerError
from torch_mpk.jit.compile import NOBODY, Build, Entry, Library, Order, build_once, check_words
from torch_mpk.jit.compiler import PREPROCESS, Compiled, first_line, preprocess, run
from torch_mpk.jit.headers import include_dir
from torch_mpk.jit.manifest import Reading, settings

_NAMES = ("c++", "g++", "clang++")
_FLAGS = [
    *("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden"),
    # Each operation rounds once, as eager's do, and never -ffast-math: its start-up code flushes denormals for the
    # whole process.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
]
_LINK = [
    "-shared",
    # Where only a static libstdc++ is installed, its symbols must not mix with the shared one torch has loaded.
    "-Wl,--exclude-libs,ALL",
]
_HEADER = ["-c", "-x", "c++-header"]

# Highway wants to see AES beside AVX2, which processors of these tiers need not have.
_HIGHWAY = "-DHWY_DISABLE_PCLMUL_AES"
_AVX512 = ["-march=x86-64-v4", "-mprefer-vector-width=512", _HIGHWAY]
_AVX512_BF16 = [*_AVX512, "-mavx512bf16"]
_TIERS = {
    "generic": [],
    "avx2": ["-march=x86-64-v3", _HIGHWAY],
    "avx512": _AVX512,
    "avx512_bf16": _AVX512_BF16,
    "amx": _AVX512_BF16,  # tiles have no word in C++
}


def compile_host(
    source: str, *, include_dirs: Sequence[Path] = (), flags: Sequence[str] = (), order: Order = NOBODY
) -> Path:
    """Compile one C++20 translation unit to a shared library, and return its path in the cache.

    ``include_dirs`` are searched before torch_mpk's own headers, and ``flags`` come after the default ones; ``order``
    says who asks, for messages and the cache's list. Symbols are
    hidden unless the source exports them: ``extern "C" __attribute__((visibility("default")))``. The library comes from
    the cache when the same source, flags, compiler and content of every file that it reads, the system's too, were
    compiled before; modification times and where files lie play no part. The code runs on every processor of the
    architecture; with ``flags=tier_flags()`` it may use all that this machine has.

    Raises:
        ArgumentError: an argument has a wrong type.
        NoHostCompilerError: there is none, or CXX names one that does not run.
        KernelCompileError, CompileForbiddenError, CacheError: see ``compile_cuda``.
    """
    return build_host(source, include_dirs, flags, order).file


def build_host(source: str, include_dirs: Sequence[Path], flags: Sequence[str], order: Order) -> Library:
    """``compile_host``, with what the cache knows of the library."""
    check_words(flags, include_dirs)
    if not isinstance(source, str):
        raise ArgumentError(name="source", expected="C++ code as a string", value=repr(source))
    name = "kernel.so"
    entry = _build(source, "kernel.cpp", name, [*_FLAGS, *_LINK, *flags], include_dirs, order)
    report = entry.report
    return Library(entry.path / name, "so", entry.key, entry.path, report["compiler"], report["seconds"])


def precompile_host(
    header: str, *, include_dirs: Sequence[Path] = (), flags: Sequence[str] = (), order: Order = NOBODY
) -> Path:
    """Parse a header once for many sources, and return its path in the cache.

    A source with the flags ``-include`` and that path begins with it. Where its other flags and ``include_dirs`` are
    the same, the compiler takes what is parsed; otherwise it parses anew. Raises what ``compile_host`` raises.
    """
    built = _build(header, "kernel.h", "kernel.h.gch", [*_FLAGS, *_HEADER, *flags], include_dirs, order)
    return built.path / "kernel.h"


def _build(
    source: str, name: str, image: str, flags: Sequence[str], include_dirs: Sequence[Path], order: Order
) -> Entry:
    compiler = HostCompiler.find()
    folders = [Path(folder).resolve() for folder in (*include_dirs, include_dir())]
    added = settings(("CCC_OVERRIDE_OPTIONS",))  # to clang's
    build = Build(
        source_name=name,
        image_name=image,
        compiler=compiler.version,
        target="the CPU",
        identity=[compiler.identity(flags), str(added), *compiler.command[1:], *flags],
        searched=[*compiler.command, *map(str, folders)],
        words=[*compiler.command, *flags],
        read=lambda path: compiler.read(path, flags, folders),
        run=lambda path, image: compiler.compile(path, image, flags, folders),
    )
    return build_once(source, build, order)


def host_tier() -> str:
    """The instruction set that CPU kernels are compiled for: TORCH_MPK_CPU_ISA, else the best this machine has."""
    return env.cpu_isa or _C.cpu_isas()[-1]


def tier_flags() -> list[str]:
    """What lets the compiler use the instructions of ``host_tier()``."""
    return _TIERS[host_tier()]


_LINKED = (".a", ".o", ".so")  # names of what is


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
        version = first_line(*command, "--version")
        if not version:
            raise NoHostCompilerError(reason=f"{shlex.join(command)} --version does not run")
        return HostCompiler(tuple(command), version)

    def identity(self, flags: Sequence[str]) -> str:
        """Of the compiler; with -march=native also of the processor, as a cache may be shared by several machines."""
        if not any("native" in flag for flag in (*self.command, *flags)):
            return self.version
        macros = [*self.command, *flags, "-x", "c++", "-E", "-dM", os.devnull]
        return self.version + subprocess.run(macros, capture_output=True, text=True, errors="replace").stdout

    def read(self, source: Path, flags: Sequence[str], include_dirs: Sequence[Path]) -> Reading:
        reading = preprocess([*self.command, *flags, *_includes(include_dirs), *PREPROCESS], source)
        # The linker says what it reads when it makes a library of nothing. What is shared it reads for names alone.
        empty = ["-x", "c++", os.devnull, "-Wl,-t", "-o", "empty.so"]
        linked = run([*self.command, *flags, *empty], source.parent).log.splitlines()
        files = [path for name in linked if (path := source.parent / name).is_file() and ".so" not in path.name]
        return Reading([*reading.files, *files], reading.folders, reading.error)

    def compile(self, source: Path, output: Path, flags: Sequence[str], include_dirs: Sequence[Path]) -> Compiled:
        # Names relative to the build's own directory, so that the image does not depend on where it was built.
        # Linkers look in a library for what stands in front of it.
        first = next((i for i, word in enumerate(flags) if word.startswith("-l") or word.endswith(_LINKED)), len(flags))
        words = [*flags[:first], *_includes(include_dirs), source.name, "-o", output.name, *flags[first:]]
        return run([*self.command, *words], source.parent)


def _includes(folders: Sequence[Path]) -> list[str]:
    return [f"-I{folder}" for folder in folders]
