"""Kernels of several ranks that run beside each other on the emulator, and exchange through mailboxes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from tests.codegen.emulated_calls import allocate, relative_error, tensors
from tests.ranks.step import graph_of, inputs_of, wanted
from tests.thinned import thinned
from torch_mpk import _C
from torch_mpk.testing.emulator import SMEM_BYTES, EmulatedKernel, aligned, compile_kernels

RANK = 6  # a StallRecord's waiting: see abi/control.h


class Ranks:
    """Kernels of one schedule, each with its own weights."""

    def __init__(self, ranks: int, rows: int, dtype: torch.dtype, polled: bool, workers: int = 3) -> None:
        self.inputs = [list(map(in_aligned_memory, own)) for own in inputs_of(ranks, rows, dtype)]
        graph = graph_of(self.inputs[0], ranks)
        schedule = _C.make_schedule(graph, _C.Target("cuda", 90, workers, SMEM_BYTES, True, polled))
        _C.validate(schedule)
        program = _C.generate_cuda(schedule)
        library = compile_kernels([program.source], 90, ["-O1"])
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


def in_aligned_memory(x: torch.Tensor) -> torch.Tensor:
    return aligned(x.numel() * x.element_size()).view(x.dtype).view(x.shape).copy_(x)


CASES = thinned([(2, 1, torch.bfloat16, True), (4, 3, torch.float16, True), (2, 2, torch.float32, False)], 0)


@pytest.mark.parametrize(("ranks", "rows", "dtype", "polled"), CASES, ids=str)
def test_all_ranks_have_the_sums(ranks: int, rows: int, dtype: torch.dtype, polled: bool) -> None:
    team = Ranks(ranks, rows, dtype, polled)
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


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named() -> None:
    team = Ranks(2, 1, torch.bfloat16, True)
    team.launch()
    right = [out.clone() for out in team.outputs[0]]
    team.launch(skipped=[1], watchdog_ns=3 * 10**8)
    kernel = team.kernels[0]
    assert kernel.host_abort[0] == 1
    assert all(out.isnan().all() for out in team.outputs[0])
    records = kernel.control[kernel.program.stalls_offset :].view(torch.int32).view(-1, 8)[:3].tolist()
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
