"""Attention over pages as generated kernels compute it, run thread by thread on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.codegen.emulated_calls import allocate, decoder_inputs, input_bytes, reference, relative_error, tensors
from tests.schedule.decoder_graph import Builder, contiguous, decoder
from tests.thinned import thinned
from torch_mpk import _C, registry
from torch_mpk.jit import compile_cuda
from torch_mpk.testing.emulator import SMEM_BYTES, EmulatedKernel, aligned, emulate

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


@dataclass
class Case:
    """Sizes of a call, and how its pages lie in memory: keys and values ``apart``, ``side by side`` within a page as
    vLLM has them, or pages of keys and of values in ``turns`` as Hugging Face's engine has them."""

    R: int = 2
    H: int = 4
    G: int = 2
    D: int = 64
    S: int = 16
    M: int = 4
    P: int = 13
    dtype: torch.dtype = torch.bfloat16
    layout: str = "turns"
    has_new: bool = True
    V: int = 0  # the size of values, where they differ from keys; then pages lie apart
    softcap: float = 0.0
    has_sinks: bool = False

    @property
    def value_size(self) -> int:
        return self.V or self.D

    def pages(self) -> dict[str, tuple[str, list[int], int]]:
        """Of keys and values: the buffer, strides, and the first element."""
        page = self.S * self.G * self.D
        strides = contiguous([self.P, self.S, self.G, self.D])
        if self.layout == "apart":
            of_values = contiguous([self.P, self.S, self.G, self.value_size])
            return {"k_pages": ("k_pages", strides, 0), "v_pages": ("v_pages", of_values, 0)}
        step = page if self.layout == "turns" else 2 * page
        return {name: ("pages", [step, *strides[1:]], i * page) for i, name in enumerate(("k_pages", "v_pages"))}

    def graph(self) -> _C.TBGraph:
        b = Builder()
        dtype = str(self.dtype).removeprefix("torch.")
        shapes = {"q": [self.R, self.H, self.D]}
        if self.has_new:
            shapes |= {"k_new": [self.R, self.G, self.D], "v_new": [self.R, self.G, self.value_size]}
        operands = [(name, b.buffer("input", name, dtype, shape)) for name, shape in shapes.items()]
        buffers: dict[str, _C.Tensor] = {}
        for name, (buffer, strides, first) in self.pages().items():
            shape = [self.P, self.S, self.G, self.value_size if name == "v_pages" else self.D]
            if buffer not in buffers:
                buffers[buffer] = b.buffer("input", buffer, dtype, [2 * self.P + 1, *shape[1:]])
            operands.append((name, _C.Tensor(buffers[buffer].buffer, dtype, shape, strides, first)))
        operands += [("block_table", b.buffer("input", "block_table", "int32", [self.R, self.M]))]
        operands += [("length", b.buffer("input", "length", "int32", [self.R]))]
        if self.has_sinks:
            operands += [("sinks", b.buffer("input", "sinks", dtype, [self.H]))]
        y = b.buffer("output", "y", dtype, [self.R, self.H, self.value_size])
        b.node("paged_attention", operands, y, {"scale": self.D**-0.5, "softcap": self.softcap})
        return b.graph

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages in any order, a prefix that rows share, a page that there is not in some, and lengths of all kinds."""
        own = 2 if self.layout == "turns" else 1  # then pages of keys are those with even numbers
        numbers = own * torch.randperm((self.P - 1) // own + 1)
        table = numbers.repeat(-(-self.R * self.M // len(numbers)))[: self.R * self.M].view(self.R, self.M)
        last = torch.arange(self.R)
        assert len(numbers) > self.R or not self.has_new, "rows write to pages of their own"
        length = torch.randint(1, self.M * self.S + 1, (self.R,))
        length[torch.randint(self.R, ())] = self.M * self.S
        if self.R > 2:
            length[:2] = torch.tensor([-(2**31), self.M * self.S + 5])
        if self.R > 5:
            length[5] = 0
        table[:, 0] = numbers[self.R]  # shared by all but those that write there
        writes = (length - 1).div(self.S, rounding_mode="floor").clamp(0, self.M - 1)
        table[last, writes] = numbers[last % len(numbers)]
        for row in range(self.R):
            others = [m for m in range(self.M) if m != int(writes[row])]
            for m in others:  # nobody else's last page
                if int(table[row, m]) in numbers[: self.R].tolist():
                    table[row, m] = numbers[self.R + (row + m) % (len(numbers) - self.R)]
            if row % 5 == 3 and others:
                table[row, others[row % len(others)]] = -1 if row % 2 else self.P
        if self.R > 4:
            table[4, writes[4]] = -1  # nowhere to write
        return table, length

    def inputs(self, graph: _C.TBGraph) -> list[torch.Tensor]:
        given = dict(zip(("block_table", "length"), self.tables()))
        made = []
        for (name, size), t in zip(input_bytes(graph).items(), tensors(graph, "input"), strict=True):
            if name in given:
                made.append(allocate(t).copy_(given[name]))
            else:
                x = aligned(size, 0xFF).view(self.dtype)
                shape = t.shape if name in ("q", "k_new", "v_new", "sinks") else [x.numel()]
                made.append(x.view(shape).copy_(torch.randn(shape)))
        return made


def exact(graph: _C.TBGraph, inputs: list[torch.Tensor]) -> torch.Tensor:
    """By the task's reference, in float64."""
    [node] = graph.nodes
    task = registry.get("paged_attention")
    by_name = {o.name: o.tensor for o in node.operands}
    buffers = {graph.buffers[t.buffer].index: x for t, x in zip(tensors(graph, "input"), inputs, strict=True)}
    operands: list[Any] = []
    for operand in task.inputs:
        t = by_name.get(operand.name)
        if t is None:
            operands.append(None)
            continue
        x = buffers[graph.buffers[t.buffer].index]
        x = x.as_strided(t.shape, t.strides, x.storage_offset() + t.offset)
        operands.append(x.double() if x.is_floating_point() else x)
    return task(*operands, **node.attrs)


