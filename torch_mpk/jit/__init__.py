"""Stage 7: source to an image, CUDA for the driver and C++ for the host; and single kernels of a user's own."""

from torch_mpk.jit.cache import Cache
from torch_mpk.jit.choice import ByDevice, by_device
from torch_mpk.jit.compile import Cubin, Library, compile_cuda
from torch_mpk.jit.compiler import Compiler
from torch_mpk.jit.find import find_compiler
from torch_mpk.jit.headers import include_dir
from torch_mpk.jit.host import compile_host, precompile_host
from torch_mpk.jit.kernels import Kernel, Module, kernel, module
from torch_mpk.jit.report import Resources

__all__ = [
    "ByDevice",
    "Cache",
    "Compiler",
    "Cubin",
    "Kernel",
    "Library",
    "Module",
    "Resources",
    "by_device",
    "compile_cuda",
    "compile_host",
    "find_compiler",
    "include_dir",
    "kernel",
    "module",
    "precompile_host",
]
