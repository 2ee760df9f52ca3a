"""How often Python's threads take turns while something is built."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest

from torch_mpk.builds.turns import turns_of


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize(("usual", "inside"), [(0.005, 0.002), (0.001, 0.001)])
def test_the_turn_of_a_build(usual: float, inside: float) -> None:
    sys.setswitchinterval(usual)
    with contextlib.suppress(ValueError), turns_of(0.002):
        assert sys.getswitchinterval() == pytest.approx(inside)
        raise ValueError  # as a build may
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_the_shortest_turn_holds_whichever_ends_first() -> None:
    sys.setswitchinterval(0.005)
    build, step, other = turns_of(0.003), turns_of(0.002), turns_of(0.003)
    seen = []
    for change in (build.__enter__, step.__enter__, other.__enter__, build, step, other):
        change.__exit__(None, None, None) if isinstance(change, contextlib.AbstractContextManager) else change()
        seen.append(sys.getswitchinterval())
    assert seen == pytest.approx([0.003, 0.002, 0.002, 0.002, 0.003, 0.005])