def launched(kernel: EmulatedKernel, inputs: list[torch.Tensor], **how: Any) -> list[torch.Tensor]:
    """The result, and the inputs after it; ``inputs`` stay as they are."""
    given = [aligned(x.nbytes, 0xFF).view(x.dtype).view(x.shape).copy_(x) for x in inputs]
    outputs = [allocate(t) for t in tensors(kernel.schedule.graph, "output")]
    kernel.launch(given, outputs, **how)
    assert kernel.host_abort.sum() == 0
    return [*outputs, *given]


def check(kernel: EmulatedKernel, case: Case, seeds: range) -> None:
    graph, tolerance = kernel.schedule.graph, TOLERANCE[case.dtype]
    for seed in seeds:
        torch.manual_seed(seed)
        inputs = case.inputs(graph)
        wanted_inputs, [want] = reference(graph, inputs)
        got, *left = launched(kernel, inputs, seed=seed)
        for x, wanted in zip(left, wanted_inputs, strict=True):
            assert torch.equal(x, wanted), "something else was written"
        is_empty = (want == 0).flatten(1).all(1)
        assert not got[is_empty].any()
        [lengths] = [x for name, x in zip(input_bytes(graph), inputs, strict=True) if name == "length"]
        assert (is_empty == (lengths <= 0)).all() or case.M == 1 or case.R > 4
        for row in torch.arange(case.R)[~is_empty].tolist():
            assert relative_error(got[row], want[row]) < tolerance
            assert relative_error(got[row], exact(graph, inputs)[row]) < tolerance
        again = launched(kernel, inputs, seed=seed + 1, order="shuffled", jitter=seed + 1)
        assert all(map(torch.equal, again, [got, *left])), "the same call gave other bits"


CASES = [
    Case(),
    Case(R=1, S=32, layout="side by side"),
    Case(R=5, S=3, M=7, P=40, H=6, D=40, layout="side by side"),
    Case(R=16, S=16, M=6, P=80, layout="turns", dtype=torch.float16),
    Case(R=64, S=1, M=5, P=200, H=2, G=1, D=32, layout="apart"),
    Case(R=64, S=32, M=3, P=150, H=2, G=1, D=128),
    Case(R=2, S=256, M=3, P=9, layout="turns", has_new=False),
    Case(R=5, S=16, M=3, P=30, dtype=torch.float32, D=128, layout="apart"),
    Case(R=5, S=24, M=3, P=30, dtype=torch.float32, D=256, H=2, layout="turns"),
    Case(R=1, S=5, M=90, P=110, layout="turns"),
    Case(R=16, S=16, M=70, P=400, H=4, G=1, D=16, layout="turns"),
    Case(R=5, S=256, M=6, P=20, H=8, G=1, D=128, layout="side by side", dtype=torch.float16),
    Case(R=5, S=16, M=7, P=40, H=6, D=40, V=24, layout="apart", softcap=1.5, has_sinks=True),
    Case(R=1, S=32, softcap=1.5, has_sinks=True),
    Case(R=2, S=16, M=20, P=50, D=192, V=128, layout="apart", dtype=torch.float16),
    Case(R=64, S=32, M=3, P=150, H=2, G=1, D=128, has_sinks=True),
    Case(R=5, S=16, M=3, P=30, dtype=torch.float32, D=64, V=128, layout="apart", softcap=2.0, has_sinks=True),
]


