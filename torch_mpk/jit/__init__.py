"""Stage 7: CUDA source to an image the driver loads."""

from .cache import Cache, CacheError
from .compile import CompileForbiddenError, CompilerError, Cubin, compile_cuda
from .compiler import Compiler, CompilerNotFound, find_compiler
from .headers import include_dir
from .report import Resources

__all__ = [
    "Cache",
    "CacheError",
    "CompileForbiddenError",
    "Compiler",
    "CompilerError",
    "CompilerNotFound",
    "Cubin",
    "Resources",
    "compile_cuda",
    "find_compiler",
    "include_dir",
]
