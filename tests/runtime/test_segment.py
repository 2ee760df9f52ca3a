"""The callable around an executable."""

import json

import pytest
import torch

from torch_mpk.builds.dump import Dump
from torch_mpk.capture.graph import capture
from torch_mpk.config import Options
from torch_mpk.dispatch.compiled_graph import CompiledGraph
from torch_mpk.errors import CompileError, UnsupportedError
from torch_mpk.partition.segments import partition
from torch_mpk.patterns import apply
from torch_mpk.runtime import cpu, synchronize
from torch_mpk.runtime.segment import compiling_ahead


def build(function, *inputs, dump=None) -> CompiledGraph:
    captured = capture(torch.fx.symbolic_trace(function), inputs)
    partitioned = partition(apply(captured.graph_module))
    assert not partitioned.fallbacks
    return CompiledGraph.build(partitioned, torch.device("cpu"), Options(num_threads=1), Dump(dump))


def step(x, weight, state):
    state.add_(1)
    return (torch.nn.functional.linear(x, weight),)


@pytest.fixture
def inputs():
    return torch.randn(2, 8), torch.randn(4, 8), torch.zeros(3)


def test_results_are_new_tensors_and_inputs_are_updated(inputs):
    x, weight, state = inputs
    call = build(step, *inputs).callable(eager=None)
    first, second = call(x, weight, state), call(x, weight, state)
    torch.testing.assert_close(first[0], x @ weight.T)
    assert state.tolist() == [2, 2, 2]
    assert first[0].data_ptr() != second[0].data_ptr()


def test_results_may_be_inputs_and_views(inputs):
    def function(x, weight, state):
        y = torch.nn.functional.linear(x, weight)
        return y, state.add_(1), y.unsqueeze(0), x.t(), 7

    x, weight, state = inputs
    y, same, view, transposed, number = build(function, *inputs).callable(eager=None)(x, weight, state)
    torch.testing.assert_close(y, x @ weight.T)
    assert same is state
    assert state.tolist() == [1, 1, 1]
    assert view.shape == (1, 2, 4)
    assert view.data_ptr() == y.data_ptr()
    assert torch.equal(transposed, x.t())
    assert number == 7


def test_versions_count_what_is_written(inputs):
    x, weight, state = inputs
    build(step, *inputs).callable(eager=None)(x, weight, state)
    assert (x._version, weight._version, state._version) == (0, 0, 1)


def test_an_address_the_executable_refuses_makes_the_call_eager(inputs):
    program = build(step, *inputs)
    (segment,) = program.segments.values()

    class Refusing:
        def call(self, *args):
            raise ValueError("input 0 of the megakernel: the address is not a multiple of 16")

    segment.executable = Refusing()
    reasons = []
    assert program.callable(eager=lambda *args: "eager", decline=reasons.append)(*inputs) == "eager"
    assert inputs[2]._version == 0
    assert [str(reason) for reason in reasons] == ["input 0 of the megakernel: the address is not a multiple of 16"]
    with pytest.raises(UnsupportedError, match="the address is not a multiple of 16"):
        program.callable(eager=None)(*inputs)


def test_what_is_built_ahead_runs_behind_it(inputs):
    x, weight, state = inputs
    with compiling_ahead():
        call = build(step, *inputs).callable(eager=None)
        assert call(x, weight, state)[0].tolist() == torch.zeros(2, 4).tolist()
        assert (state.tolist(), state._version) == ([0, 0, 0], 0)
        synchronize()
    torch.testing.assert_close(call(x, weight, state)[0], x @ weight.T)
    assert state.tolist() == [1, 1, 1]


def test_without_a_kernel_calls_of_what_was_built_ahead_fall_back(inputs, monkeypatch):
    tried = []

    def load(*args):
        tried.append(args)
        raise CompileError("no compiler")

    monkeypatch.setattr(cpu, "load", load)
    reasons = []
    with compiling_ahead():
        call = build(step, *inputs).callable(eager=lambda *args: "eager", decline=reasons.append)
    assert [call(*inputs), call(*inputs)] == ["eager", "eager"]
    assert ([str(reason) for reason in reasons], len(tried)) == (["no compiler"] * 2, 1)
    with pytest.raises(CompileError, match="no compiler"):
        build(step, *inputs)


def test_the_dump_has_an_artefact_of_each_stage(inputs, tmp_path):
    build(step, *inputs, dump=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4.graph.json", "5.schedule.json", "8.launch.json"]
    launch = json.loads((tmp_path / "8.launch.json").read_text())
    assert (launch["device"], launch["inputs"], launch["written"]) == ("cpu", [0, 1, 2], [2])


def test_synchronize_without_launches_in_flight_returns(inputs):
    program = build(step, *inputs)
    synchronize()
    del program
    synchronize()


def test_a_profiler_shows_segments_and_graphs_of_several_by_name(inputs):
    def keys(function):
        call = build_any(function, *inputs).callable(eager=None)
        call(*inputs)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call(*inputs)
        return sorted((e.key, e.count) for e in profile.key_averages() if e.key.startswith("mpk "))

    def split(x, weight, state):
        y = torch.nn.functional.linear(torch.nn.functional.linear(x, weight), weight.t())
        return (torch.nn.functional.linear(torch.linalg.det(y[:, :2])[None, None].expand(2, 8) + x, weight),)

    def build_any(function, *inputs):
        captured = capture(torch.fx.symbolic_trace(function), inputs)
        partitioned = partition(apply(captured.graph_module), 1)
        return CompiledGraph.build(partitioned, torch.device("cpu"), Options(num_threads=1), Dump(None))

    assert keys(step) == [("mpk segment segment_0", 1)]
    found = dict(keys(split))
    assert found.pop("mpk graph") == 1
    assert len(found) >= 1 and all(key.startswith("mpk segment segment_") for key in found)
