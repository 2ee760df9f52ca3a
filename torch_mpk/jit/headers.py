"""Finds the headers a generated kernel includes: ours, and CUDA's."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from torch_mpk.errors import InstallationError


def include_dir() -> Path:
    """The directory that holds ``torch_mpk/abi/launch.h``: in an installed package, or at the root of a source tree.

    Raises InstallationError when neither has it.
    """
    package = Path(__file__).resolve().parents[1]
    candidates = [package / "include", package.parent / "include"]
    for candidate in candidates:
        if (candidate / "torch_mpk" / "abi" / "launch.h").is_file():
            return candidate
    places = " or ".join(map(str, candidates))
    raise InstallationError(places=places)


def cuda_roots() -> list[Path]:
    """CUDA toolkits of this machine, the preferred one first; they may not exist."""
    named = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return [Path(root) for root in [*named, "/usr/local/cuda"]]


def nvidia_packages() -> list[Path]:
    """The ``nvidia`` folders of site-packages, in which the CUDA wheels that torch brings lie."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(path) for path in spec.submodule_search_locations or []] if spec else []


def cuda_version_of(include: Path) -> tuple[int, int] | None:
    """(major, minor) of the CUDA headers in a directory, or None where there are none."""
    try:
        text = (include / "cuda.h").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"^#define CUDA_VERSION (\d+)", text, re.MULTILINE)
    has_types = all((include / name).is_file() for name in ("cuda_bf16.h", "cuda_fp16.h"))
    return (int(found[1]) // 1000, int(found[1]) % 1000 // 10) if found and has_types else None


def find_cuda_headers(version: tuple[int, int]) -> Path | None:
    """The CUDA include directory nearest to a compiler's version: same release, same major, any; None without one."""
    candidates = [package / "cu13" / "include" for package in nvidia_packages()]
    candidates += [package / "cuda_runtime" / "include" for package in nvidia_packages()]
    candidates += [root / "include" for root in cuda_roots()]
    triton = importlib.util.find_spec("triton")
    if triton and triton.origin:
        candidates.append(Path(triton.origin).parent / "backends" / "nvidia" / "include")

    def distance(include: Path) -> tuple[bool, bool]:
        found = cuda_version_of(include)
        return (found != version, found is not None and found[0] != version[0])

    return min((path for path in candidates if cuda_version_of(path)), key=distance, default=None)
