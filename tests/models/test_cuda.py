"""What a decode step promises on a GPU alone: one launch, capture, the watchdog, the same bits, every code path."""

import gc
import json
import os
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch.cuda.green_contexts import GreenContext

import torch_mpk
from tests.models.stepping import assert_close, compiled, run_both
from torch_mpk import _C
from torch_mpk.errors import LaunchError, MegakernelTimeout
from torch_mpk.jit import compile_cuda
from torch_mpk.runtime.segment import live_segments
from torch_mpk.testing.decode import count_launches
from torch_mpk.testing.tiny import Decoding, random_ids, tiny_model

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


def executable_built_by(function: Callable[[], object]) -> _C.CudaExecutable:
    before = set(live_segments())
    function()
    [segment] = set(live_segments()) - before
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


@pytest.mark.parametrize(
    ("batch", "hidden", "ffn"),
    [(12, 5120, 512), (20, 3072, 512), (32, 2048, 512), (64, 1024, 512), (32, 512, 2048)],
)
def test_batches_whose_rows_come_in_windows(batch, hidden, ffn):
    """By warps and by warpgroups, with norms that end the jobs in front and attention's splits that overlap; and the
    last by columns."""
    if batch > 16 and os.environ.get("TORCH_MPK_ARCH") == "80":
        pytest.skip("code for Ampere takes up to 16 rows")
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": 16, "num_key_value_heads": 8}
    model = tiny_model("llama", device=DEVICE, head_dim=64, **sizes)
    run_both(model, compiled(model), batch=batch, mask="none")


@pytest.mark.parametrize(
    ("variable", "value"), [("TORCH_MPK_ARCH", "80"), ("TORCH_MPK_ARCH", "100"), ("TORCH_MPK_COMPILER", "nvrtc")]
)
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


def test_a_captured_step_outlives_what_was_compiled():
    torch.compiler.reset()
    gc.collect()
    num_captured, before = _C.synchronize_captured(), set(live_segments())
    model = tiny_model(device=DEVICE)
    step, prompt, token = compiled(model), random_ids(2, 5, DEVICE), random_ids(2, 1, DEVICE)
    ours, eager = Decoding(model, prompt), Decoding(model, prompt)
    with torch.inference_mode():
        assert_close(ours.step(step, token), eager.step(model, token))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step(input_ids=token, past_key_values=ours.cache).logits[:, -1]
        graph.replay()
        assert_close(logits, eager.step(model, token))
        del step
        torch.compiler.reset()
        gc.collect()
        assert set(live_segments()) <= before, "the executable was to be dropped"
        other = tiny_model("llama", device=DEVICE)
        run_both(other, compiled(other))  # loads and allocates where something was freed
        for _ in range(3):
            token.copy_(random_ids(2, 1, DEVICE))
            logits.fill_(torch.nan)
            graph.replay()
            assert_close(logits, eager.step(model, token))
    torch_mpk.synchronize()
    for actual, expected in zip(ours.state(), eager.state(), strict=True):
        assert_close(actual, expected)
    assert _C.synchronize_captured() == num_captured + 1
    del graph
    until = time.monotonic() + 10  # a thread of the driver's says that the graph is gone
    while _C.synchronize_captured() > num_captured and time.monotonic() < until:
        time.sleep(0.01)
    assert _C.synchronize_captured() == num_captured


def lose_signals(control):
    control[8] -= 9  # the event of phase 0: nine workers seem never to signal it


def expect_too_many_signals(control):
    control[0] += 1  # the epoch: a launch more than there was


