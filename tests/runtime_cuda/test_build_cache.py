"""A build that an earlier process has left: when it is used, and that it launches what that process launched."""

import ast
import ctypes
import os
import resource
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.runtime_cuda import simulated_gpu
from torch_mpk import _C, precompile, registry
from torch_mpk.backend.calls import compile_call
from torch_mpk.builds import timing
from torch_mpk.config import Options
from torch_mpk.dispatch import build_cache
from torch_mpk.dispatch.build_cache import build_key
from torch_mpk.errors import MpkWarning
from torch_mpk.jit import Cache
from torch_mpk.runtime.backend import BACKENDS
from torch_mpk.testing.decode import prefill
from torch_mpk.testing.tiny import random_ids, tiny_model

CPU = torch.device("cpu")


def decode_step(driver) -> tuple[list[int], tuple, tuple[int, ...], list[str]]:
    """Input positions by address, the launch's geometry, its table, and the stages that the build went through."""
    torch.manual_seed(0)
    model = tiny_model(num_layers=1)
    cache, _ = prefill(model, random_ids(1, 3), 32)
    step = torch.compile(model, backend="mpk", options={"fallback": "error"})
    token = random_ids(1, 1)
    with torch.inference_mode():
        logits = step(input_ids=token, past_key_values=cache).logits
    assert logits.shape == (1, 1, 96)
    assert logits.dtype == torch.bfloat16
    layer = cache.layers[0]
    tensors = [*model.parameters(), *model.buffers(), token, layer.keys, layer.values, layer.cumulative_length]
    known = {tensor.data_ptr(): i for i, tensor in enumerate(tensors)}
    data = bytes(driver.params)[: driver.param_bytes[0]]
    table, *_ = struct.unpack_from("<Q", data)
    pointers = struct.unpack_from(f"<{(len(data) - 192) // 8}Q", data, 192)
    geometry = (driver.grid[:], driver.block[:], driver.shared_bytes, len(data))
    stages = list(timing.recent[-1].stages)
    return [known.get(p, -1) for p in pointers], geometry, tuple(ctypes.string_at(table, 256)), stages


@pytest.mark.slow
def test_another_process_goes_straight_to_the_same_launch(simulated, tmp_path):
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert other.returncode == 0, other.stderr
    pointers, geometry, table, stages = decode_step(simulated)
    assert stages == ["look-up", "compile", "load"]
    assert pointers.count(-1) == 1  # the logits
    expected = ast.literal_eval(other.stdout.splitlines()[-1])
    assert {"capture", "patterns", "partition", "lowering", "codegen"} <= set(expected[3])
    assert (pointers, geometry, table) == expected[:3]
    (entry,) = Cache(tmp_path, 2**30, "builds").entries()
    (entry.path / "table.bin").write_bytes(b"")
    torch.compiler.reset()
    again = decode_step(simulated)
    assert "capture" in again[3]
    assert again[:3] == (pointers, geometry, table)


@pytest.fixture
def header(fake, monkeypatch, tmp_path):
    """All that kernels include, by the word of a compiler that is in use instead of the real one."""
    header = tmp_path / "header.cuh"
    header.write_text("first")
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(BACKENDS, "cpu", simulated_gpu)
    monkeypatch.setattr(simulated_gpu, "driver", fake, raising=False)
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        f"""#!/bin/bash
if [ "$1" = --version ]; then echo V13.0.1; exit; fi
if [[ "$*" = *" -E "* ]]; then echo kernel.o: kernel.cu {header} > files.d; else echo image > "${{@: -1}}"; fi
"""
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("TORCH_MPK_COMPILER", str(nvcc))
    return header


def test_what_one_process_has_precompiled_another_need_not_compile(fake, header, monkeypatch):
    monkeypatch.setenv("TORCH_MPK_FORBID_COMPILE", "1")
    x, model = torch.ones(2, 8), torch.nn.Linear(8, 8)
    with pytest.raises(Exception, match=r"FORBID_COMPILE is set: call torch_mpk\.precompile"):
        precompile(model, x, options={"fallback": "error"})
    with torch.inference_mode(), pytest.warns(MpkWarning, match=r"graph eagerly: .* call torch_mpk\.precompile"):
        assert torch.equal(precompile(model, x)(x), model(x))
    assert fake.num_launches == 0
    monkeypatch.delenv("TORCH_MPK_FORBID_COMPILE")
    torch.compiler.reset()
    precompile(model, x, options={"fallback": "error"})
    assert fake.num_launches == 1
    monkeypatch.setenv("TORCH_MPK_FORBID_COMPILE", "1")
    torch.compiler.reset()  # as good as another process
    with torch.inference_mode():
        torch.compile(model, backend="mpk", options={"fallback": "error"})(x)
    assert list(timing.recent[-1].stages) == ["look-up", "compile", "load"]
    assert fake.num_launches == 2
    header.write_text("other")  # as long as the first
    torch.compiler.reset()
    with torch.inference_mode(), pytest.raises(Exception, match=r"FORBID_COMPILE is set"):
        torch.compile(model, backend="mpk", options={"fallback": "error"})(x)
    assert list(timing.recent[-1].stages) == ["look-up", "compile"]


