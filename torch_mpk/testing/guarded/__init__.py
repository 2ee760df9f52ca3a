"""Runs what may read or write where it must not, crash or hang: in processes of their own, on guarded memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import signal
import struct
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

import torch

from torch_mpk.errors import MpkError, NoHostCompilerError, first_line
from torch_mpk.jit import compile_host
from torch_mpk.jit.compile import Order

_REDZONE_BYTES = 1 << 20  # beyond each end of a block: a wrong stride goes further than a page
_CRASH = struct.Struct("=iiQ")  # Crash of crash.cpp
_NUM_LINES = 12  # of what a process wrote before it ended

_child: Connection | None = None  # to the parent of this process, where it runs a check


class LeftOut(Exception):
    """Raised by a check that finds nothing to check; says why."""


@dataclass(frozen=True)
class Check:
    """Something to run. It passes unless it raises, crashes or takes too long."""

    run: Callable[[], None]
    file: str  # of whoever wrote what it runs: an exception's place there is told


@dataclass(frozen=True)
class Outcome:
    check: Check
    failure: str | None = None
    left_out: str | None = None
    overdue: bool = False


class Block:
    """Memory for a tensor like ``t``, with its values, between pages that nobody may touch.

    It ends where those behind it begin (but for ``alignment``), or begins where those before it end. What is no element
    of the tensor is 0xFF.
    """

    def __init__(self, name: str, t: torch.Tensor, alignment: int, at_end: bool) -> None:
        self.name, self._like = name, t
        extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        nbytes = extent * t.itemsize
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        alignment = max(alignment, t.itemsize)
        self._map = mmap.mmap(-1, size + 2 * _REDZONE_BYTES)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._skip = (size - nbytes) // alignment * alignment if at_end else 0
        self.address = start + _REDZONE_BYTES + self._skip
        self.place = name, start, start + len(self._map), self.address, self.address + nbytes
        for redzone in (start, start + _REDZONE_BYTES + size):
            _protect(redzone)
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if size:
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=_REDZONE_BYTES).fill_(0xFF)
        self._nbytes = nbytes
        self.tensor = self._of(self._bytes)
        self.tensor.copy_(t)
        self._before = self._bytes.clone()

    def _of(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in this block's bytes, or in a copy of them."""
        flat = memory[self._skip : self._skip + self._nbytes].view(self._like.dtype)
        return flat.as_strided(self._like.shape, self._like.stride(), flat.storage_offset())

    def check_rest(self) -> None:
        """Raises AssertionError where a byte has been written that belongs to no element."""
        after = self._bytes.clone()
        self._of(after).copy_(self._of(self._before))
        changed = (after != self._before).nonzero().flatten()
        if len(changed):
            place = self.address + int(changed[0]) - self._skip
            raise AssertionError(f"{self.name}: the code writes memory {_where(place, *self.place[-2:])}")


def _where(place: int, begin: int, end: int) -> str:
    if place >= end:
        return f"{place - end} bytes behind its end"
    return f"{begin - place} bytes before it" if place < begin else "between its elements"


