"""What a call is estimated to take, and that graphs are ours in part only where that is less."""

import dataclasses
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_mpk import _C, explain
from torch_mpk.backend.calls import compile_call
from torch_mpk.capture.graph import capture
from torch_mpk.config import Options
from torch_mpk.errors import MpkWarning, PartsDeclined
from torch_mpk.partition.costs import COSTS, Estimate, estimate, others_us, ours_us, work_of, working
from torch_mpk.partition.segments import partition
from torch_mpk.patterns import apply
from torch_mpk.runtime.segment import launched_segments

H200 = _C.Target("cuda", 90, 132, 232448, True, True)


def work(function, *args, patterns=False):
    gm = capture(torch.fx.symbolic_trace(function), args).graph_module
    return work_of(working((apply(gm) if patterns else gm).graph))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_run_of_operations_is_counted(mode):
    x, weight = torch.randn(4, 16), torch.randn(32, 16)

    def function(x, weight):
        return (F.linear(x, weight) * 2 + 1).view(8, 16)

    with mode():
        of_all = work(function, x, weight)
        of_tasks = work(function, x, weight, patterns=True)
    assert (of_all.num_operations, of_all.num_kernels) == (3, 2)  # Inductor fuses behind the product
    assert of_all.flops == of_tasks.flops == 2 * 4 * 16 * 32
    assert of_tasks.num_phases == 1
    inputs, result = 4 * (4 * 16 + 32 * 16), 4 * 4 * 32
    assert of_all.num_bytes == inputs + 5 * result
    assert of_all.own_bytes == of_tasks.own_bytes == inputs


def test_a_task_is_as_many_operations_as_its_reference():
    norm = torch.nn.RMSNorm(16)

    def by_hand(x, weight):
        squares = x.float().pow(2).mean(-1, keepdim=True)
        return weight * (x.float() * torch.rsqrt(squares + 1e-6)).to(x.dtype)

    x = torch.randn(4, 16, dtype=torch.bfloat16)
    plain, task = (work(by_hand, x, norm.weight.detach().bfloat16(), patterns=p) for p in (False, True))
    assert task.num_kernels == 1 and 5 <= task.num_operations <= plain.num_operations + 2


def test_tables_count_for_the_rows_that_are_read():
    table, ids = torch.randn(1000, 16), torch.tensor([1, 2, 3])
    assert work(lambda ids, table: F.embedding(ids, table), ids, table).num_bytes == 2 * 4 * 3 * 16
    assert work(lambda ids, table: table[ids], ids, table).num_bytes == 2 * 4 * 3 * 16
    cache, rows, index = torch.zeros(1, 100, 16), torch.randn(1, 1, 16), torch.tensor([5])
    assert work(lambda c, i, r: c.index_copy_(1, i, r), cache, index, rows).num_bytes == 2 * 4 * 16


def test_both_sides_follow_their_constants():
    gm = capture(torch.fx.symbolic_trace(lambda x, w: F.linear(x, w).sin()), [torch.randn(4, 16), torch.randn(32, 16)])
    nodes = working(apply(gm.graph_module).graph)
    base = COSTS["cuda"]
    for name, change in (("segment", 1), ("phase", 1)):
        more = dataclasses.replace(base, **{name: getattr(base, name) + 7})
        assert ours_us(more, nodes) == pytest.approx(ours_us(base, nodes) + 7 * change)
        assert others_us(more, nodes, "eager") == others_us(base, nodes, "eager")
    more = dataclasses.replace(base, operation=base.operation + 7)
    assert others_us(more, nodes, "eager") == pytest.approx(others_us(base, nodes, "eager") + 2 * 7)
    assert others_us(more, nodes, "inductor") == others_us(base, nodes, "inductor")
    more = dataclasses.replace(base, graph=base.graph + 7, kernel=base.kernel + 5)
    assert others_us(more, nodes, "inductor") == pytest.approx(others_us(base, nodes, "inductor") + 7 + 2 * 5)


