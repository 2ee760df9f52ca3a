"""Two layers that end with a sum over the ranks each, and a head whose logits are gathered."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from torch_mpk import _C
from torch_mpk.capture.graph import capture
from torch_mpk.lowering import lower
from torch_mpk.patterns import apply

HIDDEN, OWN, VOCAB = 128, 64, 48  # of a rank
_COMMON = (1, 3)  # inputs that all ranks have: the residual, and the norm's weight


def graph_of(inputs: Sequence[torch.Tensor], ranks: int) -> _C.TBGraph:
    group = {"ranks": ranks, "group": "0"}

    def forward(x, residual, up, norm, down, head):
        first = residual + torch.ops.mpk.all_reduce(F.linear(x, up), **group)
        normed = torch.ops.mpk.rms_norm(first, norm, eps=1e-6, style="llama")
        second = first + torch.ops.mpk.all_reduce(F.linear(normed, down), **group)
        return torch.ops.mpk.all_gather(F.linear(second, head), **group), second

    return lower(apply(capture(torch.fx.symbolic_trace(forward), inputs).graph_module)).graph


def inputs_of(ranks: int, rows: int, dtype: torch.dtype, device: str = "cpu") -> list[list[torch.Tensor]]:
    """Of each rank: x, and the weights of which it has its part."""
    shapes = [(rows, OWN), (rows, HIDDEN), (HIDDEN, OWN), (HIDDEN,), (HIDDEN, HIDDEN), (VOCAB, HIDDEN)]
    common = [torch.randn(shape) for shape in shapes]
    return [
        [(common[i] if i in _COMMON else torch.randn(shape) / 8).to(device, dtype) for i, shape in enumerate(shapes)]
        for _ in range(ranks)
    ]


def wanted(inputs: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """What all ranks should have, in float64."""
    ranks = [[t.double() for t in own] for own in inputs]
    residual, norm = (ranks[0][i] for i in _COMMON)
    first = residual + sum(F.linear(own[0], own[2]) for own in ranks)
    normed = F.rms_norm(first, (HIDDEN,), norm, 1e-6)
    second = first + sum(F.linear(normed, own[4]) for own in ranks)
    return [torch.cat([F.linear(second, own[5]) for own in ranks], -1), second]
