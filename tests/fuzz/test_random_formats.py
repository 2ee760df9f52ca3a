"""Linears with quantised weights in random formats and sizes are right beside float64."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
import torch

from tests.fuzz.checking import (
    Wrong,
    by_codegen,
    by_dynamo,
    by_emulator,
    by_reference_vm,
    by_stages,
    check,
    check_drawn,
)
from tests.fuzz.random_formats import FormatProgram
from tests.thinned import thinned

FEW = [(by_stages, 3)]
MANY = [(by_stages, 60), (by_reference_vm, 20), (by_dynamo, 5), (by_codegen, 30), (by_emulator, 6)]


@pytest.mark.parametrize(("way", "num_programs"), thinned(FEW + MANY, *range(len(FEW))))
def test_programs_are_right(way: Callable, num_programs: int) -> None:
    check_drawn(FormatProgram, way, num_programs)


@pytest.mark.gpu
def test_kernels_are_right() -> None:
    check_drawn(FormatProgram, by_stages, int(os.environ.get("FUZZED_PROGRAMS", "20")), "cuda")


def test_what_is_wrong_is_seen() -> None:
    """Results of other rows of weights."""

    def rolled(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> tuple[Callable, int]:
        return lambda *args: tuple(y.roll(1, -1) for y in gm(*args)), 1

    for seed in range(10):
        program = FormatProgram.draw(random.Random(seed), is_small=True)
        check(program, lambda gm, inputs: (gm, 1), seed=seed)
        with pytest.raises(Wrong):
            check(program, rolled, seed=seed)
