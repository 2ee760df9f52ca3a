"""Float64 operands are computed in double, or left to those who do."""

import functools
import logging

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.tasks.every_task import SAMPLES
from tests.thinned import thinned
from torch_mpk import lowering, registry

close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def run(function, *args):
    with torch.inference_mode():
        return torch.compile(function, backend="mpk", options={"fallback": "error"})(*args)


TILES = [case for case in SAMPLES if case.values[0].role == "tile"]


@pytest.mark.parametrize(("task", "sample"), thinned(TILES, *(i for i, c in enumerate(TILES) if c.id.endswith("-0"))))
def test_tasks_with_code_are_right_on_the_cpu(task, sample):
    operands, attrs = task.sample(sample, torch.float64)
    expected = [None if t is None else t.clone() for t in operands]
    weight = torch.randn(8, 8, dtype=torch.float64)

    def step(*operands):
        return F.linear(weight, weight), getattr(torch.ops.mpk, task.name)(*operands, **attrs)

    _, results = run(step, *operands)
    wanted = task(*expected, **attrs)
    error = 1e-6 if attrs.get("style") == "eager" else 1e-12  # eager attention has its softmax in float32
    for got, want in zip([*task.results(results), *operands], [*task.results(wanted), *expected], strict=True):
        if want is not None:
            if want.dtype == torch.float8_e4m3fn:  # which no tolerance is for
                got, want = got.double(), want.double()
            close(got, want, atol=error, equal_nan=True)


def block(x, weight, keys, values):
    """A layer's operations, those that become tasks of ours among them."""
    h = F.rms_norm(x + F.linear(x, weight, weight[0]), (64,), weight[1], 1e-6)
    query = F.linear(h, weight).view(1, 1, 4, 16).transpose(1, 2)
    h = F.scaled_dot_product_attention(query, keys, values).transpose(1, 2).reshape(1, 64)
    gate = F.linear(h, weight)
    h = F.linear(F.silu(gate) * gate + F.gelu(gate) * gate, weight)
    return h, F.layer_norm(h, (64,)), h.softmax(-1), h.argmax(-1), F.embedding(h.argmax(-1), weight)


def test_models_are_right_on_the_cpu():
    shapes = (1, 64), (64, 64), (1, 4, 9, 16), (1, 4, 9, 16)
    args = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    for got, want in zip(run(block, *args), block(*args), strict=True):
        close(got, want)


def test_code_in_float_is_left_out_on_the_cpu(caplog):
    x, scale, shift = torch.randn(3, 64, dtype=torch.float64), *torch.randn(2, 64, dtype=torch.float64)

    def step(*args):
        return F.linear(x, scale[None]), torch.ops.mpk.layer_norm(*args, eps=1e-5)

    with caplog.at_level(logging.INFO, "torch_mpk"):
        close(run(step, x, scale, shift)[1], F.layer_norm(x, (64,), scale, shift, 1e-5))
    assert "layer_norm runs by its reference: operands are float64" in caplog.text


@pytest.mark.parametrize(("name", "reason"), [("layer_norm", "declare it with float64=True"), ("paged_kv_write", None)])
def test_code_in_float_is_declined_on_cuda(name, reason):
    task = registry.get(name)
    graph = torch.fx.Graph()
    with FakeTensorMode():
        operands, attrs = task.sample(task.samples[0], torch.float64, "cuda")
        nodes = [graph.placeholder(f"x{i}") for i in range(len(operands))]
        for node, operand in zip(nodes, operands, strict=True):
            node.meta["val"] = operand
        call = graph.call_function(task, tuple(nodes), attrs)
        if task.outputs:
            call.meta["val"] = task(*operands, **attrs)
        refusal = lowering.supports(call)
    assert refusal is None if reason is None else reason in refusal
