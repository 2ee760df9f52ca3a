"""Every class of transformers that generates text: ``generate`` gives Hugging Face's tokens, or says why not."""

import pytest
import torch

import torch_mpk
from tests.models.generate_sweep import REFUSED, WITHOUT_SMALL, compare, is_encoder, names, small_model
from tests.thinned import thinned
from torch_mpk.errors import ArgumentError
from torch_mpk.testing.tiny import random_ids, tiny_model


def expected(name: str) -> str:
    if name in WITHOUT_SMALL:
        return "not made"
    return "refused" if name in REFUSED or is_encoder(name) else "equal"


@pytest.mark.slow
@pytest.mark.parametrize("name", names()[::4])
def test_classes_give_hugging_faces_tokens_or_are_refused(name):
    """Of every fourth class and without tracing; ``python -m tests.models.generate_sweep`` traces, and takes all."""
    row = compare(name, cases=[(3, True), (1, False)], num_traced=0)
    assert row.result == expected(name), str(row)


@pytest.mark.parametrize("name", ["BambaForCausalLM", "BloomForCausalLM", "GPTNeoForCausalLM", "CpmAntForCausalLM"])
def test_unlike_classes_do(name):
    """One that numbers a step from 0 without positions, one whose mask is as long as the cache, one with its own causal
    mask, and one whose steps take the prompt again."""
    row = compare(name, cases=[(3, True)], num_built=0)
    assert row.result == expected(name), str(row)


@pytest.mark.parametrize("name", thinned([f"Qwen{version}VLForConditionalGeneration" for version in ("2", "3")], 1))
def test_text_behind_a_turn_with_an_image_has_its_own_positions(name):
    model = small_model(name)
    config, vision = model.config, model.config.vision_config
    image = [config.vision_start_token_id, *[config.image_token_id] * 4, config.vision_end_token_id]
    ids, text = torch.tensor([[5, 6, *image, 7]]), torch.randint(3, 64, (1, 7))
    alone = model.generate(text, max_new_tokens=6, do_sample=False)
    model.generate(
        ids,
        pixel_values=torch.randn(16, 3 * vision.temporal_patch_size * vision.patch_size**2),
        image_grid_thw=torch.tensor([[1, 4, 4]]),
        mm_token_type_ids=(ids == config.image_token_id).long(),
        max_new_tokens=2,
        do_sample=False,
    )
    assert model.model.rope_deltas.any()
    assert torch.equal(torch_mpk.generate(model, text, 6), alone)


def test_an_encoder_that_is_called_a_decoder_is_refused():
    model = small_model("BertLMHeadModel")
    model.config.is_decoder = False
    for module in model.modules():
        if hasattr(module, "is_decoder"):
            module.is_decoder = module.is_causal = False
    with pytest.raises(ArgumentError, match="model: expected one that may have a static cache.*got BertLMHeadModel"):
        torch_mpk.generate(model, torch.randint(3, 64, (2, 5)), 3)


class Adapted(torch.nn.Module):
    """What PEFT makes of a model, as far as it concerns generation."""

    def __init__(self, model, is_prompt_learning):
        super().__init__()
        self.base_model, self.active_adapter = model, "default"
        self.peft_config = {"default": type("Config", (), {"is_prompt_learning": is_prompt_learning})}

    def get_base_model(self):
        return self.base_model


def test_of_adapters_those_that_change_layers_are_taken():
    model, ids = tiny_model(dtype=torch.float32, num_layers=1), random_ids(1, 5).clamp(min=1)
    assert torch.equal(torch_mpk.generate(Adapted(model, False), ids, 4), torch_mpk.generate(model, ids, 4))
    with pytest.raises(ArgumentError, match="model: expected one without prompt tuning.*Adapted of 'default'"):
        torch_mpk.generate(Adapted(model, True), ids, 4)
