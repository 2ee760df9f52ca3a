"""Source to an image, compiled once for each content: CUDA here, C++ for the host in host.py."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_mpk import _C
from torch_mpk.config import env, is_int
from torch_mpk.errors import (
    ArgumentError,
    CacheError,
    CompileForbiddenError,
    KernelCompileError,
    TemporaryFolderError,
)
from torch_mpk.jit.cache import Cache, Entry
from torch_mpk.jit.compiler import Compiled, Compiler
from torch_mpk.jit.find import find_compiler
from torch_mpk.jit.headers import include_dir
from torch_mpk.jit.manifest import SEARCH_VARIABLES, Manifest, Reading, named_files, settings, split
from torch_mpk.jit.report import Resources, parse_kernels, parse_resources

logger = logging.getLogger(__name__)

_SCHEMA = 3  # of a cache entry; another number makes every earlier entry unreachable
_NUM_ERROR_LINES = 12


@dataclass(frozen=True)
class Order:
    """Who asked for a build. It plays no part in what is built."""

    names: tuple[str, ...] = ()  # of the kernels, as the cache lists them
    ahead: str = "torch_mpk.precompile for this model and inputs like these"  # what to call to have it built in time


NOBODY = Order()


@dataclass(frozen=True)
class Library:
    """A shared library of the CPU."""

    file: Path
    kind: str  # "so"
    key: str  # of the cache
    path: Path  # the cache entry: kernel.cpp, the library, log.txt, report.json
    compiler: str  # name and version
    seconds: float  # the compiler took, whenever that was


@dataclass(frozen=True)
class Cubin:
    image: bytes  # an ELF cubin, or PTX text: the driver loads both
    kind: str  # "cubin" or "ptx"
    key: str  # of the cache
    path: Path  # the cache entry: kernel.cu, the image, log.txt, report.json
    kernels: tuple[str, ...]  # their symbols; none for PTX
    resources: Resources
    compiler: str  # name and version
    seconds: float  # the compiler took, whenever that was

    def describe(self) -> dict[str, Any]:
        """Everything but the image, for dumps and reports."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "image"}
        return fields | {"path": str(self.path), "resources": dataclasses.asdict(self.resources)}


def compile_cuda(
    source: str,
    arch: int,
    *,
    ptx: bool = False,
    compiler: Compiler | None = None,
    include_dirs: Sequence[Path] = (),
    flags: Sequence[str] = (),
    order: Order = NOBODY,
) -> Cubin:
    """Compile one translation unit for a compute capability (90 is sm_90a, with wgmma and setmaxnreg; 80 is sm_80).

    ``ptx`` stops at PTX, which the driver assembles for its own, newer device. ``compiler`` is TORCH_MPK_COMPILER's
    choice by default. ``include_dirs`` are searched before our own headers, and ``flags`` come after ours; a -std among
    them takes the place of ours. ``order`` says who asks, for messages and the cache's list. The result comes from the
    cache when the same source was compiled before with the same flags and compiler, and every file that the compiler
    reads had the content it has now; modification times and where files lie play no part.

    Raises:
        ArgumentError: an argument has a wrong type.
        NoCompilerError: there is none, or none that can be used.
        KernelCompileError: the source does not compile; the message has the command, the first errors and where the
            source is kept.
        CompileForbiddenError: TORCH_MPK_FORBID_COMPILE is set and the kernel is not in the cache.
        CacheError: the cache directory cannot be used.
        TemporaryFolderError: nor can that of temporary files.
    """
    check_words(flags, include_dirs)
    if not is_int(arch):
        raise ArgumentError(name="arch", expected="an int, as 90 for sm_90a", value=repr(arch))
    chosen = compiler or find_compiler(env.compiler)
    arch_name = _C.compiled_name(arch, ptx)
    ours = chosen.flags(arch_name, ptx)
    if any("-std=" in flag for flag in flags):
        ours = [flag for flag in ours if "-std=" not in flag]
    all_flags = [*ours, *flags]
    folders = [Path(folder).resolve() for folder in (*include_dirs, include_dir())]
    added = settings(chosen.variables)
    build = Build(
        source_name="kernel.cu",
        image_name="kernel.ptx" if ptx else "kernel.cubin",
        compiler=f"{chosen.name} {chosen.version}",
        target=arch_name,
        identity=[chosen.identity, str(added), *all_flags],
        searched=[*map(str, folders), *chosen.searched(all_flags)],
        words=[*all_flags, *split(" ".join(added.values()))],
        read=lambda path: chosen.read(path, all_flags, folders),
        run=lambda path, image: chosen.compile(path, image, all_flags, folders),
    )
    return _cubin(build_once(source, build, order))


