"""Tiny models with random weights, and decode steps of them: what the tests of the whole pipeline run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config, StaticCache

VOCAB_SIZE = 96
_CONFIGS = {"qwen3": Qwen3Config, "llama": LlamaConfig}

Step = Callable[..., Any]


def tiny_model(
    arch: str = "qwen3",
    *,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    num_layers: int = 2,
    **config: Any,
) -> PreTrainedModel:
    """A causal language model of a few thousand weights in eval mode, drawn from the current seed."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,  # spreads the logits, so that a wrong one shows
        "tie_word_embeddings": False,
        "eos_token_id": None,
    }
    model = AutoModelForCausalLM.from_config(
        _CONFIGS[arch](**(sizes | config)), attn_implementation=attention, dtype=dtype
    )
    return model.eval().to(device)


def random_ids(batch: int, length: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (batch, length)).to(device)


class Decoding:
    """A batch being decoded on a cache of its own: eager prefill, then steps that any callable runs.

    The cache is made under the caller's ``no_grad``, or else in inference mode.

    ``mask`` is what the steps are given: "none"; "2d", the int64[batch, length so far] mask of a left-padded batch,
    which grows; or "4d", the bool[batch, 1, 1, cache length] mask that ``generate`` makes. ``present``, int64[batch,
    length], says which tokens of the prompt it shows: without it all but half of the first row's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: torch.Tensor,
        *,
        mask: str = "none",
        max_cache_len: int = 32,
        present: torch.Tensor | None = None,
    ) -> None:
        self.mask = mask
        self.cache = StaticCache(config=model.config, max_cache_len=max_cache_len)
        self.present = torch.ones_like(prompt) if present is None else present
        if mask != "none" and present is None:
            self.present[0, : prompt.shape[1] // 2] = 0
        self.max_cache_len = max_cache_len
        with contextlib.nullcontext() if not torch.is_grad_enabled() else torch.inference_mode():
            model(input_ids=prompt, past_key_values=self.cache, **({} if mask == "none" else self._prefill_kwargs()))

    def step(self, run: Step, token: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Feeds token[batch, 1] through ``run`` and returns the logits[batch, vocabulary]."""
        self.present = torch.cat([self.present, torch.ones_like(token)], dim=1)
        return run(input_ids=token, past_key_values=self.cache, **self._kwargs(), **kwargs).logits[:, -1]

    def state(self) -> list[torch.Tensor]:
        """Everything a step writes: keys, values and counter of every layer."""
        return [t for layer in self.cache.layers for t in (layer.keys, layer.values, layer.cumulative_length)]

    def _prefill_kwargs(self) -> dict[str, torch.Tensor]:
        return {"attention_mask": self.present, "position_ids": (self.present.cumsum(-1) - 1).clamp(min=0)}

    def _kwargs(self) -> dict[str, torch.Tensor]:
        if self.mask == "none":
            return {}
        position_ids = self.present.sum(-1, keepdim=True) - 1
        if self.mask == "2d":
            return {"attention_mask": self.present, "position_ids": position_ids}
        visible = torch.nn.functional.pad(self.present.bool(), (0, self.max_cache_len - self.present.shape[1]))
        return {"attention_mask": visible[:, None, None, :], "position_ids": position_ids}
