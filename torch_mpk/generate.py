"""A decode loop for Hugging Face causal language models: eager prefill, then one compiled step for each token.

It does what ``model.generate`` does for greedy search and sampling, without its cost per token: the step's inputs stay
at the same addresses and are updated inside the compiled graph, Dynamo's guards are checked once a call instead of once
a token, and the host reads a token while the next one is being computed.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torch_mpk.errors import ArgumentError
from torch_mpk.runtime import synchronize

_CACHE_LENGTH_MULTIPLE = 128  # so that prompts of similar length share a compiled step
_MAX_STEPS = 8  # compiled steps kept for one model

Step = Callable[..., torch.Tensor]
_steps: WeakKeyDictionary[torch.nn.Module, OrderedDict[tuple[Any, ...], Step]] = WeakKeyDictionary()


@torch.inference_mode()
def generate(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    *,
    attention_mask: torch.Tensor | None = None,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    callback: Callable[[torch.Tensor], Any] | None = None,
    generator: torch.Generator | None = None,
    max_cache_len: int | None = None,
    options: dict[str, Any] | None = None,
) -> torch.Tensor:
    """Generates tokens with a Hugging Face causal language model.

    Args:
        model: takes ``input_ids, attention_mask, position_ids, past_key_values, logits_to_keep``.
        input_ids: int64[batch, prompt], on the model's device.
        max_new_tokens: tokens to generate, at least 1.
        attention_mask: [batch, prompt], 0 where a prompt is padded, on the left.
        do_sample: draw from the distribution that ``temperature``, ``top_k`` and ``top_p`` leave; otherwise greedy.
        temperature: divides the logits, > 0.
        top_k: keep only so many most likely tokens.
        top_p: keep only the most likely tokens whose probabilities add up to this, in (0, 1].
        eos_token_id: a row ends behind any of these; all rows ended ends the call. None: rows never end early.
        pad_token_id: fills a row behind its end. Default: the first of ``eos_token_id``.
        callback: called with each new batch of tokens, int64[batch] on the CPU. ``TextStreamer.put`` fits.
        generator: of the model's device, for sampling.
        max_cache_len: length of the key/value cache. Default: what is needed, rounded up to a multiple of 128.
        options: of the backend, as ``torch.compile(options=...)`` takes them.

    Returns:
        int64[batch, prompt + generated].

    Raises:
        ArgumentError: an argument has a wrong shape, type or range.
        MegakernelTimeout: a launch was aborted by its watchdog.
    """
    eos = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ())
    _check(input_ids, max_new_tokens, attention_mask, temperature, top_k, top_p)
    prompt = input_ids.shape[1]
    needed = prompt + max_new_tokens - 1  # the last token is not written to the cache
    length = max_cache_len or -(-needed // _CACHE_LENGTH_MULTIPLE) * _CACHE_LENGTH_MULTIPLE
    if length < needed:
        expected = f"at least {needed} for {prompt} + {max_new_tokens} tokens"
        raise ArgumentError(name="max_cache_len", expected=expected, value=max_cache_len)
    decode = _Decode(model, input_ids, attention_mask, length, options)
    if do_sample:
        decode.choose = functools.partial(
            _sample, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
        )
    pad = pad_token_id if pad_token_id is not None else eos[0] if eos else 0
    collected = _collect(decode.tokens(max_new_tokens), torch.tensor(eos), pad, callback)
    synchronize()
    return torch.cat([input_ids, collected.to(input_ids.device)], dim=1)


def _check(
    input_ids: torch.Tensor,
    max_new_tokens: int,
    attention_mask: torch.Tensor | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    def expect(ok: Any, name: str, expected: str, value: Any) -> None:
        if not ok:
            raise ArgumentError(name=name, expected=expected, value=value)

    shape = list(input_ids.shape)
    expect(input_ids.dtype == torch.int64, "input_ids", "int64", input_ids.dtype)
    expect(len(shape) == 2 and min(shape) > 0, "input_ids", "a shape [batch, prompt]", shape)
    expect(max_new_tokens > 0, "max_new_tokens", "at least 1", max_new_tokens)
    expect(temperature > 0, "temperature", "a number > 0", temperature)
    expect(top_k is None or top_k > 0, "top_k", "at least 1", top_k)
    expect(top_p is None or 0 < top_p <= 1, "top_p", "a number in (0, 1]", top_p)
    if attention_mask is not None:
        expect(list(attention_mask.shape) == shape, "attention_mask", f"the shape {shape}", list(attention_mask.shape))
        ends = attention_mask[:, -1].bool().all().item()
        expect(ends, "attention_mask", "padding on the left", "a last column with zeros")


class _Decode:
    """One call's model, cache and step inputs, which stay at their addresses."""

    choose: Callable[[torch.Tensor], torch.Tensor] | None = None  # None: greedy

    def __init__(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        length: int,
        options: dict[str, Any] | None,
    ) -> None:
        from transformers import StaticCache

        self.model, self.prompt, self.options = model, input_ids, options
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        self.mask = self.position_ids = None
        if attention_mask is not None and not attention_mask.all():
            # Later slots count as present: the causal part of the mask, made in the graph, hides them until written.
            batch, prompt = attention_mask.shape
            self.mask = torch.ones(batch, length, dtype=torch.bool, device=input_ids.device)
            self.mask[:, :prompt] = attention_mask
            self.prompt_positions = (attention_mask.long().cumsum(-1) - 1).clamp_(min=0)
            self.position_ids = self.prompt_positions[:, -1:] + 1

    def tokens(self, count: int) -> Iterator[torch.Tensor]:
        """New tokens, int64[batch, 1] each; the work for one is enqueued when it is asked for."""
        inputs: dict[str, Any] = {"attention_mask": self.mask, "past_key_values": self.cache, "use_cache": True}
        positions = {} if self.position_ids is None else {"position_ids": self.prompt_positions}
        logits = self.model(input_ids=self.prompt, logits_to_keep=1, **positions, **inputs).logits[:, -1]
        token = self.choose(logits) if self.choose else logits.argmax(-1, keepdim=True)
        yield token
        input_ids = token.clone()
        step = self._step()
        for index in range(1, count):
            # Within one call nothing that Dynamo guards can change, so the guards of its first step do for all.
            skip_guards = torch.compiler.set_stance(skip_guard_eval_unsafe=True) if index > 1 else nullcontext()
            with skip_guards:
                token = step(self.model, input_ids, self.position_ids, inputs)
            if self.choose:
                token = self.choose(token)
                input_ids.copy_(token)
            yield token

    def _step(self) -> Step:
        """The compiled step, made once for a model and a kind of call.

        Each has a code object of its own, because Dynamo counts recompilations, and looks up graphs, by code object.
        """
        steps = _steps.setdefault(self.model, OrderedDict())
        options = tuple(sorted((self.options or {}).items()))
        key = (self.prompt.shape[0], self.cache.get_max_length(), self.mask is None, self.choose is None, options)
        if key not in steps:
            plain = _greedy_step if self.choose is None else _logits_step
            own = types.FunctionType(plain.__code__.replace(), plain.__globals__)
            steps[key] = torch.compile(own, backend="mpk", dynamic=False, options=self.options)
            if len(steps) > _MAX_STEPS:
                steps.popitem(last=False)
        steps.move_to_end(key)
        return steps[key]