@pytest.mark.parametrize("fault", [lose_signals, expect_too_many_signals])
def test_a_launch_that_makes_no_progress_is_aborted_and_reported(fault):
    model = tiny_model(device=DEVICE)
    step, prompt, token = compiled(model, watchdog_seconds=0.25), random_ids(1, 5, DEVICE), random_ids(1, 1, DEVICE)
    ours, eager = Decoding(model, prompt), Decoding(model, prompt)
    with torch.inference_mode():
        executable = executable_built_by(lambda: assert_close(ours.step(step, token), eager.step(model, token)))
        for report in (torch_mpk.synchronize, lambda: ours.step(step, token)):
            before = [tensor.clone() for tensor in ours.state()]
            control = torch.as_tensor(ControlBlock(executable), device=DEVICE)
            fault(control)
            assert ours.step(step, token).isnan().all()
            assert all(map(torch.equal, ours.state(), before)), "an aborted launch changed the cache or a counter"
            with pytest.raises(MegakernelTimeout, match=r"no progress for 0.25 s(.|\n)*waits for(.|\n)*of phase 0 "):
                report()
            torch_mpk.synchronize()  # reported once
            assert_close(ours.step(step, token), eager.step(model, token))


HOG = """
#include "torch_mpk/abi/launch.h"
extern "C" __global__ void hog(const __grid_constant__ mpk::LaunchParams params) {
  int64_t begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  while (now - begin < params.scalars[0]);
}
"""


def hog(num_workers: int) -> _C.CudaExecutable:
    """A kernel that leaves no shared memory of so many multiprocessors to others, for as many nanoseconds as asked."""
    arch = _C.device_info(0).arch
    cubin = compile_cuda(HOG, 90 if arch == 90 else 80, ptx=arch not in (80, 90))
    program = SimpleNamespace(
        kernel_name="hog",
        table=b"",
        num_workers=num_workers,
        num_threads=32,
        smem_bytes=_C.device_info(0).smem_optin_bytes,
        workspace_bytes=0,
        control_bytes=64 * (1 + num_workers),
        stalls_offset=64,
        stamps_offset=0,
        num_inputs=0,
        num_outputs=0,
        num_scalars=1,
        input_alignment=[],
        maps=[],
        phase_names=[],
        phase_experts=[],
        ranks=1,
        group="",
        exchange_key="",
        mailbox_bytes=0,
    )
    return _C.CudaExecutable(program, cubin.image, 0, 0)


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_waiting_for_multiprocessors_is_not_being_stuck(share):
    """A kernel on one, half or all of them runs much longer than the watchdog would wait."""
    model = tiny_model(device=DEVICE)
    step, prompt, token = compiled(model, watchdog_seconds=0.25), random_ids(1, 5, DEVICE), random_ids(1, 1, DEVICE)
    ours, eager = Decoding(model, prompt), Decoding(model, prompt)
    other, kernel = torch.cuda.Stream(), hog(max(1, int(share * _C.device_info(0).num_sms)))
    with torch.inference_mode():
        assert_close(ours.step(step, token), eager.step(model, token))
        expected = eager.step(model, token)
        torch.cuda.synchronize()
        kernel.run([], [], [1_500_000_000], other.cuda_stream)
        actual = ours.step(step, token)
        assert not other.query(), "the other kernel is over already"
        assert_close(actual, expected)
        torch_mpk.synchronize()
        assert_close(ours.step(step, token), eager.step(model, token))


def test_a_green_context_is_refused_and_leaving_it_is_enough():
    model = tiny_model(device=DEVICE, num_layers=1)
    step, prompt, token = compiled(model), random_ids(1, 5, DEVICE), random_ids(1, 1, DEVICE)
    ours, eager = Decoding(model, prompt), Decoding(model, prompt)
    with torch.inference_mode():
        assert_close(ours.step(step, token), eager.step(model, token))
        before = [tensor.clone() for tensor in ours.state()]
        context = GreenContext.create(num_sms=16, device_id=0)
        context.set_context()
        try:
            with pytest.raises(LaunchError, match="green context"):
                ours.step(step, token)
        finally:
            context.pop_context()
        assert all(map(torch.equal, ours.state(), before))
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
        for seed in range(int(os.environ.get("JITTERED_LAUNCHES", "300"))):
            executable.jitter = seed
            launch()
            assert all(map(torch.equal, results, first)), seed
