"""Stages 4 to 6: what a segment of a graph becomes before anything is loaded, as plain data."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from torch_mpk import _C
from torch_mpk.config import Options
from torch_mpk.dump import Dump
from torch_mpk.lowering import Fresh, Output, lower
from torch_mpk.runtime.bounds import IndexBound, index_bounds
from torch_mpk.runtime.device import backend_of
from torch_mpk.timing import stage


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to run, and how the arguments and results of a segment map to it."""

    program: Any  # a _C.Schedule for the CPU; for CUDA a _C.CudaProgram, or what has its fields
    inputs: tuple[int, ...]  # positions among the segment's arguments, as are the next two
    scalars: tuple[int, ...]
    written: tuple[int, ...]
    fresh: tuple[Fresh, ...]
    outputs: tuple[Output, ...]
    index_bounds: tuple[IndexBound, ...]  # CPU only: a CUDA kernel reads its indices on the device
    schedule: _C.Schedule | None = None  # what the program was made from; None where an earlier process made it

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


def make_plan(gm: torch.fx.GraphModule, device: torch.device, options: Options, dump: Dump) -> Plan:
    """Lowers a segment, schedules it for the device and generates its program.

    Raises:
        UnsupportedError: a node cannot be lowered or generated, or the device is not supported.
    """
    backend = backend_of(device)
    with stage("lowering"):
        lowered = lower(gm)
    dump.write("4.graph.json", lowered.graph.to_json())
    with stage("schedule"):
        schedule = _C.make_schedule(lowered.graph, backend.target(device, options))
    dump.write("5.schedule.json", schedule.to_json())
    with stage("validate"):
        _C.validate(schedule)
    with stage("codegen"):
        program = backend.generate(schedule, options, dump)
    positions = {node: i for i, node in enumerate(node for node in gm.graph.nodes if node.op == "placeholder")}
    inputs = tuple(positions[node] for node in lowered.inputs)
    return Plan(
        program=program,
        inputs=inputs,
        scalars=tuple(positions[node] for node in lowered.scalars),
        written=tuple(inputs[index] for index in _written_inputs(lowered.graph)),
        fresh=lowered.fresh,
        outputs=lowered.outputs,
        index_bounds=tuple(index_bounds(gm, lowered)) if device.type == "cpu" else (),
        schedule=schedule,
    )


def _written_inputs(graph: _C.TBGraph) -> list[int]:
    operands = (operand for node in graph.nodes for operand in node.operands)
    written = {operand.tensor.buffer for operand in operands if operand.is_write}
    return [buffer.index for i, buffer in enumerate(graph.buffers) if i in written and buffer.kind == "input"]
