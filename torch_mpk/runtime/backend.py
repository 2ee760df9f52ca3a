"""What a kind of device offers to the runtime, and who does: modules of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch

from torch_mpk import _C
from torch_mpk.builds.dump import Dump
from torch_mpk.config import Options
from torch_mpk.plan import Plan
from torch_mpk.runtime import cpu, cuda


class Executable(Protocol):
    """A plan that is loaded. Inputs and outputs are in the order of its buffers' indices."""

    def run(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], scalars: Sequence[int], stream: int
    ) -> None: ...

    def call(
        self, arguments: _C.Arguments, args: tuple[Any, ...], outputs: Sequence[torch.Tensor], stream: int
    ) -> None:
        """``run``, with inputs and sizes taken out of the arguments of the captured graph's call."""

    @property
    def ranks(self) -> int:
        """How many exchange in a launch; 1: none."""

    @property
    def is_profiled(self) -> bool:
        """Whether it records."""

    @property
    def phase_experts(self) -> list[tuple[int, int]]:
        """Of each phase, how many experts it chooses from, and the bytes of one expert's weights."""

    def start_recording(self) -> None: ...

    def stop_recording(self) -> list[bytes]:
        """``PhaseTimes[num_workers][num_phases]`` of include/torch_mpk/launch_times.h, of each launch since
        ``start_recording``, in any order. Waits for all launches."""


ExecutableT = TypeVar("ExecutableT", bound=Executable)


class Backend(Protocol[ExecutableT]):
    def target(self, device: torch.device, options: Options) -> _C.Target:
        """What to schedule for, and generate.

        Raises UnsupportedError: the device is too old, or cannot run what the options ask for.
        """

    def compile_plan(self, plan: Plan, device: torch.device) -> object:
        """Compiles what ``load`` then finds compiled. Any thread may call it."""

    def load(self, plan: Plan, device: torch.device, options: Options, dump: Dump) -> ExecutableT:
        """Compiles what is to be compiled, and allocates what every launch needs."""

    def current_stream(self, device: torch.device) -> int:
        """The handle of the stream that PyTorch works on; 0 where there are none."""

    def synchronize(self, executable: ExecutableT, device: torch.device) -> None:
        """Waits for every launch. Raises MegakernelTimeout: one was aborted."""

    def check(self, executable: ExecutableT) -> None:
        """Raises MegakernelTimeout where a launch is known to have been aborted. Waits for no other."""

    def keep(self, *objects: object) -> None:
        """Keeps what a call that was aborted may still read, for as long as it may."""


_CPU: Backend[_C.CpuExecutable] = cpu
_CUDA: Backend[_C.CudaExecutable] = cuda
BACKENDS: dict[str, Backend[Any]] = {"cpu": _CPU, "cuda": _CUDA}


def backend_of(device: torch.device) -> Backend[Any]:
    """The backend whose executables take this device's tensors. They go to no other's functions."""
    return BACKENDS[device.type]
