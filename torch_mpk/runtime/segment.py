"""One segment with its executable, and the callable that launches it."""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import _profiler_enabled as is_profiling
from torch.profiler import record_function

from torch_mpk import _C
from torch_mpk.builds import background, timing
from torch_mpk.builds.background import Job
from torch_mpk.builds.dump import Dump
from torch_mpk.config import Options
from torch_mpk.errors import (
    CompileError,
    IndexRangeError,
    MegakernelTimeout,
    MpkError,
    SharedMemoryError,
    UnsupportedError,
)
from torch_mpk.plan import Output, Plan
from torch_mpk.runtime.backend import Backend, Executable, backend_of
from torch_mpk.runtime.overlaps import Memory
from torch_mpk.runtime.ranks import RankedExecutable
from torch_mpk.runtime.watchdog import watchdog_seconds


def decline_none(error: MpkError) -> None:
    """Every call must be the executable's."""
    raise error


class _Thread(threading.local):
    """What a thread is at."""

    launched: set[CompiledSegment] | None = None  # see launched_segments
    ahead: list[CompiledSegment] | None = None  # see compiling_ahead


_thread = _Thread()


@contextlib.contextmanager
def compiling_ahead(waits: bool = True) -> Iterator[list[CompiledSegment]]:
    """For calls that are made to have their segments built: inside, compilers run beside each other, and calls give
    zeros and change nothing. It ends when all compilers have, unless it does not wait.

    Gives what this thread builds inside. Without a kernel, calls of it fall back.
    """
    segments: list[CompiledSegment] = []
    _thread.ahead = segments
    try:
        yield segments
        _thread.ahead = None
        for segment in segments if waits else ():
            segment.wait()
    except BaseException:
        for segment in segments:
            segment.drop()
        raise
    finally:
        _thread.ahead = None


def is_compiling_ahead() -> bool:
    return _thread.ahead is not None