def _logits_step(
    model: torch.nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor | None, inputs: dict[str, Any]
) -> torch.Tensor:
    logits = model(input_ids=input_ids, position_ids=position_ids, **inputs).logits[:, -1]
    if position_ids is not None:
        position_ids.add_(1)
    return logits


def _greedy_step(
    model: torch.nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor | None, inputs: dict[str, Any]
) -> torch.Tensor:
    logits = _logits_step(model, input_ids, position_ids, inputs)
    token = logits.argmax(-1, keepdim=True)
    input_ids.copy_(token)
    return token


def _sample(
    logits: torch.Tensor,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """Draws int64[batch, 1] from float[batch, vocabulary]; temperature, top_k and top_p apply in this order."""
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        beyond = probabilities.cumsum(-1) - probabilities >= top_p  # never the most likely token
        logits = logits.masked_fill(beyond.gather(-1, order.argsort()), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)


def _collect(
    tokens: Iterator[torch.Tensor], eos: torch.Tensor, pad: int, callback: Callable[[torch.Tensor], Any] | None
) -> torch.Tensor:
    """Reads new tokens, one step behind the device, until all rows have ended. Returns int64[batch, generated]."""
    if not eos.numel() and callback is None:
        return torch.cat(list(tokens), dim=1)
    columns: list[torch.Tensor] = []
    ended: torch.Tensor | None = None
    pending: Callable[[], torch.Tensor] | None = None
    for token in itertools.chain(tokens, [None]):
        if pending is not None:
            column = pending()
            ended = torch.zeros_like(column, dtype=torch.bool) if ended is None else ended
            column = torch.where(ended, pad, column)
            ended = ended | torch.isin(column, eos)
            columns.append(column)
            if callback is not None:
                callback(column)
            if ended.all():
                break
        pending = None if token is None else _read(token)
    return torch.stack(columns, dim=1)


def _read(token: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begins to copy int64[batch, 1] to the CPU; the result waits and gives int64[batch]."""
    if token.device.type == "cpu":
        return lambda: token[:, 0]
    host = torch.empty(token.shape, dtype=token.dtype, pin_memory=True)
    host.copy_(token, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> torch.Tensor:
        copied.synchronize()
        return host[:, 0]

    return wait
