"""When garbage is looked for while something is built."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

import pytest

from torch_mpk.builds.garbage import few_collections

SELDOM = (50_000, 20, 100)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


@pytest.mark.parametrize(
    ("usual", "inside"),
    [
        ((700, 10, 10), SELDOM),
        ((10**6, 30, 200), (10**6, 30, 200)),  # a program that has it looked for more seldom
        ((0, 5, 5), (0, 5, 5)),  # and one that looks itself
    ],
)
def test_thresholds_of_a_build(usual: tuple[int, int, int], inside: tuple[int, int, int]) -> None:
    gc.set_threshold(*usual)
    with contextlib.suppress(ValueError), few_collections():
        with few_collections():
            assert gc.get_threshold() == inside
        assert gc.get_threshold() == inside
        raise ValueError  # as a build may
    assert gc.get_threshold() == usual


def test_builds_of_two_threads_that_end_in_the_order_they_began() -> None:
    first_is_inside, second_is_inside = threading.Event(), threading.Event()

    def build() -> None:
        with few_collections():
            first_is_inside.set()
            assert second_is_inside.wait(60)

    gc.set_threshold(700, 10, 10)
    thread = threading.Thread(target=build)
    thread.start()
    assert first_is_inside.wait(60)
    with few_collections():
        second_is_inside.set()
        thread.join()
        assert gc.get_threshold() == SELDOM
    assert gc.get_threshold() == (700, 10, 10)
