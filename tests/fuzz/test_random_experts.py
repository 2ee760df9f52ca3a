"""Random routers and experts are right beside float64, on the routes that were taken."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.fuzz.checking import (
    Wrong,
    by_codegen,
    by_dynamo,
    by_emulator,
    by_reference_vm,
    by_stages,
    check,
    check_drawn,
    graph_of,
)
from tests.fuzz.random_experts import LAYOUTS, ExpertProgram
from tests.thinned import thinned
from torch_mpk import _C
from torch_mpk.capture.graph import capture
from torch_mpk.lowering import lower
from torch_mpk.patterns import apply

FEW = [(by_stages, 3)]
MANY = [(by_stages, 100), (by_reference_vm, 40), (by_dynamo, 10), (by_codegen, 50), (by_emulator, 8)]


@pytest.mark.parametrize(("way", "num_programs"), thinned(FEW + MANY, *range(len(FEW))))
def test_programs_are_right(way: Callable, num_programs: int) -> None:
    check_drawn(ExpertProgram, way, num_programs)


@pytest.mark.gpu
def test_kernels_are_right() -> None:
    check_drawn(ExpertProgram, by_stages, int(os.environ.get("FUZZED_PROGRAMS", "20")), "cuda")


def other_experts(y: Tensor, ids: Tensor, scores: Tensor) -> None:
    ids[-1] = ids[-1].roll(1)


def other_weights(y: Tensor, ids: Tensor, scores: Tensor) -> None:
    scores[0, 0] *= 1.5


def other_rows(y: Tensor, ids: Tensor, scores: Tensor) -> None:
    y.copy_(y.roll(1, 0))


def a_choice_for_another(y: Tensor, ids: Tensor, scores: Tensor) -> None:
    ids[0, 0] = next(i for i in range(8) if i not in ids[0])


@pytest.mark.parametrize("change", [other_experts, other_weights, other_rows, a_choice_for_another])
def test_what_is_wrong_is_seen(change: Callable) -> None:
    drawn = ExpertProgram.draw(random.Random(0))
    program = dataclasses.replace(
        drawn, rows=3, experts=8, choices=2, hidden=20, width=12, router="softmax", chosen="by router", groups=1,
        values="random", form="batched", is_normed=False, dtype=torch.float32,
    )  # fmt: skip

    def changed(gm, inputs):
        def run(*args: Tensor) -> tuple[Tensor, ...]:
            results = gm(*args)
            change(*results)
            return results

        return run, 1

    for seed in range(3):
        check(program, lambda gm, inputs: (gm, 1), seed=seed)
        with pytest.raises(Wrong):
            check(program, changed, seed=seed)


def test_no_weight_is_copied() -> None:
    """Nothing that a launch makes is as large as the weights of one expert, on neither device."""
    targets = _C.Target("cuda", 90, 132, 232448, True, True), _C.Target("cpu", 0, 2)
    drawn = ExpertProgram.draw(random.Random(0))
    for form, layout in itertools.product(("batched", "grouped"), LAYOUTS):
        program = dataclasses.replace(
            drawn, rows=8, experts=16, choices=2, hidden=256, width=128, router="softmax", chosen="by router",
            form=form, layout=layout, dtype=torch.bfloat16, groups=1,
        )  # fmt: skip
        inputs = program.inputs("cpu", 0)
        with torch.no_grad():
            graph = lower(apply(capture(graph_of(program), inputs).graph_module)).graph
        least = min(t[0].nbytes for t in (inputs[5], inputs[6]))
        assert all(buffer.bytes < least for buffer in graph.buffers if buffer.kind != "input")
        assert all(_C.make_schedule(graph, target).workspace_bytes < least for target in targets)


def test_ties_and_nan_are_taken_as_on_cuda() -> None:
    """The lowest of equal ones, as often as scores tie; eager on the CPU takes others, and that is seen."""
    drawn = ExpertProgram.draw(random.Random(0))
    tied = dataclasses.replace(
        drawn, rows=40, experts=64, choices=8, hidden=8, width=8, router="softmax", chosen="by router", groups=1,
        values="exact", form="batched", dtype=torch.bfloat16,
    )  # fmt: skip
    for program in (tied, dataclasses.replace(tied, values="nan")):
        check(program, by_stages, seed=1)
    with pytest.raises(Wrong):
        check(tied, lambda gm, inputs: (gm, 1), seed=1)
