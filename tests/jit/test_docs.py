"""docs/jit.md as written: its files, its examples, and on a GPU those that need one."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from torch_mpk.jit import Cubin, Kernel

PAGE = (Path(__file__).parents[2] / "docs" / "jit.md").read_text()
BLOCKS = re.findall(r"```(?:cpp|python)\n(.*?)```", PAGE, re.DOTALL)
FILES = {match[1]: block for block in BLOCKS if (match := re.match(r"(?://|#) (\w+\.(?:cuh|cpp|py))\b", block))}
EXAMPLES = [block for block in BLOCKS if block not in FILES.values()]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        sys.modules.pop(Path(name).stem, None)
    return tmp_path


def run(examples):
    namespace: dict = {"__name__": "example"}
    for example in examples:
        exec(compile(example, str(Path(__file__).with_name("jit.md")), "exec"), namespace)


def test_the_page_s_examples(folder):
    on_cpu = [example for example in EXAMPLES if not example.startswith("# on a GPU")]
    assert (len(FILES), len(on_cpu), len(EXAMPLES)) == (6, 3, 5)
    run(on_cpu)


@pytest.mark.parametrize("name", ["doubled", "scaled"])
def test_its_cuda_kernels_compile_for_sm_90a(folder, name):
    kernel: Kernel = getattr(importlib.import_module(name), name)
    for dtype in (torch.float32, torch.bfloat16):
        cubin = kernel.compile(arch=90, **({"T": dtype} if name == "scaled" else {}))
        assert isinstance(cubin, Cubin)
        assert (cubin.kind, len(cubin.kernels), cubin.resources.spill_store_bytes) == ("cubin", 1, 0)


@pytest.mark.gpu
def test_its_examples_on_a_gpu(folder):
    run([example for example in EXAMPLES if example.startswith("# on a GPU")])


@pytest.mark.gpu
def test_in_a_cuda_graph_and_on_another_stream(folder):
    doubled = importlib.import_module("doubled").doubled
    scaled = importlib.import_module("scaled").scaled
    x, weight = torch.randn(1000, device="cuda"), torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # a launch on another stream would not see the value below
        y = x * 3
        z = doubled(y)
    stream.synchronize()
    assert torch.equal(z, x * 6)
    graph = torch.cuda.CUDAGraph()
    total = torch.zeros(1, 1000, device="cuda")
    with torch.cuda.graph(graph):
        w = doubled(x)
        scaled(w[None], weight, total, ADD=True)
    x.copy_(torch.randn(1000))
    total.zero_()
    for _ in range(3):
        graph.replay()
    torch.testing.assert_close(total[0], x * 6)
