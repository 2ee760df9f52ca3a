"""Runs generated kernels on the CPU: compiled by the machine's own compiler against a small emulation of CUDA's
execution model, with every thread, barrier and copy, so that no GPU is needed to see what device code computes."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import torch

from torch_mpk import _C
from torch_mpk.errors import NoCompilerError
from torch_mpk.jit import compile_host, precompile_host
from torch_mpk.jit.compile import Order as Asked
from torch_mpk.jit.headers import cuda_roots, find_cuda_headers

Order = Literal["forward", "reverse", "shuffled"]  # in which threads run to the next place where they wait

HERE = Path(__file__).parent
SMEM_BYTES = 232448
MAP_BYTES = 128
_NAME = "emulator"  # of what it compiles, in the list of the cache
# A GPU traps where an access is not aligned.
_FLAGS = ["-pthread", "-fsanitize=alignment", "-fno-sanitize-recover=alignment"]
# Threads jump from stack to stack, which glibc takes for an error where a compiler asks it to check, as Ubuntu's does.
_FLAGS += ["-U_FORTIFY_SOURCE"]
_FLAGS += ["-mfma"] if platform.machine() == "x86_64" else []


class Fault(ctypes.Structure):
    """``emulated_fault`` of emulator.cpp."""

    _fields_ = [("place", ctypes.c_void_p), *((name, ctypes.c_uint32) for name in ("cta", "is_late", "queued_ms"))]


class EmulatedKernel:
    """A schedule's kernel, number ``number`` of those in ``library``.

    State (epoch, events, tickets) lives from launch to launch.
    """

    def __init__(self, schedule: _C.Schedule, program: _C.CudaProgram, library: ctypes.CDLL, number: int = 0) -> None:
        self.schedule, self.program = schedule, program
        self.library, self.number = library, number
        self.table = aligned(len(program.table))
        self.table[:] = torch.frombuffer(bytearray(program.table), dtype=torch.uint8)
        self.control = aligned(program.control_bytes)
        self.workspace = aligned(program.workspace_bytes, 0xFF)
        self.polled = self.workspace[program.workspace_bytes - 2 * schedule.polled_bytes :].zero_()
        self.host_abort = aligned(4)
        self.maps = aligned(max(MAP_BYTES * len(program.maps), 1))
        self.fault = Fault.in_dll(library, "emulated_fault")
        self.rank, self.ranks, self.mailboxes = 0, 1, 0

    def spoil(self, phase: int, worker: int, is_late: bool = False) -> None:
        """The worker's signal at the end of the phase is lost, or comes when another worker has aborted."""
        self.fault.place = self.control.data_ptr() + _C.event_offset(phase)
        self.fault.cta, self.fault.is_late = worker, is_late

    def join(self, rank: int, mailboxes: torch.Tensor) -> None:
        """Launches exchange with those of other kernels from now on. ``mailboxes``: int64, the address of each rank's
        ``mailbox_bytes``, which are zero."""
        self._kept = mailboxes
        self.rank, self.ranks, self.mailboxes = rank, len(mailboxes), mailboxes.data_ptr()

    def repair(self) -> None:
        """Nothing is spoilt any more, and memory is as the host leaves it after an aborted launch."""
        self.fault.place, self.fault.queued_ms = None, 0
        self.control.zero_()
        self.workspace.zero_()
        self.host_abort.zero_()

    def launch(
        self,
        inputs: Sequence[torch.Tensor | int],
        outputs: Sequence[torch.Tensor | int],
        scalars: Sequence[int] = (),
        *,
        seed: int = 0,
        order: Order = "forward",
        jitter: int = 0,
        watchdog_ns: int = 0,
    ) -> None:
        """One launch. ``inputs`` and ``outputs`` are tensors on the CPU or addresses, in the order of the graph's
        buffers. Copies land, and shuffled threads run, as ``seed`` says; with ``jitter`` workers are delayed.

        Raises ValueError where an input is not aligned as the kernel needs it.
        """
        pointers = [t if isinstance(t, int) else t.data_ptr() for t in (*inputs, *outputs)]
        for pointer, alignment in zip(pointers, self.program.input_alignment):
            if pointer % alignment != 0:
                raise ValueError(f"an input at {pointer:#x} is not aligned to {alignment} bytes")
        for number, (of, offset, rows, columns, pitch, box_rows, box_columns, form) in enumerate(self.program.maps):
            base = self.workspace.data_ptr() if of == _C.workspace_index() else pointers[of]
            fields = (
                base + offset,
                rows,
                columns,
                pitch,
                box_rows,
                box_columns // (1 if form == 1 else 64),
            )  # of rows as they are
            content = struct.pack("=4Q2I", *fields)  # ptx::MatrixMap
            self.maps[MAP_BYTES * number :][: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        own = [t.data_ptr() for t in (self.table, self.workspace, self.control, self.maps, self.host_abort)]
        sizes = [*scalars, *[0] * (16 - len(scalars))]
        # LaunchParams, whose layout abi/launch.h asserts
        block = struct.pack("=5QQIHHQ16q", *own, watchdog_ns, jitter, self.rank, self.ranks, self.mailboxes, *sizes)
        block += struct.pack(f"={len(pointers)}Q", *pointers)
        program = self.program
        self.library.emulate(
            self.number, block, program.num_workers, program.num_threads, get_args(Order).index(order), seed
        )


def emulate(
    graph: _C.TBGraph,
    *,
    workers: int = 3,
    arch: int = 90,
    smem_bytes: int = SMEM_BYTES,
    fuse: bool = True,
    polled: bool = False,
    profiled: bool = False,
    racecheck: bool = False,
) -> EmulatedKernel:
    """The kernel of a task graph, compiled for this machine. Raises what ``compile_kernels`` raises."""
    schedule = _C.make_schedule(graph, _C.Target("cuda", arch, workers, smem_bytes, fuse, polled))
    return emulate_schedule(schedule, profiled=profiled, racecheck=racecheck)


def emulate_schedule(schedule: _C.Schedule, *, profiled: bool = False, racecheck: bool = False) -> EmulatedKernel:
    """The kernel of a schedule for a GPU. Raises what ``compile_kernels`` raises, and RuntimeError if it is unsound."""
    _C.validate(schedule)
    program = _C.generate_cuda(schedule, profiled)
    flags = ["-O1", *(["-DMPK_RACECHECK"] if racecheck else [])]
    return EmulatedKernel(schedule, program, compile_kernels([program.source], schedule.target.arch, flags))


def compile_kernels(sources: Sequence[str], arch: int, flags: Sequence[str], names: Sequence[str] = ()) -> ctypes.CDLL:
    """One library of all kernels, which have their places among ``sources`` as numbers. It is kept in the cache, under
    ``names`` and that of the emulator.

    Raises:
        NoCompilerError: CUDA's headers are missing.
        NoHostCompilerError, KernelCompileError, CacheError: see ``torch_mpk.jit.compile_host``.
    """
    name = "torch_mpk_kernel"
    parts = [_header(arch), *(source.replace(name, f"{name}_{number}") for number, source in enumerate(sources))]
    calls = [f"call<{name}_{n}_parts::LaunchBlock, {name}_{n}>" for n in range(len(sources))]
    parts.append(f"const emulator::Kernel emulator::kernels[] = {{{', '.join(calls)}}};")
    threads = [_threads_of_tiles(source, f"{name}_{number}_parts") for number, source in enumerate(sources)]
    parts.append(f'extern "C" EMULATOR_EXPORT const int threads_of_tiles[] = {{{", ".join(threads)}}};\n')
    header = precompile_host(
        _header(arch), include_dirs=_include_dirs(), flags=[*_FLAGS, *flags], order=Asked(names=(_NAME,))
    )
    machine = _machine()
    parsed = ["-include", str(header)] if header.exists() else []  # a very small cache has room for one of them
    library = _compile("\n".join(parts), [*flags, *parsed, str(machine)], names)
    return ctypes.CDLL(str(library), mode=os.RTLD_LOCAL)


def _machine() -> Path:
    """What runs the kernels' threads, as an object file: it takes the compiler longer than most kernels do."""
    return _compile(_header(90) + '#include "emulator.cpp"\n', ["-O2", "-c"])


def _header(arch: int) -> str:
    return f'#define EMULATED_ARCH {arch}0\n#include "emulator.h"\n'


def _compile(source: str, flags: Sequence[str], names: Sequence[str] = ()) -> Path:
    asked = Asked(names=(_NAME, *names))
    return compile_host(source, include_dirs=_include_dirs(), flags=[*_FLAGS, *flags], order=asked)


def _include_dirs() -> list[Path]:
    return [HERE, cuda_headers()]


def threads_of_tiles(library: ctypes.CDLL, number: int) -> int:
    """How many threads take a tile together in a kernel that has one tile task; 0 where it has none, or several."""
    return (ctypes.c_int * (number + 1)).in_dll(library, "threads_of_tiles")[number]


def _threads_of_tiles(source: str, namespace: str) -> str:
    jobs = re.findall(r"return run_(stream_)?tiles<(\w+)>", source)
    if len(jobs) != 1:
        return "0"
    [(streamed, tile)] = jobs
    return "32" if streamed else f"mpk::kTilesByWarp<{namespace}::{tile}> ? 32 : mpk::kConsumerThreads"


def cuda_headers() -> Path:
    """The headers of a toolkit: those that come with torch are not all that a host compiler asks for.

    Raises NoCompilerError where there are none.
    """
    found = [root / "include" for root in cuda_roots()] + [find_cuda_headers((13, 0)) or Path("cuda")]
    complete = [path for path in found if (path / "crt" / "host_defines.h").is_file()]
    if not complete:
        raise NoCompilerError(reasons=f"its headers are looked for in {', '.join(map(str, found))}")
    return complete[0]


def aligned(nbytes: int, value: int = 0) -> torch.Tensor:
    """Bytes whose address is a multiple of 256, as a device's allocations are."""
    raw = torch.full((nbytes + 256,), value, dtype=torch.uint8)
    skip = -raw.data_ptr() % 256
    return raw[skip : skip + nbytes]
