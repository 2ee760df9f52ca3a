"""The interface of the two compilers, and the choice between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

MIN_VERSION = (12, 8)


class CompilerNotFound(RuntimeError):  # noqa: N818
    """No usable CUDA compiler on this machine; the message says what to install."""


@dataclass(frozen=True)
class Compiled:
    ok: bool
    command: str  # to repeat it by hand
    log: str


class Compiler(ABC):
    """Turns one CUDA source into one image without host code: a cubin, or PTX for the driver to assemble."""

    name: str
    version: str
    identity: str  # of compiler and CUDA headers: with equal flags and source, equal identities give equal images

    @abstractmethod
    def flags(self, arch: str, ptx: bool) -> list[str]:
        """Everything on the command line but paths. ``arch`` is ``sm_90a``, ``sm_80``, ..."""

    @abstractmethod
    def compile(self, source: Path, output: Path, flags: list[str], include_dirs: list[Path]) -> Compiled:
        """Compile ``source`` to ``output``, a file of the same directory."""


def find_compiler(name: str = "auto") -> Compiler:
    """The compiler called ``name`` (nvcc or nvrtc); for auto nvcc where there is one, because it spills less.

    Raises CompilerNotFound saying what was looked for and what to install.
    """
    from .nvcc import Nvcc
    from .nvrtc import Nvrtc

    kinds = {kind.name: kind for kind in (Nvcc, Nvrtc)}
    if name != "auto" and name not in kinds:
        raise ValueError(f"TORCH_MPK_COMPILER is {name!r}: expected auto, {' or '.join(kinds)}")
    reasons = []
    for kind in kinds.values() if name == "auto" else [kinds[name]]:
        try:
            return kind.find()
        except CompilerNotFound as error:
            reasons.append(str(error))
    raise CompilerNotFound(
        "no CUDA compiler found (" + "; ".join(reasons) + "). Install the CUDA toolkit 12.8 or newer and set CUDA_HOME, "
        "or pip install nvidia-cuda-nvrtc nvidia-cuda-runtime in the versions of your torch"
    )
