"""Calls that take what is no plain tensor are left to PyTorch, and the rest of the graph is ours."""

import warnings

import pytest
import torch
from torch._library.opaque_object import get_opaque_type_name, register_opaque_type
from torch._opaque_base import OpaqueBase
from torch.nn import functional as F
from torch.utils._python_dispatch import return_and_correct_aliasing

from torch_mpk import explain
from torch_mpk.errors import MpkWarning
from torch_mpk.testing.tiny import Decoding, random_ids, tiny_model


class Int8Rows(torch.Tensor):
    """A weight as 8-bit integers with a scale for each row, as torchao and quanto have them."""

    @staticmethod
    def __new__(cls, values, scales):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scales.dtype, device=values.device)

    def __init__(self, values, scales):
        self.values, self.scales = values, scales

    @classmethod
    def of(cls, weight):
        scales = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scales).round().to(torch.int8), scales)

    def __tensor_flatten__(self):
        return ["values", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["values"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.t.default):
            made = cls(args[0].values, args[0].scales)
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        raise NotImplementedError(func)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight = args[:2]
            result = F.linear(x, weight.values.to(x.dtype)) * weight.scales[:, 0]
            return result if len(args) < 3 or args[2] is None else result + args[2]
        return super().__torch_function__(func, types, args, kwargs or {})


class Packed(torch.nn.Parameter):
    """A parameter whose class overrides operations in Python, as that of bitsandbytes does."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.linear else result


def quantised(weight):
    return torch.nn.Parameter(Int8Rows.of(weight), requires_grad=False)


def packed(weight):
    return Packed(weight.clone(), requires_grad=False)


KINDS = {
    quantised: "test_foreign.Int8Rows, whose operations are its own",
    packed: "test_foreign.Packed, whose operations are its own",
}


class Layers(torch.nn.Module):
    def __init__(self, change):
        super().__init__()
        self.first, self.odd, self.last = (torch.nn.Linear(16, 16) for _ in range(3))
        self.odd.weight = change(self.odd.weight.detach())

    def forward(self, x):
        return self.last(F.linear(F.silu(self.first(x)), self.odd.weight)) + 1


@pytest.mark.parametrize("change", KINDS)
def test_one_such_weight_costs_its_linear_alone(change):
    model, x = Layers(change).eval(), torch.randn(4, 16)
    with torch.inference_mode(), pytest.warns(MpkWarning) as record:
        step = torch.compile(model, backend="mpk", options={"min_segment_nodes": 1})
        torch.testing.assert_close(step(x), model(x))
        torch.testing.assert_close(step(x + 1), model(x + 1))
    (warning,) = {str(each.message) for each in record if each.category is MpkWarning}
    assert "runs a part of this graph eagerly" in warning
    assert "odd.weight is of class " in warning and KINDS[change] in warning
    report = explain(model, x, options={"min_segment_nodes": 1})
    assert [part.is_megakernel for part in report.parts] == [True, False, True]
    assert "odd.weight is of class " in str(report)


def test_a_model_s_step_is_ours_but_for_such_linears():
    model, others = (tiny_model(num_layers=2, dtype=torch.float32) for _ in range(2))
    others.load_state_dict(model.state_dict())
    for each in (model, others):
        for layer in each.model.layers:
            layer.mlp.down_proj.weight = quantised(layer.mlp.down_proj.weight.detach())
    prompt, tokens = random_ids(2, 5), random_ids(2, 3).split(1, 1)
    ours, eager = Decoding(model, prompt), Decoding(others, prompt)
    step = torch.compile(model, backend="mpk")
    with torch.inference_mode(), warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always", MpkWarning)
        for token in tokens:
            torch.testing.assert_close(ours.step(step, token), eager.step(others, token))
    for actual, expected in zip(ours.state(), eager.state(), strict=True):
        torch.testing.assert_close(actual, expected)
    (warning,) = (str(each.message) for each in record if each.category is MpkWarning)
    assert "model.layers.0.mlp.down_proj.weight is of class " in warning
    report = explain(model, input_ids=tokens[0], past_key_values=ours.cache)
    assert report.num_megakernels == 2
    assert report.share("num_operations") > 0.8


def test_a_weight_that_is_written_is_the_whole_graph_s():
    weight = packed(torch.randn(8, 8))

    def function(x, weight):
        weight.add_(1)
        return F.linear(F.linear(x, torch.eye(8)), weight)

    x = torch.randn(2, 8)
    with torch.inference_mode(), pytest.raises(Exception, match="whose operations are its own; .* in place"):
        torch.compile(function, backend="mpk", options={"fallback": "error"})(x, weight)


def test_a_result_that_is_an_argument_is_copied():
    odd = Packed(torch.randn(4, 8), requires_grad=False)
    linear = torch.nn.Linear(8, 8)

    def function(x):
        y = linear(x)
        z = y.type_as(odd)  # y itself
        return linear(z), z + 1

    x = torch.randn(4, 8)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", MpkWarning)
        actual = torch.compile(function, backend="mpk", options={"min_segment_nodes": 1})(x)
        torch.testing.assert_close(actual, function(x))


class Name(OpaqueBase):
    def __init__(self, text):
        self.text = text


def test_an_input_that_is_no_tensor_and_no_number_is_named():
    register_opaque_type(Name, typ="reference")
    with torch.library._scoped_library("mpk_foreign_test", "FRAGMENT") as library:
        library.define(f"scaled(Tensor x, {get_opaque_type_name(Name)} name) -> Tensor")
        library.impl("scaled", lambda x, name: x * len(name.text), "CompositeExplicitAutograd")
        torch.library.register_fake("mpk_foreign_test::scaled", lambda x, name: torch.empty_like(x), lib=library)
        linear = torch.nn.Linear(8, 8)

        def function(x, name):
            return linear(torch.ops.mpk_foreign_test.scaled(linear(x), name))

        x, name = torch.randn(2, 8), Name("abc")
        with (
            torch.inference_mode(),
            pytest.warns(MpkWarning, match=r"L\['name'\] is of class .*Name, neither a tensor nor"),
        ):
            step = torch.compile(function, backend="mpk", options={"min_segment_nodes": 1})
            torch.testing.assert_close(step(x, name), function(x, name))
        assert explain(function, x, name, options={"min_segment_nodes": 1}).num_megakernels == 2


def test_what_dynamo_does_not_capture_is_said():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LSTM(16, 16))
    report = explain(model, torch.randn(2, 3, 8))
    assert "Dynamo does not support RNN, GRU, or LSTM" in str(report)
    assert "torch._dynamo.config.allow_rnn=True" in str(report)
    with torch._dynamo.config.patch(allow_rnn=True):
        report = explain(model, torch.randn(2, 3, 8), options={"min_segment_nodes": 1})
    assert next(part.is_megakernel for part in report.parts)
    assert not report.breaks
    assert "aten.lstm.input is not supported" in str(report)
