"""Every sample of every task, those of a package outside torch_mpk too, in each of the ways a task can run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import plugin  # noqa: F401  declares tasks
import pytest
import torch
from emulated_kernel import EmulatedKernel, aligned

from torch_mpk import registry
from torch_mpk.jit import compile_cuda
from torch_mpk.testing.tasks import DTYPES, Calls, samples_of

TASKS = [task for task in registry.tasks() if task.samples]
CUSTOM = [task for task in TASKS if task.role == "tile"]
SAMPLES = [pytest.param(task, s, id=f"{task.name}-{i}") for task in TASKS for i, s in enumerate(task.samples)]


def test_the_plugin_is_there() -> None:
    assert {"squared_relu_gate", "layer_norm", "causal_conv", "top_k"} <= {task.name for task in CUSTOM}


@pytest.mark.parametrize(("task", "sample"), SAMPLES)
def test_operator(task: registry.Task, sample: dict) -> None:
    operands, attrs = task.sample(sample, torch.float32)
    torch.library.opcheck(getattr(torch.ops.mpk, task.name).default, tuple(operands), attrs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_in_any_order_make_the_whole(dtype: torch.dtype) -> None:
    Calls(samples_of(TASKS, dtype)).check_schedule(seed=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpu_runtime(dtype: torch.dtype) -> None:
    Calls(samples_of(TASKS, dtype)).check_pipeline(torch.device("cpu"))


@pytest.mark.parametrize(("dtype", "arch"), [(torch.float32, 80), (torch.bfloat16, 90)], ids=str)
def test_emulated_kernel(tmp_path: Path, dtype: torch.dtype, arch: int) -> None:
    calls = Calls(samples_of(TASKS, dtype))
    kernel = EmulatedKernel(calls.lowered.graph, tmp_path, arch=arch)
    calls.check_graph(functools.partial(launch, kernel))


def launch(
    kernel: EmulatedKernel, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], scalars: Sequence[int]
) -> None:
    """A launch on copies that lie where a device would allocate them."""

    def copied(t: torch.Tensor) -> torch.Tensor:
        return aligned(t.numel() * t.itemsize).view(t.dtype).as_strided(t.shape, t.stride()).copy_(t)

    given, results = [copied(t) for t in inputs], [copied(t) for t in outputs]
    kernel.launch(given, results, scalars, jitter=3)
    for t, copy in zip([*inputs, *outputs], [*given, *results], strict=True):
        t.copy_(copy)


@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tile_tasks_compile(dtype: torch.dtype, arch: int) -> None:
    program = Calls(samples_of(CUSTOM, dtype)).program(arch)
    assert ("plugin/sm90/squared_relu_gate.cuh" in program.source) == (arch == 90)
    resources = compile_cuda(program.source, arch).resources
    assert resources.warnings == ()
    assert resources.spill_store_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda(dtype: torch.dtype) -> None:
    Calls(samples_of(TASKS, dtype, "cuda")).check_pipeline(torch.device("cuda", 0))
