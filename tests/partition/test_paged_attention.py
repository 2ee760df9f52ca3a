"""A step whose tokens are requests' next ones, by page: what becomes of it on each device."""

import warnings

import torch

from torch_mpk import _C
from torch_mpk.capture import capture
from torch_mpk.errors import MpkWarning
from torch_mpk.partition import Partitioned, partition
from torch_mpk.patterns import apply

TOKENS = 5


def step(ids, table, weight, pages, block_table, length):
    """As an engine's: all tokens in one row."""
    x = torch.nn.functional.embedding(ids, table)
    q, k, v = torch.nn.functional.linear(x, weight)[0].unflatten(-1, (4, 16)).split((2, 1, 1), 1)
    y = torch.ops.mpk.paged_attention(q, k, v, pages[:-1], pages[1:], block_table, length, scale=0.25)
    return (y.unsqueeze(0).flatten(2) + x,)


def arguments() -> list[torch.Tensor]:
    block_table = torch.full((TOKENS, 2), -1, dtype=torch.int32)
    block_table[:, 0] = 2 * torch.randperm(TOKENS)
    length = torch.tensor([4, 1, 0, 3, 2], dtype=torch.int32)
    sizes = (7, 32), (64, 32), (2 * TOKENS + 2, 4, 1, 16)
    return [torch.randint(7, (1, TOKENS)), *(torch.randn(size) for size in sizes), block_table, length]


def test_on_the_cpu_it_is_one_launch_which_writes_the_pages() -> None:
    args = arguments()
    theirs, before = [t.clone() for t in args], args[3].clone()
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error", MpkWarning)
        (got,) = torch.compile(step, backend="mpk", options={"fallback": "error"})(*args)
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


def partitioned(target: _C.Target) -> Partitioned:
    return partition(apply(capture(torch.fx.symbolic_trace(step), arguments()).graph_module), None, target)


def test_on_cuda_it_falls_back_and_says_why() -> None:
    assert partitioned(_C.Target("cpu", num_workers=2, fuse=False)).fallbacks == []
    reasons = {node: why for node, _, why in partitioned(_C.Target("cuda", 90, 132, 232448)).fallbacks}
    assert "paged_attention: this task has no CUDA code" in reasons["paged_attention"]
