"""What the environment says about compiling.

TORCH_MPK_COMPILER: auto, nvcc or nvrtc. TORCH_MPK_CACHE_DIR: where compiled kernels are kept (default
~/.cache/torch_mpk). TORCH_MPK_CACHE_GB: how much of them (default 4). TORCH_MPK_FORBID_COMPILE=1: never compile, for
production: a kernel that is not in the cache is an error.
"""

from __future__ import annotations

import os
from pathlib import Path

from .cache import Cache


def compiler() -> str:
    return os.environ.get("TORCH_MPK_COMPILER", "auto")


def forbid_compile() -> bool:
    return os.environ.get("TORCH_MPK_FORBID_COMPILE", "0") not in ("", "0")


def cache() -> Cache:
    root = os.environ.get("TORCH_MPK_CACHE_DIR") or "~/.cache/torch_mpk"
    limit = os.environ.get("TORCH_MPK_CACHE_GB", "4")
    try:
        limit_bytes = int(float(limit) * 2**30)
    except ValueError:
        raise ValueError(f"TORCH_MPK_CACHE_GB is {limit!r}: expected a number of GiB") from None
    return Cache(Path(root).expanduser(), limit_bytes)