def check_words(flags: object, include_dirs: object) -> None:
    """Raises ArgumentError unless these are lists of strings, and of paths."""
    for name, given, types in (("flags", flags, (str,)), ("include_dirs", include_dirs, (str, os.PathLike))):
        if not isinstance(given, (list, tuple)) or not all(isinstance(each, types) for each in given):
            one = f"; of one word [{given!r}]" if isinstance(given, types) else ""
            what = "strings" if name == "flags" else "folders"
            raise ArgumentError(name=name, expected=f"a list of {what}{one}", value=repr(given))


def hash_of(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in (str(_SCHEMA), *parts):
        data = os.fsencode(part)
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Build:
    """One way from a source to an image. ``read`` and ``run`` get the source's path, in a folder of its own."""

    source_name: str
    image_name: str
    compiler: str  # name and version
    target: str
    identity: Sequence[str]  # what decides the image beside the content of the source and of the files that are read
    searched: Sequence[str]  # what decides which files those are, beside their content and the environment
    words: Sequence[str]  # of the command line, which may name files
    read: Callable[[Path], Reading]
    run: Callable[[Path, Path], Compiled]


def build_once(source: str, build: Build, order: Order) -> Entry:
    """The cache's entry of a build, made if there is none: the source, the image, ``log.txt`` and ``report.json``.

    Its key is a hash of everything that decides the image, the content of every file that the compiler reads among it.
    Which files those are is kept under a key of what was asked for, so that a compiler need not say it again.
    """
    cache = Cache(env.cache_dir, env.cache_bytes)
    manifests = Cache(env.cache_dir, env.cache_bytes, "manifests")
    request = hash_of("manifest", *build.identity, *build.searched, str(settings(SEARCH_VARIABLES)), source)

    def key_of(manifest: Manifest) -> str:
        return hash_of(*build.identity, source, *manifest.digests())

    known = _known_manifest(manifests, request)
    if known is not None:
        entry = cache.get(key_of(known))
        if entry is not None:
            return entry
    manifest, error = _list_files(source, build)
    while True:
        key = key_of(manifest)
        entry = cache.get(key)
        if entry is not None:
            with contextlib.suppress(CacheError):  # a cache that we may only read
                manifests.replace(request, manifest.to_json())
            return entry
        if env.forbid_compile:
            raise CompileForbiddenError(key=key, cache=cache.root, names=", ".join(order.names), ahead=order.ahead)
        what = ", ".join(order.names) or "a kernel"
        _progress(f"compiling {what} for {build.target} with {build.compiler} (kept in {cache.root})")
        with cache.workspace() as folder:
            path, image = folder / build.source_name, folder / build.image_name
            cache.write(folder, {path.name: source.encode()})
            start = time.perf_counter()
            compiled = build.run(path, image)
            seconds = round(time.perf_counter() - start, 3)
            cache.write(folder, {"log.txt": f"{compiled.command}\n{compiled.log}".encode()})
            if not compiled.ok or error:
                errors = _first_errors(compiled.log)
                if compiled.ok:
                    errors = f"the compiler does not say which files it reads:\n{_first_errors(error)}"
                kept = cache.keep_failed(key, folder)
                raise KernelCompileError(errors=errors, command=compiled.command, source=kept / path.name)
            # A file that was edited meanwhile may be in the image or not, and may have changed which others are.
            earlier, (manifest, error) = manifest, _list_files(source, build)
            if manifest == earlier and key_of(manifest) == key:
                manifests.replace(request, manifest.to_json())
                report = {"image": image.name, "target": build.target, "compiler": build.compiler, "seconds": seconds}
                return cache.put(key, folder, report | {"names": order.names})


def _list_files(source: str, build: Build) -> tuple[Manifest, str]:
    """The manifest, and what the compiler says where it cannot tell."""
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            path = Path(folder).resolve() / build.source_name
            path.write_text(source)
        except OSError as error:
            parent = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")  # none where no folder could be written to
            num_bytes, why = len(source.encode()), error.strerror
            raise TemporaryFolderError(num_bytes=num_bytes, folder=parent, why=why) from error
        reading = build.read(path)
    return Manifest.of(source, reading, named_files(build.words)), reading.error


def _known_manifest(manifests: Cache, request: str) -> Manifest | None:
    entry = manifests.get(request)
    try:
        manifest = Manifest.from_json(entry.report) if entry else None
    except (KeyError, TypeError, ValueError):  # damaged
        return None
    return manifest if manifest is not None and manifest.is_current() else None


def _first_errors(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    signs = ("error", "fatal", "undefined reference")
    first = next((i for i, line in enumerate(lines) if any(sign in line.lower() for sign in signs)), 0)
    return "\n".join(lines[first : first + _NUM_ERROR_LINES])


def _cubin(entry: Entry) -> Cubin:
    report = entry.report
    log = entry.files["log.txt"].decode(errors="replace")
    return Cubin(
        image=entry.files[report["image"]],
        kind=Path(report["image"]).suffix.removeprefix("."),
        key=entry.key,
        path=entry.path,
        kernels=parse_kernels(log),
        resources=parse_resources(log),
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
