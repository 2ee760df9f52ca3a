"""Builds torch_mpk._C: the C++ core. It needs neither torch nor CUDA."""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, naive_recompile
from setuptools import setup

ParallelCompile("MAX_JOBS", default=0, needs_recompile=naive_recompile).install()

setup(
    ext_modules=[
        Pybind11Extension(
            "torch_mpk._C",
            sorted(glob("csrc/**/*.cpp", recursive=True)),
            include_dirs=["include"],
            cxx_std=20,
            extra_compile_args=["-O3", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden"],
            extra_link_args=["-ldl", "-pthread"],
        )
    ]
)
