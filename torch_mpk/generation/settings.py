"""What ``torch_mpk.generate`` is asked for: by its keywords, and behind them by Hugging Face's GenerationConfig."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from torch_mpk.config import is_int, is_number
from torch_mpk.errors import ArgumentError

# Fields that ask for another search or another result, and the values with which they do not. Every other field of
# GenerationConfig is taken as Hugging Face takes it for greedy search and sampling; what it ignores there is ignored.
_ONLY: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    **dict.fromkeys(("constraints", "force_words_ids", "dola_layers", "assistant_early_exit"), (None,)),
    **dict.fromkeys(("use_mtp", "token_healing", "return_dict_in_generate"), (None, False)),
}
_OTHER_CACHES = ("offloaded", "quantized", "paged")  # where they are, or with other tokens
_LEAST_TEMPERATURE = 1e-30  # below it logits overflow, and are NaN in a softmax; with it only the likeliest are drawn


def expect(ok: Any, name: str, expected: str, value: Any) -> None:
    if not ok:
        raise ArgumentError(name=name, expected=expected, value=value)


@dataclass(frozen=True)
class GenerationSettings:
    """The fields of GenerationConfig that ``torch_mpk.generate`` itself looks at, with their names and meaning there.

    Attributes:
        config: all fields, as Hugging Face's logits processors are made by them.
        prompt_pad_id: marks padding in a prompt without a mask; None where nothing does.
    """

    max_new_tokens: int
    max_time: float | None
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float | None
    eos_token_id: list[int]
    pad_token_id: int
    stop_strings: str | list[str] | None
    max_cache_len: int | None
    prompt_lookup_num_tokens: int | None
    config: Any
    prompt_pad_id: int | None


def settle(
    model: torch.nn.Module | None, prompt_length: int, generation_config: Any, given: Mapping[str, Any]
) -> GenerationSettings:
    """What is ``given``, else what ``generation_config`` says, else the model's own, else what Hugging Face does.

    Raises ``ArgumentError`` where a value does not fit, and where a configuration asks for what there is not.
    """
    from transformers import GenerationConfig

    is_config = generation_config is None or isinstance(generation_config, GenerationConfig)
    expect(is_config, "generation_config", "a transformers.GenerationConfig or None", repr(generation_config))
    values = GenerationConfig._get_default_generation_params()
    del values["max_length"]  # 20, which nobody means
    for source in (getattr(model, "generation_config", None), generation_config):
        values |= {} if source is None else _set(vars(source))
    values |= {name: value for name, value in given.items() if value is not None}
    _check_lengths(values, prompt_length)
    _check_sampling(values)
    values["eos_token_id"] = eos = _token_ids("eos_token_id", values.get("eos_token_id"))
    values["pad_token_id"] = pad = _pad_token_id(values.get("pad_token_id"))
    _check_search(values)
    config = GenerationConfig()
    vars(config).update(values, max_length=prompt_length + values["max_new_tokens"], eos_token_id=eos or None)
    taken = {field.name for field in fields(GenerationSettings)} - {"config", "prompt_pad_id"}
    settled: dict[str, Any] = {name: values.get(name) for name in taken}
    settled["pad_token_id"] = pad if pad is not None else eos[0] if eos else 0
    return GenerationSettings(**settled, config=config, prompt_pad_id=None if pad in eos else pad)


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says. An empty list says nothing in it, but that there is no end of sequence."""
    return {
        name: value
        for name, value in values.items()
        if value is not None and (name == "eos_token_id" or not (isinstance(value, (list, tuple, dict)) and not value))
    }


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
    most_time = values.get("max_time")
    expect(most_time is None or is_number(most_time), "max_time", "a number of seconds or None", repr(most_time))
    _check_int("max_cache_len", values.get("max_cache_len"))


def _check_sampling(values: dict[str, Any]) -> None:
    """What only sampling looks at may be anything in greedy search, as in checkpoints' files it is."""
    expect(isinstance(values["do_sample"], bool), "do_sample", "True or False", repr(values["do_sample"]))
    _check_positive("repetition_penalty", values)
    if not values["do_sample"]:
        return
    _check_positive("temperature", values)
    values["temperature"] = max(values["temperature"], _LEAST_TEMPERATURE)
    top_k, top_p, min_p = values["top_k"], values["top_p"], values.get("min_p")
    expect(is_int(top_k) and top_k >= 0, "top_k", "an int >= 0", repr(top_k))
    expect(is_number(top_p) and 0 <= top_p <= 1, "top_p", "a number in [0, 1]", repr(top_p))
    expect(min_p is None or is_number(min_p) and 0 <= min_p <= 1, "min_p", "a number in [0, 1]", repr(min_p))


def _check_positive(name: str, values: Mapping[str, Any]) -> None:
    factor = values[name]
    is_finite = is_number(factor) and math.isfinite(factor)
    expect(is_finite and factor > 0, name, "a number > 0", repr(factor))


def _check_int(name: str, value: Any) -> None:
    expect(value is None or is_int(value), name, "an int or None", repr(value))


def _token_ids(name: str, given: Any) -> list[int]:
    if given is None:
        return []
    plain = _plain(given)
    ids = plain if isinstance(plain, (list, tuple, set, frozenset)) else [plain]
    expect(all(map(is_int, ids)), name, "an int, a list or a tensor of ints, or None", repr(given))
    return list(ids)


def _pad_token_id(given: Any) -> int | None:
    plain = _plain(given)
    _check_int("pad_token_id", plain)
    return plain


def _plain(given: Any) -> Any:
    return given.tolist() if isinstance(given, torch.Tensor) else given


def _check_search(values: Mapping[str, Any]) -> None:
    for name, only in _ONLY.items():
        value = values.get(name)
        expected = f"{only[0]!r}, since torch_mpk.generate takes no other from a configuration; model.generate does"
        expect(value is None or value in only, f"generation_config.{name}", expected, repr(value))
    is_contrastive = not values["do_sample"] and is_number(values["top_k"]) and values["top_k"] > 1
    alpha = values.get("penalty_alpha")
    expected = "None, since torch_mpk.generate has no contrastive search"
    expect(not (is_contrastive and alpha), "generation_config.penalty_alpha", expected, repr(alpha))
    cache = values.get("cache_implementation") or "static"
    is_ours = isinstance(cache, str) and not any(name in cache for name in _OTHER_CACHES)
    expected = "a cache of the model's dtype on its device: torch_mpk.generate makes a static one"
    expect(is_ours, "generation_config.cache_implementation", expected, repr(cache))
