"""Runs generated kernels on the CPU: compiled with g++ against a small emulation of CUDA's execution model."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from torch_mpk import _C
from torch_mpk.jit.headers import cuda_roots, find_cuda_headers
from torch_mpk.reference_vm import dtype_of, run_graph

HERE = Path(__file__).parent
INCLUDE = HERE.parents[1] / "include"
SMEM_BYTES = 232448
EVENTS_OFFSET = EVENT_BYTES = 32  # of the control block, see abi.h


class Fault(ctypes.Structure):
    """``emulated_fault`` of emulator.cpp."""

    _fields_ = [("place", ctypes.c_void_p), *((name, ctypes.c_uint32) for name in ("cta", "is_late", "queued_ms"))]


class EmulatedKernel:
    """A schedule's kernel as a shared library. State (epoch, events, tickets) lives from launch to launch."""

    def __init__(
        self,
        graph: _C.TBGraph,
        folder: Path,
        *,
        workers: int = 3,
        arch: int = 90,
        smem_bytes: int = SMEM_BYTES,
        fuse: bool = True,
        polled: bool = False,
        profiled: bool = False,
        racecheck: bool = False,
    ) -> None:
        self.schedule = _C.make_schedule(graph, _C.Target("cuda", arch, workers, smem_bytes, fuse, polled))
        _C.validate(self.schedule)
        self.program = _C.generate_cuda(self.schedule, profiled)
        source = folder / "kernel.cu"
        source.write_text(self.program.source)
        library = folder / "kernel.so"
        command = ["g++", "-std=c++20", "-O1", "-mfma", "-ffp-contract=off", "-fPIC", "-shared", "-pthread"]
        command += ["-fsanitize=alignment", "-fno-sanitize-recover=alignment"]  # a GPU traps
        command += ["-DMPK_RACECHECK"] if racecheck else []
        command += [f"-DEMULATED_ARCH={arch}0", f'-DKERNEL_SOURCE="{source}"', "-include", "emulator.h"]
        command += ["-I", str(HERE / "emulator"), "-I", str(INCLUDE), "-isystem", str(cuda_headers())]
        built = subprocess.run(
            [*command, str(HERE / "emulator" / "emulator.cpp"), "-o", str(library)], capture_output=True, text=True
        )
        assert built.returncode == 0, built.stderr
        self.library = ctypes.CDLL(str(library), mode=os.RTLD_LOCAL)
        self.table = aligned(len(self.program.table))
        self.table[:] = torch.frombuffer(bytearray(self.program.table), dtype=torch.uint8)
        self.control = aligned(self.program.control_bytes)
        self.workspace = aligned(self.program.workspace_bytes, 0xFF)
        self.polled = self.workspace[self.program.workspace_bytes - 2 * self.schedule.polled_bytes :].zero_()
        self.host_abort = aligned(4)
        self.fault = Fault.in_dll(self.library, "emulated_fault")

    def spoil(self, phase: int, worker: int, is_late: bool = False) -> None:
        """The worker's signal at the end of the phase is lost, or comes when another worker has given up."""
        self.fault.place = self.control[EVENTS_OFFSET:].data_ptr() + EVENT_BYTES * phase
        self.fault.cta, self.fault.is_late = worker, is_late

    def repair(self) -> None:
        """Nothing is spoilt any more, and memory is as the host leaves it after an aborted launch."""
        self.fault.place, self.fault.queued_ms = None, 0
        self.control.zero_()
        self.workspace.zero_()
        self.host_abort.zero_()

    def launch(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        scalars: Sequence[int] = (),
        *,
        seed: int = 0,
        jitter: int = 0,
        watchdog_ns: int = 0,
    ) -> None:
        for tensor, alignment in zip(inputs, self.program.input_alignment):
            assert tensor.data_ptr() % alignment == 0
        pointers = [t.data_ptr() for t in (self.table, self.workspace, self.control, self.host_abort)]
        sizes = [*scalars, *[0] * (16 - len(scalars))]
        block = struct.pack("=4QQII16q", *pointers, watchdog_ns, jitter, 0, *sizes)
        block += b"".join(struct.pack("=Q", t.data_ptr()) for t in [*inputs, *outputs])
        self.library.emulate(block, self.program.num_workers, self.program.num_threads, seed)


def cuda_headers() -> Path:
    """The headers of a toolkit: those that come with torch are not all that g++ asks for."""
    found = [root / "include" for root in cuda_roots()] + [find_cuda_headers((13, 0)) or Path("cuda")]
    complete = [path for path in found if (path / "crt" / "host_defines.h").is_file()]
    assert complete, f"CUDA's headers are needed to build kernels for the CPU; looked in {', '.join(map(str, found))}"
    return complete[0]


def aligned(nbytes: int, value: int = 0) -> torch.Tensor:
    """Bytes whose address is a multiple of 256, as a device's allocations are."""
    raw = torch.full((nbytes + 256,), value, dtype=torch.uint8)
    skip = -raw.data_ptr() % 256
    return raw[skip : skip + nbytes]


def tensors(graph: _C.TBGraph, kind: str) -> list[_C.Tensor]:
    """A view of every buffer of the kind, by index: the first that a node has."""
    found = {}
    for node in graph.nodes:
        for operand in node.operands:
            buffer = graph.buffers[operand.tensor.buffer]
            if buffer.kind == kind:
                found.setdefault(buffer.index, operand.tensor)
    return [found[i] for i in sorted(found)]


def allocate(t: _C.Tensor) -> torch.Tensor:
    count = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.strides))
    return aligned(count * dtype_of(t.dtype).itemsize, 0xFF).view(dtype_of(t.dtype)).as_strided(t.shape, t.strides)


def reference(graph: _C.TBGraph, inputs: Sequence[torch.Tensor], scalars: Sequence[int] = ()) -> tuple[list, list]:
    """The same call by the tasks' references, on copies: the inputs after it, and the outputs."""
    copies = [t.clone() for t in inputs]
    outputs = [allocate(t) for t in tensors(graph, "output")]
    run_graph(graph, copies, outputs, scalars)
    return copies, outputs


def decoder_inputs(graph: _C.TBGraph, limits: list[int], slot: int) -> list[torch.Tensor]:
    """Random inputs of ``decoder_graph.decoder``."""
    names = {b.index: b.name for b in graph.buffers if b.kind == "input"}
    inputs = []
    for i, t in enumerate(tensors(graph, "input")):
        x = allocate(t)
        if names[i] == "limit":
            x.copy_(torch.tensor(limits))
        elif t.dtype == "int64":
            x.fill_(slot)
        else:
            x.copy_(torch.randn(t.shape) / (t.shape[-1] ** 0.5 if "weight" in names[i] and len(t.shape) > 1 else 1))
        inputs.append(x)
    return inputs


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()
