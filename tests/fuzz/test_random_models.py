"""Steps of random models are eager's, as near as rounding lets them be."""

import pytest
import torch

from tests.fuzz.random_models import check_model
from tests.thinned import thinned


@pytest.mark.parametrize("seed", thinned(range(6), 0))
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_steps_of_a_model_are_eagers(device: str, seed: int) -> None:
    check_model(seed, torch.device(device), num_calls=4)
