"""The CPU runtime's watchdog: a reference that does not return does not hold its caller."""

import gc
import os
import signal
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from tests.cpu.net import CPU, Net
from torch_mpk import _C
from torch_mpk.builds.dump import Dump
from torch_mpk.config import Options
from torch_mpk.errors import MegakernelTimeout
from torch_mpk.plan import Fresh, Output, Plan
from torch_mpk.runtime import cpu
from torch_mpk.runtime.segment import CompiledSegment

SHAPE, STRIDE = (2, 8), (8, 1)


class Doubled:
    """A task without a CPU kernel; ``before`` is called in its reference."""

    name, is_ours, place = "test_doubled", False, "doubled.py:7"
    inputs, outputs = (SimpleNamespace(name="x"),), (SimpleNamespace(name="y"),)
    results = staticmethod(lambda result: (result,))

    def __init__(self):
        self.before = lambda: None

    def __call__(self, x):
        self.before()
        return 2 * x


@pytest.fixture
def task(monkeypatch):
    task = Doubled()
    if task.name not in _C.task_names():
        operands = [("x", ["R", "H"], False, True, False), ("y", ["R", "H"], False, False, True)]
        _C.register_task(task.name, "row", operands, [], "")
    monkeypatch.setattr(cpu, "get", lambda name: task)
    return task


def segment_of(task, watchdog_seconds):
    net = Net()
    net.node(task.name, x=net.input(torch.empty(SHAPE)), y=net.output(torch.empty(SHAPE)))
    fresh, output = Fresh(torch.float32, SHAPE, STRIDE), Output("output", 0, torch.float32, SHAPE, STRIDE)
    plan = Plan(None, (0,), (), (), (fresh,), (output,), (), _C.make_schedule(net.graph, CPU))
    return CompiledSegment(
        plan, torch.device("cpu"), Options(num_threads=3, watchdog_seconds=watchdog_seconds), Dump(None)
    )


def test_a_reference_that_does_not_return_is_given_up(task):
    release, x = threading.Event(), torch.randn(SHAPE)
    segment = segment_of(task, watchdog_seconds=0.2)
    call = segment.callable(eager=None)
    task.before = lambda: release.wait(100)
    with pytest.raises(MegakernelTimeout, match=r"reference of task test_doubled has run for 0.2 s") as info:
        call(x)
    assert "It is declared at doubled.py:7: make it return sooner" in str(info.value)
    assert "report" not in str(info.value)  # it is a user's
    lines = [" ".join(line.split()) for line in str(info.value).splitlines()]
    assert lines[1:4] == [
        "workers in phase waits for",
        "0 0 node the reference of task test_doubled",
        "1-2 0 node event of phase 0 node",
    ]
    task.before = lambda: None
    assert torch.equal(call(x)[0], 2 * x)

    memory = weakref.ref(x)  # which the thread left alone may still read
    del x, info
    gc.collect()
    assert memory() is not None
    release.set()
    deadline = time.monotonic() + 30
    while memory() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert memory() is None


def test_an_interrupt_ends_the_wait_for_a_reference(task):
    release, x = threading.Event(), torch.randn(SHAPE)
    call = segment_of(task, watchdog_seconds=100).callable(eager=None)

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        release.wait(100)

    task.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        call(x)
    release.set()
    task.before = lambda: None
    assert torch.equal(call(x)[0], 2 * x)


def test_a_reference_may_fail_or_run_other_models(task):
    x, weight = torch.randn(SHAPE), torch.randn(5000, 8)
    net = Net()
    net.node("linear", x=net.input(x), weight=net.input(weight), y=net.output(torch.empty(2, 5000)))
    other = net.compile(3)
    for watchdog_seconds in (100, 0):
        call = segment_of(task, watchdog_seconds).callable(eager=None)
        threads = []
        task.before = lambda threads=threads: (
            threads.append(threading.current_thread()),
            other.run(net.inputs, net.outputs),
        )
        assert torch.equal(call(x)[0], 2 * x)
        torch.testing.assert_close(net.outputs[0], x @ weight.T)
        assert (threads[0] is threading.current_thread()) == (watchdog_seconds == 0)
        task.before = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            call(x)