class Sorting(torch.nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.linears = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for linear in self.linears:
            x = F.silu(linear(F.silu(linear(x)))).sort(-1).values
        return x


def priced(monkeypatch, **constants):
    monkeypatch.setitem(COSTS, "cpu", dataclasses.replace(COSTS["cpu"], **constants))


def test_parts_that_do_not_pay_are_left_with_the_whole_call(monkeypatch):
    model, x = Sorting(16, 3), torch.randn(2, 16)
    priced(monkeypatch, segment=12, operation=5, part=100, phase=0)  # each run pays, and what is between them does not
    with torch.inference_mode():
        with pytest.warns(
            MpkWarning, match=r"3 of its parts could be ours, but it is estimated at .* ms in parts, and"
        ):
            step = torch.compile(model, backend="mpk")
            with launched_segments() as segments:
                assert torch.equal(step(x), model(x))
        assert not segments
        with warnings.catch_warnings(), launched_segments() as segments:
            warnings.simplefilter("ignore", MpkWarning)
            kept = torch.compile(model, backend="mpk", options={"min_segment_nodes": 1})
            torch.testing.assert_close(kept(x), model(x))
        assert len(segments) == 3
    report = explain(model, x)
    assert report.num_megakernels == 0
    assert "not ours, because 3 of its parts could be ours" in str(report)
    assert "options={'min_segment_nodes': 1} keeps the parts" in str(report)


def test_the_stage_that_declines_parts_raises(monkeypatch):
    def function(x, weight):
        return F.linear(F.linear(x, weight).sort(-1).values, weight)

    inputs = [torch.randn(2, 16), torch.randn(16, 16)]
    priced(monkeypatch, segment=5, operation=10, part=100, phase=0)
    with torch.inference_mode():
        with pytest.raises(PartsDeclined, match=r"2 of its parts could be ours, .* left whole to eager \(sort"):
            compile_call(torch.fx.symbolic_trace(function), inputs, Options())
        compile_call(torch.fx.symbolic_trace(function), inputs, Options(min_segment_nodes=1))


def test_parts_that_pay_are_ours_and_the_report_says_why(monkeypatch):
    model, x = Sorting(16, 3), torch.randn(2, 16)
    priced(monkeypatch, segment=5, operation=50, part=5, phase=0)
    report = explain(model, x)
    assert report.num_megakernels == 3
    (graph,) = report.graphs
    assert graph.estimate.pays and graph.estimate.how == "eager"
    assert f"taken in parts: {graph.estimate}" in str(report)
    assert explain(torch.nn.Linear(16, 16), x).graphs[0].estimate is None  # nobody asked: it is ours whole


@pytest.mark.filterwarnings("ignore::torch_mpk.errors.MpkWarning")
def test_parts_read_weights_where_they_are_at_each_call():
    model, x = Sorting(16, 3), torch.randn(2, 16)
    step = torch.compile(model, backend="mpk", options={"min_segment_nodes": 1})
    with torch.inference_mode():
        for linear in (None, *model.linears):
            if linear is not None:
                linear.weight.data = torch.randn(16, 16) / 4
            torch.testing.assert_close(step(x), model(x))


def test_an_estimate_in_words():
    assert str(Estimate(1234.0, 56.0, "inductor")) == (
        "estimated at 1.23 ms in parts, and at 0.056 ms left whole to Inductor"
    )
    assert not Estimate(2.0, 2.0, "eager").pays


def test_many_small_parts_of_a_decode_step_are_left_to_inductor_on_a_gpu():
    """Experts that are chosen by sorting: two parts a layer, with few operations in each. On an H200 such a model took
    a fourth of the time left whole."""
    width, inner, num_experts, chosen = 2048, 1024, 64, 8

    def layer(x, q, k, v, o, router, up, down):
        x = x + F.linear(F.linear(x, q) * F.linear(x, k) + F.linear(x, v), o)
        weights, ids = (each[:, :chosen] for each in F.linear(x, router).float().softmax(-1).sort(descending=True))
        gate, h = torch.bmm(up[ids[0]], x.expand(chosen, -1).unsqueeze(-1)).chunk(2, 1)
        y = torch.bmm(down[ids[0]], F.silu(gate) * h).squeeze(-1)
        return x + (y * weights[0, :, None].to(x.dtype)).sum(0)

    def model(x, *weights):
        for _ in range(4):
            x = layer(x, *weights)
        return x

    sizes = [*[(width, width)] * 4, (num_experts, width), (num_experts, 2 * inner, width), (num_experts, width, inner)]
    with FakeTensorMode():
        args = [torch.empty(1, width, dtype=torch.bfloat16), *(torch.empty(s, dtype=torch.bfloat16) for s in sizes)]
    graph = torch.fx.Graph()
    graph.output(graph.call_function(model, tuple(graph.placeholder(f"x{i}") for i in range(len(args)))))
    captured = capture(torch.fx.GraphModule({}, graph), args)
    with tracing(None):
        partitioned = partition(apply(captured.graph_module), None, H200, "inductor")
    parts = [(segment.gm.graph, segment.ours) for segment in partitioned.segments]
    assert sum(is_ours for _, is_ours in parts) >= 4
    assert not estimate(COSTS["cuda"], parts, captured.graph_module.graph, "inductor", "inductor").pays
