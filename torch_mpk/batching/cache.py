"""The engine's cache, for layers whose attention writes it."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching import PagedAttentionCache


class Cache(PagedAttentionCache):
    """Layers leave keys and values to their attention, as all do in transformers 5.23. From 5.24 on a layer updates the
    cache first, and gives its attention what ``update`` returns and what that leaves in ``kwargs``."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Does nothing yet. Keys and values are [1, heads, tokens, size]. The attention is passed the cache with the
        lengths, if the model passes those on: without, it says what is missing."""
        if kwargs is not None and "max_length_k" in kwargs:
            kwargs["cache"] = self
        return key_states, value_states

    def write(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, lengths: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``update`` is for, eagerly: all keys and values that the tokens see, [1, heads, tokens, size], and in
        ``lengths`` how many of them are which request's."""
        both: tuple[torch.Tensor, torch.Tensor] = super().update(key, value, layer, lengths)
        return both
