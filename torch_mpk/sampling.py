"""How ``torch_mpk.generate`` chooses tokens and knows a row's end: by Hugging Face's own processors and criteria."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_mpk.config import is_int, is_number
from torch_mpk.errors import ArgumentError


def check_sampling(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None, repetition_penalty: float
) -> None:
    for name, factor in {"temperature": temperature, "repetition_penalty": repetition_penalty}.items():
        expect(is_number(factor) and factor > 0, name, "a number > 0", repr(factor))
    expect(top_k is None or is_int(top_k), "top_k", "an int or None", repr(top_k))
    expect(top_k is None or top_k > 0, "top_k", "at least 1", top_k)
    expect(top_p is None or is_number(top_p) and 0 < top_p <= 1, "top_p", "a number in (0, 1]", repr(top_p))
    expect(min_p is None or is_number(min_p) and 0 <= min_p <= 1, "min_p", "a number in [0, 1]", repr(min_p))


def expect(ok: Any, name: str, expected: str, value: Any) -> None:
    if not ok:
        raise ArgumentError(name=name, expected=expected, value=value)


class Choice:
    """Chooses tokens, int64[batch, 1], by logits[batch, vocabulary] and Hugging Face's processors of them."""

    def __init__(
        self,
        prompt: torch.Tensor,
        repetition_penalty: float,
        warpers: dict[str, float | None],
        do_sample: bool,
        generator: torch.Generator | None,
    ) -> None:
        from transformers.generation import logits_process as hf

        kinds = {
            "temperature": hf.TemperatureLogitsWarper,
            "top_k": hf.TopKLogitsWarper,
            "top_p": hf.TopPLogitsWarper,
            "min_p": hf.MinPLogitsWarper,
        }
        neutral = {"temperature": 1, "top_p": 1, "min_p": 0}
        self._warpers = hf.LogitsProcessorList(
            kinds[name](value if name == "top_k" else float(value))
            for name, value in warpers.items()
            if value is not None and value != neutral.get(name)
        )
        self._penalty = None
        if repetition_penalty != 1:
            self._penalty = hf.RepetitionPenaltyLogitsProcessor(float(repetition_penalty))
        self._tokens, self._do_sample, self._generator = prompt, do_sample, generator

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.float()
        if self._penalty is not None:
            logits = self._penalty(self._tokens, logits)
        logits = self._warpers(self._tokens, logits)
        token = _draw(logits, self._generator) if self._do_sample else logits.argmax(-1, keepdim=True)
        if self._penalty is not None:
            self._tokens = torch.cat([self._tokens, token], dim=1)
        return token


def _draw(logits: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """The first of several clocks with these rates to ring, as torch.multinomial has it, which waits for the device."""
    probabilities = logits.softmax(-1)
    times = torch.empty_like(probabilities).exponential_(generator=generator)
    return (probabilities / times).argmax(-1, keepdim=True)


def stopping(
    stop_strings: str | Sequence[str] | None, tokenizer: Any, prompt: torch.Tensor
) -> Callable[[list[list[int]]], list[bool]] | None:
    """Which rows have a stop string at their end, given the columns of new tokens."""
    if stop_strings is None:
        return None
    texts = [stop_strings] if isinstance(stop_strings, str) else stop_strings
    is_text = isinstance(texts, (list, tuple)) and texts and all(isinstance(t, str) and t for t in texts)
    expect(is_text, "stop_strings", "a text or a list of texts", repr(stop_strings))
    expect(tokenizer is not None, "tokenizer", "the model's tokenizer, which stop_strings need", "None")
    from transformers import StopStringCriteria

    criteria = StopStringCriteria(tokenizer, list(texts))
    longest = criteria.maximum_token_len  # tokens that it looks at
    before = prompt[:, -longest:].cpu()

    def is_stopped(columns: list[list[int]]) -> list[bool]:
        row_ends = torch.cat([before, torch.tensor(columns[-longest:]).t()], dim=1)
        return criteria(row_ends, None).tolist()

    return is_stopped
