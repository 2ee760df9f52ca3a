"""The CUDA path of the backend on a machine without a GPU, up to the launch.

Tensors lie in host memory, kernels are generated and compiled for an H200, and the fake driver takes launches and does
nothing. After ``install`` the backend uses this module where it would use the CPU's.
"""

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.runtime_cuda import fake_driver
from torch_mpk import _C
from torch_mpk.builds.dump import Dump
from torch_mpk.config import Options
from torch_mpk.plan import Plan
from torch_mpk.runtime import cuda
from torch_mpk.runtime.backend import BACKENDS
from torch_mpk.runtime.cuda import check, keep  # noqa: F401  (parts of a backend, which this module is)

DEVICE = torch.device("cuda", 0)

driver: fake_driver.Fake


def install(compile_kernels: bool = False) -> fake_driver.Fake:
    """Returns the driver's state. Without ``compile_kernels``, kernels are generated but not compiled."""
    global driver
    library = fake_driver.build(Path(tempfile.mkdtemp()))
    os.environ["TORCH_MPK_LIBCUDA"] = str(library)
    driver = fake_driver.state_of(library)
    driver.reset()
    if not compile_kernels:
        cuda.compile_cuda = not_compiled
    BACKENDS["cpu"] = sys.modules[__name__]
    return driver


def not_compiled(source: str, arch: int, **kwargs: Any) -> Any:
    return SimpleNamespace(image=b"// ptx\n", kind="ptx", describe=dict)


def target(device: torch.device, options: Options) -> _C.Target:
    return cuda.target(DEVICE, options)


def compile_plan(plan: Plan, device: torch.device) -> Any:
    return cuda.compile_plan(plan, DEVICE)


def load(plan: Plan, device: torch.device, options: Options, dump: Dump) -> _C.CudaExecutable:
    driver.set_pointers(len(plan.inputs) + len(plan.fresh))
    driver.static_shared = 0
    return cuda.load(plan, DEVICE, options, dump)


def current_stream(device: torch.device) -> int:
    return 0


def synchronize(executable: Any, device: torch.device) -> None:
    executable.check()
