"""Kernels of several ranks that run beside each other on the emulator, and exchange through mailboxes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.codegen.emulated_calls import allocate, relative_error, tensors
from tests.ranks.step import HIDDEN, graph_of, inputs_of, wanted
from tests.ranks.team import ROOT
from tests.thinned import thinned
from torch_mpk import _C
from torch_mpk.capture.graph import capture
from torch_mpk.lowering import lower
from torch_mpk.patterns import apply
from torch_mpk.testing.emulator import SMEM_BYTES, EmulatedKernel, aligned, compile_kernels

HEADER = ROOT / "include" / "torch_mpk" / "device" / "tasks" / "exchange.cuh"
RANK = 6  # a StallRecord's waiting: see abi/control.h


class Ranks:
    """Kernels of one schedule, each with its own weights."""

    def __init__(
        self,
        graph: _C.TBGraph,
        inputs: Sequence[Sequence[torch.Tensor]],
        polled: bool,
        workers: int = 3,
        change: Callable[[str], str] = str,
        profiled: bool = False,
    ) -> None:
        """``change``: of the source."""
        ranks = len(inputs)
        self.inputs = [list(map(in_aligned_memory, own)) for own in inputs]
        schedule = _C.make_schedule(graph, _C.Target("cuda", 90, workers, SMEM_BYTES, True, polled))
        _C.validate(schedule)
        program = _C.generate_cuda(schedule, profiled)
        library = compile_kernels([change(program.source)], 90, ["-O1"])
        self.kernels = [EmulatedKernel(schedule, program, library) for _ in range(ranks)]
        self.outputs = [[allocate(t) for t in tensors(graph, "output")] for _ in range(ranks)]
        self.boxes = [aligned(program.mailbox_bytes) for _ in range(ranks)]
        self.join()

    def join(self) -> None:
        for box in self.boxes:
            box.zero_()
        addresses = torch.tensor([box.data_ptr() for box in self.boxes])
        for rank, kernel in enumerate(self.kernels):
            kernel.join(rank, addresses)

    def launch(self, times: int = 1, skipped: Sequence[int] = (), **options: int) -> None:
        """All ranks but those skipped, side by side."""

        def run(rank: int) -> None:
            for _ in range(times):
                self.kernels[rank].launch(self.inputs[rank], self.outputs[rank], **options)

        threads = [
            threading.Thread(target=run, args=(rank,)) for rank in range(len(self.kernels)) if rank not in skipped
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def layers(ranks: int, rows: int, dtype: torch.dtype, polled: bool) -> Ranks:
    inputs = inputs_of(ranks, rows, dtype)
    return Ranks(graph_of(inputs[0], ranks), inputs, polled)


def one_sum(ranks: int, change: Callable[[str], str]) -> Ranks:
    def forward(x):
        return torch.ops.mpk.all_reduce(x, ranks=ranks, group="0")

    inputs = [[torch.randn(1, HIDDEN)] for _ in range(ranks)]
    graph = lower(apply(capture(torch.fx.symbolic_trace(forward), inputs[0]).graph_module)).graph
    return Ranks(graph, inputs, polled=True, workers=2, change=change)


def in_aligned_memory(x: torch.Tensor) -> torch.Tensor:
    return aligned(x.numel() * x.element_size()).view(x.dtype).view(x.shape).copy_(x)


CASES = thinned([(2, 1, torch.bfloat16, True), (4, 3, torch.float16, True), (2, 2, torch.float32, False)], 0)


@pytest.mark.parametrize(("ranks", "rows", "dtype", "polled"), CASES, ids=str)
def test_all_ranks_have_the_sums(ranks: int, rows: int, dtype: torch.dtype, polled: bool) -> None:
    team = layers(ranks, rows, dtype, polled)
    want = wanted(team.inputs)
    for seed in range(3):
        for outputs in team.outputs:
            for out in outputs:
                out.fill_(torch.nan)
        team.launch(times=1 + seed, seed=seed, jitter=seed)  # ranks may be a launch apart
        for outputs in team.outputs:
            assert relative_error(outputs[0], want[0]) < (1e-5 if dtype == torch.float32 else 2e-2)
            for out, first in zip(outputs, team.outputs[0], strict=True):
                assert torch.equal(out, first), "ranks have different bits"


def with_header(source: str, old: str, new: str) -> str:
    """A kernel whose exchange.cuh is another."""
    text = HEADER.read_text()
    assert text.count(old) == 1
    include = '#include "torch_mpk/device/tasks/exchange.cuh"'
    assert include in source
    return source.replace(include, text.replace(old, new).replace("#pragma once", ""))


def one_tag_for_both(source: str) -> str:
    """A thread looks at the tag of the second of its words, and takes both."""
    by_second = "words.x = words.x << 32 >> 32 | uint64_t(tag) << 32"
    loop = "for (uint32_t i = 1; differing(words, tag) != 0; words = ptx::load_relaxed_sys(p), i++) {"
    return with_header(source, loop, loop.replace("differing(words, tag)", f"({by_second}, differing(words, tag))"))


@pytest.mark.slow
@pytest.mark.parametrize("change", [str, one_tag_for_both])
def test_words_come_in_any_order(change: Callable[[str], str]) -> None:
    """A word is right as soon as its own tag is: a kernel that asks for another's tag has old data in some order."""
    team = one_sum(2, change)
    is_right = []
    for seed in range(4):
        for own in team.inputs:
            own[0].copy_(torch.randn_like(own[0]))
        team.launch(seed=seed, jitter=seed)
        total = sum(own[0] for own in team.inputs)
        is_right += [torch.equal(out, total) for [out] in team.outputs]
    assert all(is_right) == (change is str)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named() -> None:
    team = layers(2, 1, torch.bfloat16, True)
    team.launch()
    right = [out.clone() for out in team.outputs[0]]
    team.launch(skipped=[1], watchdog_ns=3 * 10**8)
    kernel = team.kernels[0]
    assert kernel.host_abort[0] == 1
    assert all(out.isnan().all() for out in team.outputs[0])
    records = kernel.control[kernel.program.stalls_offset :].view(torch.int32).view(-1, 10)[:3].tolist()
    assert (RANK, 1) in [(record[3], record[4]) for record in records if record[0]]
    assert team.boxes[1].view(torch.int32)[0] == 1, "rank 1 is not told"
    team.launch(skipped=[0], watchdog_ns=10**12)  # gives up at once
    assert team.kernels[1].host_abort[0] == 1
    for each in team.kernels:
        each.repair()
    team.join()
    team.launch()
    for outputs in team.outputs:
        assert all(map(torch.equal, outputs, right))


