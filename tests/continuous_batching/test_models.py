"""Models of all families in the engine: each answers as it does alone, or says why it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from tests.continuous_batching.engine import GREEDY, alone, batched, managed, prompt_of, results, serving_model, sized
from tests.thinned import thinned
from torch_mpk.continuous_batching import ATTENTION, attention
from torch_mpk.errors import OtherAttentionError
from torch_mpk.testing.tiny import VOCAB_SIZE
from torch_mpk.testing.zoo import MODELS, Decoder

# What a request's error says, of the decoders that cannot be served.
REFUSED = {
    "Llama, dynamic rope": "Data-dependent branching",
    "StableLM": "whose cache StableLmAttention does not pass to it",
    "Nemotron": "whose cache NemotronAttention does not pass to it",
    "DeepSeek-V2": "varlen_attention: k_cache has D=",  # as large as the rotated part of a key: transformers' choice
    "DeepSeek-V3": "varlen_attention: k_cache has D=",
}
IS_CACHE_THE_LAYERS = Version(transformers.__version__) >= Version("5.24")  # to update
if IS_CACHE_THE_LAYERS:
    REFUSED["GPT-NeoX"] = "whose cache GPTNeoXAttention does not pass to it"  # nor to transformers' own
KEEP_THEIR_OWN = {"GPT-J", "Falcon"}  # attention, or one of transformers' choice
NOT_THE_ENGINES = {"Llama 4"}  # transformers' engine refuses its layers, of attention in chunks
DECODERS = {  # of those that transformers lets into its engine
    name: entry
    for name, entry in MODELS.items()
    if isinstance(entry, Decoder) and not entry.is_hybrid and name not in KEEP_THEIR_OWN | NOT_THE_ENGINES
}
SERVED = [name for name in DECODERS if name not in REFUSED]


def made(name: str) -> Any:
    torch.manual_seed(0)
    model: Any = DECODERS[name].make()
    model.set_attn_implementation(ATTENTION)
    return model


def error_of_a_request(model: Any, **settings: Any) -> str:
    with managed(model, **settings) as manager:
        manager.add_request(prompt_of(4))
        [output] = results(manager, 1).values()
    assert output.generated_tokens == []
    return str(output.error)


@pytest.mark.filterwarnings("ignore:.*runs a part of this graph eagerly")
@pytest.mark.parametrize("name", thinned(SERVED, SERVED.index("Gemma 3")))
def test_it_answers_as_it_does_alone(name: str) -> None:
    model, prompts = made(name), [prompt_of(length) for length in (5, 1, 7)]
    options = {"fallback": "error" if DECODERS[name].is_dense else "eager"}
    assert batched(model, prompts, options=options) == [alone(model, p, GREEDY.max_new_tokens) for p in prompts]


@pytest.mark.parametrize("compile_prompts", thinned([True, False], 0))
def test_layers_may_update_the_cache_before_their_attention(compile_prompts: bool) -> None:
    """As they do from transformers 5.24 on."""

    def updated_before(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        key, value = kwargs.pop("cache").update(key, value, module.layer_idx, kwargs=kwargs)
        return attention(module, query, key, value, mask, **kwargs)

    model, prompts = serving_model(), [prompt_of(length) for length in (5, 1, 7)]
    if not IS_CACHE_THE_LAYERS:
        AttentionInterface.register(ATTENTION, updated_before)
    try:
        found = batched(model, prompts, compile_prompts=compile_prompts)
    finally:
        AttentionInterface.register(ATTENTION, attention)
    assert found == [alone(model, prompt, GREEDY.max_new_tokens) for prompt in prompts]


@pytest.mark.parametrize("name", thinned(REFUSED, *range(1, 3)))
def test_it_says_why_it_cannot(name: str) -> None:
    assert REFUSED[name] in error_of_a_request(made(name))


@pytest.mark.parametrize("settings", [{}, {"compile_prompts": False}], ids=["compiled", "eager"])
def test_a_model_with_an_attention_of_its_own_is_refused(settings: dict[str, Any]) -> None:
    """It takes any name of an attention, and without the cache each of its tokens would follow those beside it."""
    config = AutoConfig.for_model("bloom", hidden_size=32, n_layer=1, n_head=4, vocab_size=VOCAB_SIZE)
    if IS_CACHE_THE_LAYERS:
        with pytest.raises(ValueError, match="BloomForCausalLM does not support Flash Attention"):
            AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
        return
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    assert "BloomForCausalLM does not call it" in error_of_a_request(model, **settings)


def test_a_model_with_another_attention_is_refused() -> None:
    model = serving_model(attention="sdpa")
    with pytest.raises(OtherAttentionError, match="got 'sdpa': load the model with"):
        model.generate_batch([prompt_of(4)], generation_config=GREEDY, continuous_batching_config=sized())
