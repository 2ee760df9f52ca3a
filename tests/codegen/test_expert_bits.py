"""The bits of an expert's product, emulated: a row's do not depend on the others, nor on the order of threads."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from tests.codegen.test_expert_rows import BOXES, ROWS, kernel_of
from tests.cpu.test_experts import chosen_ids
from torch_mpk.capture.graph import capture
from torch_mpk.lowering import lower
from torch_mpk.patterns import apply
from torch_mpk.testing.emulator import Order, aligned, emulate

# Columns, depth, dtype, whether weights lie transposed, and the kernel.
CASES = [
    (48, 320, torch.bfloat16, False, BOXES),
    (40, 96, torch.float16, False, ROWS),
    (20, 50, torch.float32, False, "tile"),
    (20, 64, torch.bfloat16, True, "tile"),
    (64, 96, torch.bfloat16, True, BOXES),
]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k", "dtype", "is_transposed", "name"), CASES, ids=str)
def test_bits(n: int, k: int, dtype: torch.dtype, is_transposed: bool, name: str) -> None:
    rows, choices, experts = 19, 2, 4
    shape = (experts, k, n) if is_transposed else (experts, n, k)
    x = aligned(rows * choices * k * dtype.itemsize).view(dtype).view(rows, choices, k)
    ids = aligned(rows * choices * 8).view(torch.int64).view(rows, choices)
    weight = aligned(experts * n * k * dtype.itemsize).view(dtype).view(shape)
    x.copy_(torch.randn(x.shape))
    weight.copy_(torch.randn(shape))
    ids.copy_(chosen_ids(rows, choices, experts, "random"))

    def step(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.ops.mpk.expert_linear(x, ids, *((None, weight) if is_transposed else (weight, None))),)

    lowered = lower(apply(capture(torch.fx.symbolic_trace(step), [x, ids, weight]).graph_module))
    kernel = emulate(lowered.graph)
    assert kernel_of(kernel.schedule) == name

    def launch(number: int) -> torch.Tensor:
        made = aligned(rows * choices * n * dtype.itemsize, 0xFF).view(dtype).view(rows, choices, n)
        orders = get_args(Order)
        kernel.launch([x, ids, weight], [made], seed=number, order=orders[number % len(orders)], jitter=number % 4)
        return made

    first = launch(0)
    assert all(torch.equal(launch(number), first) for number in range(1, 5))
    for others in (torch.randint(experts, ids.shape), ids[:1].expand_as(ids).clone()):
        ids[1:], x[1:] = others[1:], torch.randn(rows - 1, choices, k).to(dtype)
        assert torch.equal(launch(5)[0], first[0])
