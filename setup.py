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
            # Programs round after every operation, as eager does: no contraction to fma. The other two only drop errno and
            # traps, which nobody reads; never -ffast-math.
            extra_compile_args=["-O3", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden"]
            + ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"],
            extra_link_args=["-ldl", "-pthread"],
        )
    ]
)
