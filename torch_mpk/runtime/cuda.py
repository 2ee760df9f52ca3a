"""Stages 6 to 8 on CUDA: a schedule as one persistent kernel."""

from __future__ import annotations

import torch

from torch_mpk import _C, jit
from torch_mpk.config import Options, env
from torch_mpk.dump import Dump
from torch_mpk.errors import UnsupportedError

DEFAULT_WATCHDOG_SECONDS = 10.0


def target(device: torch.device, options: Options) -> _C.Target:
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major * 10 + properties.minor
    if capability < 80:
        raise UnsupportedError(f"{properties.name} has compute capability {capability / 10}; torch_mpk needs 8.0 or newer")
    return _C.Target(
        "cuda",
        arch=options.arch or (90 if capability == 90 else 80),
        num_workers=properties.multi_processor_count,
        smem_bytes=properties.shared_memory_per_block_optin,
        fuse=options.fuse,
    )


def load(schedule: _C.Schedule, device: torch.device, options: Options, dump: Dump) -> _C.CudaExecutable:
    program = _C.generate_cuda(schedule)
    dump.write("6.kernel.cu", program.source)
    cubin = jit.compile_cuda(program.source, schedule.target.arch)
    dump.write("7.kernel.cubin", cubin.image)
    choices = (options.watchdog_seconds, env.watchdog_seconds, DEFAULT_WATCHDOG_SECONDS)
    watchdog_ns = int(1e9 * next(seconds for seconds in choices if seconds is not None))
    return _C.CudaExecutable(program, cubin.image, device.index, watchdog_ns)


def current_stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index)


def synchronize(executable: _C.CudaExecutable, device: torch.device) -> None:
    torch.cuda.synchronize(device)
    executable.check()
