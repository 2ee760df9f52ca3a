"""Random programs through the backend are eager PyTorch, bit for bit where the operations are exact."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.checking import Wrong, by_codegen, by_dynamo, by_emulator, by_reference_vm, by_stages, check
from tests.fuzz.random_integers import IntegerProgram
from tests.fuzz.random_programs import KINDS, Program, Step, write
from tests.thinned import thinned

PROGRAMS = st.randoms(use_true_random=False).map(lambda rng: Program.draw(rng, max_steps=7))
INTEGERS = st.randoms(use_true_random=False).map(IntegerProgram.draw)
RANDOM = {"database": None, "suppress_health_check": list(HealthCheck)}


FEW = [(by_stages, 8), (by_reference_vm, 6), (by_dynamo, 2), (by_codegen, 6)]
MANY = [(by_stages, 100), (by_reference_vm, 40), (by_dynamo, 10), (by_codegen, 50), (by_emulator, 8)]


@pytest.mark.parametrize(("way", "num_programs"), thinned(FEW + MANY, *range(len(FEW))))
def test_programs_compute_what_eager_does(way: Callable, num_programs: int) -> None:
    @settings(max_examples=num_programs, **RANDOM)
    @given(PROGRAMS)
    def check_program(program: Program) -> None:
        check(program, way)

    check_program()


@pytest.mark.parametrize(("way", "num_programs"), thinned(FEW + MANY, *range(len(FEW))))
def test_programs_of_integers_compute_what_eager_does(way: Callable, num_programs: int) -> None:
    @settings(max_examples=2 * num_programs, **RANDOM)
    @given(INTEGERS)
    def check_program(program: IntegerProgram) -> None:
        check(program, way)

    check_program()


@pytest.mark.parametrize("seed", [23])  # what its polled vectors stood in was used again before an update read them
def test_emulated_kernels_of_programs_that_were_wrong_once(seed: int) -> None:
    check(Program.draw(random.Random(seed)), by_emulator, seed=seed)


@pytest.mark.gpu
@settings(max_examples=int(os.environ.get("FUZZED_PROGRAMS", "30")), **RANDOM)
@given(st.one_of(PROGRAMS, INTEGERS))
def test_kernels_compute_what_eager_does(program: Program | IntegerProgram) -> None:
    check(program, by_stages, "cuda")


def lost_writes(gm, inputs):
    return lambda *args: gm(*(arg.clone() for arg in args)), 1


def lost_aliases(gm, inputs):
    return lambda *args: [result.clone() for result in gm(*args)], 1


def shifted(gm, inputs):
    return lambda *args: [result.to(result.dtype) + 1 for result in gm(*args)], 1


@pytest.mark.parametrize("way", [lost_writes, lost_aliases, shifted])
def test_what_is_not_eagers_is_seen(way) -> None:
    fill = Step(KINDS.index(write), first=7, second=0, choices=4 + 5 * 4)  # x.fill_(4)
    program = dataclasses.replace(Program.draw(random.Random(0)), steps=(fill,), results=(8,))
    check(program, by_stages)
    with pytest.raises(Wrong):
        check(program, way)


@pytest.mark.slow
def test_a_long_run_in_processes() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--programs", "4", "--seed", "1", "--processes", "2"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=Path(__file__).parents[2])
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith("4 programs in ")
