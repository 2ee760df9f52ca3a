"""The accuracy gate of a release."""

import pytest
import torch

from tests.thinned import thinned
from torch_mpk.testing.accuracy import LIMIT, error_ratio
from torch_mpk.testing.tiny import tiny_model


@pytest.mark.parametrize(("arch", "dtype"), thinned([("qwen3", torch.bfloat16), ("llama", torch.float32)], 0))
def test_error_is_within_the_limit_of_eagers(device, arch, dtype):
    ratio = error_ratio(
        lambda: tiny_model(arch, dtype=dtype, device=device),
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
