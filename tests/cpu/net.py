"""Task graphs made directly from tensors, run on the CPU executable."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import torch_mpk.tasks  # noqa: F401 - registers the tasks
from torch_mpk import _C, registry

ISAS = _C.cpu_isas()
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
# Relative root-mean-square error a result rounded once may have.
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-6, torch.float64: 1e-14}
CPU = _C.Target("cpu", num_workers=2, fuse=False)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def poison(t: torch.Tensor) -> torch.Tensor:
    return t.fill_(torch.nan if t.dtype.is_floating_point else 77)


def rms_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-300)).item()


class Net:
    """A graph whose inputs and outputs are given tensors, strides and all."""

    def __init__(self) -> None:
        self.graph = _C.TBGraph()
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []

    def _external(self, kind: str, t: torch.Tensor, tensors: list[torch.Tensor]) -> _C.Tensor:
        reach = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        name = f"{kind}{len(tensors)}"
        buffer = self.graph.add_buffer(name, kind, len(tensors), reach * t.element_size())
        tensors.append(t)
        return _C.Tensor(buffer, name_of(t.dtype), list(t.shape), list(t.stride()))

    def input(self, t: torch.Tensor) -> _C.Tensor:
        return self._external("input", t, self.inputs)

    def output(self, t: torch.Tensor) -> _C.Tensor:
        return self._external("output", poison(t), self.outputs)

    def workspace(self, shape: Sequence[int], dtype: torch.dtype) -> _C.Tensor:
        like = torch.empty(*shape, dtype=dtype)
        buffer = self.graph.add_buffer("", "workspace", -1, like.numel() * like.element_size())
        return _C.Tensor(buffer, name_of(dtype), list(shape), list(like.stride()))

    def node(self, task: str, attrs: dict | None = None, **operands: _C.Tensor | None) -> None:
        """Operands in the order of the task's signature; y is written, and what a registered task writes in place."""
        declared = [each for each in registry.tasks() if each.name == task]
        in_place = [o.name for each in declared for o in each.inputs if o.is_write]
        rows = [(n, t, n != "y", n == "y" or n in in_place) for n, t in operands.items() if t is not None]
        self.graph.add_node(task, rows, attrs or {}, None, "node")

    def program(self, role: str, program: _C.Program, reads: list, writes: list, attrs: dict | None = None) -> None:
        """Operands: the tensors only read, then those only written."""
        rows = [(f"in{i}", t, True, False) for i, t in enumerate(reads)]
        rows += [(f"out{i}", t, False, True) for i, t in enumerate(writes)]
        self.graph.add_node(role, rows, attrs or {}, program, "program")

    def compile(self, num_threads: int = 2, isa: str = "") -> _C.CpuExecutable:
        return _C.CpuExecutable(_C.make_schedule(self.graph, CPU), num_threads, isa)

    def run(self, num_threads: int = 2, isa: str = "", scalars: Sequence[int] = ()) -> list[torch.Tensor]:
        """Poison the outputs, run, and return copies of them."""
        for t in self.outputs:
            poison(t)
        self.compile(num_threads, isa).run(self.inputs, self.outputs, scalars)
        return [t.clone() for t in self.outputs]

    def assert_same_bits(self, isa: str = "", scalars: Sequence[int] = ()) -> None:
        """Any number of threads, run after run, gives the same bits. For graphs that change no input."""
        first = self.run(1, isa, scalars)
        for num_threads in (1, 2, 3):
            for a, b in zip(first, self.run(num_threads, isa, scalars), strict=True):
                assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
