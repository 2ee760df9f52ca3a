"""In-place operations: what they write, in which order reads see it, and what they must not touch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.lowering.harness import capture, check, clone, run
from torch_mpk import _C, lowering
from torch_mpk.patterns import apply

WRITES: dict[str, Callable] = {
    "add_": lambda x, y, i: x.add_(y),
    "add_alpha": lambda x, y, i: x.add_(1, alpha=3),
    "abs_": lambda x, y, i: x.abs_(),
    "abs_of_view": lambda x, y, i: (x.t()[1:].abs_(), x)[1],
    "abs_of_temporary": lambda x, y, i: (x - y).abs_(),
    "relu_": lambda x, y, i: (x.relu_(), y.t()[1:].relu_())[0],
    "mul_": lambda x, y, i: (x.mul_(2), x + 1),
    "wider_operand": lambda x, y, i: (x.sub_(y.double() / 3, alpha=3), x.t().mul_(y.double().t() / 7), x + 1),
    "wider_operand_of_temporary": lambda x, y, i: (lambda t: (t.div_(y.double() + 9), t))(x * y),
    "copy_": lambda x, y, i: x.copy_(y[:1]),
    "copy_cast": lambda x, y, i: x.copy_(y.double()),
    "fill_": lambda x, y, i: x[1:3].fill_(0.5),
    "zero_": lambda x, y, i: x[:, ::2].zero_(),
    "masked_fill_": lambda x, y, i: x.masked_fill_(y > 0, 2.0),
    "setitem": lambda x, y, i: x.__setitem__((slice(None), 1), y[:, 2]),
    "setitem_number": lambda x, y, i: x.__setitem__(0, 3.0),
    "index_copy_": lambda x, y, i: x.index_copy_(0, i, y[:2] * 2),
    "index_copy_dim1": lambda x, y, i: x.index_copy_(1, i, y[:, :2]),
    "index_put_": lambda x, y, i: x.index_put_((i,), y[:2]),
    "index_put_2": lambda x, y, i: x.index_put_((i, i - 1), y[0, :2]),
    "index_put_none": lambda x, y, i: x.__setitem__((slice(None), i), 1.5),
    "index_fill_": lambda x, y, i: x.index_fill_(1, i, 9.0),
    "scatter_": lambda x, y, i: x.scatter_(1, i.view(-1, 1), 9.0),
    "scatter_src": lambda x, y, i: x.scatter_(1, i.view(-1, 1), y),
    "scatter_src_dim0": lambda x, y, i: (x.scatter_(0, i.view(-1, 1).expand(2, 3), x + y), x.scatter(0, i[None], y)),
    "no_elements": lambda x, y, i: (x[:, :1].expand(4, 4)[:, 4:].copy_(y[:, :0]), x + 1)[1],
    "functional": lambda x, y, i: (x.index_copy(0, i, y[:2]), x.index_put((i,), y[0]), x.index_fill(1, i, 2.0), x + 1),
    "counter": lambda x, y, i: (i + torch.arange(1), i.add_(1), i * 2)[::2],
    "old_value_kept": lambda x, y, i: (lambda old: (x.add_(1), old)[1])(x * 2),
    "old_value_kept_twice": lambda x, y, i: (lambda a: (x.add_(1), x.mul_(2), a, a + x))(x + y)[2:],
    "old_and_new": lambda x, y, i: (lambda a: (x.mul_(3), a + x)[1])(x + 1),
    "clone_before": lambda x, y, i: (lambda a: (x.zero_(), a)[1])(x.clone()),
    "view_sees_write": lambda x, y, i: (lambda v: (x.add_(1), v * 2)[1])(x.t()),
    "write_through_view": lambda x, y, i: (x.t()[1].mul_(2), x + 1)[1],
    "write_to_temporary": lambda x, y, i: (lambda t: (t.add_(1), t)[1])(x * y),
    "write_to_view_of_temporary": lambda x, y, i: (lambda t: (t[0].zero_(), t)[1])(x * y),
    "view_of_temporary_sees_write": lambda x, y, i: (lambda t, v: (t.add_(1), v + 0)[1])(*(lambda t: (t, t[1]))(x * y)),
    "whole_view_of_temporary_written": lambda x, y, i: (lambda t: (t.view(4, 4).copy_(y), t, t.view(4, 4), t.sum(0)))(
        x * 2
    ),
    "value_before_write_to_temporary": lambda x, y, i: (lambda t: (lambda u: (t[0].zero_(), u, t))(t + 1))(x * y)[1:],
    "reversed_onto_itself": lambda x, y, i: x.copy_(x.flip(0)),
    "transposed_onto_itself": lambda x, y, i: x.copy_(x.t().contiguous()),
    "shift_onto_itself": lambda x, y, i: x[1:].copy_(x[:-1].clone()),
    "roll_onto_itself": lambda x, y, i: x.copy_(x.roll(-1, 0)),
    "swap": lambda x, y, i: (lambda a, b: (x.copy_(b), y.copy_(a)))(x.clone(), y.clone())[:0] or x,
    "reshape_that_copies": lambda x, y, i: (lambda r: (x.add_(1), r)[1])(x.t().reshape(-1)),
    "contiguous_that_aliases": lambda x, y, i: (lambda r: (x.add_(1), r * 2)[1])(x.contiguous()),
    "read_index_after_counter": lambda x, y, i: (i.sub_(1), x.index_copy_(0, i.abs(), y[:2]))[1],
    "written_then_gathered": lambda x, y, i: (x.index_copy_(0, i, y[:2]), x[i])[1],
    "two_writes_one_buffer": lambda x, y, i: (x[0].add_(1), x[0].mul_(2), x[:, 0].copy_(y[0]))[:0] or x * 1,
    "empty_then_fill": lambda x, y, i: torch.empty(3).fill_(2.0),
    "zeros_then_setitem": lambda x, y, i: (lambda z: (z.__setitem__((slice(None), 1), y[:, 0]), z)[1])(
        torch.zeros(4, 4)
    ),
    "returned_argument": lambda x, y, i: (x, x.add_(1), x.t(), x[0]),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_bitwise_eager(name: str) -> None:
    check(WRITES[name], torch.randn(4, 4), torch.randn(4, 4), torch.tensor([3, 1]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("name", ["abs_", "abs_of_view", "abs_of_temporary", "relu_"])
def test_writes_of_other_dtypes_are_bitwise_eager(name: str, dtype: torch.dtype) -> None:
    x, y = (torch.randint(0 if dtype == torch.uint8 else -9, 9, (4, 4)).to(dtype) for _ in range(2))
    check(WRITES[name], x, y, torch.tensor([3, 1]))


def test_an_operand_that_is_copied_has_the_contents_of_its_time() -> None:
    """A clone, expanded to an operand that needs memory of its own, while a write to what it was cloned from waits."""

    def fn(x, weight):
        least = x.amin(-1, keepdim=True)
        clone = least.clone()
        least.add_(1)
        return torch.nn.functional.linear(clone.expand(4, 8), weight), least

    x, weight = torch.randn(4, 4), torch.randn(5, 8)
    results = run(lowering.lower(apply(capture(fn, x, weight))), [x, weight])
    torch.testing.assert_close(results, [*fn(x, weight)])


@pytest.mark.parametrize("index", [[-1, 0], [4, 1], [-5, 2]])
def test_writes_outside_are_dropped(index: list[int]) -> None:
    def fn(cache, index, new):
        cache.index_copy_(1, index, new)

    cache, new = torch.randn(2, 4), torch.randn(2, 2)
    inside = [i for i in index if 0 <= i < 4]
    expected = cache.clone()
    expected[:, inside] = new[:, [k for k, i in enumerate(index) if 0 <= i < 4]]
    lowered = lowering.lower(capture(fn, cache, torch.tensor([0, 1]), new))
    run(lowered, [cache, torch.tensor(index), new])
    assert torch.equal(cache, expected)


def test_counter_increments_become_one_node() -> None:
    def fn(*args):
        counters, x = args[:-1], args[-1]
        rows = []
        for counter in counters:
            position = torch.arange(1) + counter
            counter.add_(1)
            rows.append(x[position])
        return rows

    counters = [torch.tensor(i) for i in range(6)]
    lowered = check(fn, *counters, torch.randn(8, 4))
    written = [{o.tensor.buffer for o in node.operands if o.is_write} for node in lowered.graph.nodes]
    assert set(range(6)) in written
    assert len(lowered.graph.nodes) == 2


def test_counters_of_a_deep_model_become_nodes_that_a_kernel_can_hold() -> None:
    def step(*counters):
        for counter in counters:
            counter.add_(1)
        return counters[0] + 0

    graph = check(step, *(torch.tensor([i]) for i in range(80))).graph
    program = _C.generate_cuda(_C.make_schedule(graph, _C.Target("cuda", 90, 132, 232448)))
    assert program.num_phases <= 2


def test_what_reads_results_of_different_tasks_stays_apart() -> None:
    """Each may be computed as its task's results are made; what reads those of one is one node."""

    def fn(x, w, other, a, b, c, d):
        k, v = torch.nn.functional.linear(x, w), torch.nn.functional.linear(x, other)
        a.copy_(k.t())
        b.copy_(v.t())
        c.copy_(k.t() * 2)
        d.mul_(3)

    args = [torch.randn(6, 8), torch.randn(4, 8), torch.randn(4, 8), *torch.randn(4, 4, 6)]
    lowered = lowering.lower(apply(capture(fn, *args)))
    written = [
        {lowered.graph.buffers[o.tensor.buffer].index for o in node.operands if o.is_write}
        for node in lowered.graph.nodes
        if node.task == "pointwise"
    ]
    assert written == [{3, 5}, {4, 6}], "what reads no task's results goes with the latest"
    expected = clone(args)
    fn(*expected)
    run(lowered, args)
    for got, want in zip(args, expected, strict=True):
        torch.testing.assert_close(got, want)
