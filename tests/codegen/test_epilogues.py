"""Pointwise tasks behind linears and rows that read their results in another order of dimensions, in the emulator."""

from __future__ import annotations

import random

import pytest
import torch

import torch_mpk.tasks  # noqa: F401  declares the tasks
from tests.codegen.emulated_calls import allocate, reference, relative_error, tensors
from tests.schedule.decoder_graph import Builder, contiguous
from tests.schedule.prompt_graph import NORM, Prompt
from tests.thinned import thinned
from torch_mpk import _C
from torch_mpk.jit import compile_cuda
from torch_mpk.testing.emulator import SMEM_BYTES, EmulatedKernel, emulate


def many_rows(b: Builder) -> None:
    """A linear that has a kernel's warps multiply together."""
    x, weight = b.buffer("input", "many", "bfloat16", [65, 64]), b.buffer("input", "weight", "bfloat16", [32, 64])
    b.node("linear", [("x", x), ("weight", weight)], b.buffer("output", "product", "bfloat16", [65, 32]))


def random_inputs(graph: _C.TBGraph) -> list[torch.Tensor]:
    inputs = [allocate(t) for t in tensors(graph, "input")]
    for x in inputs:
        x.copy_(torch.randn(x.shape) / (x.shape[-1] ** 0.5 if x.dim() > 1 else 1) if x.is_floating_point() else 0)
    return inputs


def launch(kernel: EmulatedKernel, inputs: list[torch.Tensor], seed: int = 0) -> list[torch.Tensor]:
    outputs = [allocate(t) for t in tensors(kernel.schedule.graph, "output")]
    kernel.launch(inputs, outputs, seed=seed, jitter=seed, order="shuffled" if seed else "forward")
    assert kernel.host_abort.sum() == 0
    return outputs


# ---- caches


ENDED_WITH_ROWS = [  # tiles hold heads whole
    Prompt(batch=1, tokens=70, heads=4, groups=2, size=64, length=100),
    Prompt(batch=2, tokens=40, heads=3, groups=1, size=128, length=50, dtype="float16", bias=True),
    Prompt(batch=1, tokens=130, heads=9, groups=3, size=32, length=140, is_normed=False, bias=True),
    Prompt(batch=1, tokens=257, heads=2, groups=2, size=16, length=260, hidden=128),
    Prompt(batch=3, tokens=50, heads=2, groups=1, size=96, length=60),
]
PROMPTS = [
    Prompt(batch=1, tokens=70, heads=4, groups=2, size=40, length=100),  # rows of some lanes, of which some have none
    Prompt(batch=1, tokens=67, heads=1, groups=1, size=136, length=90, is_normed=False),  # a warp a row
    Prompt(batch=2, tokens=40, heads=3, groups=1, size=40, length=50, dtype="float16", bias=True),
    Prompt(batch=1, tokens=66, heads=2, groups=2, size=20, length=70),  # rows that no access of 16 bytes begins
    Prompt(batch=1, tokens=130, heads=2, groups=1, size=1152, length=140, hidden=128),  # all warps a row
]


@pytest.mark.parametrize("prompt", thinned(PROMPTS, 0) + thinned(ENDED_WITH_ROWS, 1), ids=str)
def test_keys_and_values_go_to_the_caches_as_they_are_made(prompt: Prompt) -> None:
    graph = prompt.graph()
    kernel = emulate(graph, polled=True)
    phases = [[[graph.nodes[n].label for n in j.epilogue] for j in p.jobs] for p in kernel.schedule.phases]
    if prompt in ENDED_WITH_ROWS:
        normed = ["q.norm", "k.norm"] if prompt.is_normed else []
        [[labels]] = phases
        assert sorted(labels) == sorted([*normed, "q.rope", "k.rope", "k.write", "v.write"])
    else:
        assert phases == [[["v.write"]], [[], ["k.write"]]]
    names = [b.name for b in graph.buffers if b.kind == "input"]
    slot = names.index("slot")
    for seed, first in enumerate((0, prompt.length - prompt.tokens, prompt.length - 7, -5, 3)):
        torch.manual_seed(seed)
        inputs = random_inputs(graph)
        inputs[slot].fill_(first)
        given = [x.clone() for x in inputs]
        wanted_inputs, [want] = reference(graph, inputs)
        [got] = launch(kernel, inputs, seed)
        assert relative_error(got, want) < 2e-2
        for name, x, wanted, before in zip(names, inputs, wanted_inputs, given, strict=True):
            if not name.endswith("cache"):
                assert torch.equal(x, before)
                continue
            is_new = torch.zeros(prompt.length, dtype=torch.bool)
            is_new[max(first, 0) : max(first + prompt.tokens, 0)] = True
            assert torch.equal(x[:, :, ~is_new], before[:, :, ~is_new])
            assert relative_error(x[:, :, is_new], wanted[:, :, is_new]) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("prompt", [*PROMPTS, *ENDED_WITH_ROWS], ids=str)
def test_keys_and_values_go_to_the_caches_on_a_gpu(prompt: Prompt) -> None:
    graph, device = prompt.graph(), _C.device_info(0)
    target = _C.Target("cuda", 90, device.num_sms, device.smem_optin_bytes, fuse=True, polled=True)
    program = _C.generate_cuda(_C.make_schedule(graph, target))
    kernel = _C.CudaExecutable(program, compile_cuda(program.source, 90).image, 0, 2_000_000_000)
    torch.manual_seed(0)
    given = random_inputs(graph)
    names = [b.name for b in graph.buffers if b.kind == "input"]
    given[names.index("slot")].fill_(prompt.length - prompt.tokens)
    wanted_inputs, wanted = reference(graph, given)
    made = []
    for _ in range(3):
        inputs, outputs = [x.cuda() for x in given], [torch.full_like(y, torch.nan, device="cuda") for y in wanted]
        kernel.run(inputs, outputs, [], torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        made.append([x.cpu() for x in (*inputs, *outputs)])
    for got, want in zip(made[0], (*wanted_inputs, *wanted), strict=True):
        assert torch.equal(got, want) or relative_error(got, want) < 2e-2
    for others in made[1:]:
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(made[0], others, strict=True))


