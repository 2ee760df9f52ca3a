"""Decode steps compile for every chip, within recorded budgets: what spills takes memory bandwidth."""

from __future__ import annotations

import itertools

import pytest

from tests.codegen.chips import CHIPS, resources
from tests.schedule import replay
from torch_mpk import _C

REGISTERS = 168  # of a thread, where twelve warps share a multiprocessor's
# Bytes of a thread's stack, and of what spills store there and load again, by decode step and capability. Where nothing
# is said: none. The cosine of rotary tables has an array there, for angles that do not occur.
COSINE = (32, 0, 0)
BUDGETS = {
    **{(name, capability): COSINE for name in ("Qwen3", "Granite 4") for capability in CHIPS},
    ("decoder of 8B, 4 rows", 100): (32, 36, 52),
    ("decoder of 0.6B, 16 rows", 86): (56, 138, 356),
    ("decoder of 0.6B, 16 rows", 89): (24, 28, 104),
}
STEPS = ("Qwen3", "Granite 4", "decoder of 8B, 4 rows", "decoder of 0.6B, 16 rows")


@pytest.fixture(scope="module")
def graphs() -> dict[str, _C.TBGraph]:
    return replay.recorded_graphs()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "capability"), [*itertools.product(STEPS, sorted(CHIPS))])
def test_decode_steps_compile_for_every_chip(name: str, capability: int, graphs: dict[str, _C.TBGraph]) -> None:
    found = resources(graphs[name], CHIPS[capability])
    assert found.warnings == ()
    assert found.registers <= REGISTERS
    taken = found.stack_bytes, found.spill_store_bytes, found.spill_load_bytes
    budget = BUDGETS.get((name, capability), (0, 0, 0))
    assert all(now <= then for now, then in zip(taken, budget, strict=True)), f"{taken}, recorded are {budget}"
