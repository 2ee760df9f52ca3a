"""A verified call passes where eager agrees within rounding, and else names the first task that differs."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends import registry

from torch_mpk import warn_once as announcements
from torch_mpk.builds.dump import Dump
from torch_mpk.capture.graph import capture
from torch_mpk.config import Options
from torch_mpk.dispatch.compiled_graph import CompiledGraph
from torch_mpk.errors import InductorVerificationError, MpkWarning, VerificationError
from torch_mpk.lowering.lowerer import Lowerer
from torch_mpk.partition.segments import partition
from torch_mpk.patterns import apply
from torch_mpk.runtime.segment import compiling_ahead
from torch_mpk.testing.tiny import Decoding, random_ids, tiny_model
from torch_mpk.verify import comparison as verify


def compiled(function, **options):
    return torch.compile(function, backend="mpk", options={"fallback": "error", "verify": 1} | options)


@pytest.fixture
def searches(monkeypatch):
    """How often a difference was looked for."""
    found = []
    in_graph = verify._Search.in_graph
    monkeypatch.setattr(verify._Search, "in_graph", lambda *args: found.append(1) or in_graph(*args))
    return found


def corrupt(monkeypatch, task, label, **wrong):
    """Lowers one task of the model with other attributes than the graph says."""
    lower = Lowerer.task

    def corrupted(self, name, operands, attrs):
        lower(self, name, operands, attrs | wrong if (name, self.label) == (task, label) else attrs)

    monkeypatch.setattr(Lowerer, "task", corrupted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_of_a_model_pass(dtype, searches):
    model = tiny_model(dtype=dtype, num_layers=1)
    step = compiled(model)
    decoding = Decoding(model, random_ids(2, 5))
    with torch.inference_mode():
        for _ in range(3):
            decoding.step(step, random_ids(2, 1))
    assert all(layer.cumulative_length == 8 for layer in decoding.cache.layers)
    assert not searches


def test_the_first_wrong_task_is_named_and_the_call_undone(monkeypatch):
    corrupt(monkeypatch, "rms_norm", "model.layers.1.input_layernorm", eps=0.5)
    model = tiny_model(dtype=torch.float32, num_layers=3)
    decoding = Decoding(model, random_ids(1, 5))
    before = [tensor.clone() for tensor in decoding.state()]
    difference = r"(?s)off by .* allow .*The first to differ: rms_norm\w* \(mpk.rms_norm\) "
    place = r"from .*modeling_qwen3\.py:\d+ .*layers\.1\.input_layernorm: "
    wrong = r"y \(torch.float32\[1, 64\]\) is .*\. This is a bug"
    with torch.inference_mode(), pytest.raises(VerificationError, match=difference + place + wrong):
        decoding.step(compiled(model, verify=True), random_ids(1, 1))
    assert all(map(torch.equal, decoding.state(), before))


def test_only_some_calls_are_verified(monkeypatch):
    for option, expected in ((True, [0]), (2, [0, 2, 4]), (1, [0, 1, 2, 3, 4]), (False, []), (0, [])):
        seen: list[int] = []
        monkeypatch.setattr(verify, "_difference", lambda results, args, *rest, to=seen: to.append(int(args[0][0, 0])))
        step = compiled(lambda x, w: F.linear(x, w), verify=option)
        with torch.inference_mode():
            for call in range(5):
                step(torch.full((2, 8), float(call)), torch.ones(8, 8))
        assert seen == expected
        torch.compiler.reset()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.norm = torch.nn.RMSNorm(8, eps=1e-6)

    def forward(self, x, state):
        y = self.first(x)
        state.add_(y.sum())
        z = self.norm(y.sort().values)
        return self.second(z) * state


def call_net(how="eager"):
    """Three parts, the second left to ``how``."""
    announcements.forget()
    with torch.inference_mode(), pytest.warns(MpkWarning, match="a part of this graph"):
        compiled(Net(), fallback=how, min_segment_nodes=1)(torch.randn(3, 8), torch.zeros(3, 8))


def test_a_call_that_only_builds_is_not_verified(monkeypatch):
    compared = []
    difference = verify._difference
    monkeypatch.setattr(verify, "_difference", lambda *args: compared.append(1) or difference(*args))
    step, args = compiled(F.linear, verify=True), (torch.randn(2, 8), torch.randn(4, 8))
    with torch.inference_mode():
        with compiling_ahead():
            step(*args)
        assert compared == []
        torch.testing.assert_close(step(*args), F.linear(*args))
        step(*args)
    assert compared == [1]


def test_a_wrong_task_of_a_later_part_is_named(monkeypatch):
    call_net()
    torch.compiler.reset()
    corrupt(monkeypatch, "rms_norm", "norm", eps=0.5)
    with pytest.raises(
        VerificationError, match=r"first to differ: rms_norm\w* \(mpk\.rms_norm\) from .*, norm: y .* This is"
    ):
        call_net()


def test_a_task_that_is_wrong_only_among_others_is_named(monkeypatch):
    lower = Lowerer.task

    def corrupted(self, name, operands, attrs):
        lower(self, name, operands, attrs | {"eps": 0.5} if name == "rms_norm" and self.steps else attrs)

    monkeypatch.setattr(Lowerer, "task", corrupted)
    with torch.inference_mode(), pytest.raises(VerificationError, match="rms_norm.* agrees where it runs alone on the"):
        compiled(lambda x, w: F.rms_norm(F.linear(x, w), (8,)))(torch.randn(3, 8), torch.randn(8, 8))


def test_what_inductor_gets_wrong_is_found(monkeypatch):
    def inductor(gm, inputs):
        return lambda *args: [result + 1 for result in gm(*args)]

    monkeypatch.setitem(registry._COMPILER_FNS, "inductor", inductor)
    with pytest.raises(InductorVerificationError, match="segment_1, which inductor compiled. options={'fallback'"):
        call_net("inductor")


def test_a_choice_between_near_equals_is_not_an_error(searches):
    numbers, x = torch.randn(512), torch.ones(1, 512)

    def function(x, weight):
        return F.linear(x, weight).argmax(-1)

    step = compiled(function)
    with torch.inference_mode():
        for _ in range(10):
            weight = torch.stack(
                [numbers[torch.randperm(512)] for _ in range(64)]
            )  # sums that only rounding tells apart
            step(x, weight)
    assert searches


def test_a_wrong_choice_is_an_error(monkeypatch):
    reduce = Lowerer.reduce

    def corrupted(self, op, out_dtype, value, dims, keepdim):
        return reduce(self, {"argmax": "argmin"}.get(op, op), out_dtype, value, dims, keepdim)

    monkeypatch.setattr(Lowerer, "reduce", corrupted)
    with torch.inference_mode(), pytest.raises(VerificationError, match=r"result 0 is \d+ at \[0\].* argmax \("):
        compiled(lambda x, w: F.linear(x, w).argmax(-1))(torch.randn(2, 8), torch.randn(8, 8))


def test_a_difference_that_does_not_come_back_is_an_error():
    x, weight, state = torch.randn(2, 8), torch.randn(8, 8), torch.zeros(2, 8)

    def function(x, weight, state):
        return (state.add_(F.linear(x, weight)) * 2,)

    captured = capture(torch.fx.symbolic_trace(function), [x, weight, state])
    device = torch.device("cpu")
    program = CompiledGraph.build(partition(apply(captured.graph_module)), device, Options(), Dump(None))

    def wrong(x, weight, state):
        state.sub_(7)
        return (torch.zeros(2, 8),)

    call = verify.verified(wrong, program, function, [2], device, Options(verify=True))
    with (
        torch.inference_mode(),
        pytest.raises(VerificationError, match="first to differ: none, when its parts"),
    ):
        call(x, weight, state)
    assert not state.any()


@pytest.mark.parametrize(
    ("ours", "eager", "exact", "message"),
    [
        ([1.0, 2.0], [1.0, 2.0], [1.0, 2.0], None),
        ([1.0, 2.001], [1.0, 2.0], [1.0, 2.0], r"is 2.001 at \[1\], in eager 2: off by 0.001, where .* \(1 elements"),
        ([1.0, 2.001], [1.0, 2.0], [1.0, 2.0005], None),  # eager itself is that far off
        ([1.0, 2.001], [1.0, 2.0], None, "off by 0.001"),
        ([1.0, torch.nan], [1.0, torch.nan], [1.0, torch.nan], None),
        ([1.0, torch.inf], [1.0, torch.inf], [1.0, torch.inf], None),
        ([1.0, torch.nan], [1.0, 2.0], [1.0, 2.0], r"is nan at \[1\], in eager 2.0"),
        ([1.0, -torch.inf], [1.0, torch.inf], [1.0, torch.inf], r"is -inf at \[1\], in eager inf"),
        ([1, 2], [1, 3], [1, 3], r"is 2 at \[1\], in eager 3 \(1 elements differ\)"),
        ([1, 2], [1.0, 2.0], [1.0, 2.0], r"is torch.int64\[2\], in eager torch.float32\[2\]"),
        ([], [], [], None),
    ],
)
def test_tensors_are_compared_against_eagers_own_error(ours, eager, exact, message):
    ours, eager, exact = (None if values is None else torch.tensor(values) for values in (ours, eager, exact))
    found = verify._tensor_difference(ours, eager, exact)
    assert found is None if message is None else re.search(message, found)
