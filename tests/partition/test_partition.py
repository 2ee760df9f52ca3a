"""Segments keep program order, hand over no views and compute what the whole graph computes, whatever falls back."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import torch_mpk.partition.segments as stage
from torch_mpk import _C, patterns, registry
from torch_mpk.capture.aliasing import is_view, storages
from torch_mpk.capture.graph import capture
from torch_mpk.capture.node_keys import node_key
from torch_mpk.partition.costs import COSTS

aten = torch.ops.aten


def graph_of(function: Callable[..., Any], *args: torch.Tensor) -> fx.GraphModule:
    def traced(*args: torch.Tensor) -> Any:
        return function(*args)

    graph = fx.Graph()
    graph.output(graph.call_function(traced, tuple(graph.placeholder(f"arg{i}") for i in range(len(args)))))
    return patterns.apply(capture(fx.GraphModule({}, graph), args).graph_module)


@torch.no_grad()
def assert_same_effect(gm: fx.GraphModule, partitioned: stage.Partitioned, *args: torch.Tensor) -> None:
    left, right = [a.clone() for a in args], [a.clone() for a in args]
    results = gm(*left), partitioned.gm(*right)
    for a, b in zip((*results[0], *left), (*results[1], *right), strict=True):
        assert torch.equal(a, b)
        assert a.shape == b.shape
    for a, b in zip(results[0], results[1], strict=True):  # results that are views of inputs still are
        aliases = [
            [x.untyped_storage().data_ptr() == r.untyped_storage().data_ptr() for x in xs]
            for r, xs in ((a, left), (b, right))
        ]
        assert aliases[0] == aliases[1]


def assert_well_formed(partitioned: stage.Partitioned) -> None:
    assert list(dict(partitioned.gm.named_children())) == [s.name for s in partitioned.segments]
    for a, b in zip(partitioned.segments, partitioned.segments[1:], strict=False):
        assert a.ours != b.ours
    for segment in partitioned.segments:
        segment.gm.graph.lint()
        placeholders = segment.gm.graph.find_nodes(op="placeholder")
        inputs = frozenset().union(*map(storages, placeholders))
        results = segment.gm.graph.output_node().args[0]
        if segment.ours:
            owned = [storages(r) for r in results if isinstance(r, fx.Node)]
            assert not any(inputs & owner for owner in owned)
            assert len(frozenset().union(*owned)) == len(set(results))
    top = partitioned.gm.graph
    assert not any(is_view(n) for n in top.nodes if n.op == "call_function" and n.meta.get("val") is None)


def partition_with(monkeypatch: pytest.MonkeyPatch, gm: fx.GraphModule, *unsupported: Any) -> stage.Partitioned:
    monkeypatch.setattr(stage, "supports", lambda node, target: "refused" if node.target in unsupported else None)
    partitioned = stage.partition(gm, min_segment_nodes=1)
    assert_well_formed(partitioned)
    return partitioned


def ours(partitioned: stage.Partitioned) -> list[bool]:
    return [segment.ours for segment in partitioned.segments]


X, W = torch.randn(2, 8), torch.randn(8, 8)


def test_one_segment_has_the_inputs_and_results_of_the_graph(monkeypatch):
    gm = graph_of(lambda x, unused, w: (F.linear(x, w).view(1, 2, 8), F.linear(x, w) + 1), X, X, W)
    partitioned = partition_with(monkeypatch, gm)
    assert ours(partitioned) == [True]
    segment = partitioned.segments[0].gm
    assert len(segment.graph.find_nodes(op="placeholder")) == 3
    assert [tuple(r.meta["val"].shape) for r in segment.graph.output_node().args[0]] == [(1, 2, 8), (2, 8)]
    assert_same_effect(gm, partitioned, X, X, W)


def test_a_fallback_in_the_middle_splits_in_program_order(monkeypatch):
    gm = graph_of(lambda x, w: (F.linear(F.linear(x, w).sort().values, w),), X, W)
    partitioned = partition_with(monkeypatch, gm, aten.sort.default)
    assert ours(partitioned) == [True, False, True]
    assert [(f.node, f.why) for f in partitioned.fallbacks] == [("sort", "refused"), ("getitem", "refused")]
    assert_same_effect(gm, partitioned, X, W)


def test_a_run_without_a_stream_task_falls_back(monkeypatch):
    gm = graph_of(lambda x, w: (F.linear(x.exp().sort().values, w),), X, W)
    partitioned = partition_with(monkeypatch, gm, aten.sort.default)
    assert ours(partitioned) == [False, True]
    assert partitioned.fallbacks[-1].node == "exp"
    assert "not worth a launch" in partitioned.fallbacks[-1].why
    assert_same_effect(gm, partitioned, X, W)


def test_a_small_run_between_fallbacks_is_left_to_them(monkeypatch):
    def function(x, w):
        for size in (1, 6, 30):
            x = x.sort().values
            for _ in range(size):
                x = (F.linear(x, w).sin() + 1).cos()
        return (x,)

    gm = graph_of(function, X, W)
    monkeypatch.setattr(stage, "supports", lambda node, target: "refused" if node.target is aten.sort.default else None)
    times = {"operation": 4, "segment": 20, "phase": 8, "bytes_per_us": 1e9, "others_bytes_per_us": 1e9}
    costs = dataclasses.replace(COSTS["cpu"], **times)
    partitioned = stage.partition(
        gm, costs=costs
    )  # 4 operations for each phase: 16 us against 8, so 20 us need 3 of them
    assert_well_formed(partitioned)
    assert ours(partitioned) == [False, True, False, True]
    assert [segment.num_operations for segment in partitioned.segments] == [8, 24, 2, 120]
    assert partitioned.fallbacks[-1].why.startswith("it and its neighbours, 4 operations between what falls back")
    assert_same_effect(gm, partitioned, X, W)
    whole = graph_of(lambda x, w: (F.linear(x, w),), X, W)
    assert ours(stage.partition(whole)) == [True], "a graph that is ours whole is one launch, however small"


H200 = _C.Target("cuda", 90, 132, 232448, True, True)


CACHE_STRIDES = "offsets and strides that are multiples of 16 bytes, and less than 4 GiB between positions"


@pytest.mark.parametrize(
    ("head_size", "begin", "why"),
    [
        (12, 0, "attention: the head size must be a multiple of 8 up to 256, got 12"),
        (8, 2, f"attention: operand k_cache needs {CACHE_STRIDES}"),
    ],
)
def test_only_the_attention_that_has_no_cuda_kernel_falls_back(head_size, begin, why):
    def function(x, cache, w):
        part = cache[..., begin : begin + head_size]
        y = F.scaled_dot_product_attention(F.linear(x, w).view(1, 2, 1, head_size), part, part)
        return (F.linear(y.view(1, 2 * head_size), w),)

    args = torch.randn(1, 2 * head_size), torch.randn(1, 2, 5, 16), torch.randn(2 * head_size, 2 * head_size)
    gm = graph_of(function, *args)
    assert ours(stage.partition(gm, 1, _C.Target("cpu"))) == [True]
    partitioned = stage.partition(gm, 1, H200)
    assert_well_formed(partitioned)
    assert ours(partitioned) == [True, False, True]
    assert [(f.node, f.why) for f in partitioned.fallbacks] == [("attention", why)]
    assert_same_effect(gm, partitioned, *args)


def test_x_that_is_too_large_for_shared_memory_is_ours_wherever_it_lies():
    """It is read where it is: workspace is aligned, an input may not be."""
    x, w = torch.randn(16, 8192), torch.randn(520, 8192)
    for step in (lambda x, w: (F.linear(x * 2, w),), lambda x, w: (F.linear(x, w),)):
        assert ours(stage.partition(graph_of(step, x, w), 1, H200)) == [True]


def test_in_place_effects_keep_their_order(monkeypatch):
    def function(x, w, counter):
        before = F.linear(x, w) * counter
        counter.add_(1)
        after = F.linear(before, w) * counter
        view = x[0]
        view.mul_(counter)
        return after, F.linear(x, w), counter * 2

    gm = graph_of(function, X, W, torch.tensor(3.0))
    for unsupported in (aten.add_.Tensor, aten.mul_.Tensor, aten.mul.Tensor):
        partitioned = partition_with(monkeypatch, gm, unsupported)
        assert len(partitioned.segments) > 1
        assert_same_effect(gm, partitioned, X, W, torch.tensor(3.0))


def test_views_are_made_again_where_they_are_used(monkeypatch):
    def function(x, w):
        view = x.t().reshape(2, 8)[:, 2:6]
        y = F.linear(x, w)
        part = y[:, ::2].t()
        z = part.sort().values
        part.add_(1)
        return F.linear(z.t().repeat(1, 2), w) + y, view.exp() + part.t()

    gm = graph_of(function, X.clone(), W)
    partitioned = partition_with(monkeypatch, gm, aten.sort.default)
    for segment in partitioned.segments:
        assert not any(
            is_view(n)
            for n in gm.graph.nodes
            if n.name in {p.name for p in segment.gm.graph.find_nodes(op="placeholder")}
        )
    assert_same_effect(gm, partitioned, X, W)


def test_results_that_are_views_of_inputs_are_left_to_pytorch(monkeypatch):
    gm = graph_of(lambda x, w, cache: (F.linear(x, w), cache[0], x, cache.add_(1)), X, W, torch.randn(2, 4))
    partitioned = partition_with(monkeypatch, gm)
    assert ours(partitioned) == [True, False]
    assert not partitioned.fallbacks
    assert_same_effect(gm, partitioned, X, W, torch.randn(2, 4))


def test_results_that_are_views_of_one_value(monkeypatch):
    def function(x, w):
        y = F.linear(x, w)
        return y[0], y.view(16), y.t(), F.linear(y, w).t(), y

    gm = graph_of(function, X, W)
    assert_same_effect(gm, partition_with(monkeypatch, gm), X, W)


def test_repeated_and_missing_results(monkeypatch):
    gm = graph_of(lambda x, w: (F.linear(x, w), F.linear(x, w) + 1), X, W)
    (output,) = gm.graph.find_nodes(op="output")
    output.args = ((*output.args[0], output.args[0][0]),)
    gm.recompile()
    assert_same_effect(gm, partition_with(monkeypatch, gm), X, W)


def test_a_graph_without_computation(monkeypatch):
    gm = graph_of(lambda x: (x, x.t()), X)
    partitioned = partition_with(monkeypatch, gm)
    assert ours(partitioned) == [False]
    assert_same_effect(gm, partitioned, X)


def test_constants_go_where_they_are_used(monkeypatch):
    constant = torch.randn(8)
    gm = graph_of(lambda x, w: (F.linear((F.linear(x, w) + constant).sort().values, w) * constant,), X, W)
    assert gm.graph.find_nodes(op="get_attr")
    partitioned = partition_with(monkeypatch, gm, aten.sort.default)
    assert ours(partitioned) == [True, False, True]
    assert_same_effect(gm, partitioned, X, W)


def test_a_tuple_and_its_items_stay_together(monkeypatch):
    def function(x, w):
        values, indices = x.sort()
        return F.linear(values, w).exp() + indices, F.linear(x, w)

    gm = graph_of(function, X, W)
    assert_same_effect(gm, partition_with(monkeypatch, gm, aten.exp.default), X, W)


def test_writing_memory_that_two_inputs_share_falls_back(monkeypatch):
    gm = graph_of(lambda x, y, w: (F.linear(x, w), y.add_(1) * 2), X, X, W)
    x, y, _ = gm.graph.find_nodes(op="placeholder")
    for node in gm.graph.nodes:
        if storages(node) == storages(y):
            node.meta["val"] = x.meta["val"]
    partitioned = partition_with(monkeypatch, gm)
    assert partitioned.fallbacks[0].why == "it writes memory that two inputs share"
    with torch.no_grad():
        x, y = X.clone(), X.clone()
        assert all(map(torch.equal, partitioned.gm(x, x, W), gm(y, y, W)))


def test_changing_a_shape_in_place_falls_back(monkeypatch):
    gm = graph_of(lambda x, w: (F.linear(x, w), (x + 1).unsqueeze_(0)), X, W)
    partitioned = partition_with(monkeypatch, gm)
    assert ours(partitioned) == [False]
    assert_same_effect(gm, partitioned, X, W)


def test_it_can_be_read(monkeypatch):
    gm = graph_of(lambda x, w: (F.linear(F.linear(x, w).sort().values, w),), X, W)
    text = str(partition_with(monkeypatch, gm, aten.sort.default))
    assert "segment_0 (ours)" in text
    assert "segment_1 (fallback)" in text
    assert "sort: refused" in text


# Random programs over a pool of tensors of one shape: fresh values, views, writes through either, and matrix products.
# Each step is (what, operand, another operand); steps may read and write whatever came before.
STEPS = {
    "linear": lambda a, b, w: F.linear(a, w),
    "add": lambda a, b, w: a + b,
    "sin": lambda a, b, w: a.sin(),
    "transpose": lambda a, b, w: a.t(),
    "flip": lambda a, b, w: a.flip(0),
    "row": lambda a, b, w: a[1:2].expand(4, 4),
    "sorted": lambda a, b, w: a.sort().values,
    "halves": lambda a, b, w: torch.cat(a.chunk(2)[::-1]),
    "write": lambda a, b, w: a.add_(b),
    "write row": lambda a, b, w: a[2].copy_(b[0]),
    "write column": lambda a, b, w: a.t()[1:].mul_(0.5),
}


def run_steps(steps):
    def function(x, y, w):
        pool = [x, y]
        for name, i, j in steps:
            a, b = pool[i % len(pool)], pool[j % len(pool)]
            if name.startswith("write"):
                if 0 in a.stride():
                    continue  # several elements in one place cannot be written
                STEPS[name](a, b.clone() if b.untyped_storage()._cdata == a.untyped_storage()._cdata else b, w)
            else:
                pool.append(STEPS[name](a, b, w))
        return tuple(pool[2:]) or (x + 1,)

    return function


OPS = [aten.linear.default, aten.add.Tensor, aten.sin.default, aten.sort.default, aten.add_.Tensor, aten.copy_.default]
OPS += [aten.mul_.Tensor, aten.flip.default, aten.cat.default, aten.clone.default, aten.t.default]


def test_a_split_keeps_effects_wherever_it_cuts():
    def function(x, w, counter):
        y = F.linear(x, w) * counter
        x.add_(1)
        values, indices = y.sort()
        view = values[0]
        counter.add_(1)
        return values + indices, view, F.linear(x, w) * counter, x.t()

    gm = graph_of(function, X.clone(), W, torch.tensor(3.0))
    count = len(stage.operations(gm))
    assert count == 8
    for cuts in [(), *((cut,) for cut in range(count + 1)), (2, 3), (3, 7), (0, 5, 5, count)]:
        partitioned = stage.split(gm, cuts)
        assert all(segment.ours for segment in partitioned.segments[:-1])
        handed_over = [node for node in partitioned.gm.graph.nodes if node.target is operator.getitem]
        assert all(isinstance(node.meta["val"], torch.Tensor) for node in handed_over)  # never a tuple
        assert_same_effect(gm, partitioned, X, W, torch.tensor(3.0))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)), max_size=12),
    unsupported=st.sets(st.sampled_from(OPS), max_size=6),
)
def test_any_program_keeps_its_effects(steps, unsupported):
    args = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4)
    gm = graph_of(run_steps(steps), *args)
    with pytest.MonkeyPatch.context() as monkeypatch:
        partitioned = partition_with(monkeypatch, gm, *unsupported)
    assert_same_effect(gm, partitioned, *args)


def test_a_tiny_model_is_one_segment():
    from torch_mpk.testing.tiny import Decoding, random_ids, tiny_model

    model = tiny_model("qwen3", num_layers=1)
    found = []

    def backend(gm, example_inputs):
        captured = capture(gm, example_inputs).graph_module
        found.append((captured, stage.partition(patterns.apply(captured))))
        return gm.forward

    decoding = Decoding(model, random_ids(1, 4))
    with torch.inference_mode():
        decoding.step(torch.compile(model, backend=backend), random_ids(1, 1))
    ((captured, partitioned),) = found
    assert partitioned.fallbacks == []
    assert ours(partitioned) == [True]
    names = [
        [n.name for n in g.find_nodes(op="placeholder")] for g in (captured.graph, partitioned.segments[0].gm.graph)
    ]
    assert names[0] == names[1]


def layers(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
    for _ in range(4):
        x = F.linear(x, w).relu()
    return (x,)


def test_nodes_of_one_form_are_tried_once(monkeypatch):
    tried: list[str] = []
    monkeypatch.setattr(stage, "supports", lambda node, target: tried.append(str(node.target)))
    partitioned = stage.partition(graph_of(layers, X, W))
    assert partitioned.segments[0].num_operations == 8
    assert sorted(tried) == ["aten.relu.default", "mpk.linear", "mpk.linear"]  # the first linear reads an input


def test_what_is_not_supported_is_said_of_every_node_of_a_form(monkeypatch):
    partitioned = partition_with(monkeypatch, graph_of(layers, X, W), aten.relu.default)
    assert [fallback.why for fallback in partitioned.fallbacks].count("refused") == 4


def test_a_form_tells_numbers_places_and_sharing_apart():
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sums = x + 1, x + 1.0, x + True, x[:, :4] + 1, x[:, 4:] + 1, x.t() + 1, x + x, x + y, x.double() + 1
        return (*sums, (x + y) + 1)

    nodes = [node for node in graph_of(function, X, X).graph.nodes if node.target is aten.add.Tensor]
    assert len({node_key(node) for node in nodes}) == len(nodes) - 1 == 10  # x + y is there twice
    assert None not in map(node_key, nodes)


def test_a_reference_gives_example_values_once_for_layers_that_are_alike(monkeypatch):
    linear, called = registry.get("linear"), []
    reference = linear.reference
    monkeypatch.setattr(linear, "reference", lambda *args, **attrs: called.append(args) or reference(*args, **attrs))
    gm = graph_of(layers, X, W)
    calls = [node for node in gm.graph.nodes if node.target is linear]
    assert (len(calls), len(called)) == (4, 1)
    assert len({storages(node) for node in calls}) == 4
