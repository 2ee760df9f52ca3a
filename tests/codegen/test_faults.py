"""Launches in which something goes wrong, on the emulator: given up, said why, and of no harm to the next one."""

from __future__ import annotations

import time

import pytest
import torch

import torch_mpk.tasks  # noqa: F401  declares the tasks
from tests.codegen.emulated_calls import allocate, decoder_inputs, reference, relative_error, tensors
from tests.schedule.decoder_graph import decoder
from torch_mpk.testing.emulator import EmulatedKernel, emulate

WORKERS = 3
WATCHDOG_NS = 5 * 10**8  # of the time for which a worker has run
CONSUMER, EVENT, ELEMENT = 0, 0, 4  # role and waiting of a StallRecord


class Launches:
    """A decoder's kernel, and what its launches should give."""

    def __init__(self, kernel: EmulatedKernel, limit: int = 40) -> None:
        self.kernel, self.last_phase = kernel, kernel.program.num_phases - 1
        graph = kernel.schedule.graph
        self.tolerance = 2e-2 if any(kernel.schedule.polled) else 1e-5
        self.inputs = decoder_inputs(graph, [limit], 5)
        self.outputs = [allocate(t) for t in tensors(graph, "output")]
        self.before = [x.clone() for x in self.inputs]
        wanted_inputs, wanted = reference(graph, self.inputs)
        self.wanted = [*wanted, *wanted_inputs]

    def launch(self, watchdog_ns: int = WATCHDOG_NS) -> None:
        for out in self.outputs:
            out.zero_()
        self.kernel.launch(self.inputs, self.outputs, watchdog_ns=watchdog_ns)

    def check_given_up(self) -> list[list[int]]:
        """Returns the workers' stall records without the first word, which says that there is one."""
        kernel = self.kernel
        assert kernel.host_abort[0] == 1
        assert all(out.isnan().all() for out in self.outputs)
        for x, before in zip(self.inputs, self.before, strict=True):
            assert x.is_floating_point() or torch.equal(x, before), "a launch that was given up advanced a counter"
        assert kernel.control.view(torch.int32)[1:4].tolist() == [0, 1, 0]  # exited, aborted, started
        records = kernel.control[kernel.program.stalls_offset :].view(torch.int32).view(-1, 10)[:WORKERS].tolist()
        assert all(written in (0, 1) for written, *_ in records)
        return [record for written, *record in records if written]

    def restore(self) -> None:
        """As before any launch, with nothing spoilt."""
        self.kernel.repair()
        for x, before in zip(self.inputs, self.before, strict=True):
            x.copy_(before)

    def check_next_is_right(self) -> None:
        self.restore()
        self.launch(watchdog_ns=0)
        assert self.kernel.host_abort[0] == 0
        for got, want in zip([*self.outputs, *self.inputs], self.wanted, strict=True):
            assert relative_error(got, want) < self.tolerance


@pytest.fixture(scope="module")
def kernel() -> EmulatedKernel:
    return emulate(decoder(layers=1, dtype="float32"), workers=WORKERS)


@pytest.fixture
def launches(kernel: EmulatedKernel) -> Launches:
    launches = Launches(kernel)
    launches.restore()
    return launches


def test_a_lost_signal(launches: Launches) -> None:
    for phase in (0, launches.last_phase - 1):
        launches.kernel.spoil(phase, worker=phase % WORKERS)
        start = time.monotonic_ns()
        launches.launch()
        assert time.monotonic_ns() - start > WATCHDOG_NS, "given up too soon"
        records = launches.check_given_up()
        assert len(records) == WORKERS  # the worker whose signal is lost waits like the others
        for record in records:
            assert record[:6] == [phase + 1, CONSUMER, EVENT, phase, WORKERS - 1, WORKERS]
        launches.restore()
    launches.check_next_is_right()


