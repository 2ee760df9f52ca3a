"""What stages 4 to 6 hand to the runtime: what to run, and how a call's arguments and results map to it. Plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from torch_mpk import _C

Kernel = _C.CudaProgram | SimpleNamespace  # one that was kept has a CudaProgram's fields, and is none


@dataclass(frozen=True)
class Fresh:
    """A tensor to allocate before each call: an output buffer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Output:
    """One result of the segment.

    ``kind`` is "output": ``as_strided(shape, stride, offset)`` of ``Plan.fresh[index]``; "input": the tensor of
    ``Plan.inputs[index]`` itself where ``whole``, else such a view of it; "scalar": that of ``Plan.scalars[index]``; or
    "value": ``value``. ``offset`` counts elements from the viewed tensor's first.
    """

    kind: str
    index: int = -1
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    whole: bool = False
    value: object = None


class IndexBound(NamedTuple):
    """``num_elements`` integers, the whole of input ``input``, that must be in [0, ``bound``).

    They lie ``stride`` elements apart. Where a size of the call counts, there are so many ``times`` as many elements,
    or the bound is so much ``less``.
    """

    input: int  # among the inputs of a launch
    num_elements: int
    stride: int
    element_bytes: int
    bound: int
    message: str  # what is wrong when they are not, and what to do
    times: int = -1  # among the scalars of a launch, as is the next; -1: none
    less: int = -1


@dataclass(frozen=True)
class Plan:
    """A segment before anything is loaded."""

    kernel: Kernel | None  # CUDA only: the CPU's threads walk through the schedule
    inputs: tuple[int, ...]  # positions among the segment's arguments, as are the next two
    scalars: tuple[int, ...]
    written: tuple[int, ...]
    fresh: tuple[Fresh, ...]
    outputs: tuple[Output, ...]
    index_bounds: tuple[IndexBound, ...]  # CPU only: a CUDA kernel reads its indices on the device
    schedule: _C.Schedule | None = None  # None where an earlier process made the kernel from it

    def describe(self) -> dict[str, Any]:
        """What a launch passes and returns."""
        fresh = [[str(buffer.dtype), list(buffer.shape), list(buffer.stride)] for buffer in self.fresh]
        return {
            "inputs": self.inputs,
            "written": self.written,
            "scalars": self.scalars,
            "fresh": fresh,
            "outputs": [str(output) for output in self.outputs],
        }


def pack(kernel: Kernel) -> dict[str, bytes]:
    """A kernel as files."""
    names = [name for name, value in vars(_C.CudaProgram).items() if isinstance(value, property)]
    fields = {name: getattr(kernel, name) for name in names}
    source, table = fields.pop("source"), fields.pop("table")
    return {"kernel.cu": source.encode(), "table.bin": table, "program.json": json.dumps(fields).encode()}


def unpack(files: Mapping[str, bytes]) -> Kernel:
    """What ``pack`` made into files. Raises KeyError or ValueError where they are not that."""
    source, table = files["kernel.cu"].decode(), files["table.bin"]
    return SimpleNamespace(source=source, table=table, **json.loads(files["program.json"]))
