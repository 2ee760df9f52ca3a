"""A step whose tokens are requests' next ones, by page: what becomes of it on each device."""

import warnings

import pytest
import torch

from torch_mpk import _C, registry
from torch_mpk.capture.graph import capture
from torch_mpk.errors import MpkWarning
from torch_mpk.lowering import lower
from torch_mpk.partition.segments import Partitioned, partition
from torch_mpk.patterns import apply

TOKENS = 5


def step(ids, table, weight, pages, block_table, length):
    """As an engine's: all tokens in one row, keys and values of a page side by side."""
    x = torch.nn.functional.embedding(ids, table)
    q, k, v = torch.nn.functional.linear(x, weight)[0].unflatten(-1, (4, -1)).split((2, 1, 1), 1)
    y = torch.ops.mpk.paged_attention(q, k, v, pages[:, 0], pages[:, 1], block_table, length, scale=0.25)
    return (y.unsqueeze(0).flatten(2) + x,)


def arguments(size: int = 16) -> list[torch.Tensor]:
    block_table = torch.full((TOKENS, 2), -1, dtype=torch.int32)
    block_table[:, 0] = torch.randperm(TOKENS)
    length = torch.tensor([4, 1, 0, 3, 2], dtype=torch.int32)
    shapes = (7, 2 * size), (4 * size, 2 * size), (TOKENS + 1, 2, 4, 1, size)
    return [torch.randint(7, (1, TOKENS)), *(torch.randn(shape) for shape in shapes), block_table, length]


def test_on_the_cpu_it_is_one_launch_which_writes_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments()
    theirs, before = [t.clone() for t in args], args[3].clone()
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error", MpkWarning)
        (got,) = torch.compile(step, backend="mpk", options={"fallback": "error"})(*args)
        monkeypatch.setattr(torch.ops.mpk, "paged_attention", registry.get("paged_attention"))
        torch.testing.assert_close(got, step(*theirs)[0])
    torch.testing.assert_close(args[3], theirs[3])
    assert not torch.equal(args[3], before)


def test_a_row_has_the_same_bits_alone() -> None:
    ids, table, weight, pages, block_table, length = arguments()
    table, weight, pages = (t.bfloat16() for t in (table, weight, pages))
    with torch.inference_mode():
        run = torch.compile(step, backend="mpk", options={"fallback": "error"}, dynamic=False)
        (together,) = run(ids, table, weight, pages.clone(), block_table, length)
        for row in range(TOKENS):
            only = slice(row, row + 1)
            (alone,) = run(ids[:, only].clone(), table, weight, pages, block_table[only].clone(), length[only].clone())
            assert torch.equal(alone[0, 0], together[0, row])


def partitioned(target: _C.Target, size: int = 16) -> Partitioned:
    return partition(apply(capture(torch.fx.symbolic_trace(step), arguments(size)).graph_module), None, target)


TARGETS = {
    "cpu": _C.Target("cpu", num_workers=2, fuse=False),
    "cuda 9.0": _C.Target("cuda", 90, 132, 232448),
    "cuda 8.0": _C.Target("cuda", 80, 108, 166912),
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_on_every_device_all_of_the_step_is_one_launch(target: _C.Target) -> None:
    parts = partitioned(target)
    assert parts.fallbacks == []
    [segment] = parts.segments
    assert segment.ours
    schedule = _C.make_schedule(lower(segment.gm).graph, target)
    _C.validate(schedule)
    if target.device == "cuda":
        assert "PagedAttention" in _C.generate_cuda(schedule).source


def test_heads_of_a_size_that_a_gpu_cannot_take_fall_back_and_say_why() -> None:
    assert partitioned(TARGETS["cpu"], size=12).fallbacks == []
    reasons = {node: why for node, _, why in partitioned(TARGETS["cuda 9.0"], size=12).fallbacks}
    assert "the head size must be a multiple of 8 up to 256, got 12" in reasons["paged_attention"]
