"""Builds torch_mpk._C, the C++ core. It needs a C++20 compiler and pybind11, but neither torch nor CUDA.

setuptools makes the package and ninja compiles. scikit-build-core with CMake or meson-python would do both, but where
nothing can be downloaded there are setuptools and, with torch, pybind11's headers, and seldom these.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

# What a source that speaks of pybind11 reads first. Parsing it takes longer than most sources do, so it is done once.
PRECOMPILED = "#include <pybind11/pybind11.h>\n#include <pybind11/stl.h>\n"

NINJA = """\
builddir = {folder}
rule compile
  command = {compiler} -MD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = $in
"""


def pybind11_include_dir() -> Path:
    """pybind11's headers: its own package's, or those that come with torch (an offline machine may have only these)."""
    for package in ("pybind11", "torch"):
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            include_dir = Path(spec.origin).parent / "include"
            if (include_dir / "pybind11" / "pybind11.h").is_file():
                return include_dir
    raise SystemExit("pybind11 not found: pip install 'pybind11>=3.0', or build without --no-build-isolation")


def copy_of_pybind11(folder: Path) -> Path:
    """pybind11's headers where they stay: pip's isolated builds have them in another place, newly made, each time."""
    headers = pybind11_include_dir() / "pybind11"
    content = hashlib.sha256(b"".join(header.read_bytes() for header in sorted(headers.rglob("*.h"))))
    include_dir = folder / f"pybind11-{content.hexdigest()[:8]}"
    if not include_dir.exists():
        shutil.copytree(headers, include_dir.with_suffix(".new") / "pybind11", dirs_exist_ok=True)
        include_dir.with_suffix(".new").rename(include_dir)
    return include_dir


def options(source: str, precompiled: Path) -> list[str]:
    """The compiler's, for one source. What runs while a model is compiled, or hands over from Python, is not worth -O3,
    which takes twice as long as -O1. (GCC crashes where a header was precompiled at another level.)"""
    if "pybind11" in Path(source).read_text():
        return ["-O1", "-include", str(precompiled)]
    return ["-O1" if Path(source).parts[1] in ("graph", "schedule", "codegen") else "-O3"]


def find_ninja() -> list[str]:
    program = shutil.which("ninja")
    if program:
        return [program]
    return [sys.executable, "-m", "ninja"] if find_spec("ninja") else []


class BuildExt(build_ext):
    """Compiles in parallel (MAX_JOBS, by default every core): with ninja what has changed, without it everything."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # An editable install builds in a folder of its own each time; objects kept here make the next one quick.
        self.build_temp = f"build/{sys.implementation.cache_tag}"

    def build_extensions(self) -> None:
        # What has to be compiled ninja knows; setuptools would look at the sources alone, and at no header.
        self.force = self.compiler.force = True
        self.compiler.compile = self.compile_sources
        super().build_extensions()

    def compile_sources(self, sources, output_dir, macros, include_dirs, debug, extra_postargs, depends):
        """In place of the compiler's own: returns the objects, as it does."""
        _, objects, flags, defines, _ = self.compiler._setup_compile(
            output_dir, macros, include_dirs, sources, depends, extra_postargs
        )
        folder = Path(output_dir)
        pybind11 = copy_of_pybind11(folder)
        compiler = [*self.compiler.compiler_so_cxx, *defines, *flags, "-isystem", str(pybind11)]
        num_jobs = int(os.environ.get("MAX_JOBS", 0)) or os.cpu_count() or 1
        header = pybind11 / "precompiled.h"
        if not header.exists() or header.read_text() != PRECOMPILED:
            header.write_text(PRECOMPILED)
        flags_of = {source: options(source, header) for source in sources}
        ninja = find_ninja()
        if not ninja:
            print("ninja not found (pip install ninja): every source is compiled, whether it has changed or not")
            Path(f"{header}.gch").unlink(missing_ok=True)  # nobody knows whether it is current

            def compile_one(source: str, target: str) -> None:
                subprocess.run([*compiler, *flags_of[source], "-c", source, "-o", target], check=True)

            with ThreadPoolExecutor(num_jobs) as pool:
                list(pool.map(compile_one, sources, objects))
            return objects

        lines = [NINJA.format(folder=folder, compiler=shlex.join(compiler).replace("$", "$$"))]
        lines.append(f"build {header}.gch: compile {header}\n  flags = -O1 -x c++-header\n")
        for source, target in zip(sources, objects, strict=True):
            after = f" | {header}.gch" if str(header) in flags_of[source] else ""
            lines.append(f"build {target}: compile {source}{after}\n  flags = {shlex.join(flags_of[source])}\n")
        file = folder / "build.ninja"
        file.write_text("".join(lines))
        # Targets by name: where no source includes pybind11, nothing is precompiled.
        if subprocess.run([*ninja, "-f", str(file), "-j", str(num_jobs), *objects]).returncode:
            raise CompileError("ninja has failed; what the compiler said stands above")
        return objects


class BuildPy(build_py):
    """Puts the headers, which generated kernels include, into the package. An editable install reads them in place."""

    def run(self) -> None:
        package = Path(self.build_lib, "torch_mpk")
        if not self.editable_mode:
            shutil.rmtree(
                package, ignore_errors=True
            )  # an earlier build may have left files that are gone from the tree
        super().run()
        if not self.editable_mode:
            shutil.copytree("include", package / "include")


setup(
    license="Apache-2.0",  # here because pyproject.toml spells it differently before and after setuptools 77
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
    ext_modules=[
        Extension(
            "torch_mpk._C",
            sorted(glob("csrc/**/*.cpp", recursive=True)),
            include_dirs=["include"],
            language="c++",
            extra_compile_args=[
                *("-std=c++20", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden"),
                # The CPU rounds after every operation, as eager does: no contraction to fma. The other two flags only
                # drop errno and traps, which nobody reads; never -ffast-math.
                *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
            ],
            # Where only a static libstdc++ is installed, its symbols must not mix with the shared one torch has loaded.
            extra_link_args=["-ldl", "-pthread", "-Wl,--exclude-libs,ALL"],
        )
    ],
)
