"""The interface of the CUDA compilers, and how a compiler is run."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_mpk.builds.background import ended_by
from torch_mpk.jit.manifest import Reading, parse_rule, parse_search

MIN_VERSION = (12, 8)

# Runs a compiler beside a watcher that kills their process group, itself too, at the end of standard input. That pipe
# ends with the process that holds its other end, also where a signal kills it. A signal of the kernel at a parent's end
# (PR_SET_PDEATHSIG) would not do: it comes as the thread ends that forked, and what a compiler starts gets none.
_WATCHED = """\
exec 3<&0 </dev/null
{ read -r line <&3; kill -9 0; } >/dev/null 2>&1 &
"$@" 3<&-
code=$?
kill -9 $!
wait $! 2>/dev/null
exit $code
"""

_pipes: set[int] = set()  # both ends of each compiler's


@dataclass(frozen=True)
class Compiled:
    ok: bool
    command: str  # to repeat it by hand
    log: str


def run(command: Sequence[str], folder: Path, **variables: str) -> Compiled:
    """Runs a compiler in the folder of its build, with these variables added to its environment.

    Where the caller is interrupted, the compiler and what it has started end with it: they are a process group. So they
    do where the build is dropped, in whatever thread, and where this process is killed.
    """
    process: subprocess.Popen[str] | None = None

    def kill() -> None:
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    with _pipe_of_this_process() as pipe:
        try:
            with _interrupts_held():  # else one that came before the process has a name would leave it running
                process = subprocess.Popen(
                    ["/bin/sh", "-c", _WATCHED, "sh", *command],
                    cwd=folder,
                    env=os.environ
                    | {"TMPDIR": str(folder.resolve())}
                    | variables,  # what it does not clear up goes with the folder
                    stdin=pipe,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
            with ended_by(kill):
                log, _ = process.communicate()
        except BaseException:
            if process is not None:
                with process:
                    kill()
            raise
    return Compiled(process.returncode == 0, shlex.join(command), log)


@contextlib.contextmanager
def _pipe_of_this_process() -> Iterator[int]:
    """The end to read from. Only this process holds the other."""
    reader, writer = os.pipe()
    _pipes.update((reader, writer))
    try:
        yield reader
    finally:
        for end in (reader, writer):
            _pipes.discard(end)
            os.close(end)


def _close_pipes() -> None:
    """In a forked child, which would hold them open when its parent is gone."""
    while _pipes:
        os.close(_pipes.pop())


os.register_at_fork(after_in_child=_close_pipes)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """An interrupt that comes within the block is raised behind it. Only the main thread gets any."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *args: held.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])


PREPROCESS = ("-M", "-MF", "files.d", "-v")


def preprocess(command: Sequence[str], source: Path) -> Reading:
    """What a preprocessor of GCC's kind reads, with the words of ``PREPROCESS`` among those of its command."""
    done = run([*command, source.name], source.parent, LC_ALL="C")
    listed = source.with_name("files.d")
    rule = os.fsdecode(listed.read_bytes()) if listed.is_file() else ""
    files = [source.parent / path for path in parse_rule(rule) if path != Path(source.name)]
    errors = [line for line in done.log.splitlines() if re.search(r"\b(error|fatal)\b", line)]
    told = done.ok and bool(rule)
    return Reading(files, parse_search(done.log), "" if told else "\n".join(errors) or done.log or "it lists none")


@functools.cache
def first_line(*command: str) -> str:
    """What a program says about itself; "" where it does not run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else ""


class Compiler(ABC):
    """Turns one CUDA source into one image without host code: a cubin, or PTX for the driver to assemble."""

    name: str
    version: str
    identity: str  # with equal flags, source and content of all files that are read, equal ones give equal images
    variables: tuple[str, ...] = ()  # of the environment, with words that are added to every command line

    @abstractmethod
    def flags(self, arch: str, ptx: bool) -> list[str]:
        """Everything on the command line but paths. ``arch`` is ``sm_90a``, ``sm_80``, ..."""

    @abstractmethod
    def read(self, source: Path, flags: list[str], include_dirs: list[Path]) -> Reading:
        """What it reads to compile ``source``, which is alone in its directory."""

    def searched(self, flags: Sequence[str]) -> list[str]:
        """What decides which files are found, beside the flags themselves and ``include_dirs``."""
        return []

    @abstractmethod
    def compile(self, source: Path, output: Path, flags: list[str], include_dirs: list[Path]) -> Compiled:
        """Compile ``source`` to ``output``, a file of the same directory."""
