"""Loads a library with a kernel of ``linear`` and looks at what becomes of a decoder. Arguments: LIBRARY NAME=VALUE...,
of the fields."""

from __future__ import annotations

import ctypes
import json
import sys

import pytest
import torch

import torch_mpk.tasks  # noqa: F401  declares the tasks
from tests.codegen.emulated_calls import allocate, decoder_inputs, reference, relative_error, tensors
from tests.schedule.decoder_graph import decoder
from tests.schedule.taken_apart import Parts
from torch_mpk import _C
from torch_mpk.testing.emulator import emulate


def main() -> None:
    library, *given = sys.argv[1:]
    before = _C.make_schedule(decoder(layers=1), _C.Target("cuda", 90, 4, 232448, polled=True))
    ctypes.CDLL(library)
    fields = {name: int(value) for name, _, value in (each.partition("=") for each in given)}
    graph = decoder(layers=1)
    kernel = emulate(graph, workers=4, polled=True)
    jobs = [job for phase in kernel.schedule.phases for job in phase.jobs]
    linears = [job for job in jobs if job.cut.kernel.startswith("linear.")]
    assert len(linears) == 5
    for job in linears:
        assert job.cut.kernel == "linear.elsewhere"
        assert job.cut.fields == fields
        next_best, *refused = job.others
        assert next_best.kernel == "linear.vector" and next_best.cost_ns > job.cut.cost_ns
        assert {other.kernel for other in refused if other.refusal} == {"linear.rows", "linear.tiles"}
    written = json.loads(kernel.schedule.to_json())
    assert [
        job["fields"] for phase in written["phases"] for job in phase["jobs"] if job["kernel"] == "linear.elsewhere"
    ]
    assert "static constexpr int kRowsAtOnce = 2;" in kernel.program.source
    check_proof(kernel.schedule)
    check_results(kernel, graph)
    assert all(job.cut.kernel != "linear.elsewhere" for phase in before.phases for job in phase.jobs)


def check_proof(schedule: _C.Schedule) -> None:
    _C.validate(schedule)
    parts = Parts.of(schedule)
    next(job["cut"] for job in parts.jobs("fields") if "rows_at_once" in job["cut"]["fields"])["fields"] |= {
        "rows_at_once": 3
    }
    with pytest.raises(RuntimeError, match=r"unsound schedule: linear .*: 3 rows at once are not 1, 2 or 4"):
        _C.validate(parts.build())


def check_results(kernel: object, graph: _C.TBGraph) -> None:
    torch.manual_seed(0)
    inputs = decoder_inputs(graph, [17], 16)
    copies = [each.clone() for each in inputs]
    outputs = [allocate(t) for t in tensors(graph, "output")]
    kernel.launch(inputs, outputs)
    _, wanted = reference(graph, copies)
    for got, want in zip(outputs, wanted, strict=True):
        assert relative_error(got, want) < 2e-2


if __name__ == "__main__":
    main()
