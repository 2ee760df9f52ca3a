"""NVRTC through ctypes: needs neither a toolkit nor a host compiler, only the library torch's CUDA wheels bring."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch_mpk.errors import CompileError
from torch_mpk.jit.compiler import MIN_VERSION, Compiled, Compiler
from torch_mpk.jit.headers import cuda_roots, find_cuda_headers, include_dir, nvidia_packages
from torch_mpk.jit.manifest import Reading

_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")


class Nvrtc(Compiler):
    name = "nvrtc"
    variables = ("NVRTC_PREPEND_FLAGS", "NVRTC_APPEND_FLAGS")

    def __init__(self, library: ctypes.CDLL, version: str, cuda_headers: Path) -> None:
        self._library = library
        self._cuda_headers = cuda_headers
        self.version = version
        self.identity = f"nvrtc {version}"

    @staticmethod
    @functools.cache
    def find() -> Nvrtc:
        """Raises CompileError, saying why, without libnvrtc of ``MIN_VERSION`` or newer or without CUDA's headers."""
        rejected = []
        for name, library in _libraries():
            version = _version(library)
            numbers = tuple(map(int, version.split(".")))
            if numbers < MIN_VERSION:
                rejected.append(f"{name} is version {version}")
                continue
            headers = find_cuda_headers((numbers[0], numbers[1]))
            if headers is None:
                raise CompileError(
                    "for nvrtc: cuda_bf16.h and cuda_fp16.h not found in the nvidia wheels, CUDA_HOME, /usr/local/cuda "
                    "or triton (pip install nvidia-cuda-runtime brings them)"
                )
            return Nvrtc(library, version, headers)
        raise CompileError("; ".join(rejected) or "libnvrtc.so is neither in the nvidia wheels nor on the system")

    def flags(self, arch: str, ptx: bool) -> list[str]:
        target = arch.replace("sm_", "compute_") if ptx else arch
        # For the constexpr functions that host and device share.
        flags = [f"--gpu-architecture={target}", "--std=c++20", "--device-as-default-execution-space"]
        return flags if ptx else [*flags, "--ptxas-options=-v"]

    def read(self, source: Path, flags: list[str], include_dirs: list[Path]) -> Reading:
        # NVRTC has no option for it, but its front end, EDG's, has. A line behind the source ends it there.
        listed, end = source.with_name("headers.txt"), "the end of the source"
        options = self._options(flags, include_dirs)
        trace = [word for option in (f"--error_output={listed}", "--trace_includes") for word in ("-Xcudafe", option)]
        with _program(self._library, f"{source.read_text()}\n#error {end}\n", _place(source)) as program:
            program.compile([*options, *trace])
            log = program.get_text("ProgramLog").decode(errors="replace")
        text = os.fsdecode(listed.read_bytes()) if listed.is_file() else ""
        files = [path for line in text.splitlines() if (path := Path(line.lstrip(" ")).absolute()).is_file()]
        folders = [Path(path).absolute() for path in _paths(options)]
        return Reading(files, folders, "" if text and end in log else log)

    def searched(self, flags: Sequence[str]) -> list[str]:
        return [os.path.abspath(path) for path in (*_paths(flags), str(self._cuda_headers))]

    def compile(self, source: Path, output: Path, flags: list[str], include_dirs: list[Path]) -> Compiled:
        options = self._options(flags, include_dirs)
        with _program(self._library, source.read_text(), _place(source)) as program:
            ok = program.compile(options)
            if ok:
                output.write_bytes(program.get_text("PTX") if output.suffix == ".ptx" else program.get("CUBIN"))
            log = program.get_text("ProgramLog").decode(errors="replace")
        return Compiled(ok, shlex.join(["nvrtc", *options, source.name]), log)

    def _options(self, flags: list[str], include_dirs: list[Path]) -> list[str]:
        own_std = include_dir() / "torch_mpk" / "nvrtc"
        return [*flags, *(f"-I{path}" for path in [*include_dirs, own_std, self._cuda_headers])]


def _place(source: Path) -> str:
    # Headers in quotes are looked for beside the source, and a name alone would be in the process's current directory.
    return f"/{source.name}"


def _paths(flags: Sequence[str]) -> Iterator[str]:
    """Folders and files that flags name for includes; they may be relative to the process's current directory."""
    for flag, behind in zip(flags, [*flags[1:], ""]):
        found = re.fullmatch(r"(?:-I|--?include-path|--?pre-include|-include)=?(.*)", flag)
        if found:
            yield found[1] or behind


def _libraries() -> Iterator[tuple[str, ctypes.CDLL]]:
    folders = [package / name / "lib" for package in nvidia_packages() for name in ("cu13", "cuda_nvrtc")]
    folders += [root / "lib64" for root in cuda_roots()]
    for path in [folder / name for folder in folders for name in _SONAMES if (folder / name).exists()]:
        with contextlib.suppress(OSError):
            # NVRTC opens its builtins by name alone, and finds them only when they are loaded already.
            for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))
            yield str(path), ctypes.CDLL(str(path))
    for name in _SONAMES:
        with contextlib.suppress(OSError):
            yield name, ctypes.CDLL(name)


class _Program:
    """An nvrtcProgram."""

    def __init__(self, library: ctypes.CDLL, source: str, name: str) -> None:
        self._library = library
        self._handle = ctypes.c_void_p()
        self._call("CreateProgram", ctypes.byref(self._handle), source.encode(), name.encode(), 0, None, None)

    def destroy(self) -> None:
        self._call("DestroyProgram", ctypes.byref(self._handle))

    def compile(self, options: list[str]) -> bool:
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        return self._library.nvrtcCompileProgram(self._handle, len(options), array) == 0

    def get(self, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", self._handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", self._handle, buffer)
        return buffer.raw

    def get_text(self, what: str) -> bytes:
        return self.get(what).rstrip(b"\0")

    def _call(self, function: str, *args: object) -> None:
        status = getattr(self._library, f"nvrtc{function}")(*args)
        if status != 0:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"nvrtc{function} failed: {self._library.nvrtcGetErrorString(status).decode()}")


@contextlib.contextmanager
def _program(library: ctypes.CDLL, source: str, name: str) -> Iterator[_Program]:
    program = _Program(library, source, name)
    try:
        yield program
    finally:
        program.destroy()


def _version(library: ctypes.CDLL) -> str:
    """With the patch level, which nvrtcVersion does not tell but the PTX of an empty program does."""
    with _program(library, "", "version.cu") as program:
        program.compile([])
        found = re.search(rb"\bV(\d+\.\d+\.\d+)", program.get("PTX"))
    return found[1].decode() if found else "0.0.0"
