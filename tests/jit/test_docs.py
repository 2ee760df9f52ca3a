"""docs/jit.md as written: its files, its examples, and on a GPU those that need one."""

import ast
import builtins
import importlib
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from torch_mpk.jit import Cubin, Kernel

PAGE = (Path(__file__).parents[2] / "docs" / "jit.md").read_text()
BLOCKS = re.findall(r"```(?:cpp|python)\n(.*?)```", PAGE, re.DOTALL)
FILES = {match[1]: block for block in BLOCKS if (match := re.match(r"(?://|#) (\w+\.(?:cuh|cpp|py))\b", block))}
EXAMPLES = [block for block in BLOCKS if block not in FILES.values()]


def needs_gpu(example):
    return example.startswith("# on a GPU")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        sys.modules.pop(Path(name).stem, None)
    return tmp_path


@pytest.fixture
def run(folder, monkeypatch):
    """Runs examples as one module, which Dynamo's guards look up by its name."""
    module = types.ModuleType("example")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def run(examples):
        for example in examples:
            exec(compile(example, str(Path(__file__).with_name("jit.md")), "exec"), vars(module))
        return module

    return run


@pytest.mark.slow
def test_the_page_s_examples(run):
    """In order, as they are written. Where there is no GPU, those that need one are read: imports run, names exist."""
    assert (len(FILES), sum(map(needs_gpu, EXAMPLES)), len(EXAMPLES)) == (6, 2, 5)
    for example in EXAMPLES:
        if torch.cuda.is_available() or not needs_gpu(example):
            run([example])
            continue
        tree = ast.parse(example)
        imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        module = run(map(ast.unparse, imports))
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        assert {node.id for node in names} <= {*vars(module), *vars(builtins), *bound}


@pytest.mark.parametrize("name", ["doubled", "scaled"])
def test_its_cuda_kernels_compile_for_sm_90a(folder, name):
    kernel: Kernel = getattr(importlib.import_module(name), name)
    for dtype in (torch.float32, torch.bfloat16):
        cubin = kernel.compile(arch=90, **({"T": dtype} if name == "scaled" else {}))
        assert isinstance(cubin, Cubin)
        assert (cubin.kind, len(cubin.kernels), cubin.resources.spill_store_bytes) == ("cubin", 1, 0)


@pytest.mark.slow
def test_dynamo_finds_what_an_example_defines(run):
    example = run(["from added import added", "two_more = lambda x: added(x) + 1"])
    compiled = torch.compile(lambda x: example.two_more(x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(5)), torch.full((5,), 3.0))


@pytest.mark.gpu
def test_its_examples_on_a_gpu(run):
    run(filter(needs_gpu, EXAMPLES))


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