@pytest.mark.slow
def test_rows_behind_wide_tiles_compile_without_local_memory() -> None:
    """A thread has 128 sums, which must be gone before the rows are worked on."""
    graph = Prompt(batch=1, tokens=2048, heads=32, groups=8, size=128, length=4096, hidden=4096, bias=True).graph()
    schedule = _C.make_schedule(graph, _C.Target("cuda", 90, 132, SMEM_BYTES, fuse=True, polled=True))
    assert [job.cut.shape.tile_rows for phase in schedule.phases for job in phase.jobs] == [256]
    resources = compile_cuda(_C.generate_cuda(schedule).source, 90).resources
    assert resources.warnings == ()
    assert max(resources.stack_bytes, resources.spill_store_bytes) == 0


# ---- any order of dimensions


def permuted(b: Builder, made: _C.Tensor, sizes: list[int], order: list[int], other: _C.Tensor) -> None:
    """z[p] = made[p] * (p[1] + 2) + other[p], where p are indices of ``sizes`` in another order."""
    domain, strides = [sizes[d] for d in order], [contiguous(sizes)[d] for d in order]
    z = b.buffer("output", "z", made.dtype, domain)
    program = _C.Program(domain)
    value = program.emit("load", made.dtype, operand=0, strides=strides)
    factor = program.emit("index", "int64", operand=1)
    factor = program.emit("add", "int64", [factor, program.emit("const", "int64", imm=2)])
    scaled = program.emit("mul", made.dtype, [value, program.emit("cast", made.dtype, [factor])])
    total = program.emit("add", made.dtype, [scaled, program.emit("load", made.dtype, operand=1, strides=strides)])
    program.emit("store", made.dtype, [total], operand=2, strides=contiguous(domain))
    operands = [("in0", made, True, False), ("in1", other, True, False), ("out0", z, False, True)]
    b.graph.add_node("pointwise", operands, {}, program, "permuted")


def check_permuted(graph: _C.TBGraph, sizes: list[int], order: list[int], seed: int) -> None:
    kernel = emulate(graph, polled=True)
    [job] = [j for p in kernel.schedule.phases for j in p.jobs if j.epilogue]
    assert [graph.nodes[n].label for n in job.epilogue] == ["permuted"]
    torch.manual_seed(seed)
    inputs = random_inputs(graph)
    names = {"input": [], "output": []}
    for buffer in graph.buffers:
        if buffer.kind in names:
            names[buffer.kind].append(buffer.name)
    outputs = dict(zip(names["output"], launch(kernel, inputs, seed), strict=True))
    y, other = outputs["y"], inputs[names["input"].index("other")]
    factor = (torch.arange(sizes[order[1]]) + 2).to(y.dtype)
    factor = factor.view([-1 if d == 1 else 1 for d in range(len(order))])
    want = y.reshape(sizes).permute(order) * factor + other.reshape(sizes).permute(order)
    assert torch.equal(outputs["z"], want), "the epilogue took other values than the job stored, or put them elsewhere"
    _, wanted = reference(graph, inputs)
    assert relative_error(y, wanted[names["output"].index("y")]) < 1e-2


def split(generator: random.Random, shape: list[int]) -> list[int]:
    """The sizes with some of them cut in two, as a reshape does."""
    sizes = []
    for size in shape:
        parts = [n for n in range(2, size) if size % n == 0]
        first = generator.choice(parts) if parts and generator.random() < 0.5 else size
        sizes += [first, size // first]
    return sizes


@pytest.mark.parametrize("seed", thinned(range(12), 0))
def test_an_epilogue_of_rows_in_any_order(seed: int) -> None:
    generator = random.Random(seed)
    b = Builder()
    shape = [generator.choice([3, 24, 70]), generator.choice([1, 4, 6]), generator.choice([8, 48, 128, 36, 2080])]
    dtype = generator.choice(["bfloat16", "float32", "float16"])
    if seed % 2 == 0:
        many_rows(b)
    flat = [shape[0] * shape[1], shape[2]]
    x, y = b.buffer("input", "x", dtype, flat), b.buffer("output", "y", dtype, flat)
    made = b.node("rms_norm", [("x", x)], y, NORM)
    sizes = split(generator, shape)
    order = generator.sample(range(len(sizes)), len(sizes))
    permuted(b, made, sizes, order, b.buffer("input", "other", dtype, flat))
    check_permuted(b.graph, sizes, order, seed)


@pytest.mark.parametrize("seed", thinned(range(8), 0))
def test_an_epilogue_of_a_linear_in_any_order(seed: int) -> None:
    generator = random.Random(seed)
    b = Builder()
    rows, columns = generator.choice([66, 128, 144, 3, 8]), generator.choice([64, 96, 200])
    x, weight = b.buffer("input", "x", "bfloat16", [rows, 128]), b.buffer("input", "w", "bfloat16", [columns, 128])
    y = b.buffer("output", "y", "bfloat16", [rows, columns])
    made = b.node("linear", [("x", x), ("weight", weight)], y)
    sizes = split(generator, [rows, columns])
    order = generator.sample(range(len(sizes)), len(sizes))
    permuted(b, made, sizes, order, b.buffer("input", "other", "bfloat16", [rows, columns]))
    check_permuted(b.graph, sizes, order, seed)
