"""Several ranks on the reference VM: in any interleaving a schedule is right, or the validator refuses it by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.codegen.emulated_calls import allocate, relative_error, tensors
from tests.ranks.step import graph_of, inputs_of, wanted
from tests.ranks.test_validate import TARGETS, draw_tiles
from tests.schedule.taken_apart import Parts
from torch_mpk import _C
from torch_mpk.capture.graph import capture
from torch_mpk.lowering import lower
from torch_mpk.patterns import apply
from torch_mpk.testing import reference_ranks

LAUNCHES, ROWS, WIDTH, SEEDS = 3, 2, 32, 20
DTYPE = torch.bfloat16


class Team:
    """Launches of one schedule on some ranks, each launch with inputs of its own."""

    def __init__(
        self, schedule: _C.Schedule, inputs: list[list[list[torch.Tensor]]], exact: Callable[..., list[torch.Tensor]]
    ) -> None:
        self.schedule, self.inputs = schedule, inputs
        self.outputs = [[[allocate(t) for t in tensors(schedule.graph, "output")] for _ in own] for own in inputs]
        self.wanted = list(map(exact, inputs))

    def run(self, seed: int, mailboxes: _C.Mailboxes | None = None) -> bool:
        """Whether all ranks have what they should.

        Raises RanksStuckError.
        """
        for out in (out for launch in self.outputs for outputs in launch for out in outputs):
            out.fill_(torch.nan)
        launches = [list(zip(*each, strict=True)) for each in zip(self.inputs, self.outputs, strict=True)]
        reference_ranks.run(self.schedule, launches, seed=seed, mailboxes=mailboxes)
        return all(
            torch.equal(out, first) and relative_error(out, exact) < 2e-2
            for launch, exacts in zip(self.outputs, self.wanted, strict=True)
            for outputs in launch
            for out, first, exact in zip(outputs, launch[0], exacts, strict=True)
        )

    def goes_wrong(self, mailboxes: _C.Mailboxes) -> bool:
        """Whether ranks wait for each other, or have a wrong result, in some interleaving."""
        try:
            return not all(self.run(seed, mailboxes) for seed in range(SEEDS))
        except reference_ranks.RanksStuckError:
            return True


def layers(target: str, ranks: int) -> Team:
    """Of sums that need each other."""
    graph = graph_of(inputs_of(1, ROWS, DTYPE)[0], ranks)
    inputs = [inputs_of(ranks, ROWS, DTYPE) for _ in range(LAUNCHES)]
    return Team(_C.make_schedule(graph, TARGETS[target]), inputs, wanted)


def apart(target: str, ranks: int, *depths: int) -> Team:
    """Of sums of which none needs another, each of so many products and of half as many rows as the one before."""
    rows = [2 ** (len(depths) - i) for i in range(len(depths))]
    ends = list(itertools.accumulate(rows, initial=0))

    def products(x, weight):
        for (begin, end), depth in zip(itertools.pairwise(ends), depths, strict=True):
            part = x[begin:end]
            for _ in range(depth):
                part = F.linear(part, weight)
            yield part

    def forward(x, weight):
        return [torch.ops.mpk.all_reduce(each, ranks=ranks, group="0") for each in products(x, weight)]

    def exact(inputs: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        return [sum(parts) for parts in zip(*(products(x.double(), w.double()) for x, w in inputs), strict=True)]

    shapes = (ends[-1], WIDTH), (WIDTH, WIDTH)
    inputs = [[[torch.randn(s).to(DTYPE) / 4 for s in shapes] for _ in range(ranks)] for _ in range(LAUNCHES)]
    graph = lower(apply(capture(torch.fx.symbolic_trace(forward), inputs[0][0]).graph_module)).graph
    return Team(_C.make_schedule(graph, TARGETS[target]), inputs, exact)


CASES = {
    "polled": lambda: layers("polled", 3),
    "events": lambda: layers("events", 2),
    "cpu": lambda: layers("cpu", 2),
    "apart": lambda: apart("polled", 3, 0, 1),
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_all_ranks_have_the_sums_in_any_interleaving(make: Callable[[], Team]) -> None:
    team = make()
    _C.validate(team.schedule)
    assert all(team.run(seed) for seed in range(3))


def share_the_phase_s_job(part: Parts) -> None:
    jobs, _ = part.phases[0]
    jobs[0]["body"] += jobs.pop()["body"]


def draw_all_tiles(part: Parts) -> None:
    for job in part.phases[0][0]:
        draw_tiles(part, job)


@pytest.mark.parametrize(
    ("spoil", "what"), [(draw_all_tiles, "tiles are drawn"), (share_the_phase_s_job, "shares its job")]
)
def test_a_schedule_that_waits_before_it_pushes(spoil: Callable[[Parts], None], what: str) -> None:
    team = apart("polled", 2, 0, 0)
    part = Parts.of(team.schedule)
    spoil(part)
    team.schedule = part.build()
    with pytest.raises(reference_ranks.RanksStuckError, match=r"rank 0 .* for rank 1 in all_reduce \(node"):
        all(team.run(seed) for seed in range(SEEDS))
    with pytest.raises(RuntimeError, match=f"unsound schedule: .*{what}"):
        _C.validate(team.schedule)


def changed(boxes: _C.Mailboxes, **fields: object) -> _C.Mailboxes:
    kept = {name: getattr(boxes, name) for name in ("ranks", "group", "turns", "by_turns", "place_bytes", "of_nodes")}
    return _C.Mailboxes(**(kept | fields))


def all_at_the_start(boxes: _C.Mailboxes) -> _C.Mailboxes:
    return changed(boxes, of_nodes={node: _C.Mailbox(b.turn, 0, b.words) for node, b in boxes.of_nodes.items()})


def in_turn_too_early(boxes: _C.Mailboxes) -> _C.Mailboxes:
    return changed(all_at_the_start(boxes), by_turns=True)


def with_half_the_words(boxes: _C.Mailboxes) -> _C.Mailboxes:
    halved = {node: _C.Mailbox(b.turn, b.offset, b.words // 2) for node, b in boxes.of_nodes.items()}
    return changed(boxes, of_nodes=halved)


def with_a_turn_less(boxes: _C.Mailboxes) -> _C.Mailboxes:
    return changed(boxes, turns=boxes.turns - 1)


def with_a_turn_left_out(boxes: _C.Mailboxes) -> _C.Mailboxes:
    return changed(boxes, turns=boxes.turns + 1)


@pytest.mark.parametrize(
    ("make", "spoil", "what"),
    [
        (lambda: apart("polled", 2, 0, 0), all_at_the_start, "push into the same words"),
        (lambda: apart("polled", 2, 0, 1, 2, 3), in_turn_too_early, "may begin before those of phase .* are read"),
        (lambda: apart("events", 3, 0), with_half_the_words, "pushes more than its mailbox holds"),
        (lambda: layers("events", 2), with_a_turn_less, "the next launch counts it again"),
        (lambda: apart("cpu", 2, 0), with_a_turn_left_out, "places would not alternate"),
    ],
    ids=lambda each: getattr(each, "__name__", None) if callable(each) and each.__name__ != "<lambda>" else "",
)
def test_a_mailbox_that_is_used_too_early(
    make: Callable[[], Team], spoil: Callable[[_C.Mailboxes], _C.Mailboxes], what: str
) -> None:
    team = make()
    boxes = _C.place_mailboxes(team.schedule)
    _C.validate_mailboxes(team.schedule, boxes)
    broken = spoil(boxes)
    with pytest.raises(RuntimeError, match=f"unsound schedule: .*{what}"):
        _C.validate_mailboxes(team.schedule, broken)
    assert team.goes_wrong(broken)
