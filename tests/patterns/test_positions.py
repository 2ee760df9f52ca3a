"""Steps over several positions of one sequence: their positions are the rows of a decode step's tasks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.patterns.positions_graph import D, G, H, L, causal, eager, sdpa, step, with_holes
from tests.patterns.rewriting import graph_of, operands_of, rewritten, tasks_of
from tests.thinned import thinned
from torch_mpk import patterns


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


def test_positions_of_several_sequences_are_left_alone():
    assert not tasks_of(patterns.apply(graph_of(*expand(step(sdpa, causal, 3, batch=2)))))


def expand(made):
    function, inputs = made
    return function, *inputs


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


@pytest.mark.parametrize("shared_tables", thinned([True, False], 0))
def test_rope_has_a_row_of_its_tables_for_each_position(shared_tables):
    def function(x, cos, sin):
        turned = torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1)
        return ((x * cos + turned * sin).transpose(1, 2).reshape(1, 5, H * D),)

    x = torch.randn(1, 5, H, D).transpose(1, 2)
    tables = [torch.randn(1, 1, 1 if shared_tables else 5, D) for _ in "cs"]
    gm = rewritten(function, x, *tables)
    [call] = operands_of(gm, "rope")
    assert call["x"].meta["val"].shape == (5, H, D)
    assert call["cos"].meta["val"].shape == (5, D)