def test_no_memory_for_a_kernel_is_said_and_the_next_call_works(simulated):
    x, model = torch.ones(2, 8), torch.nn.Linear(8, 8)
    simulated.fail_call, simulated.fail_result = b"cuMemAlloc", 2
    with torch.inference_mode():
        with pytest.raises(Exception, match=r"OUT_OF_MEMORY.* torch\.cuda\.empty_cache"):
            torch.compile(model, backend="mpk", options={"fallback": "error"})(x)
        with pytest.warns(MpkWarning, match=r"runs this graph eagerly: .*OUT_OF_MEMORY.* torch\.cuda\.empty_cache"):
            assert torch.equal(torch.compile(model, backend="mpk")(x), model(x))
        assert simulated.num_live == simulated.num_launches == 0
        simulated.fail_call = b""
        torch.compile(model, backend="mpk", options={"fallback": "error"})(x)
    assert simulated.num_launches == 1


def test_a_build_that_cannot_be_read_is_made_again(simulated, tmp_path):
    cache = Cache(tmp_path, 2**30, "builds")
    for key, text in (("a", "not json"), ("b", "{}"), ("c", '{"graph": "", "mutated": [], "plan": {"inputs": 3}}')):
        with cache.workspace() as folder:
            (folder / "plan.json").write_text(text)
            cache.put(key, folder, {})
        assert build_cache.get(key, _C.Target("cpu")) is None


def traced(function, *inputs):
    gm = torch.fx.symbolic_trace(function)
    for node, value in zip(gm.graph.nodes, inputs, strict=False):
        node.meta["example_value"] = value
    return gm, inputs


def linear(x, w):
    return (torch.nn.functional.linear(x, w),)


X, W = torch.ones(2, 8), torch.ones(4, 8)


def test_explaining_and_verifying_need_the_graph_and_build_it(simulated):
    def build(options, needs_graph=False):
        with timing.build() as record, torch.inference_mode():
            call = compile_call(*traced(linear, X, W), options, needs_graph)
        return call, "lowering" in record.stages

    assert build(Options())[1]
    found, is_built = build(Options())
    assert not is_built
    assert found.compiled_graph.partitioned is None
    explained, is_built = build(Options(), needs_graph=True)
    assert is_built
    assert len(explained.compiled_graph.plan.schedule.phases) == 1
    assert build(Options(verify=True))[1]


def test_the_key_changes_with_whatever_decides_the_build(simulated, monkeypatch):
    def scaled(x, w):
        return (torch.nn.functional.linear(x, w) * 0.5,)

    keys = {
        "itself": build_key(*traced(linear, X, W), CPU, Options()),
        "code": build_key(*traced(scaled, X, W), CPU, Options()),
        "shape": build_key(*traced(linear, torch.ones(1, 8), W), CPU, Options()),
        "stride": build_key(*traced(linear, torch.ones(8, 2).t(), W), CPU, Options()),
        "dtype": build_key(*traced(linear, X.half(), W.half()), CPU, Options()),
        "parameter": build_key(*traced(linear, X, torch.nn.Parameter(W)), CPU, Options()),
        "options": build_key(*traced(linear, X, W), CPU, Options(fuse=False)),
    }
    simulated.num_sms = 78
    keys["device"] = build_key(*traced(linear, X, W), CPU, Options())
    simulated.num_sms = 132
    with monkeypatch.context() as patch:
        patch.setattr(registry.get("paged_decode"), "header", "/elsewhere/paged_decode.cuh")
        keys["place of a header"] = build_key(*traced(linear, X, W), CPU, Options())
    monkeypatch.setattr(build_cache, "fingerprint", lambda: "another torch_mpk")
    keys["version"] = build_key(*traced(linear, X, W), CPU, Options())
    monkeypatch.undo()
    assert None not in keys.values()
    assert len(set(keys.values())) == len(keys)


def test_what_the_key_would_not_cover_is_not_kept(simulated, monkeypatch, tmp_path):
    assert build_key(*traced(linear, X, W), CPU, Options()) is not None
    graph = torch.fx.Graph()
    graph.output((graph.call_function(random_ids, (graph.placeholder("x"), 1)),))
    assert build_key(torch.fx.GraphModule({}, graph), [X], CPU, Options()) is None
    graph = torch.fx.Graph()
    graph.output((graph.get_attr("constant"),))
    assert build_key(torch.fx.GraphModule({"constant": X}, graph), [], CPU, Options()) is None
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    assert build_key(*traced(linear, X, W), CPU, Options()) is None
    monkeypatch.delenv("TORCH_MPK_DUMP")

    def task(x, w):
        return (torch.ops.mpk.linear(x, w),)

    assert build_key(*traced(task, X, W), CPU, Options()) is not None
    monkeypatch.setattr(registry.get("linear"), "__module__", "users_file")
    assert build_key(*traced(task, X, W), CPU, Options()) is None
    monkeypatch.undo()
    monkeypatch.setattr(build_cache, "patterns", lambda: [random_ids])
    monkeypatch.setattr(random_ids, "__module__", "users_file")
    assert build_key(*traced(linear, X, W), CPU, Options()) is None


def test_a_graph_with_an_in_place_form_is_kept(simulated):
    def gate(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        torch.ops.mpk.silu_mul_(x, w)
        return x

    assert build_key(*traced(gate, X, X), CPU, Options()) is not None


def test_a_full_disk_costs_the_build_but_not_the_call(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build_cache, "_pack", lambda stored: {"plan.json": bytes(1000)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        with caplog.at_level("INFO", "torch_mpk"):
            build_cache.put("key", SimpleNamespace(plan=SimpleNamespace(kernel="a kernel")), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"the build is not kept: cannot write 1000 bytes to the kernel cache {tmp_path}" in caplog.text
    assert build_cache.get("key", _C.Target("cpu")) is None


if __name__ == "__main__":
    print(decode_step(simulated_gpu.install()))