class CompiledSegment:
    """A segment of a captured graph as an executable. It holds no tensor: several callables may share it."""

    def __init__(self, plan: Plan, device: torch.device, options: Options, dump: Dump, name: str = "whole") -> None:
        self.plan, self.device, self.name = plan, device, name
        self._backend = backend = backend_of(device)
        self._load = functools.partial(_loaded, backend, plan, device, options, dump)
        self._job: Job[Executable] | None = None  # that compiles and loads it beside others
        if _thread.ahead is None:
            self.executable = self._load()
        else:
            self._job = background.compile_beside(timing.later(self._load), owner=self)
            _thread.ahead.append(self)
        _live.add(self)
        dump.write("8.launch.json", lambda: json.dumps({"device": str(device)} | plan.describe(), indent=2))

    @property
    def is_compiled(self) -> bool:
        """Whether a call would wait for no compiler, or for one of its own."""
        return self._job is None or self._job.is_done or self._job.is_lost

    def when_compiled(self, follow: Callable[[], None]) -> None:
        """Has ``follow`` called, by whatever thread, once no call would wait for the compiler of others."""
        if self._job is None or self._job.is_lost:
            follow()
        else:
            self._job.then(follow)

    def wait(self) -> None:
        """For its compiler."""
        if self._job is not None:
            self._job.wait()

    def drop(self) -> None:
        """Ends its compiler."""
        if self._job is not None and not self._job.is_done:
            self._job.drop()

    @functools.cached_property
    def executable(self) -> Executable:
        """Loaded here where nobody did it beside others."""
        self.wait()
        if self._job is not None and self._job.is_done:
            return self._job.result()
        executable: Executable = self._load()
        return executable

    def _load_ahead(self) -> Callable[..., None]:
        """What launches a segment that was built ahead, or raises why there is nothing to launch."""
        try:
            return self.executable.call
        except CompileError as error:
            reason = error  # which outlives the clause

            def refuse(*args: Any) -> None:
                raise reason

            return refuse

    @property
    def _is_loaded(self) -> bool:
        return "executable" in self.__dict__

    def synchronize(self) -> None:
        if self._is_loaded:
            self._backend.synchronize(self.executable, self.device)

    def check(self) -> None:
        """Raises MegakernelTimeout where a launch was aborted, as far as is known. Waits for no other launch."""
        if self._is_loaded:
            self._backend.check(self.executable)

    def callable(
        self,
        eager: Callable[..., Any],
        freeze: bool = False,
        memory: Sequence[Memory] = (),
        decline: Callable[[MpkError], None] = decline_none,
    ) -> Callable[..., Any]:
        """What runs the segment on the arguments of its graph, or ``eager`` where the executable cannot take them.

        Outputs are new tensors at every call. There is no Python work for each argument: the executable itself asks the
        tensors for their addresses.

        Args:
            eager: takes the same arguments.
            freeze: see ``Options``.
            memory: that of each argument, to be checked for overlaps at each call; empty where there can be none.
            decline: is given the error of a call that is about to be ``eager``'s, which it announces or raises.
        """
        launch = self.executable.call if self._is_loaded else None
        stream, keep = functools.partial(self._backend.current_stream, self.device), self._backend.keep
        plan = self.plan
        arguments = _C.Arguments(plan.inputs, plan.scalars, freeze, [memory[i] for i in plan.inputs] if memory else [])
        pick_written = _picker(plan.written)
        allocate = [
            functools.partial(torch.empty_strided, buffer.shape, buffer.stride, dtype=buffer.dtype, device=self.device)
            for buffer in plan.fresh
        ]
        results = [self._result(output) for output in plan.outputs]
        fresh_only = [output.index for output in plan.outputs] == list(range(len(plan.fresh))) and all(
            output.kind == "output" and (output.shape, output.stride, output.offset) == (buffer.shape, buffer.stride, 0)
            for output, buffer in zip(plan.outputs, plan.fresh, strict=True)
        )

        def results_of(args: tuple[Any, ...], fresh: list[torch.Tensor]) -> list[Any]:
            return fresh if fresh_only else [result(args, fresh) for result in results]

        increment_version, is_inference = torch.autograd.graph.increment_version, torch.Tensor.is_inference
        is_inference_mode = torch.is_inference_mode_enabled

        def run(args: tuple[Any, ...]) -> Any:
            nonlocal launch
            written = pick_written(args)
            if not is_inference_mode() and any(map(is_inference, written)):
                return eager(*args)  # which raises: such tensors may change in inference mode only
            fresh = [make() for make in allocate]
            if _thread.ahead is not None:
                return results_of(args, [each.zero_() for each in fresh])
            if _thread.launched is not None:
                _thread.launched.add(self)
            if launch is None:
                launch = self._load_ahead()
            try:
                launch(arguments, args, fresh, stream())
            except (ValueError, SharedMemoryError, CompileError) as error:
                # Nothing was launched: tensors overlap, or an address is null, or not aligned as the kernel needs; or
                # there is no kernel.
                decline(error if isinstance(error, MpkError) else UnsupportedError(str(error)))
                return eager(*args)
            except IndexError as error:
                raise IndexRangeError(str(error)) from None
            except (MegakernelTimeout, KeyboardInterrupt):
                keep(self, args, fresh)
                raise
            except RuntimeError:  # an integer was divided by zero, in a launch that has run
                increment_version(written)
                raise
            increment_version(written)
            return results_of(args, fresh)

        label = f"mpk segment {self.name}"

        def call(*args: Any) -> Any:
            if is_profiling():  # which costs a fifth of what an idle record_function does
                with record_function(label):
                    return run(args)
            return run(args)

        return call

    def _result(self, output: Output) -> Callable[[tuple[Any, ...], list[torch.Tensor]], Any]:
        """How to make one result from the call's arguments and the buffers that were allocated for it."""
        if output.kind == "value":
            return lambda args, fresh: output.value
        if output.kind == "scalar":
            position = self.plan.scalars[output.index]
            return lambda args, fresh: args[position]
        if output.kind == "output":
            return lambda args, fresh: fresh[output.index].as_strided(output.shape, output.stride, output.offset)
        position = self.plan.inputs[output.index]
        if output.whole:
            return lambda args, fresh: args[position]
        return lambda args, fresh: args[position].as_strided(
            output.shape, output.stride, args[position].storage_offset() + output.offset
        )


def _loaded(backend: Backend[Any], plan: Plan, device: torch.device, options: Options, dump: Dump) -> Any:
    executable = backend.load(plan, device, options, dump)
    if executable.ranks == 1:
        return executable
    return RankedExecutable(executable, device, watchdog_seconds(options))


_live: weakref.WeakSet[CompiledSegment] = weakref.WeakSet()


def live_segments() -> list[CompiledSegment]:
    """The executables in use."""
    return list(_live)


@contextlib.contextmanager
def launched_segments() -> Iterator[set[CompiledSegment]]:
    """A set of those that this thread calls inside."""
    before, _thread.launched = _thread.launched, set()
    try:
        yield _thread.launched
    finally:
        _thread.launched = before


def synchronize() -> None:
    """Waits for every launch of every model, and raises the error of one that was aborted. CUDA graphs' launches are
    among them, also of models that were dropped; what nothing but a destroyed graph has kept is freed.

    Raises:
        MegakernelTimeout: a launch was aborted by its watchdog; its outputs are NaN and its counters did not advance.
    """
    for segment in live_segments():
        segment.synchronize()
    _C.synchronize_captured()  # by graphs that have outlived what was captured


def _picker(positions: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that takes these positions out of a tuple."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda args: tuple(args[position] for position in positions)
