"""Source to an image, compiled once for each content: CUDA here, C++ for the host in host.py."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_mpk.config import env
from torch_mpk.errors import CompileForbiddenError, KernelCompileError
from torch_mpk.jit.cache import Cache, Entry
from torch_mpk.jit.compiler import Compiled, Compiler, find_compiler
from torch_mpk.jit.headers import header_files, include_dir, users_headers
from torch_mpk.jit.report import Resources, parse_resources

logger = logging.getLogger(__name__)

_SCHEMA = 2  # of a cache entry; another number makes every earlier entry unreachable
_NUM_ERROR_LINES = 12


@dataclass(frozen=True)
class Cubin:
    image: bytes  # an ELF cubin, or PTX text: the driver loads both
    kind: str  # "cubin" or "ptx"
    key: str  # of the cache
    path: Path  # the cache entry: kernel.cu, the image, log.txt, report.json
    resources: Resources
    compiler: str  # name and version
    seconds: float  # the compiler took, whenever that was

    def describe(self) -> dict[str, Any]:
        """Everything but the image, for dumps and reports."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "image"}
        return fields | {"path": str(self.path), "resources": dataclasses.asdict(self.resources)}


def compile_cuda(source: str, arch: int, *, ptx: bool = False, compiler: Compiler | None = None) -> Cubin:
    """Compile one translation unit for a compute capability (90 is sm_90a, with wgmma and setmaxnreg; 80 is sm_80).

    ``ptx`` stops at PTX, which the driver assembles for its own, newer device. ``compiler`` is TORCH_MPK_COMPILER's
    choice by default. The result comes from the cache when the same source, headers, flags, compiler and CUDA headers
    were compiled before; modification times and paths play no part.

    Raises:
        NoCompilerError: there is none, or none that can be used.
        KernelCompileError: the source does not compile; the message has the command, the first errors and where the
            source is kept.
        CompileForbiddenError: TORCH_MPK_FORBID_COMPILE is set and the kernel is not in the cache.
        CacheError: the cache directory cannot be used.
    """
    chosen = compiler or find_compiler(env.compiler)
    arch_name = f"sm_{arch}a" if arch >= 90 and not ptx else f"sm_{arch}"
    flags = chosen.flags(arch_name, ptx)
    build = Build(
        source_name="kernel.cu",
        image_name="kernel.ptx" if ptx else "kernel.cubin",
        compiler=f"{chosen.name} {chosen.version}",
        target=arch_name,
        key=lambda: cache_key(source, flags, chosen),
        run=lambda path, image: chosen.compile(path, image, flags, [include_dir()]),
    )
    return _cubin(build_once(source, build))


def cache_key(source: str, flags: list[str], compiler: Compiler) -> str:
    """Hash of everything that decides the image. The flags carry the architecture."""
    headers = [part for name, content in (*header_files(), *users_headers(source)) for part in (name.encode(), content)]
    return hash_of(compiler.identity, *flags, *headers, source)


def hash_of(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in (str(_SCHEMA), *parts):
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Build:
    """One way from a source to an image."""

    source_name: str
    image_name: str
    compiler: str  # name and version
    target: str
    key: Callable[[], str]  # reads the files that the source includes
    run: Callable[[Path, Path], Compiled]  # source and image, in one new folder


def build_once(source: str, build: Build) -> Entry:
    """The cache's entry of a build, made if there is none: the source, the image, ``log.txt`` and ``report.json``."""
    cache = Cache(env.cache_dir, env.cache_bytes)
    while True:
        key = build.key()
        entry = cache.get(key)
        if entry is not None:
            return entry
        if env.forbid_compile:
            raise CompileForbiddenError(key=key, cache=cache.root)
        _progress(f"compiling a kernel for {build.target} with {build.compiler} (kept in {cache.root})")
        with cache.workspace() as folder:
            path, image = folder / build.source_name, folder / build.image_name
            path.write_text(source)
            start = time.perf_counter()
            compiled = build.run(path, image)
            seconds = round(time.perf_counter() - start, 3)
            (folder / "log.txt").write_text(f"{compiled.command}\n{compiled.log}")
            if not compiled.ok:
                kept = cache.keep_failed(key, folder)
                raise KernelCompileError(
                    errors=_first_errors(compiled.log), command=compiled.command, source=kept / path.name
                )
            if build.key() == key:  # else a header was edited meanwhile, and may be in the image or not
                return cache.put(key, folder, {"image": image.name, "compiler": build.compiler, "seconds": seconds})


def _first_errors(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if "error" in line.lower() or "fatal" in line.lower()), 0)
    return "\n".join(lines[first : first + _NUM_ERROR_LINES])


def _cubin(entry: Entry) -> Cubin:
    report = entry.report
    return Cubin(
        image=entry.files[report["image"]],
        kind=Path(report["image"]).suffix.removeprefix("."),
        key=entry.key,
        path=entry.path,
        resources=parse_resources(entry.files["log.txt"].decode(errors="replace")),
        compiler=report["compiler"],
        seconds=report["seconds"],
    )


def _progress(message: str) -> None:
    # A first call may take long; whoever has not set up logging should still see why.
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("torch_mpk: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    logger.info("%s", message)