def test_an_event_that_expects_too_many_signals(launches: Launches) -> None:
    launches.kernel.control.view(torch.int32)[0] = 1  # the epoch: launches before this one, which have signalled
    launches.launch()
    for record in launches.check_given_up():
        assert record[:6] == [1, CONSUMER, EVENT, 0, WORKERS, 2 * WORKERS]
    launches.check_next_is_right()


@pytest.mark.slow
def test_a_worker_that_stalls_and_goes_on_when_the_others_have_given_up(launches: Launches) -> None:
    for worker in range(WORKERS):  # one of which would advance the counter
        launches.kernel.spoil(launches.last_phase - 1, worker, is_late=True)
        launches.launch()
        launches.check_given_up()
        launches.restore()
    launches.check_next_is_right()


def test_a_worker_that_waits_for_a_multiprocessor_is_not_stuck(launches: Launches) -> None:
    launches.kernel.fault.cta, launches.kernel.fault.queued_ms = 1, 3 * WATCHDOG_NS // 10**6
    launches.launch()
    assert launches.kernel.host_abort[0] == 0
    for got, want in zip([*launches.outputs, *launches.inputs], launches.wanted, strict=True):
        assert relative_error(got, want) < 1e-5


@pytest.mark.slow
def test_elements_that_never_come() -> None:
    kernel = emulate(decoder(layers=1), workers=WORKERS, polled=True)
    launches = Launches(kernel)
    launches.check_next_is_right()
    stored = kernel.polled[: kernel.schedule.polled_bytes].view(torch.int16)
    made = stored.nonzero().flatten()
    for place in (made[0], made[len(made) // 2], made[-1]):
        given_up = 0
        for worker in range(WORKERS):  # one of which makes it
            launches.restore()
            kernel.fault.place, kernel.fault.cta = stored[place:].data_ptr(), worker
            launches.launch()
            if kernel.host_abort[0] == 0:
                continue
            given_up += 1
            assert [CONSUMER, ELEMENT] in [record[1:3] for record in launches.check_given_up()]
        assert given_up == 1
    launches.check_next_is_right()


def test_signals_that_never_come_where_most_phases_poll() -> None:
    kernel = emulate(decoder(layers=1), workers=WORKERS, polled=True)
    launches = Launches(kernel)
    waiting = [p for p, phase in enumerate(kernel.schedule.phases) if phase.waits]
    for phase in waiting:  # the others need no signal
        kernel.spoil(phase - 1, worker=1)
        launches.launch()
        assert launches.check_given_up()
        launches.restore()
    launches.check_next_is_right()


@pytest.mark.slow
def test_a_split_of_attention_whose_result_never_comes() -> None:
    graph = decoder(layers=1, groups=1, head_dim=64, length=450)
    kernel = emulate(graph, workers=WORKERS, polled=True)
    launches = Launches(kernel, limit=450)
    launches.check_next_is_right()
    (phase,) = [p for p, name in enumerate(kernel.program.phase_names) if "attention" in name]
    words = kernel.workspace.view(torch.int64)
    places = (words >> 32 == phase - 2**31).nonzero().flatten()  # with the tag of the phase in the first launch
    workers = WORKERS - 1  # that store results for the last one, of four heads: elements, maximum and sum
    assert len(places) == workers * 4 * (64 + 2)
    for place, worker in ((places[0], 0), (places[-2], 1)):
        launches.restore()
        kernel.fault.place, kernel.fault.cta = words[place:].data_ptr(), worker
        launches.launch()
        records = launches.check_given_up()
        assert [phase, CONSUMER, ELEMENT] in [record[:3] for record in records]
    launches.check_next_is_right()


def test_a_launch_behind_one_that_was_given_up_runs_nothing_and_does_not_wait(launches: Launches) -> None:
    launches.kernel.spoil(0, worker=1)
    launches.launch()
    launches.kernel.host_abort.zero_()
    left_behind = [x.clone() for x in launches.inputs]
    launches.launch(watchdog_ns=0)
    launches.check_given_up()
    assert all(map(torch.equal, launches.inputs, left_behind))
    launches.check_next_is_right()
