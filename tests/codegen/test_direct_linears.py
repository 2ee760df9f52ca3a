"""Linears that no kernel for few rows or for tensor cores takes: weights and x are read where they are."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.thinned import thinned
from torch_mpk.capture.graph import capture
from torch_mpk.lowering import lower
from torch_mpk.patterns import apply
from torch_mpk.testing.emulator import EmulatedKernel, aligned, emulate


def routed(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    """As DeepSeek's router: a product in float32 of what is stored in 16 bits."""
    return (F.linear(x.float(), weight.float()),)


def plain(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    return (F.linear(x, weight, bias),)


def gated(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    gate, up = weight.chunk(2)
    return (F.silu(F.linear(x, gate)) * F.linear(x, up),)


def normed(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    """Row tasks in front, and several weights behind each other."""
    x = F.rms_norm(x, x.shape[-1:])
    return F.linear(x, weight), F.linear(x, weight[:5], bias[:5]) + 1


def prompted(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    """A router beside what warpgroups multiply together."""
    x = F.linear(x, weight)
    return (F.linear(x.float(), weight.float()).to(x.dtype),)


# Rows, rows of weights, depth.
CASES = [
    (routed, torch.bfloat16, 33, 64, 96),
    (plain, torch.float32, 17, 37, 50),
    (gated, torch.float32, 24, 40, 64),
    (normed, torch.float32, 40, 48, 33),
    (plain, torch.bfloat16, 70, 19, 100),  # no boxes of its rows, and warpgroups elsewhere would take more
    (normed, torch.float16, 19, 48, 72),
    (prompted, torch.bfloat16, 80, 128, 128),
    (plain, torch.float32, 16, 8, 2048),  # x is too large to stage, and may begin anywhere
]


def copied(t: Tensor) -> Tensor:
    return aligned(t.numel() * t.itemsize).view(t.dtype).view(t.shape).copy_(t)


def launch(kernel: EmulatedKernel, lowered, operands: list[Tensor]) -> list[Tensor]:
    made = [aligned(f.dtype.itemsize * math.prod(f.shape), 0xFF).view(f.dtype).view(f.shape) for f in lowered.fresh]
    kernel.launch(operands, made, order="shuffled", jitter=3)
    return [made[output.index] for output in lowered.outputs]


def name(value: object) -> str:
    """A function's, for a case's: processes that share the tests must find the same."""
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("function", "dtype", "rows", "n", "k"), thinned(CASES), ids=name)
def test_products(function: Callable[..., tuple[Tensor, ...]], dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    operands = [torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype) / k**0.5, torch.randn(n).to(dtype)]
    operands = [copied(t) for t in operands]
    graph = torch.fx.symbolic_trace(function)
    lowered = lower(apply(capture(graph, operands).graph_module))
    kernel = emulate(lowered.graph)
    used = {job.cut.kernel for phase in kernel.schedule.phases for job in phase.jobs}
    assert "linear.direct" in used
    results = launch(kernel, lowered, operands)
    wide = [t.double() for t in operands]
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[results[0].dtype]
    for y, exact in zip(results, function(*wide), strict=True):
        torch.testing.assert_close(y.double(), exact.double(), rtol=tolerance, atol=tolerance)
    operands[0][1:] = torch.randn(rows - 1, k)
    for y, other in zip(results, launch(kernel, lowered, operands), strict=True):
        assert torch.equal(y[0], other[0])
