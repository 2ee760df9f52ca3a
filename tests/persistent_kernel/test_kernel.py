"""A kernel's life: made, compiled with its artefacts, run, finalized; and what is refused on the way."""

import json
import warnings

import pytest
import torch

import torch_mpk
from torch_mpk import PersistentKernel
from torch_mpk.errors import GradModeError, KernelStateError, LayerError, MpkWarning, OptionError, SharedMemoryError
from torch_mpk.runtime.segment import live_segments


def doubling(kernel, x, out):
    kernel.elementwise_add_layer(*[kernel.attach_input(x, "x")] * 2, kernel.attach_input(out, "out"))


def test_runs_follow_the_tensors_and_count_versions():
    x, out = torch.randn(3), torch.zeros(3)
    with PersistentKernel() as kernel:
        doubling(kernel, x, out)
        kernel.compile()
        for _ in range(2):
            x.add_(1)
            kernel()
            assert torch.equal(out, 2 * x)
        assert (x._version, out._version) == (2, 2)


def test_new_weights_in_the_same_storage_and_strided_tensors():
    base = torch.randn(4, 10)
    x, out = base[:, 1::3], torch.full((4, 6), torch.nan)[:, ::2]
    with PersistentKernel() as kernel:
        doubling(kernel, x, out)
        kernel.compile()
        kernel()
        assert torch.equal(out, 2 * x)
        base.copy_(torch.randn(4, 10))
        kernel()
        assert torch.equal(out, 2 * x)


def test_artefacts(tmp_path):
    with PersistentKernel() as kernel:
        doubling(kernel, torch.randn(3), torch.zeros(3))
        kernel.compile(tmp_path / "new" / "folder")
    files = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert files == ["2.tasks.txt", "4.graph.json", "5.schedule.json", "8.launch.json"]
    graph = json.loads((tmp_path / "new" / "folder" / "4.graph.json").read_text())
    assert [(b["name"], b["kind"]) for b in graph["buffers"]] == [("x", "input"), ("out", "input")]


def test_the_order_of_calls():
    kernel = PersistentKernel(test_mode=False)
    with pytest.raises(KernelStateError, match="a run before compile: the order is attach_input, layers"):
        kernel()
    with pytest.raises(KernelStateError, match="compile without a layer"):
        kernel.compile()
    doubling(kernel, torch.randn(3), torch.zeros(3))
    with pytest.raises(KernelStateError, match="schedule before compile"):
        _ = kernel.schedule
    assert repr(kernel) == "<PersistentKernel of x, out, being built>"
    kernel.compile()
    assert repr(kernel) == "<PersistentKernel of x, out, compiled>"
    with pytest.raises(KernelStateError, match="compile after compile"):
        kernel.compile()
    with pytest.raises(KernelStateError, match="identity_layer after compile"):
        kernel.identity_layer(None)
    with pytest.raises(KernelStateError, match="run_test_mode without test_mode=True: pass it"):
        kernel.run_test_mode()
    kernel.finalize()
    kernel.finalize()
    for call in (kernel, kernel.compile, lambda: kernel.attach_input(torch.ones(1), "late"), lambda: kernel.schedule):
        with pytest.raises(KernelStateError, match="after finalize"):
            call()


def test_finalize_gives_up_what_the_kernel_held():
    before = len(live_segments())
    kernel = PersistentKernel()
    doubling(kernel, torch.randn(3), torch.zeros(3))
    kernel.compile()
    assert len(live_segments()) == before + 1
    kernel.finalize()
    assert len(live_segments()) == before


def test_a_failed_compile_can_be_tried_again():
    shared = torch.zeros(4)
    kernel = PersistentKernel()
    doubling(kernel, shared[:3], shared[1:])
    for _ in range(2):
        with pytest.raises(SharedMemoryError, match="out and x share memory|x and out share memory"):
            kernel.compile()


def test_gradients_are_refused():
    weight, out = torch.randn(3, requires_grad=True), torch.zeros(3)
    kernel = PersistentKernel()
    doubling(kernel, weight, out)
    kernel.compile()
    with pytest.raises(GradModeError, match=r"wrap the call in torch\.inference_mode"):
        kernel()
    assert not out.any()
    with torch.no_grad():
        kernel()
    assert torch.equal(out, 2 * weight.detach())


def test_configuration():
    workers, schedulers = torch_mpk.get_configurations_from_gpu(0)
    assert workers >= 1
    assert schedulers == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", MpkWarning)
        PersistentKernel(**PersistentKernel.get_default_init_parameters())
    with PersistentKernel(num_workers=1) as kernel:
        kernel.identity_layer(kernel.attach_input(torch.randn(2), "x"), kernel.attach_input(torch.zeros(2), "y"))
        kernel.compile()
        assert kernel.schedule.target.num_workers == 1
    for wrong in ({"num_workers": 0}, {"page_size": 0}, {"max_num_batched_tokens": -1}):
        (name,) = wrong
        with pytest.raises(LayerError, match=f"PersistentKernel: {name}=.*, expected"):
            PersistentKernel(**wrong)
    with pytest.raises(OptionError, match="unknown option 'num_thread'"):
        PersistentKernel(options={"num_thread": 1})


@pytest.mark.gpu
def test_workers_of_a_gpu():
    workers, _ = torch_mpk.get_configurations_from_gpu(0)
    assert workers == torch.cuda.get_device_properties(0).multi_processor_count
    kernel = PersistentKernel(num_workers=workers + 1)
    kernel.identity_layer(
        kernel.attach_input(torch.randn(2, device="cuda"), "x"), kernel.attach_input(torch.zeros(2, device="cuda"), "y")
    )
    with pytest.warns(MpkWarning, match=f"num_workers={workers + 1}\\) has no effect: there are {workers}, one a"):
        kernel.compile()
    kernel = PersistentKernel()
    kernel.attach_input(torch.randn(2, device="cuda"), "x")
    with pytest.raises(LayerError, match="is on cpu, what was attached before on cuda:0: put all on one"):
        kernel.attach_input(torch.zeros(2), "z")


@pytest.mark.gpu
def test_runs_are_on_the_current_stream_and_leave_their_source(tmp_path):
    x, out = torch.randn(64, device="cuda"), torch.zeros(64, device="cuda")
    with PersistentKernel(test_mode=True) as kernel:
        doubling(kernel, x, out)
        kernel.compile(tmp_path)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            x.mul_(3)
            kernel.run_test_mode()
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(out, 2 * x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel.run_test_mode()
        x.mul_(2)
        graph.replay()
        torch_mpk.synchronize()
        assert torch.equal(out, 2 * x)
    assert "__global__" in (tmp_path / "6.kernel.cu").read_text()
