"""A task of role "stream" of a file outside torch_mpk is scheduled by what it declares, whatever its name."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from torch_mpk import _C
from torch_mpk.capture.graph import capture
from torch_mpk.errors import UnsupportedError
from torch_mpk.lowering import Lowered, lower
from torch_mpk.patterns import apply
from torch_mpk.registry import Task
from torch_mpk.testing import reference_vm

FILE = """
import torch
from torch_mpk import task
from torch_mpk.registry.stream_traits import StreamTraits


@task(
    "x[R, K], codes[N, K] -> y[R, N]",
    role="stream",
    traits=StreamTraits(
        loaded=("codes",),
        staged=("x",),
        whole=("x",),
        takes_rows=("x",),
        joined_by="x",
        tiled_by="codes",
        hands_over=True,
    ),
    samples=[{"R": 2, "K": 64, "N": 48}],
)
def distances_for_test(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return (x[:, None] - codes).abs().sum(-1)
"""


@pytest.fixture(scope="module")
def distances(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Task]:
    path: Path = tmp_path_factory.mktemp("package") / "distances_tasks.py"
    path.write_text(FILE)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    yield module.distances_for_test
    del sys.modules[path.stem]


def step(x, norm, codes, others, shift):
    """A row task in front of two calls that share its result, and elementwise work behind them."""
    h = F.rms_norm(x, (64,), norm, 1e-6)
    near, far = (torch.ops.mpk.distances_for_test(h, c) for c in (codes, others))
    return (torch.sigmoid(near) * far + shift,)


def step_over_a_made_table(x, norm, codes, others, shift):
    made = others.softmax(-1)
    return (torch.ops.mpk.distances_for_test(x, made) + shift,)


def arguments() -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in ((2, 64), (64,), (48, 64), (48, 64), (48,))]


def lowered_of(function: Callable, args: list[torch.Tensor]) -> Lowered:
    return lower(apply(capture(torch.fx.symbolic_trace(function), args).graph_module))


def scheduled(function: Callable, args: list[torch.Tensor], polled: bool = False) -> tuple[_C.Schedule, Lowered]:
    lowered = lowered_of(function, args)
    schedule = _C.make_schedule(lowered.graph, _C.Target("cuda", 90, 4, 232448, True, polled))
    _C.validate(schedule)
    return schedule, lowered


def tasks_of(schedule: _C.Schedule, nodes: list[int]) -> list[str]:
    return [schedule.graph.nodes[node].task for node in nodes]


@pytest.mark.parametrize("polled", [False, True])
def test_it_is_one_job_with_what_stands_before_and_behind_it(distances: Task, polled: bool) -> None:
    args = arguments()
    schedule, lowered = scheduled(step, args, polled)
    [phase] = schedule.phases
    [job] = phase.jobs
    assert tasks_of(schedule, job.prologue) == ["rms_norm"]
    assert tasks_of(schedule, job.body) == [distances.name, distances.name]
    assert tasks_of(schedule, job.epilogue) == ["pointwise"]
    assert job.loader_waits == []
    assert len(job.unstored) == 3  # the normalised rows and both results
    for seed in range(3):
        check(functools.partial(reference_vm.run, schedule, seed=seed), lowered, step, args)


def test_the_loader_waits_for_a_table_that_the_launch_makes(distances: Task) -> None:
    args = arguments()
    schedule, lowered = scheduled(step_over_a_made_table, args)
    job = schedule.phases[-1].jobs[0]
    assert tasks_of(schedule, job.body) == [distances.name]
    assert job.loader_waits != []
    check(functools.partial(reference_vm.run, schedule, seed=1), lowered, step_over_a_made_table, args)


def check(runner: Callable, lowered: Lowered, function: Callable, args: list[torch.Tensor]) -> None:
    outputs = [torch.full(fresh.shape, torch.nan) for fresh in lowered.fresh]
    placeholders = lowered.inputs[0].graph.find_nodes(op="placeholder")
    runner([args[placeholders.index(node)] for node in lowered.inputs], outputs, ())
    torch.testing.assert_close(outputs[lowered.outputs[0].index], function(*args)[0])


@pytest.mark.usefixtures("distances")
def test_it_runs_in_models_on_the_cpu() -> None:
    args = arguments()
    with torch.inference_mode():
        (got,) = torch.compile(step, backend="mpk", options={"fallback": "error"})(*args)
        torch.testing.assert_close(got, step(*args)[0])


def test_without_a_kernel_it_is_named_as_what_has_no_kernel(distances: Task) -> None:
    schedule, _ = scheduled(step, arguments())
    with pytest.raises(UnsupportedError, match=distances.name):
        _C.generate_cuda(schedule)
