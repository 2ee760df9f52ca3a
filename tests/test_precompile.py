"""``torch_mpk.precompile`` builds all that a call needs, and changes nothing."""

import pytest
import torch
import torch.nn.functional as F

from torch_mpk import backend, precompile
from torch_mpk.errors import OptionError
from torch_mpk.testing.tiny import Decoding, random_ids, tiny_model

STRICT = {"fallback": "error"}


@pytest.fixture
def num_graphs(monkeypatch):
    """How many graphs Dynamo has handed to the backend so far."""
    compile_call, graphs = backend.compile_call, []

    def counting(gm, *args, **kwargs):
        graphs.append(gm)
        return compile_call(gm, *args, **kwargs)

    monkeypatch.setattr(backend, "compile_call", counting)
    return lambda: len(graphs)


def test_a_step_is_built_but_not_made(num_graphs):
    model, prompt, token = tiny_model(num_layers=1), random_ids(1, 5), random_ids(1, 1)
    decoding, eager = Decoding(model, prompt), Decoding(model, prompt)
    state = [tensor.clone() for tensor in decoding.state()]
    step = precompile(model, input_ids=token, past_key_values=decoding.cache, options=STRICT)
    assert all(map(torch.equal, decoding.state(), state))
    assert num_graphs() == 1
    own = torch.compile(model, backend="mpk", options=STRICT)
    with torch.inference_mode(), torch.compiler.set_stance("fail_on_recompile"):
        for run in (step, own):
            torch.testing.assert_close(decoding.step(run, token), eager.step(model, token), rtol=0.1, atol=0.1)
    assert num_graphs() == 1


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(8))
        self.history = torch.zeros(8)  # no buffer
        self.part = self.history[2:5]

    def forward(self, x, seen):
        self.calls.add_(1)
        self.history.add_(1)
        seen.append(x)
        y = self.linear(x)
        torch._dynamo.graph_break()
        x.add_(1)
        self.part.mul_(3)
        return F.linear(y, self.linear.weight) + self.calls + torch.rand(8)


def test_nothing_of_a_call_is_left(num_graphs):
    model, seen, x = Counting(), [], torch.randn(2, 8)
    before, state = x.clone(), torch.get_rng_state()
    precompile(model, x, seen)
    assert not model.history.any()
    num_built = num_graphs()
    precompile(model, x, seen)  # all graphs are there already
    assert num_graphs() == num_built > 1
    assert not model.calls.any()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, before)
    assert not seen


def test_sizes_that_change_are_built_for(num_graphs):
    """A float among the inputs is a number that a graph is built for at its first call."""

    def function(x, weight, scale):
        return F.linear(x, weight) * scale

    x, weight = torch.randn(2, 8), torch.randn(8, 8)
    step = precompile(function, x, weight, 0.5, options=STRICT)
    precompile(function, x, weight, 0.25, options=STRICT)
    with torch.inference_mode(), torch.compiler.set_stance("fail_on_recompile"):
        for scale in (0.5, 0.25):
            torch.testing.assert_close(step(x, weight, scale), function(x, weight, scale))


def test_what_is_not_ours_is_an_error_where_asked_to():
    with pytest.raises(Exception, match="linalg_inv"):
        precompile(torch.linalg.inv, torch.eye(3), options=STRICT)
    with pytest.raises(OptionError, match="unknown option 'verfy'"):
        precompile(torch.sin, torch.ones(1), options={"verfy": 1})
