"""Calls of users' tasks in guarded memory: code that writes outside of its outputs is found before it harms others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from torch_mpk import _C
from torch_mpk.builds.dump import Dump
from torch_mpk.config import Options
from torch_mpk.dispatch.compiled_graph import build_segment
from torch_mpk.errors import CompileError, StrayWriteError
from torch_mpk.jit.host import HostCompiler
from torch_mpk.registry import Task
from torch_mpk.registry.calls import Call, graph_of
from torch_mpk.runtime.backend import backend_of

_MIN_REDZONE_BYTES, _MAX_REDZONE_BYTES = 2**16, 2**26


def way_of(task: Task, dtypes: Iterable[torch.dtype], device: torch.device, options: Options) -> str:
    """What runs a task for operands of these dtypes on a device, and where that stands."""
    if device.type == "cuda":
        arch = backend_of(device).target(device, options).device_arch
        return f"CUDA code at {task.code('cuda', arch)}"
    if _has_host_code(task) and task.runs_code(dtypes):
        return f"C++ code at {task.code('cpu')}"
    return f"reference at {task.place}"


def is_guarded(task: Any, device: torch.device) -> bool:
    """Whether a task runs by code of its user's."""
    if not isinstance(task, Task) or task.is_ours or task.role != "tile":
        return False
    return device.type == "cuda" or _has_host_code(task)


def _has_host_code(task: Task) -> bool:
    try:
        return bool(task.cpu_body) and HostCompiler.find() is not None
    except CompileError:
        return False


class GuardedCall:
    """A task as an executable of its own, for operands of the sizes and dtypes of those given."""

    def __init__(
        self,
        call: Call,
        device: torch.device,
        options: Options,
    ) -> None:
        self.task, self.device = call.task, device
        self.dtypes = [t.dtype for t in call.operands if t is not None]
        self.options = options = dataclasses.replace(options, num_threads=1)  # behind whose scratch memory is a redzone
        self.segment = build_segment(graph_of([call]), device, options, Dump(None))
        self.plan = self.segment.plan

    def check(self, operands: Sequence[torch.Tensor | None]) -> None:
        """Run it on copies of the operands that it writes.

        Raises:
            StrayWriteError: something outside of what it writes has changed.
        """
        named = [(spec, t) for spec, t in zip(self.task.inputs, operands, strict=True) if t is not None]
        names = {output.index: spec.name for output, spec in zip(self.plan.outputs, self.task.outputs, strict=True)}
        guarded: list[_Guarded] = []
        inputs = []
        for position in self.plan.inputs:
            spec, t = named[position]
            if spec.is_write:
                guarded.append(_Guarded(spec.name, t.shape, t.stride(), t.dtype, self.device))
                t = guarded[-1].tensor.copy_(t)
            inputs.append(t)
        fresh = [
            _Guarded(names[i], buffer.shape, buffer.stride, buffer.dtype, self.device)
            for i, buffer in enumerate(self.plan.fresh)
        ]
        stream = backend_of(self.device).current_stream(self.device)
        executable = self.segment.executable
        executable.run(inputs, [each.tensor for each in fresh], [], stream)
        self.segment.synchronize()
        for each in (*guarded, *fresh):
            for where in each.stray():
                self._fail(f"{each.name} ({each.tensor.dtype}{list(each.tensor.shape)}), {where}")
        if isinstance(executable, _C.CpuExecutable) and not executable.scratch_is_intact:
            self._fail("shared, of which kSharedBytes says how much there is")

    def _fail(self, what: str) -> NoReturn:
        way = way_of(self.task, self.dtypes, self.device, self.options)
        raise StrayWriteError(what, task=self.task.name, place=self.task.place, way=way)


class _Guarded:
    """A tensor amid bytes that are known."""

    def __init__(
        self, name: str, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.name = name
        num_elements = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else 0
        self.num_bytes = num_elements * dtype.itemsize
        self.redzone = min(max(self.num_bytes, _MIN_REDZONE_BYTES), _MAX_REDZONE_BYTES) // 512 * 512
        self.memory = torch.arange(2 * self.redzone + self.num_bytes, device=device).mul_(37).remainder_(251).byte()
        self.before = self.memory.clone()
        self.tensor = self._view(self.memory, shape, stride, dtype)

    def _view(
        self, memory: torch.Tensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        return memory[self.redzone : self.redzone + self.num_bytes].view(dtype).as_strided(shape, stride)

    def stray(self) -> Iterator[str]:
        """Where bytes have changed that are not the tensor's."""
        own = self._view(self.before, self.tensor.shape, self.tensor.stride(), self.tensor.dtype)
        own.copy_(self.tensor)
        changed = (self.memory != self.before).nonzero().flatten() - self.redzone
        before, after = changed[changed < 0], changed[changed >= self.num_bytes]
        if len(before):
            yield f"from {-int(before[0])} bytes before its first element on"
        if len(after):
            yield f"up to {int(after[-1]) + 1 - self.num_bytes} bytes after its last element"
        if len(changed) > len(before) + len(after):
            yield "between its rows"
