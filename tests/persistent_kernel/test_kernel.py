"""A kernel's life: made, compiled with its artefacts, run, finalized; and what is refused on the way."""

import gc
import json
import warnings

import pytest
import torch

import torch_mpk
from torch_mpk import _C, PersistentKernel
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


def mlp(kernel, name):
    """The kernel's layers; ``name`` is that of the tensor between them."""
    x, gate, up, down, out = (
        kernel.attach_input(torch.randn(shape), name)
        for name, shape in {"x": (2, 64), "gate": (96, 64), "up": (96, 64), "down": (64, 96), "out": (2, 64)}.items()
    )
    made = kernel.linear_layer(input=x, weight=kernel.shuffle_tensors([gate, up], 0, 4))
    between = kernel.new_tensor((2, 96), dtype=torch.float32, name=name)
    kernel.linear_with_residual_layer(kernel.silu_mul_layer(made, between), down, x, out)


def test_a_source_that_names_layers_and_tensors_needs_no_gpu(tmp_path):
    with PersistentKernel() as kernel:
        mlp(kernel, "act\n\\")
        with pytest.raises(LayerError, match="compile: arch='sm_90a' without output_dir: name the folder to write to"):
            kernel.compile(arch="sm_90a")
        with pytest.raises(OptionError, match="arch: expected 'sm_80' or 'sm_90a' .*got 'sm_70'"):
            kernel.compile(tmp_path, arch="sm_70")
        kernel.compile(tmp_path, arch="sm_90a")
        graph = kernel.schedule.graph
    assert json.loads((tmp_path / "5.schedule.json").read_text())["target"]["device"] == "cpu"
    folder = tmp_path / "sm_90a"
    assert sorted(path.name for path in folder.iterdir()) == ["4.graph.json", "5.schedule.json", "6.kernel.cu"]
    assert json.loads((folder / "5.schedule.json").read_text())["target"]["workers"] == 132
    source = (folder / "6.kernel.cu").read_text()
    assert (
        """\
// Phase 0:
//   0 linear linear.0: x x[2, 64], weight gate[96, 64] -> y t0[2, 96]
//   1 linear linear.0: x x[2, 64], weight up[96, 64] -> y t1[2, 96]
//   2 pointwise linear.0, silu_mul.act??: in0 t0[2, 96], in1 t1[2, 96] -> out0 t2[2, 96]
struct Linear0 {
"""
        in source
    )
    assert "//   3 linear linear_with_residual.out: x t2[2, 96], weight down[64, 96] -> y t3[2, 64]\n" in source

    # What is compiled is without names, so that equal programs share one kernel in the cache.
    target = _C.Target("cuda", 90, 132, 232448, True, True)
    compiled = _C.generate_cuda(_C.make_schedule(graph, target)).source
    assert compiled == "".join(line for line in source.splitlines(True) if not line.startswith(("//   ", "// Phase ")))
    with PersistentKernel() as other:
        mlp(other, "another")
        other.compile()
        assert _C.generate_cuda(_C.make_schedule(other.schedule.graph, target)).source == compiled


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
    gc.collect()  # what other tests have left
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
