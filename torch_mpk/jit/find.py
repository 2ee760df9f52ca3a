"""The choice between CUDA compilers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch_mpk.errors import CompileError, NoCompilerError, OptionError
from torch_mpk.jit.compiler import Compiler
from torch_mpk.jit.nvcc import Nvcc
from torch_mpk.jit.nvrtc import Nvrtc


def find_compiler(name: str = "auto") -> Compiler:
    """The compiler called ``nvcc``, the path of one, ``nvrtc``, or ``auto``: nvcc if there is one, as it spills less.

    Raises:
        NoCompilerError: not found; the message says where it was looked for and what to install.
        OptionError: the name is none of these.
    """
    if Path(name).is_absolute():
        return Nvcc.at(name)
    finders: dict[str, list[Callable[[], Compiler]]] = {
        "auto": [Nvcc.find, Nvrtc.find],
        "nvcc": [Nvcc.find],
        "nvrtc": [Nvrtc.find],
    }
    if name not in finders:
        expected = "auto, nvcc, nvrtc or the absolute path of an nvcc"
        raise OptionError(name="TORCH_MPK_COMPILER", expected=expected, value=name)
    reasons = []
    for find in finders[name]:
        try:
            return find()
        except CompileError as error:
            reasons.append(str(error))
    raise NoCompilerError(reasons="; ".join(reasons))
