"""Attention over several positions of one sequence, as models write it, and its inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

H, G, L, D = 4, 2, 24, 16


def sdpa(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, scale=0.3)


def eager(q, k, v, mask):
    k, v = (x[:, :, None].expand(-1, G, H // G, L, D).reshape(-1, H, L, D) for x in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.3 + torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32), v)


def causal(slot):
    return torch.arange(L) <= slot[None, None, :, None]


def with_holes(slot):
    return causal(slot) & (torch.arange(L) % 3 != 1)


def step(attend, mask, num_positions, batch=1):
    """A function as models have it, and its inputs."""

    def function(q, k_new, v_new, k, v, counter):
        slot = torch.arange(num_positions) + counter
        counter.add_(num_positions)
        k.index_copy_(2, slot, k_new)
        v.index_copy_(2, slot, v_new)
        y = attend(q, k, v, mask(slot))
        return (y.transpose(1, 2).reshape(batch, num_positions, H * D),)

    rows = [torch.randn(batch, num_positions, heads, D).transpose(1, 2) for heads in (H, G, G)]
    return function, [*rows, *(torch.randn(batch, G, L, D) for _ in "kv"), torch.tensor(7)]
