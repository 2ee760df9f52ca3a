"""Routers and experts as runs of nodes, emulated: what is one job is right, whatever was chosen."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import silu, softmax

from tests.cpu.test_experts import chosen_ids
from tests.thinned import thinned
from torch_mpk import _C
from torch_mpk.capture.graph import capture
from torch_mpk.lowering import lower
from torch_mpk.patterns import apply
from torch_mpk.testing.emulator import EmulatedKernel, aligned, emulate
from torch_mpk.testing.reference_vm import run as run_schedule


def experts(x, ids, weights, gate_up, down, residual):
    rows, choices = ids.shape
    each = x.unsqueeze(1).expand(rows, choices, x.shape[1])
    gate, up = torch.ops.mpk.expert_linear(each, ids, gate_up).chunk(2, dim=-1)
    products = torch.ops.mpk.expert_linear(silu(gate) * up, ids, down)
    return (products * weights.unsqueeze(-1)).sum(1) + residual


def expected_of(x, ids, weights, gate_up, down, residual):
    """In float64, but rounded where tensors are made; an id that names no expert gives zeros."""
    valid = (ids >= 0) & (ids < len(gate_up))
    of = ids.clamp(0, len(gate_up) - 1)
    halves = torch.einsum("rcnk,rk->rcn", gate_up.double()[of], x.double()).to(x.dtype) * valid.unsqueeze(-1)
    gate, up = halves.chunk(2, dim=-1)
    made = torch.einsum("rcnk,rck->rcn", down.double()[of], (silu(gate) * up).double()).to(x.dtype)
    return (made * valid.unsqueeze(-1) * weights.unsqueeze(-1)).double().sum(1) + residual.double()


def router(logits, choices: int):
    values, ids = torch.ops.mpk.topk(softmax(logits, dim=-1, dtype=torch.float32), num=choices)
    return (values / values.sum(-1, keepdim=True)).to(logits.dtype), ids


def lowered_call(call, operands):
    names = ", ".join(f"x{i}" for i in range(len(operands)))
    step = torch.fx.symbolic_trace(eval(f"lambda {names}: call({names})", {"call": call}))
    return lower(apply(capture(step, operands).graph_module))


def in_place(operands: list[torch.Tensor]) -> list[torch.Tensor]:
    return [aligned(t.numel() * t.itemsize).view(t.dtype).view(t.shape).copy_(t) for t in operands]


def fresh(lowered) -> list[torch.Tensor]:
    return [aligned(f.dtype.itemsize * math.prod(f.shape), 0xFF).view(f.dtype).view(f.shape) for f in lowered.fresh]


def kernels(schedule: _C.Schedule) -> list[str]:
    return [job.cut.kernel for phase in schedule.phases for job in phase.jobs]


GATED, SUMMED = "expert_linear.gated", "expert_linear.summed"

# Rows, choices, experts, width, experts' width, workers, and the kernels: tiles for more workers than there are, and
# for fewer; more experts than warps, more pairs of one than a group, boxes that columns do not fill.
CASES = [
    ((1, 4, 16, 64, 256), 4, [GATED, SUMMED]),
    ((1, 3, 5, 320, 64), 30, [GATED, SUMMED]),
    ((20, 2, 30, 192, 64), 4, [GATED, SUMMED]),
    ((64, 4, 4, 64, 512), 132, [GATED, "expert_linear.boxes", "reduced_points"]),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(("sizes", "workers", "names"), thinned(CASES, 0, 2), ids=str)
def test_experts(sizes: tuple[int, ...], workers: int, names: list[str], dtype: torch.dtype) -> None:
    rows, choices, num, width, inner = sizes
    kernel: EmulatedKernel | None = None
    for chosen in ("random", "one", "last", "none"):
        ids = chosen_ids(rows, choices, num, chosen if chosen in ("one", "last") else "random")
        if chosen == "none":
            ids.view(-1)[::2] = torch.tensor([-1, num])[torch.randint(2, ids.view(-1)[::2].shape)]
        x, residual = torch.randn(2, rows, width).to(dtype)
        gate_up, down = torch.randn(num, 2 * inner, width) / width**0.5, torch.randn(num, width, inner) / inner**0.5
        operands = in_place([x, ids, torch.rand(rows, choices).to(dtype), gate_up.to(dtype), down.to(dtype), residual])
        lowered = lowered_call(experts, operands)
        kernel = kernel or emulate(lowered.graph, workers=workers)
        assert kernels(kernel.schedule) == names
        made = fresh(lowered)
        kernel.launch(operands, made, order="shuffled", jitter=3)
        expected = expected_of(*operands)
        torch.testing.assert_close(made[0].double(), expected, rtol=2e-2, atol=3e-2)


@pytest.mark.slow
def test_a_profiled_kernel_counts_the_pairs_that_chose_each_expert() -> None:
    (rows, choices, num, width, inner), workers, names = CASES[2]
    operands = [
        torch.randn(rows, width).bfloat16(),
        chosen_ids(rows, choices, num, "random"),
        torch.rand(rows, choices),
    ]
    operands += [torch.randn(num, 2 * inner, width), torch.randn(num, width, inner), torch.randn(rows, width)]
    operands = in_place([t.bfloat16() if t.is_floating_point() else t for t in operands])
    operands[1][0] = num  # of no expert
    lowered = lowered_call(experts, operands)
    kernel = emulate(lowered.graph, workers=workers, profiled=True)
    assert kernels(kernel.schedule) == names
    assert kernel.program.phase_experts == [[num, 2 * inner * width * 2], [num, inner * width * 2]]
    kernel.launch(operands, fresh(lowered), jitter=3)
    launches_kept = 8
    pairs = kernel.control.view(torch.int32)[-launches_kept * 2 * num :].view(launches_kept, 2, num)
    assert not pairs[1:].any()
    for counts in pairs[0]:
        assert torch.equal(counts.long(), operands[1][1:].flatten().bincount(minlength=num))


FULL_SLOT = 1  # of Waiting


def test_a_stall_names_the_tile_of_an_expert() -> None:
    """The weights of one tile do not come; which expert's it is follows from the launch's ids."""
    (rows, choices, num, width, inner), workers, names = CASES[0]
    ids = chosen_ids(rows, choices, num, "random")
    x, residual = torch.randn(2, rows, width).bfloat16()
    weights, gate_up, down = (torch.randn(s) for s in ((rows, choices), (num, 2 * inner, width), (num, width, inner)))
    operands = in_place([x, ids, weights.bfloat16(), gate_up.bfloat16(), down.bfloat16(), residual])
    lowered = lowered_call(experts, operands)
    kernel = emulate(lowered.graph, workers=workers)
    assert kernels(kernel.schedule) == names
    expert, tile = int(ids[0, -1]), 3
    for phase, matrices, rows_of_tile in ((0, operands[3], 8), (1, operands[4], 16)):  # of the gate, and down
        kernel.fault.place, kernel.fault.cta = matrices[expert, rows_of_tile * tile].data_ptr(), 2**32 - 1  # any worker
        kernel.launch(operands, fresh(lowered), watchdog_ns=5 * 10**8)
        assert kernel.host_abort[0] == 1
        records = kernel.control[kernel.program.stalls_offset :].view(torch.int32).view(-1, 10).tolist()
        [(_, in_phase, _, waiting, *_, found, found_tile)] = [record for record in records if record[8]]
        assert (in_phase, waiting, found - 1, found_tile) == (phase, FULL_SLOT, expert, tile)
        kernel.repair()


@pytest.mark.parametrize(("rows", "num", "choices"), thinned([(1, 64, 8), (5, 128, 8), (3, 8, 2)], 1))
def test_routers(rows: int, num: int, choices: int) -> None:
    logits = torch.randn(rows, num).bfloat16()
    operands = in_place([logits])
    lowered = lowered_call(lambda x: router(x, choices), operands)
    kernel = emulate(lowered.graph, workers=4)
    assert kernels(kernel.schedule) == ["row_run"]
    made = fresh(lowered)
    kernel.launch(operands, made, order="reverse", jitter=2)
    weights, ids = (made[output.index] for output in lowered.outputs)
    expected, chosen = router(logits, choices)
    assert torch.equal(ids, chosen)
    torch.testing.assert_close(weights, expected)
    again = fresh(lowered)
    run_schedule(kernel.schedule, operands, again)
    torch.testing.assert_close(again[lowered.outputs[0].index], expected)
