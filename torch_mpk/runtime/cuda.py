"""Stage 8 on CUDA: one persistent kernel."""

from __future__ import annotations

import json

import torch

from torch_mpk import _C
from torch_mpk.builds.dump import Dump
from torch_mpk.builds.timing import stage
from torch_mpk.config import ARCHS, Options, env
from torch_mpk.errors import OptionError, UnsupportedError
from torch_mpk.jit import compile_cuda
from torch_mpk.jit.compile import Cubin, Order
from torch_mpk.plan import Plan
from torch_mpk.registry import tasks
from torch_mpk.runtime.watchdog import watchdog_seconds

# Devices that a schedule may be for where they are not there: each generation's largest.
ABSENT = {_C.compiled_name(arch.number): arch for arch in _C.archs()}


def absent_target(arch: str, options: Options) -> _C.Target:
    """What to schedule for where such a device is not there.

    Raises:
        OptionError: there is no such architecture.
    """
    if arch not in ABSENT:
        raise OptionError(name="arch", expected=" or ".join(map(repr, ABSENT)), value=arch)
    absent = ABSENT[arch]
    return _C.Target("cuda", absent.number, absent.num_sms, absent.smem_bytes, options.fuse, True)


def target(device: torch.device, options: Options) -> _C.Target:
    """The whole device: a worker on each multiprocessor, each with all the shared memory one CTA may have.

    Raises:
        UnsupportedError: the device is too old, or lacks instructions of the code that is asked for.
    """
    info = _C.device_info(device.index)
    own = _C.arch_of_device(info.arch)
    capability = f"{info.name} has compute capability {_C.capability_text(info.arch)}"
    if own is None:
        raise UnsupportedError(f"{capability}, torch_mpk needs {_C.capability_text(min(ARCHS))} or newer")
    asked = options.arch or env.arch
    arch = own if asked is None else _C.arch_of(asked)
    if not _C.can_run(info.arch, arch):
        raise UnsupportedError(f"{capability}, and lacks instructions of code for arch={asked}: leave the option out")
    # Code for 8.0 that was asked for, and for a device that is not known yet, is for all devices that can run it.
    is_its_own = info.arch in own.devices and (asked is None or arch.is_compiled_by_device)
    device_arch = info.arch if is_its_own else arch.number
    return _C.Target("cuda", arch.number, info.num_sms, info.smem_optin_bytes, options.fuse, True, device_arch)


def compile_plan(plan: Plan, device: torch.device) -> Cubin:
    """The kernel of a plan for this device, which the cache has from then on.

    Raises:
        CompileError: see ``compile_cuda``.
    """
    assert plan.kernel is not None
    arch = plan.kernel.arch
    runs = _C.runs_on(arch, _C.device_info(device.index).arch)  # else the driver makes machine code of PTX
    nodes = plan.schedule.graph.nodes if plan.schedule else ()  # else the cache has had the kernel, and its names
    users = sorted({task.name for task in tasks() if not task.is_ours} & {node.task for node in nodes})
    return compile_cuda(plan.kernel.source, arch, ptx=not runs, order=Order(names=("megakernel", *users)))


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
    """Nothing: what a launch that aborted has read, it reads no more."""


def check(executable: _C.CudaExecutable) -> None:
    executable.check()


def synchronize(executable: _C.CudaExecutable, device: torch.device) -> None:
    torch.cuda.synchronize(device)
    executable.check()