@pytest.mark.slow
def test_a_profiled_kernel_notes_how_long_it_waits_for_each_rank() -> None:
    """Rank 2 comes when rank 0 has pushed its first part; the emulator's clocks run at 2 cycles a nanosecond."""
    inputs, workers, late = inputs_of(3, 1, torch.float32), 2, 0.5
    team = Ranks(graph_of(inputs[0], 3), inputs, polled=True, workers=workers, profiled=True)
    first = threading.Thread(target=team.launch, kwargs={"skipped": [2]})
    first.start()
    while not team.boxes[2].any():
        time.sleep(0.001)
    time.sleep(late)
    team.launch(skipped=[0, 1])
    first.join()
    program, names = team.kernels[0].program, team.kernels[0].schedule.phase_names
    waits = team.kernels[0].control[-8 * workers * len(names) * 3 * 4 :].view(torch.int32)  # of 8 launches, the first
    cycles = waits.view(8, workers, len(names), 3)[0].amax(0)
    assert program.stamps_offset and not waits.view(8, -1)[1:].any()
    exchanges = torch.tensor([name.startswith(("all_reduce", "all_gather")) for name in names])
    assert (cycles[:, 0] == 0).all() and (cycles[~exchanges] == 0).all()
    assert (cycles[exchanges][:, 1:] > 0).all()
    assert cycles[:, 2].sum() > late * 1e8  # a twentieth of it: on a busy machine a thread may come late to wait
    want = wanted(team.inputs)
    assert all(relative_error(out, exact) < 1e-5 for out, exact in zip(team.outputs[0], want, strict=True))
