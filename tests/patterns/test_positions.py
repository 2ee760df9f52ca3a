"""Steps over several positions: of one sequence they are rows of a decode step's tasks, more are a prompt."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.patterns.positions_graph import D, G, H, L, causal, eager, sdpa, step, with_holes
from tests.patterns.rewriting import operands_of, rewritten


@pytest.mark.parametrize("num_positions", [2, 16])
@pytest.mark.parametrize("mask", [causal, with_holes])
@pytest.mark.parametrize("attend", [sdpa, eager])
def test_each_position_is_a_row_with_a_limit_of_its_own(attend, mask, num_positions):
    function, inputs = step(attend, mask, num_positions)
    first = [*inputs[:-1], torch.tensor(0)]
    gm = rewritten(function, *inputs, also=[first], tolerance=1e-5)
    [call] = operands_of(gm, "attention")
    assert call["q"].meta["val"].shape == (num_positions, H, D)
    assert call["limit"].meta["val"].shape == (num_positions,)
    assert call["k_cache"].meta["val"].stride(0) == 0  # one cache for all rows
    assert ("mask" in call) == (mask is with_holes)


@pytest.mark.parametrize(("batch", "num_positions"), [(2, 3), (1, 17)])
@pytest.mark.parametrize("mask", [causal, with_holes])
@pytest.mark.parametrize("attend", [sdpa, eager])
def test_a_prompt_is_a_task_of_its_own(attend, mask, batch, num_positions):
    function, inputs = step(attend, mask, num_positions, batch)
    first = [*inputs[:-1], torch.tensor(0)]
    gm = rewritten(function, *inputs, also=[first], tolerance=1e-5)
    [call] = operands_of(gm, "prefill_attention")
    assert call["q"].meta["val"].shape == (batch, num_positions, H, D)
    assert call["limit"].meta["val"].shape == (batch, num_positions)
    assert ("mask" in call) == (mask is with_holes)
    if "mask" in call:
        assert call["mask"].meta["val"].stride(1) == 0  # one for all heads


def test_sequences_of_a_prompt_may_have_bounds_and_masks_of_their_own():
    padding = torch.tensor([0, 4])

    def left_padded(slot):
        bound = slot[None, None, :, None] + torch.arange(2)[:, None, None, None]
        positions = torch.arange(L)
        return (positions <= bound) & (positions >= padding[:, None, None, None])

    function, inputs = step(sdpa, left_padded, 3, batch=2)
    gm = rewritten(function, *inputs, tolerance=1e-5)
    [call] = operands_of(gm, "prefill_attention")
    assert call["mask"].meta["val"].shape == (2, H, 3, L)
    assert call["limit"].meta["val"].shape == (2, 3)


@pytest.mark.parametrize(("positions", "length"), [(18, 18), (18, 24), (24, 18), (5, 9)])
def test_causal_attention_without_a_mask_has_limits(positions, length):
    """As of a prompt before which the cache is empty. Two layers share them."""

    def function(q, k, v):
        attend = {"is_causal": True, "enable_gqa": True}
        y = F.scaled_dot_product_attention(q, k, v, **attend)
        return (F.scaled_dot_product_attention(y, k, v, **attend),)

    q, keys = torch.randn(1, H, positions, D), [torch.randn(1, G, length, D) for _ in "kv"]
    gm = rewritten(function, q, *keys, tolerance=1e-5)
    calls = operands_of(gm, "prefill_attention" if positions > 16 else "attention")
    assert len(calls) == 2
    assert not any("mask" in call for call in calls)
    assert len([node for node in gm.graph.nodes if node.target is torch.ops.aten.arange.start]) == 1


def test_a_write_of_one_position_is_no_part_of_attention_over_several():
    def function(q, k_new, v_new, k, v, slot):
        k.index_copy_(2, slot, k_new)
        v.index_copy_(2, slot, v_new)
        return (F.scaled_dot_product_attention(q, k, v, enable_gqa=True),)

    q, k_new, v_new = torch.randn(1, H, 3, D), torch.randn(1, G, 1, D), torch.randn(1, G, 1, D)
    caches = [torch.randn(1, G, L, D) for _ in "kv"]
    gm = rewritten(function, q, k_new, v_new, *caches, torch.tensor([5]), tolerance=1e-5)
    [call] = operands_of(gm, "attention")
    assert "slot" not in call


@pytest.mark.parametrize(("batch", "tables"), [(1, (1, 5)), (1, (1, 1)), (2, (2, 5)), (2, (1, 5)), (2, (1, 1))])
def test_rope_has_a_row_of_its_tables_for_each_position(batch, tables):
    def function(x, cos, sin):
        turned = torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1)
        return ((x * cos + turned * sin).transpose(1, 2).reshape(batch, 5, H * D),)

    x = torch.randn(batch, 5, H, D).transpose(1, 2)
    sequences, positions = tables
    gm = rewritten(function, x, *(torch.randn(sequences, 1, positions, D) for _ in "cs"))
    [call] = operands_of(gm, "rope")
    assert call["x"].meta["val"].shape == (batch * 5, H, D)
    assert call["cos"].meta["val"].shape == (batch * 5, D)
