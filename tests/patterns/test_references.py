"""Tasks that stand for the operations of their references: found whatever their numbers, where exact."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

from tests.patterns.rewriting import graph_of, operands_of, rewritten, tasks_of
from torch_mpk import patterns, registry, task
from torch_mpk.errors import MpkWarning, TaskError
from torch_mpk.patterns.rewriter import shape


@task(
    "x[..., H], weight[H]? -> y[..., H]",
    pattern=True,
    samples=[{"...": (2,), "H": 8}, {"...": (2,), "H": 8, "weight": None}],
)
def mean_difference(
    x: torch.Tensor, weight: torch.Tensor | None = None, *, slope: float = 0.5, twice: bool = False
) -> torch.Tensor:
    wide = x.float()
    y = torch.atan(slope * wide - wide.mean(-1, keepdim=True))
    y = y if weight is None else y * weight
    return (y * 2 if twice else y).to(x.dtype)


def spelled_out(x, weight):
    wide = x.float()
    return ((weight * torch.atan(0.25 * wide - wide.mean(-1, keepdim=True))).to(x.dtype),)


def without_weight(x, weight):
    wide = x.float()
    return (torch.atan(2.5 * wide - wide.mean(-1, keepdim=True)).to(x.dtype) + weight,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("function", "slope"), [(spelled_out, 0.25), (without_weight, 2.5)])
def test_found_with_other_shapes_numbers_and_orders(function, slope, dtype):
    x, weight = torch.randn(1, 3, 40, dtype=dtype), torch.randn(40, dtype=dtype)
    gm = rewritten(function, x, weight)
    [operands] = operands_of(gm, "mean_difference")
    assert (operands["slope"], operands["twice"]) == (slope, False)
    assert ("weight" in operands) == (function is spelled_out)


def other_dimension(x, weight):
    wide = x.float()
    return ((weight * torch.atan(0.25 * wide - wide.mean(-2, keepdim=True))).to(x.dtype),)


def other_rounding(x, weight):
    wide = x.float()
    return (weight * torch.atan(0.25 * wide - wide.mean(-1, keepdim=True)).to(x.dtype),)


def other_operand(x, weight):
    wide = x.float()
    return ((weight * torch.atan(0.25 * wide - weight.float().mean(-1, keepdim=True))).to(x.dtype),)


def changed_in_between(x, weight):
    wide = x.float()
    y = torch.atan(0.25 * wide - wide.mean(-1, keepdim=True))
    weight.add_(1)
    return (weight * y).to(x.dtype), x.add_(1)


def changed_before_the_last_read(x, weight):
    wide = 0.25 * x.float()
    x.add_(1)
    return ((weight * torch.atan(wide - x.float().mean(-1, keepdim=True))).to(x.dtype),)


@pytest.mark.parametrize("function", [other_dimension, other_operand, changed_before_the_last_read])
def test_left_alone_where_it_would_differ(function):
    gm = rewritten(function, torch.randn(1, 3, 40), torch.randn(40))
    assert not tasks_of(gm)["mean_difference"]


def test_what_is_like_it_in_part_becomes_the_part():
    gm = rewritten(other_rounding, torch.randn(1, 3, 40).bfloat16(), torch.randn(40).bfloat16())
    [operands] = operands_of(gm, "mean_difference")
    assert "weight" not in operands
    rewritten(changed_in_between, torch.randn(1, 3, 40), torch.randn(40))


def test_a_hidden_task_is_neither_listed_nor_taken():
    @task("x[..., H] -> y[..., H]", pattern=True, samples=[{"...": (2,), "H": 8}])
    def hidden_acosh(x: torch.Tensor) -> torch.Tensor:
        return torch.acosh(x).cumsum(-1)

    def is_taken() -> bool:
        return "hidden_acosh" in tasks_of(rewritten(lambda x: (torch.acosh(x).cumsum(-1),), torch.rand(2, 8) + 1))

    assert is_taken()
    with registry.hidden(["hidden_acosh"]):
        assert hidden_acosh not in registry.tasks()
        assert not is_taken()
    assert is_taken()


def test_a_signature_of_another_rank_is_no_match():
    @task("x[R, H] -> y[R, H]", pattern=True, samples=[{"R": 2, "H": 8}])
    def flat_sinc(x: torch.Tensor) -> torch.Tensor:
        return torch.sinc(x) * x

    for x, is_lifted in ((torch.randn(3, 4), True), (torch.randn(1, 3, 4), False)):
        gm = rewritten(lambda x: (torch.sinc(x) * x,), x)
        assert bool(tasks_of(gm)[flat_sinc.name]) == is_lifted


def test_what_a_pattern_cannot_stand_for():
    def updates(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with pytest.raises(TaskError, match="updates: pattern=True takes outputs"):
        task("x[R, H]! -> y[R, H]", pattern=True, samples=[{"R": 1, "H": 1}])(updates)


@task(
    "x[..., H] -> y[..., H], low[..., 1], high[..., 1]",
    pattern=True,
    samples=[{"...": (2,), "H": 8}],
)
def within_range(x: torch.Tensor, *, shift: float = 0.5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    return torch.atan((x - low) / (high - low) + shift), low, high


def spread(x, shift=0.5):
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    return torch.atan((x - low) / (high - low) + shift), low, high


def all_results(x):
    return spread(x)


def results_in_another_order(x):
    y, low, high = spread(x, 2.0)
    return high.sin(), low * 2, y.cos()


def a_result_read_before_the_last_is_there(x):
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    middle = torch.exp(low + high)
    return torch.atan((x - low) / (high - low) + 0.5) * middle, low


def only_the_first_result(x):
    return (spread(x)[0] + 1,)


def a_result_updated_in_place(x):
    y, low, high = spread(x)
    low.add_(1)
    return y, low * 2, high


def twice(x):
    return *spread(x), *spread(x * 2)


@pytest.mark.parametrize(
    "function",
    [
        all_results,
        results_in_another_order,
        a_result_read_before_the_last_is_there,
        only_the_first_result,
        a_result_updated_in_place,
        twice,
    ],
)
def test_several_results(function):
    gm = rewritten(function, torch.randn(3, 2, 40))
    assert tasks_of(gm)["within_range"] == (2 if function is twice else 1)
    assert not any(node.target is torch.ops.aten.atan.default for node in gm.graph.nodes)


def changed_between_the_results(x):
    low = x.amin(-1, keepdim=True)
    x.mul_(2)
    high = x.amax(-1, keepdim=True)
    return torch.atan((x - low) / (high - low) + 0.5), low, high


def changed_by_who_reads_the_first(x):
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    x.mul_(low)
    return torch.atan((x - low) / (high - low) + 0.5), low, high


def without_the_first(x):
    return spread(x)[1:]


def from_different_operands(x):
    low, high = x.amin(-1, keepdim=True), (x + 1).amax(-1, keepdim=True)
    return torch.atan((x - low) / (high - low) + 0.5), low, high


@pytest.mark.parametrize(
    "function",
    [changed_between_the_results, changed_by_who_reads_the_first, without_the_first, from_different_operands],
)
def test_several_results_left_alone_where_they_would_differ(function):
    assert not tasks_of(rewritten(function, torch.randn(3, 2, 40)))["within_range"]


@task("q[R, H], k[R, G], turn[R] -> p[R, H], o[R, G]", tile="R", pattern=True, samples=[{"R": 2, "H": 8, "G": 4}])
def turned(q: torch.Tensor, k: torch.Tensor, turn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.atan(q) * turn[:, None], torch.atan(k) * turn[:, None]


def test_results_of_different_operands_are_paired_with_the_nearest():
    def function(q, k, turn):
        first = torch.atan(q) * turn[:, None], torch.atan(k) * turn[:, None]
        return *first, torch.atan(first[0] + 1) * turn[:, None], torch.atan(first[1] + 1) * turn[:, None]

    gm = rewritten(function, torch.randn(3, 8), torch.randn(3, 4), torch.randn(3))
    calls = [node for node in gm.graph.nodes if node.target is turned]
    assert [[shape(operand) for operand in call.args] for call in calls] == [[(3, 8), (3, 4), (3,)]] * 2


@task("x[..., H], weight[H]?, bias[H]? -> y[..., H]", pattern=True, samples=[{"...": (2,), "H": 8, "eps": 1e-3}])
def scaled_tan(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, *, eps: float = 0.0
) -> torch.Tensor:
    y = torch.tan(x * 0.5 + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@pytest.mark.parametrize("absent", [[], ["weight"], ["bias"], ["weight", "bias"]], ids=str)
def test_optional_operands_that_every_sample_has(absent):
    def function(x, weight, bias):
        y = torch.tan(x * 0.5 + 0.25)
        y = y if "weight" in absent else y * weight
        return (y if "bias" in absent else y + bias,)

    [operands] = operands_of(rewritten(function, torch.randn(3, 8), torch.randn(8), torch.randn(8)), "scaled_tan")
    assert operands.keys() == {"x", "weight", "bias", "eps"} - {*absent}
    assert operands["eps"] == 0.25


def refused(reference, signature="x[R, H] -> y[R, H]", **options):
    """Why the pattern of a task with that reference is not used."""
    reference.__name__ += f"_{len(registry.tasks())}"
    declared = task(signature, pattern=True, samples=[{"R": 2, "H": 8}], **options)(reference)
    gm = graph_of(lambda x: (x.sin(),), torch.randn(2, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MpkWarning)
        [why] = [miss for miss in patterns.apply(gm).meta["misses"] if declared.name in miss]
    prefix = f"the pattern of {declared.name} ({__file__}:{reference.__code__.co_firstlineno}) is not used: "
    assert why.startswith(prefix)
    return why.removeprefix(prefix)


def test_a_reference_that_no_graph_can_show_is_refused_with_the_reason():
    table = torch.arange(8.0)

    def writes(x: torch.Tensor) -> torch.Tensor:
        return x.clone().asinh_()

    def has_a_tensor(x: torch.Tensor) -> torch.Tensor:
        return torch.asinh(x) * table

    def returns_a_view(x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape)

    def draws(x: torch.Tensor) -> torch.Tensor:
        return torch.asinh(x) + torch.rand_like(x)

    def looks(x: torch.Tensor) -> torch.Tensor:
        return x if x.max().item() > 3 else torch.asinh(x)

    def ignores(x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        return torch.asinh(x)

    def needs_it(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.asinh(x) + bias.square()

    assert refused(writes) == "its reference writes in place"
    assert refused(has_a_tensor) == "its reference has a tensor of its own, which a graph does not show"
    assert refused(returns_a_view) == "its reference returns y as a view of an operand"
    assert refused(draws) == "its reference draws random numbers"
    assert refused(looks).startswith("its reference raises ")
    why = refused(ignores, "x[R, H], unused[R] -> y[R, H]")
    assert why == "its reference makes no use of unused, so that nothing says what it is"
    why = refused(needs_it, "x[R, H], bias[H]? -> y[R, H]")
    assert why == "without bias its reference raises AttributeError: 'NoneType' object has no attribute 'square'"


def test_a_reference_that_no_graph_can_show_is_announced_once():
    @task("x[R, H] -> y[R, H]", pattern=True, samples=[{"R": 2, "H": 8}])
    def announced(x: torch.Tensor) -> torch.Tensor:
        return x.clone().acosh_()

    gm = graph_of(lambda x: (x.sin(),), torch.randn(2, 8))
    with pytest.warns(MpkWarning, match=r"the pattern of announced \(.*test_references.py:\d+\) is not used: its ref"):
        patterns.apply(gm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patterns.apply(gm)


def test_a_reference_that_checks_its_attributes_is_found_with_those_of_its_samples():
    @task("x[R, H] -> y[R, H]", pattern=True, samples=[{"R": 2, "H": 8, "base": 10.0}])
    def checked(x: torch.Tensor, *, base: float) -> torch.Tensor:
        assert base in (2.0, 10.0)
        return torch.log1p(x.abs()) / base

    gm = rewritten(lambda x: (torch.log1p(x.abs()) / 10.0,), torch.randn(3, 8))
    assert operands_of(gm, "checked")[0]["base"] == 10.0
    assert not tasks_of(rewritten(lambda x: (torch.log1p(x.abs()) / 3.0,), torch.randn(3, 8)))["checked"]


def reshaped(x):
    return (torch.atan(0.25 * x - x.view(1, -1).mean(-1, keepdim=True)),)


def test_a_view_of_another_shape_is_not_the_tensor():
    rewritten(reshaped, torch.randn(3, 8))


ALMOST = [
    (other_dimension, (3, 40), r"dim of mean\w* \(aten.mean.dim\) is -2, in its reference -1"),
    (other_operand, (3, 40), r"arg1_1 is not arg0_1, which its reference has twice"),
    (changed_before_the_last_read, (3, 40), "something in between writes what its operations read"),
]


@pytest.mark.parametrize(("function", "shape", "why"), ALMOST)
def test_what_was_almost_taken_is_told(function, shape, why):
    gm = rewritten(function, torch.randn(shape), torch.randn(40))
    [miss] = [miss for miss in gm.meta["misses"] if "mean_difference" in miss]
    assert re.fullmatch(rf"the pattern of mean_difference \(.*\.py:\d+\) is not taken at .*: {why}", miss), miss


def test_what_was_taken_is_not_told():
    gm = rewritten(spelled_out, torch.randn(3, 40), torch.randn(40))
    assert not any("mean_difference" in miss for miss in gm.meta["misses"])
