"""Two ranks on one GPU: two executables of one process, each with half of the multiprocessors, on two streams; or two
processes that take turns."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

import torch_mpk
from tests.codegen.emulated_calls import relative_error, tensors
from tests.ranks.step import graph_of, inputs_of, wanted
from tests.ranks.team import run
from tests.ranks.test_processes import Layers, compiled, digest, inputs
from torch_mpk import _C
from torch_mpk.errors import MegakernelTimeout
from torch_mpk.jit import compile_cuda

pytestmark = pytest.mark.gpu
RANKS = 2
PATIENCE = 60.0  # seconds: a sanitizer's kernels are slow
IMPATIENCE = 2.0
STEPS = int(os.environ.get("JITTERED_LAUNCHES", "200"))


class Pair:
    def __init__(self, rows: int, dtype: torch.dtype, polled: bool = True, watchdog: float = PATIENCE) -> None:
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
        self.ranks = [_C.CudaExecutable(program, image, 0, int(1e9 * watchdog)) for _ in range(RANKS)]
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

    def captured(self, rank: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.streams[rank]):
            self.launch(rank)
        return graph

    def replay(self, rank: int, graph: torch.cuda.CUDAGraph) -> None:
        with torch.cuda.stream(self.streams[rank]):
            graph.replay()

    def error_of(self, rank: int) -> str:
        """Of its last launch, which was aborted."""
        torch.cuda.synchronize()
        assert all(out.isnan().all() for out in self.outputs[rank])
        with pytest.raises(MegakernelTimeout) as raised:
            self.ranks[rank].check()
        return str(raised.value)

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
    pair = Pair(1, torch.bfloat16, watchdog=IMPATIENCE)
    pair.step()
    right = [out.clone() for out in pair.outputs[0]]
    pair.launch(0)
    assert "rank 1" in pair.error_of(0)
    pair.launch(1)  # which is told, and gives up at once
    assert "rank 0" in pair.error_of(1)
    pair.join()
    pair.step()
    for outputs in pair.outputs:
        assert all(map(torch.equal, outputs, right))


def test_graphs_that_ranks_replay_unequally_often() -> None:
    pair = Pair(1, torch.bfloat16, watchdog=IMPATIENCE)
    pair.step()
    right = [out.clone() for out in pair.outputs[0]]
    graphs = [pair.captured(rank) for rank in range(RANKS)]

    def replay_all() -> None:
        for _ in range(3):
            for rank, graph in enumerate(graphs):
                pair.replay(rank, graph)
        torch.cuda.synchronize()
        for executable, outputs in zip(pair.ranks, pair.outputs, strict=True):
            executable.check()
            assert all(map(torch.equal, outputs, right))

    replay_all()
    pair.replay(0, graphs[0])
    assert "rank 1" in pair.error_of(0)
    pair.replay(0, graphs[0])  # its words of the other rank would be an earlier launch's
    assert "has not begun anew" in pair.error_of(0)
    pair.replay(1, graphs[1])
    assert "rank 0" in pair.error_of(1)
    pair.join()
    replay_all()


def test_many_steps_with_random_delays_have_the_same_bits() -> None:
    pair = Pair(1, torch.bfloat16)
    pair.step()
    right = [out.clone() for out in pair.outputs[0]]
    for number in range(STEPS):
        for rank, executable in enumerate(pair.ranks):
            executable.jitter = RANKS * number + rank + 1
        pair.step(check=number % 16 == 0)
        if number % 16 == 0:
            assert all(all(map(torch.equal, outputs, right)) for outputs in pair.outputs)


@torch.no_grad()
def in_turn(rank: int, steps: int) -> dict[str, object]:
    """Steps of a process that takes turns on the GPU with others; then rank 1 is late for one."""
    step = compiled(Layers(rank).cuda(), watchdog_seconds=5 * IMPATIENCE)
    found = [step(inputs(i % 5).cuda()) for i in range(steps)]
    torch_mpk.synchronize()
    wide = Layers(rank).double()
    errors = [(got.cpu().double() - wide(inputs(i).double())).abs().max().item() for i, got in enumerate(found[:5])]
    said = ""
    try:
        time.sleep(10 * IMPATIENCE * rank)
        step(inputs(0).cuda())
        torch_mpk.synchronize()
    except MegakernelTimeout as error:
        said = str(error)
    again = step(inputs(0).cuda())
    torch_mpk.synchronize()
    found = [each.cpu() for each in found]
    is_same = all(torch.equal(each, found[i % 5]) for i, each in enumerate(found)) and torch.equal(
        again.cpu(), found[0]
    )
    return {"digest": digest(found[:5]), "is_same": is_same, "error": max(errors), "said": said}


def test_two_processes_take_turns_on_one_gpu(tmp_path: Path) -> None:
    """Mailboxes in symmetric memory, and how ranks begin anew."""
    both = run(RANKS, in_turn, tmp_path, 100, TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1")
    assert both[0]["digest"] == both[1]["digest"]
    assert all(each["is_same"] and each["error"] < 1e-5 for each in both)
    assert "rank 1" in both[0]["said"] and "rank 0" in both[1]["said"]
