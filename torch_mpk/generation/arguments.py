"""What ``torch_mpk.generate`` is called with, beside a configuration's fields: checked, and as the loop takes it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from torch_mpk.config import MAX_POSITIONS, MAX_ROWS, Options, is_int
from torch_mpk.errors import AutocastError
from torch_mpk.generation.settings import GenerationSettings, expect
from torch_mpk.ranks.sharding import group_of_model
from torch_mpk.runtime.ranks import draw_alike, draw_as_first
from torch_mpk.runtime.segment import launched_segments
from torch_mpk.warn_once import warn

_CACHE_LENGTH_MULTIPLE = 128  # so that prompts of similar length share a compiled step


def plain_model(model: Any) -> Any:
    """The model inside of one that is compiled, or wrapped by PEFT: Hugging Face's ``generate`` calls that, too."""
    model = getattr(model, "_orig_mod", model)
    if not hasattr(model, "get_base_model"):  # of PEFT
        return model
    is_prompt = any(config.is_prompt_learning for config in model.peft_config.values())
    expected = "one without prompt tuning, prefix tuning and the like, which model.generate takes"
    expect(not is_prompt, "model", expected, f"{type(model).__name__} of {model.active_adapter!r}")
    return model.get_base_model()


def check_tensors(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    has_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    expect(not has_encoder, "model", "a decoder alone", f"{type(model).__name__}, which has an encoder")
    for name, value in {"input_ids": input_ids, "attention_mask": attention_mask}.items():
        is_absent = name == "attention_mask" and value is None
        expect(is_absent or isinstance(value, torch.Tensor), name, "a tensor", repr(value))
        expect(value is None or not value.is_meta, name, "a tensor that has values", "one on the meta device")
    shape = list(input_ids.shape)
    expect(input_ids.dtype == torch.int64, "input_ids", "int64", input_ids.dtype)
    expect(len(shape) == 2 and min(shape) > 0, "input_ids", "a shape [batch, prompt]", shape)
    if attention_mask is not None:
        expect(list(attention_mask.shape) == shape, "attention_mask", f"the shape {shape}", list(attention_mask.shape))
        ends = attention_mask[:, -1].bool().all().item()
        expected = "padding on the left (a tokenizer's padding_side='left')"
        expect(ends, "attention_mask", expected, "a last column with zeros")


def check_model(model: Any) -> None:
    is_hf = all(callable(getattr(model, name, None)) for name in ("prepare_inputs_for_generation", "generate"))
    expect(is_hf, "model", "a Hugging Face model that generates text", type(model).__name__)
    empty = next((name for name, weight in model.named_parameters() if weight.is_meta), None)
    expected = "weights that have values; model.generate takes those that are offloaded"
    expect(empty is None, "model", expected, f"{empty} on the meta device")


def sharing_draws(
    model: Any, settings: GenerationSettings, generator: torch.Generator | None, device: torch.device
) -> None:
    """Has ranks that share a model take the same steps: all draw as rank 0 does, and none stops by its own clock.
    Collective where there are several ranks."""
    group = group_of_model(model)
    if group is None:
        return
    _expect_no_clock(settings)
    if settings.do_sample:
        draw_as_first(group, generator, device)


def _expect_no_clock(settings: GenerationSettings) -> None:
    expected = "None for a model whose weights are shared out to several ranks, which have clocks of their own"
    expect(settings.max_time is None, "max_time", expected, settings.max_time)


def checking_draws(
    tokens: Iterator[torch.Tensor],
    model: Any,
    settings: GenerationSettings,
    generator: torch.Generator | None,
    device: torch.device,
) -> Iterator[torch.Tensor]:
    """The same tokens. Launches may turn out to exchange with ranks that ``sharing_draws`` does not know of, since the
    model's weights are no DTensors. Then these must take the same steps by themselves. Collective where there are such.

    Raises ArgumentError where they do not.
    """
    known = {"", group_of_model(model)}
    with launched_segments() as launched:
        yield next(tokens)  # after the prompt
        yield from itertools.islice(tokens, 1)
    for group in {getattr(segment.executable, "group", "") for segment in launched} - known:
        _expect_no_clock(settings)
        if settings.do_sample and not draw_alike(group, generator, device):
            expected = f"one of the same state on all ranks of group {group}, within which the model exchanges"
            expect(False, "generator", expected, "states that differ: seed all ranks alike")
    yield from tokens


def check_streamer(streamer: Any) -> None:
    is_streamer = streamer is None or all(callable(getattr(streamer, name, None)) for name in ("put", "end"))
    expect(is_streamer, "streamer", "an object with methods put and end, or None", repr(streamer))


def is_of_transformers(streamer: Any) -> bool:
    """Whether a streamer's code is known: it leaves the model alone."""
    return streamer is None or type(streamer).__module__ == "transformers.generation.streamers"


def check_drafts(settings: GenerationSettings, input_ids: torch.Tensor) -> None:
    count = settings.prompt_lookup_num_tokens
    if count is None:
        return
    name, batch, most = "prompt_lookup_num_tokens", input_ids.shape[0], MAX_ROWS - 1
    expect(is_int(count) and 0 < count <= most, name, f"an int from 1 to {most}, or None", repr(count))
    expect(batch == 1, name, "one sequence", f"a batch of {batch}")


def check_chunks(size: int | None) -> None:
    is_in_range = size is None or is_int(size) and MAX_ROWS <= size <= MAX_POSITIONS
    expect(is_in_range, "prefill_chunk_size", f"an int from {MAX_ROWS} to {MAX_POSITIONS}, or None", repr(size))


def padding_of(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, settings: GenerationSettings
) -> torch.Tensor | None:
    """int64[batch, prompt], 0 where a prompt is padded; None where nothing is. Without ``attention_mask``
    ``pad_token_id`` says it, as in Hugging Face's generate."""
    if attention_mask is None and settings.prompt_pad_id is None:
        return None
    mask = input_ids.ne(settings.prompt_pad_id or 0) if attention_mask is None else attention_mask.bool()
    expected = "one, since a prompt ends in pad_token_id, which Hugging Face takes for padding without it"
    expect(mask[:, -1].all(), "attention_mask", expected, "None")
    return None if bool(mask.all()) else mask.to(torch.int64)


def cache_length(settings: GenerationSettings, input_ids: torch.Tensor, asked: int | None) -> int:
    """``asked``: the keyword, which has to suffice; of a configuration's the longer counts, as in Hugging Face's."""
    prompt, count = input_ids.shape[1], settings.max_new_tokens
    num_drafts = settings.prompt_lookup_num_tokens or 0
    needed = prompt + count - 1 + num_drafts  # the last token is not written to the cache
    drafted = f" and drafts of {num_drafts}" if num_drafts else ""
    expected = f"at least {needed} for {prompt} + {count} tokens{drafted}"
    expect(asked is None or asked >= needed, "max_cache_len", expected, asked)
    if settings.max_cache_len is not None:
        return max(settings.max_cache_len, needed)
    return -(-needed // _CACHE_LENGTH_MULTIPLE) * _CACHE_LENGTH_MULTIPLE


def is_autocast(device: torch.device, options: Options) -> bool:
    """Whether autocast is on, which is announced: everything runs eagerly then, since under autocast keys and values
    have different dtypes and a static cache has one."""
    if not torch.is_autocast_enabled(device.type):
        return False
    error = AutocastError(device=device.type)
    if options.fallback == "error":
        raise error
    warn(f"torch_mpk.generate runs eagerly: {error}")
    return True
