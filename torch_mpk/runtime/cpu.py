"""Stage 8 on the CPU: a schedule run by persistent worker threads."""

from __future__ import annotations

import torch

from torch_mpk import _C
from torch_mpk.config import Options, env
from torch_mpk.dump import Dump


def num_threads(options: Options) -> int:
    return options.num_threads or env.num_threads or torch.get_num_threads()


def target(device: torch.device, options: Options) -> _C.Target:
    return _C.Target("cpu", num_workers=num_threads(options), fuse=False)


def load(schedule: _C.Schedule, device: torch.device, options: Options, dump: Dump) -> _C.CpuExecutable:
    return _C.CpuExecutable(schedule, num_threads(options), env.cpu_isa)


def current_stream(device: torch.device) -> int:
    return 0


def synchronize(executable: _C.CpuExecutable, device: torch.device) -> None:
    """Nothing to wait for: a run on the CPU returns when it is done."""
