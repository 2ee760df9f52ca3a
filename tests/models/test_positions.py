"""Steps over several positions of one sequence, as speculative decoding checks its draft tokens, against eager."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.lowering.harness import capture, clone, run
from tests.models.stepping import STRICT, assert_as_near
from tests.patterns.positions_graph import causal, sdpa, step, with_holes
from tests.thinned import thinned
from torch_mpk import lowering
from torch_mpk.errors import IndexRangeError
from torch_mpk.patterns import apply
from torch_mpk.testing.decode import copy_cache, prefill
from torch_mpk.testing.emulator import emulate
from torch_mpk.testing.tiny import random_ids, tiny_model


@pytest.mark.parametrize(
    ("attention", "dtype", "num_positions"),
    thinned(
        [
            ("sdpa", torch.bfloat16, 5),
            ("eager", torch.float32, 16),
            ("sdpa", torch.float32, 2),
            ("eager", torch.float16, 8),
        ],
        1,
    ),
)
def test_a_step_over_several_positions_is_eagers(
    device: torch.device, attention: str, dtype: torch.dtype, num_positions: int
) -> None:
    model = tiny_model(attention=attention, dtype=dtype, device=device, num_layers=1)
    wider = {torch.float32: torch.float64}.get(dtype, torch.float32)
    exact = copy.deepcopy(model).to(wider)
    ours = torch.compile(model, backend="mpk", options=STRICT)
    prompt, tokens = random_ids(1, 7, device), random_ids(1, num_positions, device)
    cache, _ = prefill(model, prompt, 48)
    caches = [copy_cache(cache, model.config, t) for t in (dtype, dtype, wider)]
    with torch.inference_mode():
        for ids in (tokens, tokens[:, :1], tokens):  # over several, over one, over several again
            logits = (
                m(input_ids=ids, past_key_values=c).logits for m, c in zip((ours, model, exact), caches, strict=True)
            )
            assert_as_near(*logits)
            for mine, theirs, exacts in zip(*(c.layers for c in caches), strict=True):
                assert torch.equal(mine.cumulative_length, theirs.cumulative_length)
                assert_as_near(mine.keys, theirs.keys, exacts.keys)
                assert_as_near(mine.values, theirs.values, exacts.values)


def test_a_cache_without_room_for_all_positions_is_named_as_one_for_one() -> None:
    model = tiny_model(num_layers=1)
    ours = torch.compile(model, backend="mpk", options=STRICT)
    cache, _ = prefill(model, random_ids(1, 14), 16)
    before = cache.layers[0].keys.clone()
    with (
        torch.inference_mode(),
        pytest.raises(IndexRangeError, match="full.*the first of 3 positions from 0 to 13, got 14"),
    ):
        ours(input_ids=random_ids(1, 3), past_key_values=cache)
    assert torch.equal(cache.layers[0].keys, before)


@pytest.mark.parametrize("mask", thinned([causal, with_holes], 1))
def test_a_gpus_kernel_reads_what_the_launch_has_written_of_the_cache(mask) -> None:
    function, inputs = step(sdpa, mask, 3)
    graph = apply(capture(function, *clone(inputs)))
    lowered = lowering.lower(graph)
    kernel = emulate(lowered.graph)
    ours, theirs = clone(inputs), clone(inputs)
    results = run(lowered, ours, lambda inputs, outputs, _: kernel.launch(inputs, outputs))
    for got, want in zip([*results, *ours], [*function(*theirs), *theirs], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
