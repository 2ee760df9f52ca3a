"""Builds torch_mpk._C, the C++ core. It needs a C++20 compiler and pybind11, but neither torch nor CUDA."""

import hashlib
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py


def pybind11_include_dir() -> Path:
    """pybind11's headers: its own package's, or those that come with torch (an offline machine may have only these)."""
    for package in ("pybind11", "torch"):
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            include_dir = Path(spec.origin).parent / "include"
            if (include_dir / "pybind11" / "pybind11.h").is_file():
                return include_dir
    raise SystemExit("pybind11 not found: pip install 'pybind11>=3.0', or build without --no-build-isolation")


def objects_dir() -> str:
    """Where objects are kept: a folder for everything that goes into them beside the files of this tree."""
    toolchain = [Path(__file__).read_bytes(), (PYBIND11 / "pybind11" / "detail" / "common.h").read_bytes()]
    flags = [os.environ.get(name, "").encode() for name in ("CXX", "CC", "CXXFLAGS", "CFLAGS", "CPPFLAGS")]
    key = hashlib.sha256(b"\0".join(toolchain + flags)).hexdigest()[:8]
    return f"build/objects-{sys.implementation.cache_tag}-{key}"


def is_current(object_file: Path) -> bool:
    """Whether an object is newer than every file of this tree that the compiler read for it."""
    depfile = object_file.with_suffix(".d")
    if not object_file.is_file() or not depfile.is_file():
        return False
    inputs = depfile.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    built = object_file.stat().st_mtime_ns
    return all(os.path.isfile(f) and os.stat(f).st_mtime_ns <= built for f in inputs)


PYBIND11 = pybind11_include_dir()


class BuildExt(build_ext):
    """Compiles the sources in parallel (MAX_JOBS, by default every core), and only those that changed."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # An editable install builds in a folder of its own each time; objects kept here make the next one quick.
        self.build_temp = objects_dir()

    def build_extensions(self) -> None:
        compile_sources = self.compiler.compile

        def compile_changed(sources, output_dir=None, **options):
            def compile_one(source: str) -> str:
                [object_file] = self.compiler.object_filenames([source], output_dir=output_dir)
                if not is_current(Path(object_file)):
                    compile_sources([source], output_dir=output_dir, **options)
                return object_file

            num_jobs = int(os.environ.get("MAX_JOBS", 0)) or os.cpu_count()
            with ThreadPoolExecutor(num_jobs) as pool:
                return list(pool.map(compile_one, sources))

        self.compiler.compile = compile_changed
        super().build_extensions()


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
                *("-std=c++20", "-O3", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden"),
                # The CPU rounds after every operation, as eager does: no contraction to fma. The other two flags only
                # drop errno and traps, which nobody reads; never -ffast-math.
                *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
                *("-isystem", str(PYBIND11)),
                "-MMD",  # leaves the list of this tree's files that went into an object
            ],
            # Where only a static libstdc++ is installed, its symbols must not mix with the shared one torch has loaded.
            extra_link_args=["-ldl", "-pthread", "-Wl,--exclude-libs,ALL"],
        )
    ],
)
