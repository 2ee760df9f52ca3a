"""Loads a library with a kernel of runs of two linears and looks at what becomes of some. Argument: LIBRARY."""

from __future__ import annotations

import ctypes
import json
import sys

import pytest
import torch

import torch_mpk.tasks  # noqa: F401  declares the tasks
from tests.codegen.emulated_calls import allocate, reference, relative_error, tensors
from tests.schedule.decoder_graph import Builder
from tests.schedule.taken_apart import Parts
from torch_mpk import _C
from torch_mpk.testing.emulator import emulate
from torch_mpk.testing.reference_vm import run as run_schedule

KERNEL = "linear.pair"


def two_linears(hidden: int) -> _C.TBGraph:
    """``y = -(relu(x) @ first.T @ second.T)``: a phase stands in front of the linears, and one behind them."""
    build = Builder()
    x = build.buffer("input", "x", "bfloat16", [1, 64])
    first = build.buffer("input", "first", "bfloat16", [hidden, 64])
    second = build.buffer("input", "second", "bfloat16", [256, hidden])
    bent = build.pointwise("relu", [x], build.buffer("workspace", "bent", "bfloat16", [1, 64]))
    made = build.buffer("workspace", "made", "bfloat16", [1, hidden])
    build.node("linear", [("x", bent), ("weight", first)], made)
    result = build.buffer("workspace", "result", "bfloat16", [1, 256])
    build.node("linear", [("x", made), ("weight", second)], result)
    build.pointwise("neg", [result], build.buffer("output", "y", "bfloat16", [1, 256]))
    return build.graph


def target(workers: int = 4, **modes: bool) -> _C.Target:
    return _C.Target("cuda", 90, workers, 232448, **modes)


def runs(schedule: _C.Schedule) -> list[_C.Job]:
    return [job for phase in schedule.phases for job in phase.jobs if job.run]


def main() -> None:
    before = _C.make_schedule(two_linears(48), target(polled=True))
    ctypes.CDLL(sys.argv[1])
    assert not runs(before)
    graph = two_linears(48)
    kernel = emulate(graph, workers=4, polled=True)
    (job,) = runs(kernel.schedule)
    assert (job.run, job.cut.kernel, job.body) == (KERNEL, KERNEL, [1, 2])
    (own,) = job.others
    assert own.kernel == "jobs of their own" and own.cost_ns > job.cut.cost_ns
    written = json.loads(kernel.schedule.to_json())
    assert [job["run"] for phase in written["phases"] for job in phase["jobs"] if "run" in job] == [KERNEL]
    check_proof(kernel.schedule)
    check_results(kernel, graph)
    # Where many workers could share what each would compute, the nodes have jobs of their own. So they do where nothing
    # is fused, and on the CPU.
    assert not runs(_C.make_schedule(two_linears(1 << 14), target(132, polled=True)))
    assert not runs(_C.make_schedule(graph, target(fuse=False, polled=True)))
    assert not runs(_C.make_schedule(graph, _C.Target("cpu", num_workers=2)))


def check_proof(schedule: _C.Schedule) -> None:
    _C.validate(schedule)
    for change, why in (
        ({"unstored": []}, "buffer 'made' is needed besides"),
        ({"run": ""}, "no write happens before the read"),
        ({"body": [2, 1]}, "no write happens before the read"),
    ):
        parts = Parts.of(schedule)
        (job,) = parts.jobs("run")
        job.update(change)
        parts.offsets = [4096 * i for i in range(len(parts.offsets))]  # room for all, stored or not
        parts.workspace_bytes = 4096 * len(parts.offsets)
        with pytest.raises(RuntimeError, match=why):
            _C.validate(parts.build())


def check_results(kernel: object, graph: _C.TBGraph) -> None:
    torch.manual_seed(0)
    inputs = [allocate(t).copy_(torch.randn(t.shape)) for t in tensors(graph, "input")]
    _, (wanted,) = reference(graph, inputs)
    (output,) = (allocate(t) for t in tensors(graph, "output"))
    kernel.launch([each.clone() for each in inputs], [output])
    assert relative_error(output, wanted) < 2e-2
    (simulated,) = (allocate(t) for t in tensors(graph, "output"))
    run_schedule(kernel.schedule, [each.clone() for each in inputs], [simulated], seed=0)
    assert torch.equal(simulated, wanted)


if __name__ == "__main__":
    main()