@pytest.mark.parametrize("case", thinned([pytest.param(c, id=str(i)) for i, c in enumerate(CASES)], 12, 16))
def test_rows_over_pages(case: Case) -> None:
    kernel = emulate(case.graph())
    in_boxes = case.G > 1 and case.S % 16 == 0 and case.dtype != torch.float32
    assert len(kernel.program.maps) == (2 if in_boxes else 0)
    check(kernel, case, range(3))


def test_caches_of_other_sizes_share_a_kernel() -> None:
    """How many pages there are stands in the table: a page that the larger cache has is none of the smaller's."""
    cases = [Case(R=16, M=6, P=pages, dtype=torch.float16) for pages in (61, 80)]
    small, large = (emulate(case.graph()) for case in cases)
    assert small.program.source == large.program.source
    assert small.program.table != large.program.table
    for kernel, case in zip((small, large), cases):
        check(kernel, case, range(1))


def test_copies_without_the_copy_engine() -> None:
    case = Case(R=3, S=24)
    check(emulate(case.graph(), arch=80), case, range(2))


@pytest.mark.parametrize(("rows", "workers"), thinned([(5, 3), (5, 12), (40, 12)], 1))
def test_a_rows_bits_depend_on_no_other_row(rows: int, workers: int) -> None:
    case = Case(R=rows, S=16, M=30, P=rows * 8, H=2, G=1, D=16, has_new=False, layout="apart")
    kernel = emulate(case.graph(), workers=workers)
    [[job]] = [phase.jobs for phase in kernel.schedule.phases]
    assert job.cut.fields["split_tiles"] > 0
    assert job.cut.fields["overlaps"] == (2 * rows > workers)
    inputs = case.inputs(kernel.schedule.graph)
    inputs[-1][2] = 333
    before = launched(kernel, inputs)[0][2]
    for others in (0, 7, 480):
        inputs[-1][[r for r in range(rows) if r != 2]] = others
        assert torch.equal(launched(kernel, inputs, seed=others)[0][2], before)


@pytest.mark.parametrize(
    ("batch", "page_size", "limits"), thinned([(1, 16, [40]), (3, 5, [0, 17, 40]), (16, 16, [*range(1, 16), 40])], 1)
)
def test_a_decoder_with_norms_and_rope_in_front(batch: int, page_size: int, limits: list[int]) -> None:
    """Layers' pages lie in one tensor, in turns: none awaits what another writes."""
    kernel = emulate(decoder(batch=batch, page_size=page_size, computed_tables=True), polled=True)
    graph = kernel.schedule.graph
    jobs = [job for phase in kernel.schedule.phases for job in phase.jobs]
    attention = [job for job in jobs if graph.nodes[job.body[0]].task == "paged_attention"]
    assert [(len(job.prologue), job.loader_waits) for job in attention] == [(4, []), (4, [])]
    torch.manual_seed(batch)
    inputs = decoder_inputs(graph, limits, 0)
    wanted_inputs, wanted = reference(graph, inputs)
    bits = None
    for jitter in (0, 7):
        left = launched(kernel, inputs, seed=jitter, jitter=jitter)
        for got, want in zip(left, [*wanted, *wanted_inputs], strict=True):
            if got.is_floating_point():
                assert relative_error(got, want) < 2e-2
            else:
                assert torch.equal(got, want)
        assert bits is None or all(map(torch.equal, left, bits)), "the same call gave other bits"
        bits = left


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(R=1, H=16, G=8, D=128, S=256, M=8, P=100, softcap=50.0, has_sinks=True),
        Case(R=8, H=16, G=16, D=192, V=128, S=16, M=8, P=200, layout="apart"),
        Case(R=64, H=64, G=8, D=64, S=256, M=8, P=600, has_sinks=True),
    ],
    ids=str,
)
def test_caps_sinks_and_unequal_sizes_keep_nothing_in_local_memory(case: Case) -> None:
    schedule = _C.make_schedule(case.graph(), _C.Target("cuda", 90, 132, SMEM_BYTES, True, True))
    resources = compile_cuda(_C.generate_cuda(schedule).source, 90).resources
    assert resources.warnings == ()
    assert resources.stack_bytes == resources.spill_store_bytes == 0
