"""One decode step of a Hugging Face causal language model, set up the way tests, benchmarks and examples measure it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, StaticCache

Step = Callable[..., Any]  # the model, or what torch.compile made of it


@torch.inference_mode()
def prefill(model: PreTrainedModel, input_ids: Tensor, max_cache_len: int) -> tuple[StaticCache, Tensor]:
    """Runs input_ids[B, S] eagerly. Returns the static cache they filled and the logits[B, V] of the last position."""
    cache = StaticCache(config=model.config, max_cache_len=max_cache_len)
    logits = model(input_ids=input_ids, past_key_values=cache, logits_to_keep=1).logits
    return cache, logits[:, -1]


def copy_cache(cache: StaticCache, config: PreTrainedConfig, dtype: torch.dtype | None = None) -> StaticCache:
    """A cache of the same contents in memory of its own, in ``dtype`` if one is given."""
    copy = StaticCache(config=config, max_cache_len=max(layer.max_cache_len for layer in cache.layers))
    for new, old in zip(copy.layers, cache.layers, strict=True):
        new.lazy_initialization(old.keys.to(dtype or old.keys.dtype), old.values.to(dtype or old.values.dtype))
        new.keys.copy_(old.keys)
        new.values.copy_(old.values)
        new.cumulative_length.copy_(old.cumulative_length)
        if old.is_sliding:
            new.cumulative_length_int = old.cumulative_length_int
    return copy


@contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """The model computes in float32 meanwhile. A module's weights are float32 only while it runs: a whole copy of the
    largest models would not fit beside them. A module in a list, as a decoder layer, is taken as one."""

    dtypes = {parameter: parameter.dtype for parameter in model.parameters()}
    hooks = []

    def widen(module: nn.Module, *_: object) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.float()

    def restore(module: nn.Module, *_: object) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtypes[parameter])

    def hook(module: nn.Module, is_whole: bool) -> None:
        if is_whole or not any(True for _ in module.children()):
            hooks.extend([module.register_forward_pre_hook(widen), module.register_forward_hook(restore)])
            return
        for child in module.children():
            hook(child, isinstance(module, nn.ModuleList))

    hook(model, False)
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


@torch.inference_mode()
def chosen_experts(model: PreTrainedModel, step: Callable[[], object]) -> dict[str, int]:
    """How many experts the rows of a step choose together, by the name of each module that holds some. ``step`` runs
    the model eagerly. Empty where a model has no experts."""
    chosen: dict[str, int] = {}

    def count(name: str) -> Callable[..., None]:
        # Their forward takes (hidden_states, top_k_index, top_k_weights).
        return lambda module, args: chosen.update({name: args[1].unique().numel()})

    hooks = [
        module.register_forward_pre_hook(count(name))
        for name, module in model.named_modules()
        if hasattr(module, "num_experts") and hasattr(module, "down_proj")
    ]
    if hooks:
        step()
    for hook in hooks:
        hook.remove()
    return chosen


def bytes_read(
    model: PreTrainedModel, cache: StaticCache, position: int, chosen: Mapping[str, int] | None = None
) -> int:
    """What a step cannot avoid reading: every weight but an untied embedding, and the keys and values so far.

    Args:
        chosen: see ``chosen_experts``; weights of experts that no row chose need not be read.
    """
    weights = sum(_local(p).nbytes for p in model.parameters())
    for name, count in (chosen or {}).items():
        module = model.get_submodule(name)
        experts = sum(p.nbytes for p in module.parameters())
        weights -= experts - experts * count // module.num_experts
    if not model.config.tie_word_embeddings:
        weights -= _local(model.get_input_embeddings().weight).nbytes
    return weights + sum(t[..., :position, :].nbytes for layer in cache.layers for t in (layer.keys, layer.values))


def _local(parameter: Tensor) -> Tensor:
    """This rank's part of it."""
    return getattr(parameter, "_local_tensor", parameter)


@torch.inference_mode()
def decode_logits(step: Step, cache: StaticCache, tokens: Tensor) -> Tensor:
    """Feeds tokens[B, S] one position at a time. Returns the logits[S, B, V], float32 or wider."""
    logits = []
    for token in tokens.unbind(1):
        output = step(input_ids=token[:, None].contiguous(), past_key_values=cache)
        last = output.logits[:, -1]
        logits.append(last.to(torch.promote_types(last.dtype, torch.float32), copy=True))  # CUDA graphs reuse outputs
    return torch.stack(logits)


def device_events(function: Callable[[], object]) -> list[Any]:
    """What a call has the CUDA device do, as the profiler sees it: kernels, copies and fills."""
    from torch.autograd import DeviceType

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return [event for event in profile.events() if event.device_type == DeviceType.CUDA]


def count_launches(function: Callable[[], object]) -> int:
    """Kernels that one call launches on the CUDA device. Copies and fills count too."""
    return len(device_events(function))
