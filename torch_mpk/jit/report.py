"""What the assembler says about a kernel: registers, shared memory, stack, spills and performance warnings."""

from __future__ import annotations

import re
from dataclasses import dataclass

_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_KERNEL = re.compile(r"Compiling entry function '(\S+)'")
_WARNING = re.compile(r"^.*\((C75\d\d)\).*$", re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """The worst over the functions of one image; spills are summed. All zero for PTX, which the driver assembles."""

    registers: int = 0
    shared_bytes: int = 0
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    warnings: tuple[str, ...] = ()
    """Lines with a code C75xx: the assembler dropped an optimisation (serialised wgmma, ignored setmaxnreg)."""


def parse_resources(log: str) -> Resources:
    """Read the output of ``ptxas -v``, as nvcc and NVRTC both print it."""
    frames = [tuple(map(int, frame)) for frame in _STACK.findall(log)]
    return Resources(
        registers=max(map(int, _REGISTERS.findall(log)), default=0),
        shared_bytes=max(map(int, _SHARED.findall(log)), default=0),
        stack_bytes=max((frame[0] for frame in frames), default=0),
        spill_store_bytes=sum(frame[1] for frame in frames),
        spill_load_bytes=sum(frame[2] for frame in frames),
        warnings=tuple(line.group(0).strip() for line in _WARNING.finditer(log)),
    )


def parse_kernels(log: str) -> tuple[str, ...]:
    """The symbols of the kernels that an image has."""
    return tuple(_KERNEL.findall(log))
