"""Stages 6 to 8 on CUDA: a schedule as one persistent kernel."""

from __future__ import annotations

import json

import torch

from torch_mpk import _C
from torch_mpk.config import Options, env
from torch_mpk.dump import Dump
from torch_mpk.errors import UnsupportedError
from torch_mpk.jit import compile_cuda
from torch_mpk.stages import stage

DEFAULT_WATCHDOG_SECONDS = 10.0


def target(device: torch.device, options: Options) -> _C.Target:
    """The whole device: a worker on each multiprocessor, each with all the shared memory one CTA may have.

    Raises:
        UnsupportedError: the device is too old, or ``options.arch`` names code that it cannot run.
    """
    info = _C.device_info(device.index)
    capability = f"{info.name} has compute capability {info.arch // 10}.{info.arch % 10}"
    if info.arch < 80:
        raise UnsupportedError(f"{capability}, torch_mpk needs 8.0 or newer")
    if options.arch == 90 != info.arch:
        raise UnsupportedError(f"{capability}, and option arch=90 generates code for 9.0 alone: leave the option out")
    arch = options.arch or (90 if info.arch == 90 else 80)
    return _C.Target("cuda", arch, info.num_sms, info.smem_optin_bytes, options.fuse)


def load(schedule: _C.Schedule, device: torch.device, options: Options, dump: Dump) -> _C.CudaExecutable:
    """Generate, compile and load the kernel of a schedule; everything a launch needs is allocated.

    Raises:
        CompileError: see ``compile_cuda``.
        LaunchError: the driver cannot load the kernel.
        RuntimeError: a node cannot be generated.
    """
    with stage("codegen"):
        program = _C.generate_cuda(schedule)
    dump.write("6.kernel.cu", program.source)
    arch = schedule.target.arch
    # A cubin runs on later devices of its generation only; for the others the driver assembles PTX.
    is_same_generation = arch // 10 == _C.device_info(device.index).arch // 10
    with stage("jit"):
        cubin = compile_cuda(program.source, arch, ptx=not is_same_generation)
    dump.write(f"7.kernel.{cubin.kind}", cubin.image)
    dump.write("7.report.json", json.dumps(cubin.describe(), indent=2))
    with stage("runtime"):
        return _C.CudaExecutable(program, cubin.image, device.index, watchdog_ns(options))


def watchdog_ns(options: Options) -> int:
    settings = (options.watchdog_seconds, env.watchdog_seconds, DEFAULT_WATCHDOG_SECONDS)
    return int(1e9 * next(seconds for seconds in settings if seconds is not None))


def current_stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index)


def synchronize(executable: _C.CudaExecutable, device: torch.device) -> None:
    torch.cuda.synchronize(device)
    executable.check()
