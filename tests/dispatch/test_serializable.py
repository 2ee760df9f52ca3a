"""What is compiled ahead of time can be saved, and is ours again where it is loaded."""

import contextlib

import pytest
import torch
from torch._dynamo.aot_compile import ModelInput

from torch_mpk.backend import pipeline
from torch_mpk.errors import MpkWarning

OPTIONS = {"fallback": "error"}


@pytest.fixture(autouse=True)
def allowed():
    """As PyTorch up to 2.14 asks for it. Its settings hide one that ``monkeypatch`` has put back."""
    name = "enable_aot_compile"
    with torch._dynamo.config.patch({name: True} if hasattr(torch._dynamo.config, name) else {}):
        yield


@pytest.fixture
def built(monkeypatch):
    """The graphs that have been built."""
    graphs, build = [], pipeline.build
    monkeypatch.setattr(pipeline, "build", lambda *args: graphs.append(args) or build(*args))
    return graphs


def linear_silu(x, weight):
    return torch.nn.functional.silu(torch.nn.functional.linear(x, weight))


def test_a_function_is_saved_and_loaded(tmp_path, built):
    x, weight, path = torch.randn(3, 8), torch.randn(8, 8), tmp_path / "saved"
    with torch.no_grad():
        compiled = torch.compile(linear_silu, fullgraph=True, backend="mpk", options=OPTIONS)
        ahead = compiled.aot_compile(((x, weight), {}))
        torch.testing.assert_close(ahead(x, weight), linear_silu(x, weight))
        assert len(built) == 1
        ahead.save_compiled_function(str(path))
        torch.testing.assert_close(ahead(x, weight), linear_silu(x, weight))  # saving takes nothing from it
        torch.compiler.reset()
        with path.open("rb") as file:
            loaded = torch.compiler.load_compiled_function(file)
        for _ in range(2):
            x = torch.randn(3, 8)
            torch.testing.assert_close(loaded(x, weight), linear_silu(x, weight))
        assert len(built) == 2


def test_a_module_is_saved_and_loaded(built):
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)), torch.randn(3, 8)
    compiled, other = (torch.compile(model, fullgraph=True, backend="mpk") for _ in range(2))
    compiled._aot_compile([ModelInput(args=(x,), kwargs={}, contexts=[torch.no_grad()])])
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        other._load_aot_compiled_module(compiled._save_aot_compiled_module())
        torch.testing.assert_close(other(x), model(x))
    assert built


def test_what_falls_back_is_saved_too(tmp_path):
    path = tmp_path / "saved"
    with torch.no_grad(), pytest.warns(MpkWarning, match="linalg_inv"):
        ahead = torch.compile(torch.linalg.inv, fullgraph=True, backend="mpk").aot_compile(((torch.eye(3),), {}))
        ahead.save_compiled_function(str(path))
        with path.open("rb") as file, contextlib.suppress(MpkWarning):
            loaded = torch.compiler.load_compiled_function(file)
        assert torch.equal(loaded(torch.eye(3)), torch.eye(3))
