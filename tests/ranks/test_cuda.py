"""Two ranks on one GPU: two executables of one process, each with half of the multiprocessors, on two streams."""

from __future__ import annotations

import pytest
import torch

from tests.codegen.emulated_calls import relative_error, tensors
from tests.ranks.step import graph_of, inputs_of, wanted
from torch_mpk import _C
from torch_mpk.errors import MegakernelTimeout
from torch_mpk.jit import compile_cuda

pytestmark = pytest.mark.gpu
RANKS, WATCHDOG_NS = 2, 2 * 10**9


class Pair:
    def __init__(self, rows: int, dtype: torch.dtype, polled: bool = True) -> None:
        info = _C.device_info(0)
        self.inputs = inputs_of(RANKS, rows, dtype, "cuda")
        graph = graph_of([t.cpu() for t in self.inputs[0]], RANKS)
        arch = _C.arch_of_device(info.arch).number
        workers = info.num_sms // RANKS
        target = _C.Target("cuda", arch, workers, info.smem_optin_bytes, True, polled, info.arch)
        schedule = _C.make_schedule(graph, target)
        _C.validate(schedule)
        program = _C.generate_cuda(schedule)
        image = compile_cuda(program.source, program.arch).image
        self.ranks = [_C.CudaExecutable(program, image, 0, WATCHDOG_NS) for _ in range(RANKS)]
        self.streams = [torch.cuda.Stream() for _ in range(RANKS)]
        self.boxes = [torch.zeros(program.mailbox_bytes, dtype=torch.uint8, device="cuda") for _ in range(RANKS)]
        self.outputs = [
            [torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="cuda") for t in tensors(graph, "output")]
            for _ in range(RANKS)
        ]
        torch.cuda.synchronize()
        self.join()

    def join(self) -> None:
        for box in self.boxes:
            box.zero_()
        torch.cuda.synchronize()
        for rank, executable in enumerate(self.ranks):
            executable.join(rank, [box.data_ptr() for box in self.boxes])

    def launch(self, rank: int) -> None:
        self.ranks[rank].run(self.inputs[rank], self.outputs[rank], (), self.streams[rank].cuda_stream)

    def step(self, check: bool = True) -> None:
        for rank in range(RANKS):
            self.launch(rank)
        if check:
            torch.cuda.synchronize()
            for executable in self.ranks:
                executable.check()


@pytest.mark.parametrize(
    ("rows", "dtype", "polled"),
    [(1, torch.bfloat16, True), (3, torch.float16, True), (2, torch.float32, False), (80, torch.bfloat16, True)],
)
def test_all_ranks_have_the_sums(rows: int, dtype: torch.dtype, polled: bool) -> None:
    pair = Pair(rows, dtype, polled)
    want = wanted([[t.cpu() for t in own] for own in pair.inputs])
    for _ in range(5):
        pair.step()
        for outputs in pair.outputs:
            assert relative_error(outputs[0].cpu(), want[0]) < (1e-5 if dtype == torch.float32 else 2e-2)
            for out, first in zip(outputs, pair.outputs[0], strict=True):
                assert torch.equal(out, first), "ranks have different bits"


def test_a_rank_that_does_not_come_is_named() -> None:
    pair = Pair(1, torch.bfloat16)
    pair.step()
    right = [out.clone() for out in pair.outputs[0]]
    pair.launch(0)
    torch.cuda.synchronize()
    with pytest.raises(MegakernelTimeout, match="rank 1"):
        pair.ranks[0].check()
    assert all(out.isnan().all() for out in pair.outputs[0])
    pair.launch(1)  # which is told, and gives up at once
    torch.cuda.synchronize()
    with pytest.raises(MegakernelTimeout, match="rank 0"):
        pair.ranks[1].check()
    pair.join()
    pair.step()
    for outputs in pair.outputs:
        assert all(map(torch.equal, outputs, right))


@pytest.mark.slow
def test_ten_thousand_steps_have_the_same_bits() -> None:
    pair = Pair(1, torch.bfloat16)
    pair.step()
    right = [out.clone() for out in pair.outputs[0]]
    for number in range(10_000):
        for rank, executable in enumerate(pair.ranks):
            executable.jitter = RANKS * number + rank + 1
        pair.step(check=number % 16 == 0)
        if number % 16 == 0:
            assert all(all(map(torch.equal, outputs, right)) for outputs in pair.outputs)
