"""What ``torch_mpk.generate`` is asked for: by its keywords, and behind them by Hugging Face's GenerationConfig."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from torch_mpk.config import is_int, is_number
from torch_mpk.errors import ArgumentError

# They mean something for calls without a prompt, for encoders, or nothing.
_WITHOUT_EFFECT = {"bos_token_id", "decoder_start_token_id", "transformers_version"}
_CACHES = ("static", "hybrid")  # a StaticCache, with sliding windows where the model has them


def expect(ok: Any, name: str, expected: str, value: Any) -> None:
    if not ok:
        raise ArgumentError(name=name, expected=expected, value=value)


@dataclass(frozen=True)
class GenerationSettings:
    """The fields of GenerationConfig that ``torch_mpk.generate`` takes, with their names and meaning there."""

    max_new_tokens: int
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float | None
    repetition_penalty: float
    eos_token_id: list[int]
    pad_token_id: int
    stop_strings: str | list[str] | None
    max_cache_len: int | None
    prompt_lookup_num_tokens: int | None

    @property
    def is_plain(self) -> bool:
        """The likeliest token by the model's own logits is next."""
        return not self.do_sample and self.repetition_penalty == 1


def settle(
    model: torch.nn.Module | None, prompt_length: int, generation_config: Any, given: Mapping[str, Any]
) -> GenerationSettings:
    """What is ``given``, else what ``generation_config`` says, else the model's own, else what Hugging Face does.

    Raises ``ArgumentError`` where a value does not fit, and where a configuration asks for what there is not.
    """
    from transformers import GenerationConfig

    is_config = generation_config is None or isinstance(generation_config, GenerationConfig)
    expect(is_config, "generation_config", "a transformers.GenerationConfig or None", repr(generation_config))
    defaults = GenerationConfig._get_default_generation_params()
    del defaults["max_length"]  # 20, which nobody means
    values = dict(defaults)
    for source in (getattr(model, "generation_config", None), generation_config):
        values |= {} if source is None else _set(vars(source).items())
    values |= _set(given.items())
    _check_lengths(values, prompt_length)
    _check_sampling(values)
    values["eos_token_id"] = eos = _token_ids("eos_token_id", values.get("eos_token_id"))
    _check_int("pad_token_id", values.get("pad_token_id"))
    values.setdefault("pad_token_id", eos[0] if eos else 0)
    taken = {field.name for field in fields(GenerationSettings)}
    _check_others({name: value for name, value in values.items() if name not in taken}, defaults)
    settled: dict[str, Any] = {name: values.get(name) for name in taken}
    return GenerationSettings(**settled)


def _set(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if value is not None}


def _check_lengths(values: dict[str, Any], prompt_length: int) -> None:
    """Leaves of ``max_length``, where it says how many tokens there will be, ``max_new_tokens``."""
    most = values.pop("max_length", None)
    count = values.get("max_new_tokens")
    if count is None and most is not None:
        is_longer = is_int(most) and most > prompt_length
        expect(is_longer, "max_length", f"an int above the prompt's {prompt_length} tokens", repr(most))
        count = values["max_new_tokens"] = most - prompt_length
    expect(is_int(count), "max_new_tokens", "an int", repr(count))
    expect(values["max_new_tokens"] > 0, "max_new_tokens", "at least 1", count)
    _check_int("max_cache_len", values.get("max_cache_len"))


def _check_sampling(values: dict[str, Any]) -> None:
    expect(isinstance(values["do_sample"], bool), "do_sample", "True or False", repr(values["do_sample"]))
    for name in ("temperature", "repetition_penalty"):
        factor = values[name]
        expect(is_number(factor) and factor > 0, name, "a number > 0", repr(factor))
    top_k, top_p, min_p = values["top_k"], values["top_p"], values.get("min_p")
    expect(is_int(top_k) and top_k >= 0, "top_k", "an int >= 0", repr(top_k))
    expect(is_number(top_p) and 0 < top_p <= 1, "top_p", "a number in (0, 1]", repr(top_p))
    expect(min_p is None or is_number(min_p) and 0 <= min_p <= 1, "min_p", "a number in [0, 1]", repr(min_p))


def _check_int(name: str, value: Any) -> None:
    expect(value is None or is_int(value), name, "an int or None", repr(value))


def _token_ids(name: str, given: Any) -> list[int]:
    if given is None:
        return []
    ids = given if isinstance(given, (list, tuple, set, frozenset)) else [given]
    expect(all(map(is_int, ids)), name, "an int, a list of ints or None", repr(given))
    return list(ids)


def _check_others(values: dict[str, Any], defaults: dict[str, Any]) -> None:
    cache = values.pop("cache_implementation", "static")
    expect(cache in _CACHES, "generation_config.cache_implementation", " or ".join(map(repr, _CACHES)), repr(cache))
    for name, value in values.items():
        is_meant = name not in _WITHOUT_EFFECT and not name.startswith("_")
        default = defaults.get(name)
        is_default = value == default or default is None and value is False
        expected = f"{default!r}, since torch_mpk.generate takes no other from a configuration"
        expect(is_default or not is_meant, f"generation_config.{name}", expected, repr(value))
