"""Stage 7: CUDA source to an image the driver loads."""

from torch_mpk.jit.cache import Cache
from torch_mpk.jit.compile import Cubin, compile_cuda
from torch_mpk.jit.compiler import Compiler, find_compiler
from torch_mpk.jit.headers import include_dir
from torch_mpk.jit.report import Resources

__all__ = ["Cache", "Compiler", "Cubin", "Resources", "compile_cuda", "find_compiler", "include_dir"]
