"""The plain CUDA code of routing and of experts' products, emulated, where its loops have their ends."""

from __future__ import annotations

import math

import pytest
import torch

from tests.cpu.test_experts import chosen_ids, exact, scores
from tests.thinned import thinned
from torch_mpk import registry
from torch_mpk.capture.graph import capture
from torch_mpk.lowering import lower
from torch_mpk.patterns import apply
from torch_mpk.testing.emulator import Order, aligned, emulate


def launch(call, operands: list[torch.Tensor], order: Order) -> list[torch.Tensor]:
    """The results of one call of a task, in memory that was not zero."""
    names = ", ".join(f"x{i}" for i in range(len(operands)))
    step = torch.fx.symbolic_trace(eval(f"lambda {names}: call({names})", {"call": call}))
    lowered = lower(apply(capture(step, operands).graph_module))
    given = [aligned(t.numel() * t.itemsize).view(t.dtype).view(t.shape).copy_(t) for t in operands]
    made = [aligned(f.dtype.itemsize * math.prod(f.shape), 0xFF).view(f.dtype).view(f.shape) for f in lowered.fresh]
    emulate(lowered.graph).launch(given, made, order=order, jitter=3)
    return [made[output.index] for output in lowered.outputs]


def transposed(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mpk.expert_linear(x, ids, None, weight)


# Rows, choices, experts, columns, depth: with fewer pairs than threads, more than are sorted at a time, and more rows
# than a tile has.
SHAPES = [(1, 1, 1, 1, 1), (3, 2, 5, 21, 40), (2, 1100, 3, 1, 2), (67, 2, 4, 17, 9)]


@pytest.mark.parametrize("is_transposed", [False, True], ids=["weight", "transposed"])
@pytest.mark.parametrize(
    ("number", "order"),
    thinned([(1, "reverse"), (3, "shuffled"), (0, "shuffled"), (1, "forward"), (2, "reverse"), (3, "forward")], 0),
)
def test_products(number: int, order: Order, is_transposed: bool) -> None:
    rows, choices, experts, n, k = SHAPES[number]
    for chosen in ("random", "one", "last"):
        for dtype in (torch.float32, torch.bfloat16):
            x, weight = torch.randn(rows, choices, k).to(dtype), torch.randn(experts, n, k).to(dtype)
            weight = weight.mT.contiguous() if is_transposed else weight
            ids = chosen_ids(rows, choices, experts, chosen)
            [y] = launch(transposed if is_transposed else torch.ops.mpk.expert_linear, [x, ids, weight], order)
            expected = exact(x, ids, weight, is_transposed)
            torch.testing.assert_close(y.double(), expected, rtol=8e-3 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)


@pytest.mark.parametrize(("num", "columns", "order"), [(8, 128, "forward"), (1, 5, "shuffled"), (300, 300, "reverse")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_topk(num: int, columns: int, order: Order, dtype: torch.dtype) -> None:
    x = scores(columns, dtype)
    values, ids = launch(lambda x: torch.ops.mpk.topk(x, num=num), [x], order)
    expected = registry.get("topk").reference(x, num=num)
    torch.testing.assert_close(values, expected[0], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ids, expected[1])
