"""A step with prompts as its generated kernel computes it, run thread by thread on the CPU."""

from __future__ import annotations

import pytest
import torch

import torch_mpk.batching.engine
import torch_mpk.continuous_batching
from tests.codegen.emulated_calls import input_bytes, reference, relative_error, tensors
from tests.continuous_batching.engine import batched, planning_for_a_gpu, prompt_of, serving_model
from torch_mpk import _C
from torch_mpk.testing.emulator import aligned, emulate
from torch_mpk.testing.reference_vm import dtype_of

ENDS = {"cu_seq_lens_q": [0, 60, 61, 100], "cu_seq_lens_k": [0, 90, 161, 205]}


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> _C.TBGraph:
    """Of the engine's step of 128 tokens, by a model of one layer."""
    monkeypatch.setitem(torch_mpk.batching.engine.MIN_TOKENS, "cpu", 128)
    model = serving_model("qwen3", dtype=torch.bfloat16, head_dim=64)
    step, schedules = planning_for_a_gpu()
    batched(model, [prompt_of(40)], varlen_compile_config=step, max_batch_tokens=128, num_blocks=16)
    [schedule] = schedules
    return schedule.graph


def inputs_of(graph: _C.TBGraph) -> list[torch.Tensor]:
    """Random, of three requests and padding: what is read of the cache stands in front of what is written."""
    [node] = [node for node in graph.nodes if node.task == "varlen_attention"]
    names = {graph.buffers[o.tensor.buffer].index: o.name for o in node.operands}
    made = []
    for i, (t, size) in enumerate(zip(tensors(graph, "input"), input_bytes(graph).values(), strict=True)):
        x = aligned(size, 0).view(dtype_of(t.dtype))
        if x.is_floating_point():
            x.copy_(torch.randn(x.shape) / (t.shape[-1] ** 0.5 if len(t.shape) > 1 else 1))
        elif names.get(i) in ENDS:
            ends = ENDS[names[i]]
            x.copy_(torch.tensor(ends + ends[-1:] * (x.numel() - len(ends))))
        elif names.get(i) == "read_index":
            x.copy_(torch.randint(400, x.shape))
        elif t.dtype == "int64":
            x.copy_(400 + torch.randperm(x.numel()))
        else:
            x.copy_(torch.randint(60, x.shape))
        made.append(x)
    return made


@pytest.mark.slow
def test_a_step_with_prompts(graph: _C.TBGraph) -> None:
    inputs = inputs_of(graph)
    before = [x.clone() for x in inputs]
    wanted, _ = reference(graph, inputs)
    kernel = emulate(graph, polled=True)
    kernel.launch(inputs, [], jitter=1, watchdog_ns=60 * 10**9)
    assert kernel.host_abort.sum() == 0
    changed = [(got, want) for got, want, old in zip(inputs, wanted, before) if not torch.equal(got, old)]
    assert [got.dtype for got, _ in changed] == [torch.bfloat16, torch.int32]  # the cache, and the tokens
    (cache, wanted_cache), (tokens, wanted_tokens) = changed
    assert relative_error(cache, wanted_cache) < 1e-2
    assert torch.equal(tokens, wanted_tokens)
