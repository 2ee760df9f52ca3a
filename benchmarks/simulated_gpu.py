"""The CUDA path of the backend on a machine without a GPU, up to the launch: what the host does can be measured there.

Tensors lie in host memory, kernels are generated and compiled for an H200, and the driver of ``tests/runtime_cuda``
takes launches and does nothing. After ``install`` the backend uses this module for the CPU.
"""

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from torch_mpk import _C
from torch_mpk.config import Options
from torch_mpk.dump import Dump
from torch_mpk.runtime import cuda
from torch_mpk.runtime.cuda import generate  # noqa: F401  (the backend finds it here)
from torch_mpk.runtime.device import BACKENDS
from torch_mpk.runtime.plan import Plan

sys.path.append(str(Path(__file__).parents[1] / "tests" / "runtime_cuda"))
import fake_driver

DEVICE = torch.device("cuda", 0)


def install(compile_kernels: bool) -> None:
    """Without ``compile_kernels``, kernels are generated but not compiled."""
    library = fake_driver.build(Path(tempfile.mkdtemp()))
    os.environ["TORCH_MPK_LIBCUDA"] = str(library)
    global _fake
    _fake = fake_driver.state_of(library)
    _fake.reset()
    _fake.static_shared = 0
    if not compile_kernels:
        cuda.compile_cuda = lambda *args, **kwargs: SimpleNamespace(image=b"// ptx\n", kind="ptx", describe=dict)
    BACKENDS["cpu"] = __name__


def target(device: torch.device, options: Options) -> _C.Target:
    return cuda.target(DEVICE, options)


def load(plan: Plan, device: torch.device, options: Options, dump: Dump) -> _C.CudaExecutable:
    _fake.set_pointers(len(plan.inputs) + len(plan.fresh))
    return cuda.load(plan, DEVICE, options, dump)


def current_stream(device: torch.device) -> int:
    return 0


def synchronize(executable: Any, device: torch.device) -> None:
    executable.check()
