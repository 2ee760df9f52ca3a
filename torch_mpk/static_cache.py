"""What ``torch_mpk.generate`` asks of Hugging Face's ``StaticCache``, beside what models do with it."""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torch_mpk.generation_settings import expect

# Of each layer: how many heads have keys, the sizes of a key and of a value, and their dtype.
_Heads = list[tuple[int, int, int, torch.dtype]]
_heads: WeakKeyDictionary[torch.nn.Module, dict[torch.dtype, _Heads]] = WeakKeyDictionary()  # by the model's dtype


def allocate(cache: Any, model: Any, input_ids: torch.Tensor) -> None:
    """Makes the tensors of a cache whose layers all have full attention, before a model runs on ``input_ids``."""
    make = functools.partial(torch.empty, device=input_ids.device)
    for layer, (count, key_size, value_size, dtype) in zip(cache.layers, _heads_of(model, input_ids), strict=True):
        shape = input_ids.shape[0], count, 0
        layer.lazy_initialization(make(*shape, key_size, dtype=dtype), make(*shape, value_size, dtype=dtype))


def _heads_of(model: Any, input_ids: torch.Tensor) -> _Heads:
    """From what the model writes: its configuration may not say, as Falcon's does not."""
    from transformers import StaticCache

    known = _heads.setdefault(model, {})
    if model.dtype not in known:
        cache = StaticCache(config=model.config, max_cache_len=1)
        model(input_ids=input_ids[:1, :1], past_key_values=cache, use_cache=True)
        expect_written(cache, model)
        written = ((layer.keys, layer.values) for layer in cache.layers)
        known[model.dtype] = [(k.shape[1], k.shape[3], v.shape[3], k.dtype) for k, v in written]
    return known[model.dtype]


def expect_written(cache: Any, model: torch.nn.Module) -> None:
    """Raises ArgumentError where a model that has run has left nothing in the cache."""
    is_kept = any(map(_is_written, cache.layers))
    expect(is_kept, "model", "one that keeps the prompt in past_key_values", type(model).__name__)


def _is_written(layer: Any) -> bool:
    """Whether a model has written to a layer, which makes its tensors; ``allocate`` makes them for one that does."""
    if hasattr(layer, "is_initialized"):
        return bool(layer.is_initialized)
    return any(layer.has_previous_state.values())  # of a layer without attention


def rewind(cache: Any, position: int) -> None:
    """Makes a cache whose layers all have full attention forget what lies at and beyond ``position``."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(position)
