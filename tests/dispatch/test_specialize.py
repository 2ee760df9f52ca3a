"""One build for each combination of numbers."""

import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from torch_mpk.builds import background
from torch_mpk.dispatch.specialize import MAX_FAILURES, per_call, per_call_numbers
from torch_mpk.errors import MpkWarning


def test_each_combination_is_built_once_and_the_oldest_is_dropped():
    built = []

    def build(args):
        built.append((args[0], float(args[2])))
        return lambda *later: (args[0], *later)

    call = per_call_numbers([0, 2], build, on_failure=None, limit=2)
    half, one = torch.tensor(0.5, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    assert call(1, "x", half) == (1, 1, "x", half)
    call(1, "y", one)
    call(1, "y", torch.tensor(0.5, dtype=torch.float64))
    assert built == [(1, 0.5), (1, 1.0)]
    call(2, "y", one)  # drops (1, 1.0), which was used least recently
    call(1, "y", half)
    assert len(built) == 3
    call(1, "y", one)
    assert built[3:] == [(1, 1.0)]


def test_a_failure_decides_for_its_own_numbers_only():
    tried = []

    def build(args):
        tried.append(args[0])
        if args[0] == 2:
            raise RuntimeError("too odd")
        return lambda *later: "built"

    call = per_call_numbers([0], build, on_failure=lambda args, error: lambda *later: f"{error}: {later}")
    assert [call(n) for n in (1, 2, 3, 2, 1)] == ["built", "too odd: (2,)", "built", "too odd: (2,)", "built"]
    assert tried == [1, 2, 3]


def test_builds_that_are_dropped_and_made_again_are_announced_once():
    built = []

    def build(args):
        built.append(args[0])
        return lambda n: n

    call = per_call_numbers([0], build, on_failure=None, limit=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MpkWarning)
        for n in (*range(9), *range(8, 4, -1)):  # more than are kept, but not in turns
            call(n)
    assert built == [*range(9)]
    with pytest.warns(MpkWarning, match="builds again for sizes .* a graph keeps 4 builds") as record:
        for n in (*range(5), *range(5)):
            call(n)
    assert len(record) == 1
    assert len(built) == 9 + 10


def test_after_many_failures_no_other_numbers_are_tried():
    tried = []

    def build(args):
        tried.append(args[0])
        raise RuntimeError("none of ours")

    call = per_call_numbers([0], build, on_failure=lambda args, error: lambda *later: f"{error}: {later}")
    assert [call(n) for n in range(9)] == [f"none of ours: ({n},)" for n in range(9)]
    assert tried == list(range(MAX_FAILURES))


def test_calls_run_while_another_thread_builds():
    building, go_on = threading.Event(), threading.Event()

    def build(args):
        if args[0] == 2:
            building.set()
            assert go_on.wait(60)
        return lambda n: f"built for {n}"

    call = per_call_numbers([0], build, on_failure=None)
    call(1)
    with ThreadPoolExecutor(2) as pool:
        slow = [pool.submit(call, 2) for _ in range(2)]
        assert building.wait(60)
        assert call(1) == "built for 1"
        go_on.set()
        assert [each.result(60) for each in slow] == ["built for 2"] * 2


def test_calls_run_otherwise_while_the_background_builds():
    go_on, modes = threading.Event(), []

    def build(args):
        go_on.wait(60)
        modes.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return lambda *later: ("built", *later)

    call = per_call(lambda args: args[0], build, on_failure=None, meanwhile=lambda *args: ("eager", *args))
    with torch.inference_mode(), pytest.warns(MpkWarning, match="in the background") as record:
        assert call(1, "x") == ("eager", 1, "x")
        assert call(1, "y") == ("eager", 1, "y")
        assert call(2, "z") == ("eager", 2, "z")
    assert len(record) == 1
    go_on.set()
    assert background.wait(60)
    assert [call(n) for n in (1, 2)] == [("built", 1), ("built", 2)]
    assert modes == [(True, False)] * 2


@pytest.mark.filterwarnings("ignore::torch_mpk.errors.MpkWarning")
def test_what_the_background_could_not_build_is_raised_by_the_next_call():
    tried = []

    def build(args):
        tried.append(args)
        raise RuntimeError("too odd")

    def on_failure(args, error):
        raise error

    call = per_call(lambda args: None, build, on_failure, meanwhile=lambda: "eager")
    for _ in range(2):
        assert call() == "eager"
        assert background.wait(60)
        with pytest.raises(RuntimeError, match="too odd"):
            call()
    assert len(tried) == 2


def test_a_call_runs_otherwise_while_too_many_builds_wait(monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(background, "MAX_WAITING", 0)
    call = per_call(lambda args: args[0], lambda args: lambda n: go_on.wait(60), None, meanwhile=lambda n: "eager")
    assert call(1) == "eager"
    monkeypatch.undo()
    with pytest.warns(MpkWarning, match="in the background"):
        assert call(1) == "eager"
    go_on.set()
    assert background.wait(60)
    assert call(1) is True


@pytest.mark.filterwarnings("ignore::torch_mpk.errors.MpkWarning")
def test_a_build_that_was_dropped_is_asked_for_again():
    building, go_on, tried = threading.Event(), threading.Event(), []

    def build(args):
        tried.append(args)
        building.set()
        assert go_on.wait(60)
        background.go_on()
        return lambda: "built"

    call = per_call(lambda args: None, build, on_failure=None, meanwhile=lambda: "eager")
    assert call() == "eager" and building.wait(60)
    background.drop()
    go_on.set()
    assert background.wait(60)
    assert call() == "eager"
    assert background.wait(60)
    assert call() == "built"
    assert len(tried) == 2


@pytest.mark.filterwarnings("ignore::torch_mpk.errors.MpkWarning")
def test_what_is_built_in_the_background_holds_no_memory_of_its_call():
    go_on, given = threading.Event(), []

    def build(args):
        assert go_on.wait(60)
        given.extend(args)
        return lambda *later: "built"

    call = per_call(lambda args: None, build, on_failure=None, meanwhile=lambda *args: "eager")
    cache, number = torch.randn(4, 3, dtype=torch.bfloat16).T, torch.tensor(0.5, dtype=torch.float64)
    weight, expected = torch.nn.Parameter(torch.randn(2)), (cache.shape, cache.stride(), cache.dtype, cache.device)
    assert call(cache, number, weight, 7) == "eager"
    gone = weakref.ref(cache)
    del cache
    assert gone() is None
    go_on.set()
    assert background.wait(60)
    described, *others = given
    assert (described.shape, described.stride(), described.dtype, described.device) == expected
    assert others[0] is number and others[1] is weight and others[2] == 7
