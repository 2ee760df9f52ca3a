"""A task that stands for its reference is taken in compiled models that spell the same operation in another way."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.thinned import thinned
from torch_mpk import registry, task
from torch_mpk.backend import pipeline
from torch_mpk.errors import MpkWarning

# Of one operation: ways to write it on x[4, 8] (and w[8], b[8]); k is an attribute of the task where it has a default.
WAYS: dict[str, tuple[float, list[Callable]]] = {
    "gelu": (0, [lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="none"), lambda x: torch.nn.GELU()(x)]),
    "gelu_tanh": (0, [lambda x: F.gelu(x, approximate="tanh"), lambda x: torch.nn.GELU("tanh")(x)]),
    "softmax": (
        0,
        [
            lambda x: F.softmax(x, dim=-1),
            lambda x: F.softmax(x, dim=-1, dtype=None),
            lambda x: x.softmax(-1),
            lambda x: torch.softmax(x, -1),
        ],
    ),
    "log_softmax": (0, [lambda x: F.log_softmax(x, dim=-1, dtype=None), lambda x: x.log_softmax(-1)]),
    "layer_norm": (
        1e-5,
        [
            lambda x, k=1e-5: F.layer_norm(x, (8,), eps=k),
            lambda x, k=1e-5: F.layer_norm(x, [8], None, None, k),
            lambda x: F.layer_norm(x, x.shape[-1:]),
            lambda x: F.layer_norm(x, x.shape[-1:], weight=None, eps=1e-5),
        ],
    ),
    "rms_norm": (
        1e-6,
        [lambda x, k=1e-6: F.rms_norm(x, (8,), None, k), lambda x, k=1e-6: F.rms_norm(x, [8], eps=k)],
    ),
    "group_norm": (
        1e-5,
        [
            lambda x: F.group_norm(x, 2),
            lambda x, k=1e-5: F.group_norm(x, num_groups=2, eps=k),
            lambda x: F.group_norm(x, 2, None, None, 1e-5),
        ],
    ),
    "elu": (
        1.0,
        [lambda x: F.elu(x), lambda x, k=1.0: F.elu(x, k), lambda x: F.elu(x, alpha=1), lambda x: F.elu(x, 1.0, False)],
    ),
    "celu": (1.0, [lambda x: F.celu(x), lambda x, k=1.0: F.celu(x, alpha=k), lambda x: F.celu(x, 1)]),
    "leaky_relu": (
        0.01,
        [
            lambda x: F.leaky_relu(x),
            lambda x, k=0.01: F.leaky_relu(x, k),
            lambda x: F.leaky_relu(x, negative_slope=0.01),
            lambda x: torch.nn.LeakyReLU()(x),
        ],
    ),
    "softplus": (
        1.0,
        [
            lambda x: F.softplus(x),
            lambda x, k=1.0: F.softplus(x, k),
            lambda x: F.softplus(x, beta=1, threshold=20),
            lambda x: F.softplus(x, 1.0, 20.0),
        ],
    ),
    "hardtanh": (
        1.0,
        [
            lambda x: F.hardtanh(x),
            lambda x, k=1.0: F.hardtanh(x, -1.0, k),
            lambda x: F.hardtanh(x, min_val=-1, max_val=1),
        ],
    ),
    "softshrink": (0.5, [lambda x: F.softshrink(x), lambda x, k=0.5: F.softshrink(x, k)]),
    "hardshrink": (0.5, [lambda x: F.hardshrink(x), lambda x, k=0.5: F.hardshrink(x, k)]),
    "glu": (0, [lambda x: F.glu(x), lambda x: F.glu(x, dim=-1), lambda x: F.glu(x, -1)]),
    "scaled": (2.0, [lambda x: x * 2, lambda x, k=2.0: x * k, lambda x: 2.0 * x, lambda x: torch.mul(x, 2)]),
    "halved": (2.0, [lambda x: x / 2, lambda x, k=2.0: x / k, lambda x: torch.div(x, 2.0)]),
    "shifted": (
        1.0,
        [lambda x: x + 1, lambda x, k=1.0: k + x, lambda x: torch.add(x, 1.0, alpha=1), lambda x: x.add(1, alpha=1.0)],
    ),
    "doubled_sum": (2.0, [lambda x: torch.add(x, x, alpha=2), lambda x, k=2.0: x.add(x, alpha=k)]),
    "less": (1.0, [lambda x: x - 1, lambda x, k=1.0: x - k, lambda x: torch.sub(x, 1.0, alpha=1)]),
    "from_one": (1.0, [lambda x: 1 - x, lambda x, k=1.0: k - x, lambda x: torch.rsub(x, 1.0)]),
    "cube": (3.0, [lambda x: x**3, lambda x, k=3.0: x**k, lambda x: x.pow(3.0), lambda x: torch.pow(x, 3)]),
    "clamp": (
        0.25,
        [
            lambda x: x.clamp(0.25),
            lambda x, k=0.25: torch.clamp(x, min=k),
            lambda x: torch.clamp(x, 0.25, None),
        ],
    ),
    "clamp_max": (1.0, [lambda x: x.clamp(max=1), lambda x, k=1.0: torch.clamp(x, None, k)]),
    "nan_to_num": (
        0.0,
        [
            lambda x: torch.nan_to_num(x, 0.0),
            lambda x, k=0.0: torch.nan_to_num(x, nan=k),
            lambda x: x.nan_to_num(nan=0),
        ],
    ),
    "masked": (
        -1e4,
        [
            lambda x: x.masked_fill(x > 0.5, -1e4),
            lambda x, k=-1e4: torch.masked_fill(x, x > 0.5, k),
            lambda x: x.masked_fill(mask=x > 0.5, value=-10000),
        ],
    ),
    "masked_inf": (
        0,
        [lambda x: x.masked_fill(x > 0.5, -math.inf), lambda x: torch.masked_fill(x, x > 0.5, -math.inf)],
    ),
    "masked_nan": (0, [lambda x: x.masked_fill(x > 0.5, math.nan), lambda x: x.masked_fill(x > 0.5, float("nan"))]),
    "sum": (
        0,
        [
            lambda x: x.sum(-1, keepdim=True) + x,
            lambda x: torch.sum(x, dim=[-1], keepdim=True, dtype=None) + x,
            lambda x: x + x.sum((-1,), True),
        ],
    ),
    "mean": (
        0,
        [
            lambda x: x - x.mean(-1, keepdim=True),
            lambda x: x - torch.mean(x, dim=(-1,), keepdim=True, dtype=None),
            lambda x: torch.sub(x, x.mean([-1], True)),
        ],
    ),
    "var": (
        0,
        [
            lambda x: x * x.var(-1, keepdim=True),
            lambda x: x.var(-1, True, keepdim=True) * x,
            lambda x: x * torch.var(x, dim=[-1], unbiased=True, keepdim=True),
        ],
    ),
    "var_corrected": (
        0,
        [
            lambda x: x * x.var(-1, correction=0, keepdim=True),
            lambda x: torch.var(x, dim=(-1,), keepdim=True, correction=0) * x,
        ],
    ),
    "normalize": (
        1e-12,
        [
            lambda x: F.normalize(x, dim=-1),
            lambda x, k=1e-12: F.normalize(x, p=2.0, dim=-1, eps=k),
            lambda x: F.normalize(x, 2.0, -1, 1e-12),
        ],
    ),
    "cumsum": (0, [lambda x: x.cumsum(-1), lambda x: torch.cumsum(x, dim=-1, dtype=None)]),
    "flip": (0, [lambda x: x.flip(-1) * 2, lambda x: torch.flip(x, dims=(-1,)) * 2, lambda x: x.flip([-1]) * 2.0]),
    "halves": (
        0,
        [
            lambda x: torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1),
            lambda x: torch.cat([x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1),
        ],
    ),
    "constant": (0, [lambda x: x * torch.tensor(0.5), lambda x: torch.tensor(0.5) * x]),
    "linear": (
        0,
        [
            lambda x: F.linear(x, x, None).sinh(),
            lambda x: F.linear(x, x).sinh(),
            lambda x: F.linear(input=x, weight=x, bias=None).sinh(),
        ],
    ),
    "attention": (
        0,
        [
            lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]).squeeze(1),
            lambda x: F.scaled_dot_product_attention(
                x[:, None], x[:, None], x[:, None], dropout_p=0.0, is_causal=False
            ).squeeze(1),
            lambda x: F.scaled_dot_product_attention(
                x[:, None], x[:, None], x[:, None], attn_mask=None, scale=None, enable_gqa=False
            ).squeeze(1),
        ],
    ),
}
REFERENCES = [pytest.param(name, i, id=f"{name}-{i}") for name, (_, ways) in WAYS.items() for i in range(len(ways))]
FIRST_OF_EACH = [i for i, case in enumerate(REFERENCES) if case.id.endswith("-0")]
_NUMBERS = itertools.count()
_SHAPES = {"glu": "x[R, H] -> y[R, G]", "linear": "x[R, H] -> y[R, R]"}


@pytest.fixture
def lifted(monkeypatch):
    """The names of the patterns that were taken. Those declared by a test are its own."""
    taken: list[str] = []
    apply = pipeline.apply

    def recording(gm):
        result = apply(gm)
        taken.extend(lift.pattern for lift in result.meta["lifts"])
        return result

    monkeypatch.setattr(pipeline, "apply", recording)
    with registry.hidden([task.name for task in registry.tasks() if not task.is_ours]):
        yield taken


class Model(torch.nn.Module):
    """Each function after a linear of its own."""

    def __init__(self, functions: list[Callable]) -> None:
        super().__init__()
        self.linears = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in functions)
        self.functions = functions

    def forward(self, *xs: torch.Tensor) -> list[torch.Tensor]:
        return [f(linear(x)) for f, linear, x in zip(self.functions, self.linears, xs, strict=True)]


def declare(name: str, way: Callable, default: float) -> str:
    """The name of a task whose reference is written in that way."""

    def without(x: torch.Tensor) -> torch.Tensor:
        return way(x)

    def with_attribute(x: torch.Tensor, *, k: float = default) -> torch.Tensor:
        return way(x, k)

    reference = without if way.__defaults__ is None else with_attribute
    reference.__name__ = f"{name}_for_test_{next(_NUMBERS)}"
    signature = _SHAPES.get(name, "x[R, H] -> y[R, H]")
    sample = {"R": 4, "H": 8} | ({"G": 4} if "G" in signature else {})
    return task(signature, tile="R", samples=[sample], pattern=True)(reference).name


@pytest.mark.parametrize(("name", "number"), thinned(REFERENCES, *FIRST_OF_EACH))
def test_taken_however_it_is_spelled(name, number, lifted):
    default, ways = WAYS[name]
    declared = declare(name, ways[number], default)
    net, xs = Model(ways), [torch.randn(4, 8) for _ in ways]
    with torch.inference_mode():
        got = torch.compile(net, backend="mpk", options={"fallback": "error"})(*xs)
        assert lifted.count(declared) == len(ways)
        torch.testing.assert_close(got, net(*xs), equal_nan=True)


# Of one operation: how a reference writes it, and a model something else.
OTHERS: dict[str, tuple[Callable, Callable]] = {
    "another default": (lambda x: F.layer_norm(x, (8,), eps=1e-6), lambda x: F.layer_norm(x, (8,))),
    "a default of the reference": (lambda x: F.layer_norm(x, (8,)), lambda x: F.layer_norm(x, (8,), eps=1e-3)),
    "another form": (lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="tanh")),
    "another dimension": (lambda x: x.softmax(-1), lambda x: x.softmax(0)),
    "another correction": (lambda x: x * x.var(-1, keepdim=True), lambda x: x * x.var(-1, False, keepdim=True)),
    "another order": (lambda x: torch.add(x, x.sin(), alpha=2), lambda x: torch.add(x.sin(), x, alpha=2)),
    "the sign of a zero": (lambda x: x + 0.0, lambda x: x + -0.0),
    "another dtype": (lambda x: x.long() * 2, lambda x: x.long() * 2.0),
    "a mask": (
        lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
        lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], torch.zeros(1, 1)),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_the_same_is_not_taken(name, lifted):
    reference, other = OTHERS[name]
    declared = declare(name.replace(" ", "_"), reference, 0)
    net, xs = Model([other]), [torch.randn(4, 8)]
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", MpkWarning)
        got = torch.compile(net, backend="mpk")(*xs)
        torch.testing.assert_close(got, net(*xs))
    assert declared not in lifted


def test_a_task_declared_after_a_build_is_taken_by_the_next(lifted):
    net, x = Model([torch.asinh]), torch.randn(4, 8)
    with torch.inference_mode():
        first = torch.compile(net, backend="mpk", options={"fallback": "error"})
        expected = first(x)
        declared = declare("asinh", lambda x: torch.asinh(x), 0)
        torch.compiler.reset()
        torch.testing.assert_close(torch.compile(net, backend="mpk", options={"fallback": "error"})(x), expected)
    assert lifted == ["linear", "linear", declared] or lifted == ["linear", declared]
