"""Greedy choices of which ranks exchange each its own best, in place of all columns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from tests.ranks.test_validate import TARGETS
from torch_mpk import _C
from torch_mpk.capture.graph import capture
from torch_mpk.lowering import lower
from torch_mpk.patterns import apply
from torch_mpk.ranks.choices import Gathered, choose_before_gathering

RANKS, OWN, BATCH = 3, 16, 4
GROUP = {"ranks": RANKS, "group": "0"}


def graph_of(read: Callable[[torch.Tensor], object], rank: int) -> fx.GraphModule:
    """A rank's part, of x[BATCH, 2, OWN]."""
    gm = fx.symbolic_trace(lambda x: read(torch.ops.mpk.all_gather(x, **GROUP)))
    [node] = [node for node in gm.graph.nodes if node.op == "call_function" and "all_gather" in str(node.target)]
    choose_before_gathering(Gathered(node, (BATCH, 2, RANKS * OWN), torch.bfloat16, rank * OWN))
    gm.recompile()
    return gm


class Together(fx.Interpreter):
    """A rank's graph, with what all have where it gathers; without, it ends there and ``pushed`` is its own."""

    def __init__(self, gm: fx.GraphModule, everybodys: list[torch.Tensor] | None = None) -> None:
        super().__init__(gm)
        self.everybodys, self.pushed = everybodys, None

    def call_function(self, target, args, kwargs):
        if "all_gather" not in str(target):
            return super().call_function(target, args, kwargs)
        self.pushed = args[0]
        return torch.cat(self.everybodys or [args[0]] * RANKS, -1)


def chosen(read: Callable[[torch.Tensor], object], parts: list[torch.Tensor]) -> tuple[list, list[torch.Tensor]]:
    """What each rank chooses, and what it pushes."""
    graphs = [graph_of(read, rank) for rank in range(RANKS)]
    first = [Together(gm) for gm in graphs]
    for each, part in zip(first, parts, strict=True):
        each.run(part)
    pushed = [each.pushed for each in first]
    return [Together(gm, pushed).run(part) for gm, part in zip(graphs, parts, strict=True)], pushed


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "last": lambda logits: logits[:, -1].argmax(-1, keepdim=True),
    "all": lambda logits: torch.argmax(logits, dim=-1),
    "capped": lambda logits: (torch.tanh(logits[:, -1] / 3.0) * 3.0).float().argmax(-1, keepdim=True),
}


@pytest.mark.parametrize("name", READS)
def test_the_first_of_the_largest_is_chosen(name: str) -> None:
    whole = torch.randint(-5, 5, (BATCH, 2, RANKS * OWN)).bfloat16()  # many are equal
    whole[0, -1, OWN + 3] = whole[0, -1, -1] = torch.nan
    got, pushed = chosen(READS[name], list(whole.chunk(RANKS, -1)))
    want = READS[name](whole)
    assert all(torch.equal(each, want) and each.dtype == torch.int64 for each in got)
    assert all(each.shape[-1] == 2 for each in pushed)


def test_logits_that_are_read_are_gathered() -> None:
    parts = [torch.randn(BATCH, 2, OWN).bfloat16() for _ in range(RANKS)]
    for read in (lambda y: (y, y.argmax(-1)), lambda y: y.softmax(-1).argmax(-1), lambda y: y[..., 1:].argmax(-1)):
        _, pushed = chosen(read, parts)
        assert all(map(torch.equal, pushed, parts))


@pytest.mark.parametrize("target", TARGETS)
def test_a_choice_is_eight_bytes_a_row(target: str) -> None:
    gm = graph_of(READS["last"], rank=1)
    graph = lower(apply(capture(gm, [torch.randn(BATCH, 2, OWN).bfloat16()]).graph_module)).graph
    schedule = _C.make_schedule(graph, TARGETS[target])
    _C.validate(schedule)
    if TARGETS[target].device == "cuda":
        assert _C.generate_cuda(schedule).source
    [box] = _C.place_mailboxes(schedule).of_nodes.values()
    assert 4 * box.words == 8 * BATCH
