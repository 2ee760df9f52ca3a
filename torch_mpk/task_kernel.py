"""``kernel_of``: one task in a kernel of its own, for tests and timings of its code."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from torch_mpk.builds.dump import Dump
from torch_mpk.config import Options
from torch_mpk.dispatch.compiled_graph import build_segment
from torch_mpk.errors import CompileError, MpkError, NoDerivativeError, SeveralDevicesError, TaskError, UnsupportedError
from torch_mpk.registry import Task
from torch_mpk.registry.calls import Call, graph_of
from torch_mpk.runtime.overlaps import memory_of
from torch_mpk.warn_once import warn

MOST_BUILDS = 64  # of a task's kernel; the oldest is dropped for the next


class TaskKernel:
    """A function of a task's operands and attributes, as the task itself is, that runs its code and nothing else.

    With ``or_reference``, operands that no code takes, or that it cannot be compiled for, are the reference's, with a
    warning; else they are an error.
    """

    def __init__(self, task: Task, or_reference: bool = False) -> None:
        if not isinstance(task, Task):
            raise TaskError(f"kernel_of: expected a task, which @torch_mpk.task has declared, got {task!r}")
        self.task = task
        self.or_reference = or_reference
        self._runs: dict[Hashable, Callable[..., Sequence[torch.Tensor]]] = {}

    def __repr__(self) -> str:
        return f"<torch_mpk.kernel_of {self.task.name}: {self.task.signature}>"

    def __call__(self, *operands: torch.Tensor | None, **attrs: Any) -> Any:
        attrs = self.task.bind_attrs(attrs)
        self.task.check_tensors(operands)
        present = [t for t in operands if t is not None]
        if torch.is_grad_enabled() and any(t.requires_grad for t in present):
            raise NoDerivativeError(op=f"the kernel of {self.task.name}")
        forms = [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in operands]
        key = (*forms, *attrs.items())
        run = self._runs.get(key)
        if run is None:
            if len(self._runs) == MOST_BUILDS:
                del self._runs[next(iter(self._runs))]
            run = self._runs[key] = self._build(operands, attrs)
        results = tuple(run(*present))
        return results[0] if len(results) == 1 else results or None

    def _build(self, operands: Sequence[torch.Tensor | None], attrs: dict[str, Any]) -> Callable[..., Any]:
        """A program of this one call. What a tile task's ``compute`` is there, it is in a megakernel."""
        task = self.task
        absent = (None,) * (len(task.inputs) - len(operands))
        given = [(spec, t) for spec, t in zip(task.inputs, operands) if t is not None]
        devices = sorted({str(t.device) for _, t in given})
        if len(devices) != 1:
            if devices:
                raise SeveralDevicesError(devices=", ".join(devices))
            raise TaskError(f"{task.name}: no operand was given (signature: {task.signature})")
        gm = graph_of([Call(task, [*operands, *absent], attrs)])
        written = [i for i, (spec, _) in enumerate(given) if spec.is_write]
        memory = memory_of([spec.name for spec, _ in given], [t for _, t in given], written) if written else []
        try:
            segment = build_segment(gm, given[0][1].device, Options(), Dump(None), task.name)
        except (UnsupportedError, CompileError) as error:
            self._decline(error)
            return gm
        except ValueError as error:  # of the core, which knows what its code takes
            if isinstance(error, MpkError):
                raise
            self._decline(UnsupportedError(str(error)))
            return gm
        return segment.callable(gm, memory=memory, decline=self._decline)

    def _decline(self, error: MpkError) -> None:
        if not self.or_reference:
            raise error
        warn(f"torch.ops.mpk.{self.task.name} runs the task's reference: {error}")


def kernel_of(task: Task) -> TaskKernel:
    """The task in a kernel of its own: ``kernel_of(l2_norm)(x, eps=1e-6)`` takes what ``l2_norm`` takes and returns it.

    The kernel is a program of this one call, built when operands of such sizes, strides and dtypes come first. So it
    runs the code that a megakernel runs: on CUDA the device code in one launch, on the CPU the C++ code, or the
    reference where there is none. Operands that the task updates are updated.

    Raises TaskError where ``task`` is none. A call raises:
        TaskError, TaskAttributeError: the operands or attributes do not fit the task.
        UnsupportedError: the task has no device code, or torch_mpk cannot take the operands.
        SeveralDevicesError: the operands are on several devices.
        SharedMemoryError: an operand that is updated overlaps another.
        NoDerivativeError: an operand requires grad and grad mode is on.
        CompileError: the code does not compile.
    """
    return TaskKernel(task)
