"""What a decode step promises on a GPU alone: one launch, capture, the watchdog, the same bits, every code path."""

import json
from collections.abc import Callable

import pytest
import torch
from stepping import assert_close, compiled, run_both

import torch_mpk
from torch_mpk import _C
from torch_mpk.errors import MegakernelTimeout
from torch_mpk.runtime.program import _live
from torch_mpk.testing.decode import count_launches
from torch_mpk.testing.tiny import Decoding, random_ids, tiny_model

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


def executable_built_by(function: Callable[[], object]) -> _C.CudaExecutable:
    before = set(_live)
    function()
    [segment] = set(_live) - before
    return segment.executable


class ControlBlock:
    """The first words of the control block of the current stream, as ``torch.as_tensor`` takes them."""

    def __init__(self, executable: _C.CudaExecutable) -> None:
        address = executable.control_address(torch.cuda.current_stream().cuda_stream)
        self.__cuda_array_interface__ = {"shape": (16,), "typestr": "<i4", "data": (address, False), "version": 3}


def test_a_step_is_one_launch():
    model = tiny_model(device=DEVICE)
    step, token = compiled(model), random_ids(1, 1, DEVICE)
    decoding = Decoding(model, random_ids(1, 5, DEVICE))
    with torch.inference_mode():
        for _ in range(2):
            decoding.step(step, token)
        assert count_launches(lambda: step(input_ids=token, past_key_values=decoding.cache)) == 1


@pytest.mark.parametrize(("variable", "value"), [("TORCH_MPK_ARCH", "80"), ("TORCH_MPK_COMPILER", "nvrtc")])
def test_other_code_paths(variable, value, tmp_path, monkeypatch):
    """With its variable set for pytest itself, the whole suite runs on one of them."""
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    model = tiny_model(device=DEVICE, num_layers=1)
    run_both(model, compiled(model, watchdog_seconds=7.0), batch=2, mask="2d")  # an option of its own: a new build
    schedules = list(tmp_path.rglob("5.schedule.json"))
    assert schedules
    for schedule in schedules:
        report = json.loads(schedule.with_name("7.report.json").read_text())
        arch = json.loads(schedule.read_text())["target"]["arch"]
        assert value == {"TORCH_MPK_ARCH": str(arch), "TORCH_MPK_COMPILER": report["compiler"].split()[0]}[variable]


def test_a_captured_step_can_be_replayed():
    model = tiny_model(device=DEVICE)
    step, prompt, token = compiled(model), random_ids(2, 5, DEVICE), random_ids(2, 1, DEVICE)
    ours, eager = Decoding(model, prompt), Decoding(model, prompt)
    with torch.inference_mode():
        assert_close(ours.step(step, token), eager.step(model, token))  # builds and loads
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step(input_ids=token, past_key_values=ours.cache).logits[:, -1]
        for i in range(6):
            token.copy_(random_ids(2, 1, DEVICE))
            logits.fill_(torch.nan)
            graph.replay()
            assert_close(logits, eager.step(model, token))
            if i == 3:  # a launch of its own among the replays
                assert_close(ours.step(step, token), eager.step(model, token))
    for actual, expected in zip(ours.state(), eager.state(), strict=True):
        assert_close(actual, expected)


def test_a_launch_that_makes_no_progress_is_aborted_and_reported():
    model = tiny_model(device=DEVICE)
    step, prompt, token = compiled(model, watchdog_seconds=0.25), random_ids(1, 5, DEVICE), random_ids(1, 1, DEVICE)
    ours, eager = Decoding(model, prompt), Decoding(model, prompt)
    with torch.inference_mode():
        executable = executable_built_by(lambda: assert_close(ours.step(step, token), eager.step(model, token)))
        for report in (torch_mpk.synchronize, lambda: ours.step(step, token)):
            before = [tensor.clone() for tensor in ours.state()]
            control = torch.as_tensor(ControlBlock(executable), device=DEVICE)
            control[8] -= 9  # the event of phase 0: nine workers seem never to signal it
            assert ours.step(step, token).isnan().all()
            assert all(map(torch.equal, ours.state(), before)), "an aborted launch changed the cache or a counter"
            with pytest.raises(MegakernelTimeout, match=r"no progress for 0.25 s(.|\n)*waits for(.|\n)*of phase 0 "):
                report()
            torch_mpk.synchronize()  # reported once
            assert_close(ours.step(step, token), eager.step(model, token))


def test_random_delays_change_no_bit():
    model = tiny_model(device=DEVICE)
    step, token = compiled(model, watchdog_seconds=9.0), random_ids(2, 1, DEVICE)
    decoding = Decoding(model, random_ids(2, 5, DEVICE), mask="2d")
    results = []
    with torch.inference_mode():
        before = [tensor.clone() for tensor in decoding.state()]
        present = decoding.present

        def launch() -> None:
            for tensor, value in zip(decoding.state(), before, strict=True):
                tensor.copy_(value)
            decoding.present = present
            results[:] = [decoding.step(step, token), *(tensor.clone() for tensor in decoding.state())]

        executable = executable_built_by(launch)
        first = list(results)
        for seed in range(300):
            executable.jitter = seed
            launch()
            assert all(map(torch.equal, results, first)), seed
