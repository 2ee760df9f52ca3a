"""What a Hugging Face model is called with, as its ``generate`` prepares it: for the prompt, and for later steps.

Two things differ. The cache is static, with 2-D masks, which the model makes its own of inside the graph. And a step's
inputs are made once: each step renews them in place.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from torch_mpk.generation.settings import expect

TIMED = ("input_ids", "position_ids")  # whose last dimension is of positions
CACHE_NAMES = ("cache", "cache_params", "past_key_values")  # the first from transformers 5.24 on, the others before


class ModelInputs:
    """The keyword arguments of a model's calls for one prompt. ``length`` is the cache's, None of one that grows.

    Attributes:
        mask: bool[batch, cache length], with later slots as present: the causal part of a mask, made in the graph,
            hides them until they are written. None where nothing is padded, or the cache grows.
    """

    def __init__(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, cache: Any, length: int | None
    ) -> None:
        self._model, self._ids, self._cache = model, input_ids, cache
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[-1])
        self.mask: torch.Tensor | None = None
        if attention_mask is not None:
            expected = f"no zeros, since {type(model).__name__} takes no mask"
            expect("attention_mask" in parameters, "attention_mask", expected, "zeros")
            if length is not None:
                self.mask = torch.ones(len(input_ids), length, dtype=torch.bool, device=input_ids.device)
                self.mask[:, : attention_mask.shape[1]] = attention_mask
        known: dict[str, Any] = {"attention_mask": attention_mask, "use_cache": True, "logits_to_keep": 1}
        if "position_ids" in parameters:
            present = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            known["position_ids"] = model._prepare_position_ids_for_generation(input_ids, {"attention_mask": present})
        self._known = {name: known[name] for name in known if name in parameters or name == "use_cache"}

    def of_prompt(self) -> dict[str, Any]:
        """For a call on the whole prompt."""
        inputs = self._prepared(self._ids, is_first_iteration=True)
        if self.mask is not None and not self._has_recurrent_layers():  # which take the last columns for the prompt's
            inputs["attention_mask"] = self.mask
        return inputs

    def of_next(self, outputs: Any, token: torch.Tensor) -> dict[str, Any]:
        """For a call on ``token``, int64[batch, 1], behind one that gave ``outputs``. Masks and positions are new."""
        known = self._model._update_model_kwargs_for_generation(outputs, dict(self._known), is_encoder_decoder=False)
        self._known = {name: value for name, value in known.items() if name != self._cache_name}
        self._ids = torch.cat([self._ids, token], dim=1)
        return self._prepared(self._ids, next_sequence_length=1)

    def of_steps(self) -> dict[str, Any]:
        """For all steps behind the prompt.

        ``input_ids`` is int64[batch, 1], for a step's token to be written to; ``position_ids`` is of the first step,
        and goes up by one with each. Raises ArgumentError where a step of the model takes more than a cache keeps.
        """
        from transformers.utils import ModelOutput

        token = self._ids[:, -1:]
        inputs = self.of_next(ModelOutput(), token)
        kind, expected = type(self._model).__name__, "one whose steps take a token, its position and a mask"
        others = {name for name, value in inputs.items() if isinstance(value, (torch.Tensor, dict))}
        others -= {*TIMED, "attention_mask"}
        expect(not others, "model", expected, f"{kind}, whose steps take {', '.join(sorted(others))}")
        ids = inputs["input_ids"]
        expect(ids.shape == token.shape, "model", expected, f"{kind}, whose steps take all tokens so far")
        if inputs.get("attention_mask") is not None:
            inputs["attention_mask"] = self.mask
        inputs.pop("logits_to_keep", None)  # of one token all
        own = {name: inputs[name].clone(memory_format=torch.contiguous_format) for name in TIMED if name in inputs}
        return inputs | own

    def _prepared(self, ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        cache = {self._cache_name: _Seen(self._cache)}
        inputs = self._model.prepare_inputs_for_generation(ids, **cache, **self._known, **kwargs)
        inputs = {name: self._cache if isinstance(value, _Seen) else value for name, value in inputs.items()}
        absent = [name for name in TIMED if inputs.get(name, ids) is None]
        return {name: value for name, value in inputs.items() if name not in absent} | {"return_dict": True}

    def _has_recurrent_layers(self) -> bool:
        from transformers.cache_utils import LinearAttentionCacheLayerMixin

        return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self._cache.layers)


class _Seen:
    """A cache that a model may look at while it prepares inputs. No ``Cache``: of a static one transformers would make
    4-D masks, for a cache that it compiles with, in each call."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)
