"""Loads a library with a kernel of a task of its own and looks at what becomes of its calls. Argument: LIBRARY."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import pytest
import torch

import torch_mpk.tasks  # noqa: F401  declares the tasks
from tests.codegen.emulated_calls import allocate, reference, tensors
from tests.schedule.decoder_graph import Builder
from tests.schedule.taken_apart import Parts
from torch_mpk import _C, task
from torch_mpk.errors import UnsupportedError
from torch_mpk.registry.stream_traits import StreamTraits
from torch_mpk.testing.emulator import emulate

KERNEL = "listed_sums.rows"
ROWS, SIZE = 40, 96


@task(
    "table[N, K], ids[S]: int64 -> y[S]",
    role="stream",
    traits=StreamTraits(loaded=("table", "ids")),
    samples=[{"N": ROWS, "K": SIZE, "S": 5}],
)
def listed_sums(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The sums of the table's rows that a list names, and 0 where it names none."""
    sums = table.float().sum(-1).to(table.dtype)
    return sums[ids.clamp(0, len(table) - 1)] * ((ids >= 0) & (ids < len(table)))


def sums_of_a_list(listed: int, size: int = SIZE) -> _C.TBGraph:
    """``y = -listed_sums(table, -negated)``, twice over, so that the rows of two jobs stand in the ring."""
    build = Builder()
    results = []
    for i in range(2):
        table = build.buffer("input", f"table{i}", "bfloat16", [ROWS, size])
        negated = build.buffer("input", f"negated{i}", "int64", [listed])
        ids = build.pointwise("neg", [negated], build.buffer("workspace", f"ids{i}", "int64", [listed]))
        made = build.buffer("workspace", f"made{i}", "bfloat16", [listed])
        results.append(build.node("listed_sums", [("table", table), ("ids", ids)], made))
    for i, made in enumerate(results):
        build.pointwise("neg", [made], build.buffer("output", f"y{i}", "bfloat16", [listed]))
    return build.graph


def main() -> None:
    ctypes.CDLL(sys.argv[1])
    torch.manual_seed(0)
    for arch, workers, listed in ((90, 3, 47), (80, 3, 47), (90, 2, 3), (90, 1, 32)):
        graph = sums_of_a_list(listed)
        kernel = emulate(graph, workers=workers, arch=arch)
        jobs = [job for phase in kernel.schedule.phases for job in phase.jobs if job.cut.kernel == KERNEL]
        assert len(jobs) == 2 and all(job.loader_waits for job in jobs)
        for seed, ids in enumerate(lists(listed)):
            check_results(kernel, graph, ids, seed)
        if listed > 32:
            check_proof(kernel.schedule)
    check_refusals()


def lists(listed: int) -> list[torch.Tensor]:
    """Rows in any order, one often, none, and places that name none in between and at both ends."""
    some = torch.randint(-3, ROWS + 3, (listed,))
    some[0], some[-1] = ROWS, -1
    return [torch.randint(ROWS, (listed,)), torch.full((listed,), 7), torch.full((listed,), -1), some]


def check_results(kernel: object, graph: _C.TBGraph, ids: torch.Tensor, seed: int) -> None:
    inputs = []
    for t in tensors(graph, "input"):
        inputs.append(allocate(t).copy_(-ids if t.dtype == "int64" else torch.randint(-8, 9, t.shape)))
    _, wanted = reference(graph, inputs)
    outputs = [allocate(t) for t in tensors(graph, "output")]
    kernel.launch([each.clone() for each in inputs], outputs, seed=seed, jitter=seed)
    for got, want in zip(outputs, wanted, strict=True):
        assert torch.equal(got, want)


def check_proof(schedule: _C.Schedule) -> None:
    """The loader may read no list that is still to be made. On one worker a loader would have fewer lanes than rows."""
    _C.validate(schedule)
    parts = Parts.of(schedule)
    parts.jobs("loader_waits")[0]["loader_waits"] = []
    with pytest.raises(RuntimeError, match=r"the loader of listed_sums .* may read buffer 'ids0' before pointwise"):
        _C.validate(parts.build())
    parts = Parts.of(schedule)
    one = _C.Target("cuda", schedule.target.arch, 1, schedule.target.smem_bytes)
    parts.schedule = SimpleNamespace(graph=schedule.graph, target=one)
    with pytest.raises(RuntimeError, match="a worker may have more rows than lanes"):
        _C.validate(parts.build())


def check_refusals() -> None:
    for listed, size, why in (
        (65, SIZE, "a worker's rows are more than its loader's lanes"),
        (5, 90, "rows of 180 bytes do not come to a slot by copies of 16"),
        (5, 1 << 14, "rows of 32768 bytes do not come to a slot by copies of 16"),
    ):
        schedule = _C.make_schedule(sums_of_a_list(listed, size), _C.Target("cuda", 90, 2, 232448))
        with pytest.raises(UnsupportedError, match=why):
            _C.generate_cuda(schedule)


if __name__ == "__main__":
    main()
