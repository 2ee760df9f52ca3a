"""Every sample of every task, those of a package outside torch_mpk too, in each of the ways a task can run."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import get_args

import pytest
import torch

from tests.schedule.taken_apart import Parts
from tests.tasks.every_task import FIRST_OF_EACH, ON_CUDA, SAMPLES, TASKS
from tests.thinned import thinned
from torch_mpk import _C, registry
from torch_mpk.capture.graph import capture
from torch_mpk.jit import compile_cuda
from torch_mpk.lowering import lower
from torch_mpk.patterns import apply
from torch_mpk.tasks.quantized_linear import E2M1, E4M3
from torch_mpk.testing.emulator import EmulatedKernel, Order, aligned, emulate
from torch_mpk.testing.tasks import DTYPES, Calls, samples_of

FEWER = thinned(DTYPES, DTYPES.index(torch.bfloat16))
CUSTOM = [task for task in TASKS if task.role == "tile" and task.header]


def test_the_plugin_is_there() -> None:
    names = {"squared_relu_gate", "layer_norm", "causal_conv", "top_k", "scaled_linear"}
    assert names <= {task.name for task in CUSTOM}


@pytest.mark.parametrize(("task", "sample"), thinned(SAMPLES, *FIRST_OF_EACH))
def test_operator(task: registry.Task, sample: dict) -> None:
    operands, attrs = task.sample(sample, torch.float32)
    checks = [*torch.testing._internal.optests.generate_tests.DEFAULT_TEST_UTILS]
    if any(t is not None and t.dtype in (E4M3, E2M1) for t in operands):
        checks.remove("test_schema")  # compares operands by arithmetic that the dtype has not
    torch.library.opcheck(getattr(torch.ops.mpk, task.name).default, tuple(operands), attrs, test_utils=checks)


@pytest.mark.parametrize("dtype", FEWER, ids=str)
def test_tiles_in_any_order_make_the_whole(dtype: torch.dtype) -> None:
    Calls(samples_of(TASKS, dtype)).check_schedule(seed=1)


@pytest.mark.parametrize("dtype", FEWER, ids=str)
def test_cpu_runtime(dtype: torch.dtype) -> None:
    Calls(samples_of(TASKS, dtype)).check_pipeline(torch.device("cpu"))


@pytest.mark.parametrize(("dtype", "arch"), thinned([(torch.float32, 80), (torch.bfloat16, 90)]), ids=str)
def test_emulated_kernel(dtype: torch.dtype, arch: int) -> None:
    calls = Calls(samples_of(ON_CUDA, dtype))
    kernel = emulate(calls.lowered.graph, arch=arch)
    for order in get_args(Order):
        calls.check_graph(functools.partial(launch, kernel, order))


@pytest.mark.slow
def test_emulated_chain_of_tasks_that_share_the_ring() -> None:
    """A linear whose tiles are claimed, a task that streams what it can load ahead, one that does not, and a linear."""

    def step(x, wide, weight, scale, norm, out):
        y = torch.ops.mpk.linear(x, wide)
        y = torch.ops.mpk.scaled_linear(y, weight, scale)
        y = torch.ops.mpk.layer_norm(y, norm)
        # Of what the first phase streams the linear is alone: otherwise its tiles would not be claimed.
        return torch.ops.mpk.linear(y, out), torch.ops.mpk.scaled_linear(x * 2, wide[:50], scale[:50])

    shapes = [(2, 64), (5000, 64), (70, 5000), (70,), (70,), (33, 70)]
    args = [torch.randn(shape) / shape[-1] ** 0.5 for shape in shapes]
    lowered = lower(apply(capture(torch.fx.symbolic_trace(step), args).graph_module))
    kernel = emulate(lowered.graph)
    jobs = [job for phase in kernel.schedule.phases for job in phase.jobs]
    assert any(job.assignment == "claimed" for job in jobs)
    for seed in range(2):
        inputs = [aligned(t.numel() * 4).view(torch.float32).view(t.shape).copy_(t) for t in args]
        outputs = [aligned(4 * math.prod(f.shape), 0xFF).view(torch.float32).view(f.shape) for f in lowered.fresh]
        kernel.launch(inputs, outputs, seed=seed, jitter=seed)
        for got, want in zip([outputs[o.index] for o in lowered.outputs], step(*args), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def launch(
    kernel: EmulatedKernel,
    order: Order,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    scalars: Sequence[int],
) -> None:
    """A launch on copies that lie where a device would allocate them."""

    def copied(t: torch.Tensor) -> torch.Tensor:
        return aligned(t.numel() * t.itemsize).view(t.dtype).as_strided(t.shape, t.stride()).copy_(t)

    given, results = [copied(t) for t in inputs], [copied(t) for t in outputs]
    kernel.launch(given, results, scalars, order=order, jitter=3)
    for t, copy in zip([*inputs, *outputs], [*given, *results], strict=True):
        t.copy_(copy)


def test_what_is_streamed_comes_through_the_ring_where_it_can() -> None:
    """Rows of 37 elements are not a multiple of 16 bytes: they are read from where they lie."""
    [task] = [task for task in CUSTOM if task.stream]
    source = Calls(samples_of([task], torch.float32)).program(90).source
    assert source.count("return run_stream_tiles<") == source.count("return load_tiles<") == len(task.samples) - 1
    assert source.count("return run_tiles<") == 1


def test_the_loader_waits_for_what_is_streamed() -> None:
    """A weight that the launch itself computes: the schedule says so, and one that does not is refused."""
    [task] = [task for task in CUSTOM if task.stream]
    graph = torch.fx.Graph()
    x, weight, scale = (graph.placeholder(name) for name in ("x", "weight", "scale"))
    x.meta["val"], weight.meta["val"], scale.meta["val"] = torch.randn(2, 64), torch.randn(12, 64), torch.randn(12)
    made = graph.call_function(registry.get("softmax"), (weight,))
    made.meta["val"] = weight.meta["val"]
    y = graph.call_function(task, (x, made, scale))
    y.meta["val"] = torch.empty(2, 12)
    graph.output((y,))
    schedule = _C.make_schedule(lower(torch.fx.GraphModule({}, graph)).graph, _C.Target("cuda", 90, 4, 232448))
    _C.validate(schedule)
    assert schedule.phases[-1].jobs[0].loader_waits != []
    parts = Parts.of(schedule)
    for job in parts.phases[-1][0]:
        job["loader_waits"].clear()
    with pytest.raises(RuntimeError, match="the loader of scaled_linear .* may read buffer .* before pointwise"):
        _C.validate(parts.build())


# Bytes, of one kernel with the plain code of all: expert_linear's has sixteen sums and their places, and attention over
# latents has its sums beside what a launch keeps from phase to phase.
SPILLED = 520


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tile_tasks_compile(dtype: torch.dtype, arch: int) -> None:
    program = Calls(samples_of(CUSTOM, dtype)).program(arch)
    assert ("plugin/sm90/squared_relu_gate.cuh" in program.source) == (arch == 90)
    resources = compile_cuda(program.source, arch).resources
    assert resources.warnings == ()
    assert resources.spill_store_bytes <= SPILLED


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda(dtype: torch.dtype) -> None:
    Calls(samples_of(ON_CUDA, dtype, "cuda")).check_pipeline(torch.device("cuda", 0))
