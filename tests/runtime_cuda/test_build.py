"""From a device and a schedule to a loaded executable, up to the driver."""

import gc
import json
import threading

import pytest
import torch
import torch.nn.functional as F

import torch_mpk
from tests.runtime_cuda import simulated_gpu
from tests.runtime_cuda.fake_driver import destroy_graphs
from torch_mpk.builds import background
from torch_mpk.builds.dump import Dump
from torch_mpk.config import Options
from torch_mpk.errors import MpkWarning, UnsupportedError
from torch_mpk.plan import Plan
from torch_mpk.runtime import cuda
from torch_mpk.runtime.segment import compiling_ahead, live_segments
from torch_mpk.runtime.watchdog import watchdog_seconds

DEVICE = torch.device("cuda", 0)
SOURCE = """
#include "torch_mpk/abi/launch.h"
extern "C" __global__ void mpk_kernel(const __grid_constant__ mpk::LaunchParams params) { params.control->exited++; }
"""


@pytest.mark.parametrize(
    ("device_arch", "option", "arch", "compiled_for"),
    [
        (80, None, 80, 80),
        (86, None, 80, 86),
        (90, None, 90, 90),
        (90, 80, 80, 80),
        (90, 120, 120, 90),  # with instructions that 9.0 has, too
        (100, None, 100, 100),
        (103, None, 100, 103),
        (121, 120, 120, 121),
        (130, None, 120, 120),  # not known yet: as PTX
    ],
)
def test_target_is_the_whole_device(fake, device_arch, option, arch, compiled_for):
    fake.arch, fake.num_sms, fake.smem_optin = device_arch, 78, 166912
    target = cuda.target(DEVICE, Options(arch=option, fuse=False))
    assert (target.device, target.arch, target.num_workers, target.smem_bytes) == ("cuda", arch, 78, 166912)
    assert (target.device_arch, target.fuse) == (compiled_for, False)


@pytest.mark.parametrize(("device_arch", "option"), [(75, None), (86, 90), (100, 90), (121, 90), (89, 120)])
def test_target_refuses_what_the_device_cannot_run(fake, device_arch, option):
    fake.arch = device_arch
    with pytest.raises(UnsupportedError, match=f"Fake GPU has compute capability {device_arch / 10}, "):
        cuda.target(DEVICE, Options(arch=option))


@pytest.mark.parametrize(
    ("device_arch", "arch", "kind"),
    [
        (90, 90, "cubin"),
        (80, 80, "cubin"),
        (86, 80, "cubin"),
        (90, 80, "ptx"),
        (100, 80, "ptx"),
        (100, 100, "cubin"),
        (130, 120, "ptx"),
    ],
)
def test_load_compiles_for_the_device(fake, make_program, monkeypatch, tmp_path, device_arch, arch, kind):
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(tmp_path / "cache"))
    program = make_program(source=SOURCE, arch=arch)
    fake.arch = device_arch
    options = Options(watchdog_seconds=0.5)
    dump = tmp_path / "dump"
    dump.mkdir()
    plan = Plan(program, (0, 1), (2,), (), (), (), ())
    executable = cuda.load(plan, DEVICE, options, Dump(dump))
    executable.run([16, 32], [48], [0], 64)
    assert fake.num_launches == 1
    assert int.from_bytes(bytes(fake.params[40:48]), "little") == 500_000_000
    image = (dump / f"7.kernel.{kind}").read_bytes()
    assert image.startswith(b"\x7fELF" if kind == "cubin" else b"//")
    assert fake.image[:4] == image[: len(fake.image[:4])]
    report = json.loads((dump / "7.report.json").read_text())
    assert report["kind"] == kind
    assert (report["resources"]["registers"] > 0) == (kind == "cubin")


def test_the_watchdog_of_the_option_goes_before_that_of_the_environment(monkeypatch):
    assert watchdog_seconds(Options()) == 10
    monkeypatch.setenv("TORCH_MPK_WATCHDOG_SECONDS", "3")
    assert watchdog_seconds(Options()) == 3
    assert watchdog_seconds(Options(watchdog_seconds=0)) == 0


def test_attention_that_has_no_kernel_runs_between_launches(simulated):
    def step(x, cache, w):
        y = F.scaled_dot_product_attention(F.linear(x, w).view(1, 2, 1, 12), cache, cache)
        return F.linear(y.view(1, 24), w)

    compiled = torch.compile(step, backend="mpk", options={"fallback": "eager", "min_segment_nodes": 1})
    args = torch.randn(1, 24), torch.randn(1, 2, 5, 12), torch.randn(24, 24)
    with torch.inference_mode(), pytest.warns(MpkWarning, match="a part of this graph .* the head size must be"):
        compiled(*args)
    assert simulated.num_launches == 2


def test_a_graph_keeps_what_was_compiled(simulated, fake_library, monkeypatch):
    monkeypatch.setattr(simulated_gpu, "current_stream", lambda device: 64)
    others = live_segments()  # of other tests
    step, args = torch.compile(F.linear, backend="mpk", options={"fallback": "error"}), (torch.randn(1, 64),) * 2
    with torch.inference_mode():
        step(*args)
        simulated.capturing_stream, simulated.capture_id = 64, 5
        step(*args)
    simulated.capturing_stream = 0
    del step
    torch.compiler.reset()
    gc.collect()
    torch_mpk.synchronize()
    assert all(segment in others for segment in live_segments())
    assert simulated.num_live > 0
    destroy_graphs(fake_library, 5)
    torch_mpk.synchronize()
    assert simulated.num_live == 0


def test_kernels_built_ahead_are_compiled_beside_each_other_and_loaded_at_a_call(simulated, monkeypatch):
    together = threading.Barrier(2, timeout=60)  # neither compiler ends before both have begun
    compiled = []

    def compile_kernel(source, *args, **kwargs):
        if source not in compiled:
            compiled.append(source)
            together.wait()
        return simulated_gpu.not_compiled(source, *args)

    monkeypatch.setattr(background, "num_compilers", lambda: 2)
    monkeypatch.setattr(cuda, "compile_cuda", compile_kernel)
    step = torch.compile(F.linear, backend="mpk", options={"fallback": "error"}, dynamic=False)
    calls = [(torch.randn(1, size), torch.randn(16, size)) for size in (64, 128)]
    with torch.inference_mode():
        with compiling_ahead():
            assert all(torch.equal(step(*args), torch.zeros(1, 16)) for args in calls)
        assert (len(compiled), simulated.num_launches) == (2, 0)
        for args in calls:
            step(*args)
    assert simulated.num_launches == 2
