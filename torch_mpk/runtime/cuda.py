"""Stage 8 on CUDA: one persistent kernel."""

from __future__ import annotations

import json

import torch

from torch_mpk import _C
from torch_mpk.config import Options, env, generated_arch
from torch_mpk.dump import Dump
from torch_mpk.errors import OptionError, UnsupportedError
from torch_mpk.jit import compile_cuda
from torch_mpk.jit.compile import Cubin, Order
from torch_mpk.plan import Plan
from torch_mpk.runtime.watchdog import watchdog_seconds
from torch_mpk.timing import stage

# Of an A100 and an H200: (compute capability, multiprocessors, bytes of shared memory that a CTA may have).
ABSENT = {"sm_80": (80, 108, 166912), "sm_90a": (90, 132, 232448)}


def absent_target(arch: str, options: Options) -> _C.Target:
    """What to schedule for where such a device is not there.

    Raises:
        OptionError: there is no such architecture.
    """
    if arch not in ABSENT:
        raise OptionError(name="arch", expected=" or ".join(map(repr, ABSENT)), value=arch)
    capability, num_workers, smem_bytes = ABSENT[arch]
    return _C.Target("cuda", capability, num_workers, smem_bytes, options.fuse, True)


def target(device: torch.device, options: Options) -> _C.Target:
    """The whole device: a worker on each multiprocessor, each with all the shared memory one CTA may have.

    Raises:
        UnsupportedError: the device is too old, or the code asked for is such that it cannot run.
    """
    info = _C.device_info(device.index)
    capability = f"{info.name} has compute capability {info.arch // 10}.{info.arch % 10}"
    if info.arch < 80:
        raise UnsupportedError(f"{capability}, torch_mpk needs 8.0 or newer")
    asked = options.arch or env.arch
    if asked == 90 != info.arch:
        raise UnsupportedError(f"{capability}, and arch=90 generates code for 9.0 alone: leave the option out")
    device_arch = asked or info.arch
    arch = generated_arch(device_arch)
    return _C.Target("cuda", arch, info.num_sms, info.smem_optin_bytes, options.fuse, True, device_arch)


def compile_plan(plan: Plan, device: torch.device) -> Cubin:
    """The kernel of a plan for this device, which the cache has from then on.

    Raises:
        CompileError: see ``compile_cuda``.
    """
    assert plan.kernel is not None
    arch = plan.kernel.arch
    # A cubin runs on later devices of its generation only; for the others the driver assembles PTX.
    is_same_generation = arch // 10 == _C.device_info(device.index).arch // 10
    return compile_cuda(plan.kernel.source, arch, ptx=not is_same_generation, order=Order(names=("megakernel",)))


def load(plan: Plan, device: torch.device, options: Options, dump: Dump) -> _C.CudaExecutable:
    """Compile and load the kernel of a plan for this device; everything a launch needs is allocated.

    Raises:
        CompileError: see ``compile_cuda``.
        LaunchError: the driver cannot load the kernel.
    """
    assert plan.kernel is not None
    with stage("compile"):
        cubin = compile_plan(plan, device)
    dump.write(f"7.kernel.{cubin.kind}", cubin.image)
    dump.write("7.report.json", json.dumps(cubin.describe(), indent=2))
    with stage("load"):
        return _C.CudaExecutable(plan.kernel, cubin.image, device.index, int(1e9 * watchdog_seconds(options)))


def current_stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index)


def keep(*objects: object) -> None:
    """Nothing: what a launch that was given up has read, it reads no more."""


def check(executable: _C.CudaExecutable) -> None:
    executable.check()


def synchronize(executable: _C.CudaExecutable, device: torch.device) -> None:
    torch.cuda.synchronize(device)
    executable.check()
