"""What asynchronous batching, which takes a GPU, does in front of a step: tokens of the step before, on the device."""

import torch
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs

from tests.continuous_batching.engine import planned_for_a_gpu

ROWS, MOST, VOCAB = 4, 32, 48


def step(ids, carry, before, out, table, weight, pages, block_table, length):
    ContinuousBatchingAsyncIOs.carry_over_tokens(None, ids, carry, before)
    q = torch.nn.functional.embedding(ids, table)[0].unflatten(-1, (2, 16))
    k = q[:, :1]
    y = torch.ops.mpk.paged_attention(q, k, k, pages[:, 0], pages[:, 1], block_table, length, scale=0.25)
    tokens = torch.nn.functional.linear(y.flatten(1), weight).float().argmax(-1)
    out[0, : tokens.size(0)].copy_(tokens)


def arguments() -> list[torch.Tensor]:
    """The engine's ids and places are rows of one tensor; -1 is a token that is not carried over."""
    bulk = torch.zeros(2, MOST, dtype=torch.int32)
    bulk[0, :ROWS] = torch.randint(VOCAB, (ROWS,))
    bulk[1] = -1
    bulk[1, :ROWS] = torch.tensor([-1, 2, 0, -1])
    before, out = (torch.zeros(1, MOST + 1, dtype=torch.int32) for _ in range(2))
    before[0, :ROWS] = torch.randint(VOCAB, (ROWS,))
    block_table = torch.arange(ROWS, dtype=torch.int32).unsqueeze(1)
    length = torch.tensor([3, 1, 8, 0], dtype=torch.int32)
    weights = torch.randn(VOCAB, 32), torch.randn(VOCAB, 32)
    return [bulk[:1, :ROWS], bulk[1], before, out, *weights, torch.randn(ROWS, 2, 8, 1, 16), block_table, length]


def test_it_is_in_the_launch_on_a_gpu_too() -> None:
    def plan(gm, inputs):
        planned_for_a_gpu(gm, inputs)
        return gm.forward

    with torch.inference_mode():
        torch.compile(step, backend=plan, fullgraph=True, dynamic=False)(
            *(t.bfloat16() if t.is_floating_point() else t for t in arguments())
        )


def test_it_is_in_the_launch() -> None:
    args = arguments()
    expected = [t.clone() for t in args]
    with torch.inference_mode():
        step(*expected)
        torch.compile(step, backend="mpk", options={"fallback": "error"}, fullgraph=True, dynamic=False)(*args)
    assert all(map(torch.equal, args, expected))
    assert args[0][0, 1:3].tolist() == [int(args[2][0, 2]), int(args[2][0, 0])]
    assert args[3].any()
