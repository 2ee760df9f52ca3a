"""What is garbage from before stays while an engine captures a CUDA graph."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from tests.continuous_batching.engine import capture_as_an_engine, captured_by


class Cycle:
    """As an engine is in one with its memory pool."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _without_a_gpu() -> Iterator[None]:
    gc.unfreeze()  # what the tests' process has frozen
    with captured_by(lambda runner, forward, stream: forward()):
        yield
    gc.collect()
    gc.freeze()


def capture(step: Callable[[], None]) -> None:
    capture_as_an_engine(step, None)


@pytest.mark.parametrize("error", [None, ValueError("no step")])
def test_garbage_is_collected_before_a_capture_and_behind_it(error: Exception | None) -> None:
    before, meanwhile = Cycle(), [Cycle()]
    seen = weakref.ref(before), weakref.ref(meanwhile[0])
    del before

    def step() -> None:
        assert seen[0]() is None
        meanwhile.clear()
        gc.collect(1)  # as Dynamo does behind a compile
        collector = threading.Thread(target=gc.collect)  # as ``stop`` of another engine does
        collector.start()
        collector.join()
        assert seen[1]() is not None
        if error is not None:
            raise error

    num_frozen = gc.get_freeze_count()
    if error is None:
        capture(step)
    else:
        with pytest.raises(ValueError, match="no step"):
            capture(step)
    assert gc.get_freeze_count() == num_frozen
    assert gc.isenabled()
    gc.collect()
    assert seen[1]() is None


def test_a_capture_waits_for_another_threads() -> None:
    """Whose end would let its garbage go."""
    begun, may_end = threading.Event(), threading.Event()
    num_frozen: list[int] = []

    def first() -> None:
        begun.set()
        may_end.wait(10)
        num_frozen.append(gc.get_freeze_count())

    threads = [threading.Thread(target=capture, args=[first])]
    threads[0].start()
    assert begun.wait(10)
    threads.append(threading.Thread(target=capture, args=[lambda: num_frozen.append(gc.get_freeze_count())]))
    threads[1].start()
    threads[1].join(0.1)
    assert num_frozen == []
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert len(num_frozen) == 2
    assert all(num_frozen)
