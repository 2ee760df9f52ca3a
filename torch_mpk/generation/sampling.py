"""How ``torch_mpk.generate`` chooses tokens and knows a row's end: as Hugging Face's processors and criteria do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_mpk.errors import ArgumentError
from torch_mpk.generation.settings import GenerationSettings, expect


def processors_of(settings: GenerationSettings, model: Any, prompt: torch.Tensor, mask: torch.Tensor | None) -> Any:
    """Hugging Face's processors of logits, a LogitsProcessorList, in its order; those that change no choice left out.

    Raises ArgumentError where Hugging Face does not take a field of the configuration.
    """
    from transformers.generation import LogitNormalization, LogitsProcessorList

    config = settings.config
    eos = settings.eos_token_id
    config._eos_token_tensor = torch.tensor(eos, device=prompt.device) if eos else None
    given = {"attention_mask": mask}
    try:
        found = model._get_logits_processor(
            config, prompt.shape[1], encoder_input_ids=prompt, device=str(prompt.device), model_kwargs=given
        )
    except (TypeError, ValueError) as error:
        raise ArgumentError(name="generation_config", expected="what Hugging Face takes", value=str(error)) from error
    return LogitsProcessorList(one for one in found if not isinstance(one, LogitNormalization))


def are_drawn_in_steps(processors: Any) -> bool:
    """Whether ``drawn`` does what they do."""
    from transformers.generation import logits_process as hf

    ours = {hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper}
    return {type(processor) for processor in processors} <= ours


class Choice:
    """Chooses tokens, int64[batch, 1], by logits[batch, vocabulary] and Hugging Face's processors of them."""

    def __init__(
        self, prompt: torch.Tensor, processors: Any, do_sample: bool, generator: torch.Generator | None
    ) -> None:
        self._tokens, self._processors = prompt, processors
        self._do_sample, self._generator = do_sample, generator

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        logits = self._processors(self._tokens, logits.to(torch.float32, copy=True))
        if self._do_sample:
            token = first_to_ring(logits, torch.empty_like(logits).exponential_(generator=self._generator))
        else:
            token = logits.argmax(-1, keepdim=True)
        self._tokens = torch.cat([self._tokens, token], dim=1)
        return token


class Draws:
    """What a compiled step takes to draw tokens itself, as ``Choice`` does between steps: limits as tensors, so that a
    build serves all values, and randomness from outside, since a launch has none."""

    def __init__(
        self, settings: GenerationSettings, batch: int, vocab_size: int, device: torch.device, generator: Any
    ) -> None:
        def numbers(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((batch, 1), value, dtype=dtype, device=device)

        self.limits: dict[str, torch.Tensor] = {}
        if settings.temperature != 1:
            self.limits["temperature"] = numbers(settings.temperature, torch.float32)
        if settings.top_k:
            self.limits["rank"] = numbers(min(settings.top_k, vocab_size) - 1, torch.int64)
        if settings.top_p != 1:
            self.limits["rest"] = numbers(1 - settings.top_p, torch.float32)
        if settings.min_p:
            self.limits["min_p"] = numbers(settings.min_p, torch.float32)
        self.times = torch.empty(batch, vocab_size, device=device)
        self._generator = generator

    def renew(self) -> None:
        """Before each step."""
        self.times.exponential_(generator=self._generator)


def drawn(logits: torch.Tensor, limits: dict[str, torch.Tensor], times: torch.Tensor) -> torch.Tensor:
    """Tokens, int64[batch, 1], of logits[batch, vocabulary], by ``Draws``. What is sorted here becomes tasks that sort
    nothing (``patterns/sampling.py``)."""
    scores = logits.float()
    if "temperature" in limits:
        scores = scores / limits["temperature"]
    if "rank" in limits:
        least = scores.sort(-1, descending=True)[0].gather(-1, limits["rank"])
        scores = scores.masked_fill(scores < least, -torch.inf)
    if "rest" in limits:
        ascending, order = scores.sort()
        gone = ascending.softmax(-1).cumsum(-1) <= limits["rest"]
        gone[..., -1:] = False
        scores = scores.masked_fill(gone.scatter(-1, order, gone), -torch.inf)
    if "min_p" in limits:
        probabilities = scores.softmax(-1)
        least = limits["min_p"] * probabilities.amax(-1, keepdim=True)
        scores = scores.masked_fill(probabilities < least, -torch.inf)
    return first_to_ring(scores, times)


def first_to_ring(logits: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """Of several clocks with the probabilities' rates, as torch.multinomial has it, which waits for the device.

    int64[..., 1], by logits[..., vocabulary] and as many exponentially distributed times. A clock rings at its time
    divided by its probability; logarithms say which is first without the probabilities' sum.
    """
    return (logits - times.log()).argmax(-1, keepdim=True)


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
