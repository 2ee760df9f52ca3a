"""Attention over cached latents: what is absorbed, and what stays as it is."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.patterns.rewriting import operands_of, rewritten, tasks_of

B, H, C, R, K, V, L = 3, 4, 16, 8, 12, 20, 24


def keys_and_values(latent, rope, weight, joined):
    """As ``expand_kv`` of transformers, or by ``cat``."""
    batch, _, length, _ = latent.shape
    both = F.linear(latent, weight).view(batch, length, -1, K + V).transpose(1, 2)
    k_nope, values = torch.split(both, [K, V], dim=-1)
    rotated = rope.expand(-1, k_nope.shape[1], -1, -1)
    if joined:
        return torch.cat((k_nope, rotated), -1), values
    keys = both.new_empty(*both.shape[:-1], K + R)
    keys[..., :K].copy_(k_nope)
    keys[..., K:].copy_(rotated)
    return keys, values


def step(q, latent_new, rope_new, weight, latent, rope, counter, joined=False, mask=None, **kwargs):
    slot = torch.arange(q.shape[2]) + counter
    attend = torch.arange(L) <= slot[:, None]
    latent.index_copy_(2, slot, latent_new)
    rope.index_copy_(2, slot, rope_new)
    keys, values = keys_and_values(latent, rope, weight, joined)
    attend = attend if mask is None else mask(attend)
    y = F.scaled_dot_product_attention(torch.cat((q[..., :K], q[..., K:]), -1), keys, values, attend, **kwargs)
    return (y.transpose(1, 2).flatten(2),)


def inputs(dtype=torch.float32, counter=7, positions=1, batch=B):
    shapes = [(batch, H, positions, K + R), (batch, 1, positions, C), (batch, 1, positions, R), (H * (K + V), C)]
    shapes += [(batch, 1, L, C), (batch, 1, L, R)]
    return [*(torch.randn(shape).to(dtype) for shape in shapes), torch.tensor(counter)]


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("joined", [False, True])
def test_products_are_absorbed(joined, dtype):
    also = [inputs(dtype, counter=0), inputs(dtype, counter=L - 1)]
    gm = rewritten(partial(step, joined=joined, scale=0.3), *inputs(dtype), also=also, tolerance=TOLERANCE[dtype])
    assert tasks_of(gm) == {"expert_linear": 2, "latent_attention": 1}
    [call] = operands_of(gm, "latent_attention")
    assert call["scale"] == 0.3
    assert "limit" in call
    assert "mask" not in call


def test_a_mask_of_heads_and_one_row():
    def mask(attend):
        return attend & (torch.arange(L) % torch.arange(2, 2 + H)[:, None, None] == 0)

    gm = rewritten(partial(step, mask=mask), *inputs(batch=1), tolerance=1e-5)
    [call] = operands_of(gm, "latent_attention")
    assert {"mask", "limit"} <= call.keys()
    assert call["scale"] == (K + R) ** -0.5


def with_bias(q, latent_new, rope_new, weight, latent, rope, counter):
    both = F.linear(latent, weight, weight[:, 0]).view(B, L, -1, K + V).transpose(1, 2)
    keys = torch.cat((both[..., :K], rope.expand(-1, H, -1, -1)), -1)
    return (F.scaled_dot_product_attention(q, keys, both[..., K:]),)


def with_other_values(q, latent_new, rope_new, weight, latent, rope, counter):
    keys, _ = keys_and_values(latent, rope, weight, True)
    _, values = keys_and_values(latent * 2, rope, weight, True)
    return (F.scaled_dot_product_attention(q, keys, values),)


def with_keys_of_its_own(q, latent_new, rope_new, weight, latent, rope, counter):
    keys, values = keys_and_values(latent, rope, weight, False)
    return F.scaled_dot_product_attention(q, keys, values), keys


def with_a_made_weight(q, latent_new, rope_new, weight, latent, rope, counter):
    keys, values = keys_and_values(latent, rope, weight * 2, False)
    return (F.scaled_dot_product_attention(q, keys, values),)


def with_keys_written_again(q, latent_new, rope_new, weight, latent, rope, counter):
    keys, values = keys_and_values(latent, rope, weight, False)
    keys[..., 0].mul_(2)
    return (F.scaled_dot_product_attention(q, keys, values),)


@pytest.mark.parametrize(
    "function", [with_bias, with_other_values, with_keys_of_its_own, with_a_made_weight, with_keys_written_again]
)
def test_other_forms_stay(function):
    assert not tasks_of(rewritten(function, *inputs(), tolerance=1e-5))["latent_attention"]


@pytest.mark.parametrize("batch", [1, B])
def test_several_positions_stay(batch):
    gm = rewritten(step, *inputs(positions=2, batch=batch), tolerance=1e-5)
    assert not tasks_of(gm)["latent_attention"]


def test_latents_written_after_they_were_read_stay():
    def function(q, latent_new, rope_new, weight, latent, rope, counter):
        keys, values = keys_and_values(latent, rope, weight, False)
        latent.mul_(2)
        return (F.scaled_dot_product_attention(q, keys, values),)

    assert not tasks_of(rewritten(function, *inputs(), tolerance=1e-5))["latent_attention"]
