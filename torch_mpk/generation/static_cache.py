"""What ``torch_mpk.generate`` asks of Hugging Face's ``StaticCache``, beside what models do with it."""

from __future__ import annotations

import functools
import inspect
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torch_mpk.errors import ArgumentError
from torch_mpk.generation.model_inputs import ModelInputs
from torch_mpk.generation.settings import expect

# Of each layer: how many heads have keys, the sizes of a key and of a value, and their dtype.
_Heads = list[tuple[int, int, int, torch.dtype]]
_TRIAL_LENGTH = 128
_TRIAL_ERROR = 0.05  # relative: far above rounding in 16 bits, far below what other keys make of logits
_faults: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()  # with a static cache; "": none
_heads: WeakKeyDictionary[torch.nn.Module, dict[torch.dtype, _Heads]] = WeakKeyDictionary()  # by the model's dtype


def expect_right(model: Any, device: torch.device) -> None:
    """Raises ArgumentError where a model is wrong with a static cache: its attention may count keys that are not
    written yet, or see a prompt from both sides with a growing one alone, as PaliGemma's does. Classes of text alone
    that Hugging Face compiles are right; each other model is tried once, on a few tokens."""
    if getattr(type(model), "_can_compile_fullgraph", False) and not hasattr(model.config, "text_config"):
        return
    if model not in _faults:
        _faults[model] = _fault(model, device)
    expected = "one that may have a static cache; model.generate takes others"
    expect(not _faults[model], "model", expected, f"{type(model).__name__}, which {_faults[model]}")


def _fault(model: Any, device: torch.device) -> str:
    from transformers import DynamicCache

    takes_mask = "attention_mask" in inspect.signature(model.forward).parameters
    for is_padded in (True, False) if takes_mask else (False,):
        growing = _trial(model, device, DynamicCache(config=model.config), None, is_padded)
        try:
            static = _trial(model, device, make_cache(model, _TRIAL_LENGTH), _TRIAL_LENGTH, is_padded)
        except ArgumentError:
            raise
        except Exception as error:
            return f"raises {type(error).__name__} with one"
        if (static - growing).abs().max() / growing.abs().max() > _TRIAL_ERROR:
            return "gives other logits with one"
    return ""


def _trial(model: Any, device: torch.device, cache: Any, length: int | None, is_padded: bool) -> torch.Tensor:
    """float32 logits behind prompts of which one may be padded, and behind one token more."""
    ids = torch.arange(3, 9, device=device).view(2, 3)
    mask = ids.ne(3).long() if is_padded else None
    inputs = ModelInputs(model, ids, mask, cache, length)
    of_prompt = inputs.of_prompt()
    step = None if length is None else inputs.of_steps()
    outputs = model(**of_prompt)
    if step is None:
        step = inputs.of_next(outputs, ids[:, -1:])
    return torch.cat([outputs.logits[:, -1], model(**step).logits[:, -1]]).float()


def make_cache(model: Any, length: int) -> Any:
    """A ``StaticCache`` for so many positions. Raises ArgumentError where a model's state is no such cache's."""
    from transformers import StaticCache

    kind = type(model).__name__
    expected = "one that keeps all its state in a StaticCache; model.generate takes others"
    expect(model._supports_default_dynamic_cache(), "model", expected, kind)
    try:
        return StaticCache(config=model.config, max_cache_len=length)
    except KeyError as error:
        raise ArgumentError(name="model", expected=expected, value=f"{kind}, with layers of type {error}") from error


def allocate(cache: Any, model: Any, input_ids: torch.Tensor) -> None:
    """Makes the tensors of a cache whose layers all have full attention, before a model runs on ``input_ids``."""
    make = functools.partial(torch.empty, device=input_ids.device)
    for layer, (count, key_size, value_size, dtype) in zip(cache.layers, _heads_of(model, input_ids), strict=True):
        shape = input_ids.shape[0], count, 0
        layer.lazy_initialization(make(*shape, key_size, dtype=dtype), make(*shape, value_size, dtype=dtype))


def _heads_of(model: Any, input_ids: torch.Tensor) -> _Heads:
    """From what the model writes: its configuration may not say, as Falcon's does not."""
    known = _heads.setdefault(model, {})
    if model.dtype not in known:
        cache = make_cache(model, 1)
        model(**ModelInputs(model, input_ids[:1, :1], None, cache, 1).of_prompt())
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
    """Makes a cache whose layers all have full attention forget what lies at and beyond ``position``.

    Layers with a window count from there, too, but keep the keys and values they have: enough to time steps.
    """
    for layer in cache.layers:
        layer.cumulative_length.fill_(position)
        if layer.is_sliding:
            layer.cumulative_length_int = position
