"""What attention of prompts makes of PyTorch's, whose arguments differ by version."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torch_mpk import continuous_batching

SCALE, WINDOW = 0.3, (-1, 0)
ENDS_Q, ENDS_K = [0, 3, 4], [0, 5, 12]


class Versions:
    """``varlen_attn`` of several versions of PyTorch, as they compute it: by sequence, new tokens at its end."""

    def __init__(self) -> None:
        self.key_heads: list[int] = []

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        self.key_heads.append(k.shape[1])
        y = torch.empty_like(q)
        for (q0, q1), (k0, k1) in zip(pairwise(ENDS_Q), pairwise(ENDS_K)):
            mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
            parts = (t.transpose(0, 1) for t in (q[q0:q1], k[k0:k1], v[k0:k1]))
            y[q0:q1] = F.scaled_dot_product_attention(
                *parts, attn_mask=mask, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
            ).transpose(0, 1)
        return y

    def grouped(
        self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
        enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        assert enable_gqa and window_size == WINDOW
        return self.attend(query, key, value, scale)

    def alike(
        self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
    ):
        assert key.shape[1] == value.shape[1] == query.shape[1] and window_size == WINDOW
        return self.attend(query, key, value, scale)

    def plain(self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
        raise AssertionError("it has no scale")


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Versions]:
    made = Versions()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", getattr(made, request.param))
    continuous_batching.varlen_attention.cache_clear()
    yield made
    continuous_batching.varlen_attention.cache_clear()


@pytest.mark.parametrize(("versions", "key_heads"), [("grouped", 2), ("alike", 6)], indirect=["versions"])
def test_heads_go_in_groups_where_pytorch_takes_them_and_repeated_elsewhere(versions: Versions, key_heads: int) -> None:
    q, k, v = torch.randn(4, 6, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    bounds: list[Any] = [*(torch.tensor(ends, dtype=torch.int32) for ends in (ENDS_Q, ENDS_K)), 3, 7]
    attend = continuous_batching.varlen_attention()
    assert attend is continuous_batching.varlen_attention(), "the signature is read once"
    got = attend(q, k, v, *bounds, scale=SCALE, window_size=WINDOW)
    assert versions.key_heads == [key_heads]
    wanted = versions.attend(q, *(t[:, [0, 0, 0, 1, 1, 1]] for t in (k, v)), SCALE)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("versions", ["plain"], indirect=True)
def test_without_a_scale_or_a_window_it_is_not_taken(versions: Versions) -> None:
    assert continuous_batching.varlen_attention() is None


def test_the_installed_one_is() -> None:
    assert continuous_batching.varlen_attention() is not None