def _protect(address: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(_REDZONE_BYTES), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


def announce(blocks: Sequence[Block]) -> None:
    """Lets the process that waits for this one name the block that an access goes beyond."""
    if _child is not None:
        _child.send(("blocks", [block.place for block in blocks]))


def run_in_turns(
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    alignment: Sequence[int],
    run: Callable[[int, list[Block]], None],
    turns: Sequence[str],
) -> None:
    """``run(turn, blocks)`` with the tensors in blocks, in each turn placed differently; then they have its results.

    ``turns`` say of each why its results might differ from the first's. Raises AssertionError where they do.
    """
    first: list[Block] = []
    for turn, why in enumerate(turns):
        blocks = [Block(*each, at_end=turn != 1) for each in zip(names, tensors, alignment, strict=True)]
        announce(blocks)
        run(turn, blocks)
        for block in blocks:
            block.check_rest()
        for block, before in zip(blocks, first):
            if not torch.equal(_bits(block.tensor), _bits(before.tensor)):
                raise AssertionError(f"{block.name} differs where {why}")
        first = first or blocks
    for t, block in zip(tensors, first, strict=True):
        t.copy_(block.tensor)


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().flatten().view(torch.uint8)


def run_checks(checks: Sequence[Check], seconds: float) -> Generator[Outcome, None, None]:
    """What becomes of each check, in their order. One that does not end within ``seconds`` is killed."""
    done = 0
    while done < len(checks):
        with contextlib.closing(_Process(checks[done:])) as process:
            for outcome in process.outcomes(seconds):
                done += 1
                yield outcome


@dataclass
class _Process:
    """A copy of this process that runs checks, as many as it gets to."""

    checks: Sequence[Check]
    log: IO[bytes] = field(default_factory=tempfile.TemporaryFile)

    def __post_init__(self) -> None:
        self.results, to_parent = Pipe(duplex=False)
        self.crashes, crash_end = os.pipe()
        library = _crash_library()
        with warnings.catch_warnings():
            # The child runs Python and PyTorch on its one thread, as the workers of a DataLoader do.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _run(self.checks, to_parent, crash_end, library, self.log.fileno())
        to_parent.close()
        os.close(crash_end)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.results.close()
        os.close(self.crashes)
        self.log.close()

    def outcomes(self, seconds: float) -> Iterator[Outcome]:
        """Up to that of the check which ends the process."""
        for check in self.checks:
            deadline = time.monotonic() + seconds
            blocks: list[tuple] = []
            log_begin = os.fstat(self.log.fileno()).st_size
            while True:
                if not self.results.poll(max(0, deadline - time.monotonic())):
                    failure = f"it has not ended within {seconds:g} s"
                    yield Outcome(check, failure, overdue=True)
                    return
                try:
                    kind, value = self.results.recv()
                except EOFError:
                    yield Outcome(check, self._why_it_ended(blocks, log_begin))
                    return
                if kind == "blocks":
                    blocks = value
                    continue
                yield Outcome(check, **{kind: value} if kind != "passed" else {})
                break

    def _why_it_ended(self, blocks: list[tuple], log_begin: int) -> str:
        crash = os.read(self.crashes, _CRASH.size)
        text = os.pread(self.log.fileno(), 1 << 16, log_begin).decode(errors="replace")
        said = "".join(f"\n{line}" for line in text.splitlines()[:_NUM_LINES])
        if len(crash) < _CRASH.size:
            trapped = re.search(r".*: runtime error: .*", text)  # by the compiler's sanitizer
            return f"a GPU would trap: {trapped[0]}" if trapped else f"the process ended{said}"
        number, is_write, address = _CRASH.unpack(crash)
        if number not in (signal.SIGSEGV, signal.SIGBUS):
            return f"{signal.Signals(number).name} ended the process{said}"
        verb = {0: "reads", 1: "writes"}.get(is_write, "accesses")
        for name, first, last, begin, end in blocks:
            if first <= address < last:
                return f"{name}: the code {verb} memory {_where(address, begin, end)}"
        if address < mmap.PAGESIZE:
            return f"the code {verb} memory at address {address}: the pointer of an absent operand is null"
        return f"the code {verb} memory at {address:#x}, where no operand is"


def _crash_library() -> ctypes.CDLL | None:
    """None where no compiler is there, and so no code but PyTorch's runs."""
    source = Path(__file__).with_name("crash.cpp").read_text()
    with contextlib.suppress(NoHostCompilerError):
        return ctypes.CDLL(str(compile_host(source, order=Order(names=("crash",)))))
    return None


def _run(checks: Sequence[Check], to_parent: Connection, crash_end: int, library: ctypes.CDLL | None, log: int) -> None:
    """What the child does; it does not return."""
    global _child
    try:
        for standard in (1, 2):
            os.dup2(log, standard)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
        if library is not None:
            library.tell_of_crashes(crash_end)
        torch.set_num_threads(1)  # those of its parent's pool are not here
        # Nor does its parent's CUDA work, whose random numbers PyTorch would put back after what runs on the CPU.
        torch.cuda.is_available, torch.cuda.device_count = lambda: False, lambda: 0
        _child = to_parent
        for check in checks:
            to_parent.send(_outcome(check))
    finally:
        os._exit(0)


def _outcome(check: Check) -> tuple[str, str]:
    try:
        check.run()
    except LeftOut as reason:
        return "left_out", str(reason)
    except (AssertionError, MpkError) as error:
        return "failure", str(error)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == check.file]
        return "failure", first_line(error) + (f" ({check.file}, line {lines[-1]})" if lines else "")
    return "passed", ""
