"""Every option of the backend and every ``TORCH_MPK_*`` environment variable, typed."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeGuard

from torch_mpk import _C
from torch_mpk.errors import OptionError, UnknownOptionError
from torch_mpk.warn_once import warn

WHILE_BUILDING = (None, "wait", "eager")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
FALLBACKS = ("inductor", "eager", "error")
MAX_ROWS = 16  # of a batch, and positions of one sequence that are rows of a step: attention reads the cache for each
MAX_POSITIONS = 8192
MAX_THREADS = 4095  # of the CPU runtime: csrc/cpu/thread_pool.cpp
MAX_SECONDS = 1e9  # some thirty years, and few enough to count them in nanoseconds
COMPILERS = ("auto", "nvcc", "nvrtc")
ARCHS = tuple(arch.number for arch in _C.archs())  # that kernels are generated for
# Compute capabilities that code may be for by name; other devices run what there is for all.
DEVICE_ARCHS = tuple(device for arch in _C.archs() for device in arch.devices)


_PREFIX = "TORCH_MPK_"


def closest(name: str, known: list[str], prefix: str = "") -> str:
    match = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {prefix + match[0]!r}?)" if match else ""


@dataclasses.dataclass(frozen=True)
class Options:
    """What ``torch.compile(..., backend="mpk", options={...})`` accepts."""

    fallback: Literal["inductor", "eager", "error"] | None = None
    """What runs a graph, or the part of one, that torch_mpk cannot take. "error" raises instead. What Inductor cannot
    compile runs eagerly, and so do parts of a graph with symbolic sizes. None: Inductor on CUDA, eager on the CPU and
    where TORCH_MPK_FORBID_COMPILE is set. A prefill that is not ours runs eagerly where this is None."""
    min_segment_nodes: int | None = None
    """Operations that a part of a graph needs to be ours, where others fall back; 1 keeps every part that could be.
    None: parts are ours where a call is estimated to be faster so than left whole to what ``fallback`` says.
    ``torch_mpk.explain`` has both estimates."""
    max_positions: int = MAX_POSITIONS
    """A bound on the positions of each sequence that a call may be over and still be ours, at most 8192, the default.
    Up to 16 of one sequence (1 + the draft tokens that a step of speculative decoding checks) run on every device.
    More, and several of several, are ours on the CPU and, in 16-bit dtypes, on GPUs of compute capability 9.0.

    Where the number differs from call to call, so that Dynamo makes it a symbol, calls share a build for each bucket:
    16, 32, 64 and so on up to this option, on the CPU quarters of the way between two, too. A call takes as long as its
    bucket. The first number that Dynamo sees is no symbol yet, and 1 never is: each is a build of its own, the first
    unless ``torch._dynamo.maybe_mark_dynamic(input_ids, 1)`` comes before it. Without a cache prompts share buckets as
    well (``use_cache=False``), and so do texts that an encoder reads. Each number is a build where positions meet
    elsewhere; the log says so, and a warning, where builds are made again that were dropped for others."""
    while_building: Literal["wait", "eager"] | None = None
    """What a call does while the kernel that it needs is built, some 20 seconds for a large model on a GPU. "wait": it
    waits. "eager": it runs eagerly, as do others until a thread in the background has built the kernel; a warning says
    so once. None: prompts, and texts in buckets, run eagerly, while all else, decode steps among it, waits. Steps of
    ``torch_mpk.continuous_batching`` wait where it says "wait" alone: docs/serving.md.

    When a kernel arrives, calls of its kind are the kernel's: their results may then have other bits, by rounding. Who
    wants the same bits from the first call on takes "wait". What cannot be built raises, or falls back, at the next
    call. A CUDA graph that is captured meanwhile keeps eager's kernels."""
    verify: bool | int = False
    """Compare with eager, on copies of what a call writes: True the first call, n the first and every n-th after it."""
    num_threads: int | None = None
    """Worker threads of the CPU runtime. None: TORCH_MPK_NUM_THREADS, else ``torch.get_num_threads()``."""
    watchdog_seconds: float | None = None
    """A launch without progress for so long is aborted, waiting for multiprocessors aside, and on the CPU a task's
    reference that takes longer is aborted; 0 waits forever. None: TORCH_MPK_WATCHDOG_SECONDS, else 10."""
    arch: int | None = None
    """The generation of GPUs to generate CUDA code for: 80 (8.x, and as PTX newer devices), 90 (9.0), 100 (10.x, 11.0)
    or 120 (12.x), which may be another than the device's where the device has all its instructions: an H200 runs all
    four. None: TORCH_MPK_ARCH, else the device's own."""
    profile: bool = False
    """Build kernels that note when each worker passes each phase, for ``torch_mpk.profile``. The CPU needs no other
    build for that."""
    fuse: bool = True
    """Let the scheduler fuse row and pointwise tasks into their neighbours (CUDA only; the CPU never fuses)."""
    freeze: bool = False
    """Take the addresses of weights, caches and other inputs once, and assume that they stay.

    A tensor object that a call shares with the call before is taken to be where it was. Its contents may change, and
    another object in its place (another cache, ``load_state_dict(assign=True)``) is noticed. What is not noticed is the
    same object in other memory, after ``tensor.data = other``, ``set_()``, ``resize_()`` or ``module.to()`` there and
    back: call ``torch.compiler.reset()`` before the next step, or the kernel reads and writes the old memory. Each
    compiled graph keeps the tensors of its last call alive."""

    @classmethod
    def parse(cls, mode: str | None, options: Mapping[str, Any] | None) -> Options:
        """Checks what ``torch.compile`` passes on.

        ``mode`` may be any of PyTorch's; all mean the same here, because there is one way to run a graph.

        Raises:
            OptionError: naming the option, or the ``TORCH_MPK_*`` variable, what was expected and what was given.
        """
        env.check()
        if mode is not None and mode not in MODES:
            hint = closest(str(mode), [*MODES])
            raise OptionError(name="mode", expected=f"one of {', '.join(MODES)}", value=mode, hint=hint)
        if not isinstance(options, Mapping | None):
            raise OptionError(name="options", expected="a dict of options by their names", value=options)
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options or {}:
            if name not in known:
                raise UnknownOptionError(name=name, hint=closest(str(name), known), known=", ".join(known))
        return cls(**(options or {}))

    def __post_init__(self) -> None:
        def expect(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise OptionError(name=f"option {name!r}", expected=expected, value=getattr(self, name))

        expect(
            self.fallback in (None, *FALLBACKS),
            "fallback",
            f"one of {', '.join(FALLBACKS)}{closest(str(self.fallback), [*FALLBACKS])}",
        )
        threads = self.num_threads
        expect(
            threads is None or is_int(threads) and 0 < threads <= MAX_THREADS,
            "num_threads",
            f"an int from 1 to {MAX_THREADS}",
        )
        expect(self.while_building in WHILE_BUILDING, "while_building", "wait, eager or None")
        nodes = self.min_segment_nodes
        expect(nodes is None or is_int(nodes) and nodes > 0, "min_segment_nodes", "an int > 0")
        most = self.max_positions
        expect(is_int(most) and 0 < most <= MAX_POSITIONS, "max_positions", f"an int from 1 to {MAX_POSITIONS}")
        expect(isinstance(self.verify, int) and self.verify >= 0, "verify", "True, False or an int >= 0")
        seconds = self.watchdog_seconds
        expect(
            seconds is None or is_number(seconds) and 0 <= seconds <= MAX_SECONDS,
            "watchdog_seconds",
            f"a number of seconds from 0, which waits forever, to {MAX_SECONDS:g}",
        )
        expect(
            self.arch is None or is_int(self.arch) and self.arch in ARCHS,
            "arch",
            f"{', '.join(map(str, ARCHS))} or None",
        )
        for name in ("profile", "fuse", "freeze"):
            expect(isinstance(getattr(self, name), bool), name, "True or False")


def is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[int | float]:
    return is_int(value) or isinstance(value, float)


class Environment:
    """The ``TORCH_MPK_*`` variables. Each is read when it is used, so a test or a notebook can set it late.

    Where a graph is compiled, a value that cannot be used raises ``OptionError``, and a name that is not known is a
    warning."""

    def check(self) -> None:
        """Warns of variables that nothing reads. Raises OptionError where one has a value that cannot be used."""
        for error in self.errors().values():
            raise error
        for name, hint in self.unknown().items():
            warn(f"the environment variable {name} is not known and has no effect{hint}")

    def errors(self) -> dict[str, OptionError]:
        """What is wrong with variables' values, by their names."""
        found = {}
        for variable, attribute in _variables().items():
            try:
                getattr(self, attribute)
            except OptionError as error:
                found[variable] = error
        return found

    def unknown(self) -> dict[str, str]:
        """The ``TORCH_MPK_*`` variables that are set and nothing reads, with a hint at the name that may be meant."""
        known = _variables()
        suffixes = [name.removeprefix(_PREFIX) for name in known]  # the prefix alone would make all of them alike
        return {
            name: closest(name.removeprefix(_PREFIX), suffixes, prefix=_PREFIX)
            for name in sorted(os.environ)
            if name.startswith(_PREFIX) and name not in known
        }

    @property
    def disable(self) -> bool:
        """TORCH_MPK_DISABLE=1: ``torch.compile(backend="mpk")`` runs the captured graph eagerly."""
        return self._flag("TORCH_MPK_DISABLE")

    @property
    def dump(self) -> Path | None:
        """TORCH_MPK_DUMP: folder in which each built graph leaves the artefacts of its stages, in a numbered folder."""
        return self._path("TORCH_MPK_DUMP")

    @property
    def dump_arch(self) -> str | None:
        """TORCH_MPK_DUMP_ARCH: "sm_80", "sm_90a", "sm_100a" or "sm_120a": artefacts have a folder of that name, too,
        with the schedule and the source for such a device, which need not be there."""
        value = os.environ.get("TORCH_MPK_DUMP_ARCH")
        known = [_C.compiled_name(arch.number) for arch in _C.archs()]
        if value and value not in known:
            raise OptionError(
                name="TORCH_MPK_DUMP_ARCH", expected=f"{', '.join(known)}{closest(value, known)}", value=value
            )
        return value or None

    @property
    def cache_dir(self) -> Path:
        """TORCH_MPK_CACHE_DIR: compiled kernels. Default: ``$XDG_CACHE_HOME/torch_mpk`` or ``~/.cache/torch_mpk``."""
        default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torch_mpk"
        return self._folder("TORCH_MPK_CACHE_DIR") or default

    @property
    def cache_bytes(self) -> int:
        """TORCH_MPK_CACHE_GB: how much the compiled kernels may take, in GiB. Default: 4."""
        gigabytes = self._number("TORCH_MPK_CACHE_GB", float, 0, 1e9)
        return int((4 if gigabytes is None else gigabytes) * 2**30)

    @property
    def compiler(self) -> str:
        """TORCH_MPK_COMPILER: "nvcc", the path of an nvcc, "nvrtc", or "auto": nvcc if there is one. Default: auto."""
        value = os.environ.get("TORCH_MPK_COMPILER") or "auto"
        if value not in COMPILERS and not Path(value).is_absolute():
            expected = f"{', '.join(COMPILERS)} or the absolute path of an nvcc{closest(value, [*COMPILERS])}"
            raise OptionError(name="TORCH_MPK_COMPILER", expected=expected, value=value)
        return value

    @property
    def arch(self) -> int | None:
        """TORCH_MPK_ARCH: see ``Options.arch``."""
        value = os.environ.get("TORCH_MPK_ARCH")
        if value and value not in map(str, ARCHS):
            raise OptionError(name="TORCH_MPK_ARCH", expected=_C.known_archs(), value=value)
        return int(value) if value else None

    @property
    def forbid_compile(self) -> bool:
        """TORCH_MPK_FORBID_COMPILE=1: no kernel is compiled, for machines in production. One that is not in the cache
        (``torch_mpk.precompile`` puts it there) is an error, which ``Options.fallback`` deals with."""
        return self._flag("TORCH_MPK_FORBID_COMPILE")

    @property
    def num_threads(self) -> int | None:
        """TORCH_MPK_NUM_THREADS: worker threads of the CPU runtime."""
        return self._number("TORCH_MPK_NUM_THREADS", int, 1, MAX_THREADS)

    @property
    def watchdog_seconds(self) -> float | None:
        """TORCH_MPK_WATCHDOG_SECONDS: see ``Options.watchdog_seconds``."""
        return self._number("TORCH_MPK_WATCHDOG_SECONDS", float, 0, MAX_SECONDS)

    @property
    def cpu_isa(self) -> str | None:
        """TORCH_MPK_CPU_ISA: the instruction set of the CPU runtime and of CPU kernels ("generic", "avx2", "avx512",
        "avx512_bf16", "amx"). Default: the best that this machine has."""
        value, isas = os.environ.get("TORCH_MPK_CPU_ISA"), _C.cpu_isas()
        if value and value not in isas:
            expected = f"one of {', '.join(isas)}, which this machine has"
            raise OptionError(name="TORCH_MPK_CPU_ISA", expected=expected, value=value)
        return value or None

    @property
    def libcuda(self) -> Path | None:
        """TORCH_MPK_LIBCUDA: the CUDA driver's library. Default: the system's libcuda.so.1."""
        return self._path("TORCH_MPK_LIBCUDA")

    @staticmethod
    def _flag(name: str) -> bool:
        value = os.environ.get(name, "").lower()
        if value in ("", "0", "false", "off", "no"):
            return False
        if value in ("1", "true", "on", "yes"):
            return True
        raise OptionError(name=name, expected="0 or 1", value=value)

    @staticmethod
    def _path(name: str) -> Path | None:
        value = os.environ.get(name)
        try:
            return Path(value).expanduser() if value else None
        except RuntimeError:
            expected = "a path; no home directory is known for the one that it begins with"
            raise OptionError(name=name, expected=expected, value=value) from None

    @classmethod
    def _folder(cls, name: str) -> Path | None:
        path = cls._path(name)
        if path and os.path.exists(path) and not path.is_dir():
            raise OptionError(name=name, expected="a folder, which is made where there is none", value=str(path))
        return path

    @staticmethod
    def _number(name: str, kind: type, least: int, most: float) -> Any:
        text = os.environ.get(name)
        if not text:
            return None
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            what = "an int" if kind is int else "a number"
            raise OptionError(name=name, expected=f"{what} from {least} to {most:g}", value=text)
        return value


def _variables() -> dict[str, str]:
    """The attribute of ``Environment`` for each variable, whose name its text begins with."""
    texts = {name: member.__doc__ or "" for name, member in vars(Environment).items() if isinstance(member, property)}
    return {re.split("[=:]", text)[0]: name for name, text in texts.items()}


env = Environment()
