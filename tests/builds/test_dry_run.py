"""``explain`` and ``precompile`` run a model, and leave every object that it holds as it was."""

import copy
import random
import types

import pytest
import torch

from torch_mpk import explain, precompile
from torch_mpk.builds.snapshot import Snapshot


class Average(torch.nn.Module):
    """Rebinds a buffer and a plain attribute, and writes a parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.randn(8))
        self.scale = torch.nn.Parameter(torch.randn(8))
        self.last = torch.randn(8)

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.mean(0)
        self.last = x.sum(0)
        self.scale.data.mul_(2)
        return (x + self.mean) * self.scale


class Remembering(torch.nn.Module):
    def __init__(self, is_broken=False):
        super().__init__()
        self.linear, self.average = torch.nn.Linear(8, 8), Average()
        self.calls, self.seen, self.by_name = 0, [torch.randn(8)], {"x": torch.randn(8)}
        self.other = types.SimpleNamespace(sum=torch.randn(8), history=[torch.zeros(8)])
        self.state, self.is_broken = torch.randn(8), is_broken

    def forward(self, x):
        y = self.average(self.linear(x))
        self.calls += 1
        self.seen.append(y)
        self.by_name["y"] = self.by_name.pop("x") + 1
        self.other.sum = y.sum(0)
        self.other.history[0].add_(1)
        self.state.add_(1)
        random.random()
        self.new = self.linear(y) + self.state
        if self.is_broken:
            torch._dynamo.graph_break()
            raise ValueError("it is broken")
        return self.new


def everything(model):
    """What the model holds, by the path to it: objects, and of tensors the contents too."""
    held = {}

    def walk(path, obj):
        held[path] = (obj, obj.clone() if isinstance(obj, torch.Tensor) else None)
        if isinstance(obj, (torch.nn.Module, types.SimpleNamespace)):
            obj = vars(obj)
        if isinstance(obj, dict):
            for name, value in obj.items():
                if name != "_is_torch_compile":  # which torch.compile sets, whoever calls it
                    walk((*path, name), value)
        elif isinstance(obj, list):
            for i, value in enumerate(obj):
                walk((*path, i), value)

    walk((), model)
    return held


def assert_same(model, before):
    after = everything(model)
    assert after.keys() == before.keys()
    for path, (obj, contents) in after.items():
        known, known_contents = before[path]
        assert obj is known or not isinstance(obj, torch.Tensor) and obj == known, path
        assert contents is None or torch.equal(contents, known_contents), path


@pytest.mark.parametrize("is_broken", [False, True])
@pytest.mark.parametrize("run", [explain, precompile])
@pytest.mark.filterwarnings("ignore::torch_mpk.errors.MpkWarning")
def test_a_model_holds_what_it_held(run, is_broken):
    model, x = Remembering(is_broken), torch.randn(2, 8)
    before, state = everything(model), random.getstate()
    for _ in range(2):  # the second time its graphs may be there
        if is_broken:
            with pytest.raises(ValueError, match="it is broken"):
                run(model, x)
        else:
            run(model, x)
        assert_same(model, before)
        assert random.getstate() == state


@pytest.mark.filterwarnings("ignore::torch_mpk.errors.MpkWarning")
def test_what_is_precompiled_is_what_the_next_call_runs():
    model = Remembering()
    models = [model, copy.deepcopy(model)]
    x = torch.randn(2, 8)
    step = precompile(models[0], x)
    with torch.inference_mode(), torch.compiler.set_stance("fail_on_recompile"):
        actual = step(x)
    with torch.inference_mode():
        torch.testing.assert_close(actual, models[1](x))
    torch.testing.assert_close(models[0].average.mean, models[1].average.mean)
    torch.testing.assert_close(models[0].average.scale, models[1].average.scale)


@pytest.mark.parametrize("run", [explain, precompile])
def test_a_model_that_a_function_closes_over_holds_it_too(run):
    model, calls = Remembering(), 0
    before = everything(model)

    @torch.no_grad()
    def step(x):
        nonlocal calls
        calls += 1
        return model.average(x)

    run(step, torch.randn(2, 8))
    assert_same(model, before)
    assert calls == 0


def test_a_parameter_that_an_earlier_graph_writes_is_kept():
    model, x = Average(), torch.randn(2, 8)
    with torch.inference_mode():
        torch.compile(model, backend="mpk", options={"min_segment_nodes": 1})(x)
    before = everything(model)
    precompile(model, x, options={"min_segment_nodes": 1})
    assert_same(model, before)


def test_a_snapshot_follows_containers_and_leaves_what_is_others():
    class Ordered(dict):
        def __setitem__(self, key, value):
            raise TypeError("it is read-only")

    inner, ordered, generator = {1, 2}, Ordered(a=1), torch.Generator()
    obj = types.SimpleNamespace(pair=(inner, [3]), ordered=ordered, generator=generator, torch=torch.nn)
    state = generator.get_state()
    snapshot = Snapshot([obj])
    inner.add(9)
    obj.pair[1][0] = 4
    dict.clear(ordered)
    obj.pair = None
    obj.more = 1
    torch.rand(2, generator=generator)
    snapshot.restore()
    assert (obj.pair, obj.ordered, vars(obj).get("more")) == (({1, 2}, [3]), {"a": 1}, None)
    assert obj.pair[0] is inner
    assert torch.equal(generator.get_state(), state)
