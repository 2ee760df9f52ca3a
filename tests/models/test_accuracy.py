"""The accuracy gate of a release."""

import dataclasses
import itertools

import pytest
import torch

from tests.thinned import thinned
from torch_mpk.testing.accuracy import LIMIT, error_ratio
from torch_mpk.testing.tiny import tiny_model
from torch_mpk.testing.zoo import MODELS


@pytest.mark.parametrize(("arch", "dtype"), thinned([("qwen3", torch.bfloat16), ("llama", torch.float32)], 0))
def test_error_is_within_the_limit_of_eagers(device, arch, dtype):
    ratio = error_ratio(
        lambda: tiny_model(arch, dtype=dtype, device=device),
        lambda model: torch.compile(model, backend="mpk", options={"fallback": "error"}),
    )
    assert ratio <= LIMIT


@pytest.mark.parametrize(
    ("name", "dtype"), thinned(itertools.product(["DeepSeek-V2", "DeepSeek-V3"], [torch.bfloat16, torch.float32]), 2)
)
def test_absorbed_products_are_within_the_limit(name, dtype):
    """Without experts, whose choice a last bit may change."""
    model = MODELS[name]
    dense = dataclasses.replace(model, config={**model.config, "first_k_dense_replace": 2})
    ratio = error_ratio(
        lambda: dense.make().to(dtype),
        lambda model: torch.compile(model, backend="mpk", options={"fallback": "error"}),
    )
    assert ratio <= LIMIT


def test_the_gate_sees_a_lost_digit():
    def sloppy(model):
        def step(**kwargs):
            output = model(**kwargs)
            output.logits = output.logits * (1 + 2**-9)
            return output

        return step

    assert error_ratio(lambda: tiny_model(dtype=torch.float32), sloppy, seeds=2, positions=2) > LIMIT
