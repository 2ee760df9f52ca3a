"""Stages 4 to 6: what a segment of a graph becomes before anything is loaded."""

from __future__ import annotations

import torch

from torch_mpk import _C
from torch_mpk.builds.dump import Dump
from torch_mpk.builds.timing import stage
from torch_mpk.config import Options
from torch_mpk.lowering import lower
from torch_mpk.plan import Plan
from torch_mpk.planning.bounds import index_bounds


def make_plan(gm: torch.fx.GraphModule, target: _C.Target, options: Options, dump: Dump) -> Plan:
    """Lowers a segment, schedules it for the target and generates its kernel.

    Raises:
        UnsupportedError: a node cannot be lowered or generated.
    """
    with stage("lowering"):
        lowered = lower(gm)
    dump.write("4.graph.json", lowered.graph.to_json)
    with stage("schedule"):
        schedule = _C.make_schedule(lowered.graph, target)
    dump.write("4.graph.json", schedule.graph.to_json)  # whose nodes the schedule counts: some are the target's own
    dump.write("5.schedule.json", schedule.to_json)
    with stage("validate"):
        _C.validate(schedule)
    kernel = None
    if target.device == "cuda":
        with stage("codegen"):
            kernel = _C.generate_cuda(schedule, options.profile)
        # With names, which are no part of what is compiled: kernels that differ in them alone are one in the cache.
        dump.write("6.kernel.cu", lambda: _C.generate_cuda(schedule, options.profile, named=True).source)
    positions = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    inputs = tuple(positions[node] for node in lowered.inputs)
    return Plan(
        kernel=kernel,
        inputs=inputs,
        scalars=tuple(positions[node] for node in lowered.scalars),
        written=tuple(inputs[index] for index in _written_inputs(lowered.graph)),
        fresh=lowered.fresh,
        outputs=lowered.outputs,
        index_bounds=tuple(index_bounds(gm, lowered)) if target.device == "cpu" else (),
        schedule=schedule,
    )


def _written_inputs(graph: _C.TBGraph) -> list[int]:
    operands = (operand for node in graph.nodes for operand in node.operands)
    written = {operand.tensor.buffer for operand in operands if operand.is_write}
    return [buffer.index for i, buffer in enumerate(graph.buffers) if i in written and buffer.kind == "input"]
