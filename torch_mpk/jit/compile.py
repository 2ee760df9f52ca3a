"""CUDA source to an image the driver loads, compiled once for each content."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_mpk.config import env
from torch_mpk.errors import CompileForbiddenError, KernelCompileError
from torch_mpk.jit.cache import Cache, Entry
from torch_mpk.jit.compiler import Compiler, find_compiler
from torch_mpk.jit.headers import header_files, include_dir, users_headers
from torch_mpk.jit.report import Resources, parse_resources

logger = logging.getLogger(__name__)

_SCHEMA = 1  # of a cache entry; another number makes every earlier entry unreachable
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
    compiler = compiler or find_compiler(env.compiler)
    arch_name = f"sm_{arch}a" if arch >= 90 and not ptx else f"sm_{arch}"
    flags = compiler.flags(arch_name, ptx)
    key = cache_key(source, flags, compiler)
    cache = Cache(env.cache_dir, env.cache_bytes)
    entry = cache.get(key)
    if entry is None:
        if env.forbid_compile:
            raise CompileForbiddenError(key=key, cache=cache.root)
        _progress(f"compiling a kernel for {arch_name} with {compiler.name} {compiler.version} (kept in {cache.root})")
        entry = _build(source, key, flags, ptx, compiler, cache)
    return _cubin(entry)


def cache_key(source: str, flags: list[str], compiler: Compiler) -> str:
    """Hash of everything that decides the image. The flags carry the architecture."""
    digest = hashlib.sha256()

    def add(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)

    for text in (str(_SCHEMA), compiler.identity, *flags):
        add(text.encode())
    for name, content in (*header_files(), *users_headers(source)):
        add(name.encode())
        add(content)
    add(source.encode())
    return digest.hexdigest()


def _build(source: str, key: str, flags: list[str], ptx: bool, compiler: Compiler, cache: Cache) -> Entry:
    with cache.workspace() as folder:
        path = folder / "kernel.cu"
        path.write_text(source)
        image = folder / ("kernel.ptx" if ptx else "kernel.cubin")
        start = time.perf_counter()
        compiled = compiler.compile(path, image, flags, [include_dir()])
        seconds = time.perf_counter() - start
        (folder / "log.txt").write_text(f"{compiled.command}\n{compiled.log}")
        if not compiled.ok:
            kept = cache.keep_failed(key, folder)
            raise KernelCompileError(
                errors=_first_errors(compiled.log), command=compiled.command, source=kept / path.name
            )
        report = {
            "image": image.name,
            "compiler": f"{compiler.name} {compiler.version}",
            "seconds": round(seconds, 3),
            "resources": dataclasses.asdict(parse_resources(compiled.log)),
        }
        return cache.put(key, folder, report)


def _first_errors(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if "error" in line.lower() or "fatal" in line.lower()), 0)
    return "\n".join(lines[first : first + _NUM_ERROR_LINES])


def _cubin(entry: Entry) -> Cubin:
    report = dict(entry.report)
    resources = dict(report["resources"], warnings=tuple(report["resources"]["warnings"]))
    return Cubin(
        image=entry.files[report["image"]],
        kind=Path(report["image"]).suffix.removeprefix("."),
        key=entry.key,
        path=entry.path,
        resources=Resources(**resources),
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
