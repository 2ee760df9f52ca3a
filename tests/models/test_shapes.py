"""Batch, query length, cache length and masks that change from call to call."""

import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F

from tests.thinned import thinned
from torch_mpk.builds import timing
from torch_mpk.errors import MpkWarning
from torch_mpk.testing.tiny import Decoding, random_ids, tiny_model
from torch_mpk.testing.zoo import MODELS, PROMPT_LENGTH, DecodeSteps

CALLS = [
    # batch, prompt length, cache length, mask
    (1, 3, 16, "none"),
    (2, 40, 64, "2d"),
    (2, 7, 64, "none"),
    (3, 200, 256, "4d"),
    (1, 11, 64, "2d"),
]


@pytest.mark.slow
def test_any_order_of_shapes_is_right_and_none_is_built_twice(device, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    model = tiny_model(device=device, num_layers=1)
    step = torch.compile(model, backend="mpk", options={"fallback": "error"})
    builds = []
    for _ in range(2):
        for batch, prompt_length, max_cache_len, mask in CALLS:
            prompt = random_ids(batch, prompt_length, device)
            ours, eager = (Decoding(model, prompt, mask=mask, max_cache_len=max_cache_len) for _ in range(2))
            with torch.inference_mode():
                token = random_ids(batch, 1, device)
                torch.testing.assert_close(ours.step(step, token), eager.step(model, token), rtol=0.05, atol=0.05)
        builds.append(len(list(tmp_path.iterdir())))
    assert builds[0] == builds[1]


def test_prompts_beyond_the_bound_run_without_a_build(device, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    model = tiny_model(device=device, num_layers=1)
    step = torch.compile(model, backend="mpk", options={"max_positions": 1})
    with torch.inference_mode():
        for length in (2, 5, 64, 300):
            prompt = random_ids(2, 1, device)
            ours, eager = (Decoding(model, prompt, max_cache_len=512) for _ in range(2))
            tokens = random_ids(2, length, device)
            assert torch.equal(ours.step(step, tokens), eager.step(model, tokens))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", thinned(["Gemma 3", "Qwen3-MoE"]))  # with a window that slides; with experts
def test_the_length_of_a_mask_is_no_reason_to_build(device, name, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    model = MODELS[name].make().to(device)
    step = torch.compile(model, backend="mpk", options={"fallback": "eager"})
    prompt = random_ids(2, PROMPT_LENGTH, device)
    ours, eager = (DecodeSteps(model, prompt, mask_grows=True) for _ in range(2))
    with torch.inference_mode():
        for _ in range(9):
            token = random_ids(2, 1, device)
            torch.testing.assert_close(ours.step(step, token), eager.step(model, token), rtol=1e-4, atol=1e-4)
    assert len(list(tmp_path.iterdir())) <= 3  # the first length, any other, and any with a full window


def test_numbers_for_which_a_graph_holds_share_a_build(device):
    """The slice of all has another layout, and the first number is none yet to Dynamo."""
    x, weight = torch.randn(3, 64, device=device), torch.randn(64, 64, device=device)

    def padded(n: int) -> torch.Tensor:
        return F.linear(x, weight) + F.pad(x[:, :n], (0, 64 - n))

    step = torch.compile(padded, backend="mpk", options={"fallback": "error"})
    timing.recent.clear()
    with torch.inference_mode():
        for n, builds in ((2, 1), (3, 2), (60, 2), (64, 3), (5, 3)):
            torch.testing.assert_close(step(n), padded(n), rtol=1e-4, atol=1e-4)
            assert len(timing.recent) == builds, n


def test_the_last_compile_that_dynamo_allows_is_announced(device):
    linear = torch.nn.Linear(8, 8, device=device)
    step = torch.compile(linear, backend="mpk", dynamic=False)
    rows = [torch.randn(n, 8, device=device) for n in (1, 2, 3)]
    with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=2):
        step(rows[0])
        with pytest.warns(MpkWarning, match=r"compiled 2 times, all that Dynamo allows.*recompile_limit = 16"):
            step(rows[1])
        for x in rows:
            torch.testing.assert_close(step(x), linear(x))


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters, reason="PyTorch isolates no compiles"
)
def test_what_is_compiled_for_others_is_no_reason_to_announce_a_limit(device):
    linear = torch.nn.Linear(8, 8, device=device)
    rows = torch.randn(3, 8, device=device)
    with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=2), warnings.catch_warnings():
        warnings.simplefilter("error", MpkWarning)
        for _ in range(4):
            step = torch.compile(linear, backend="mpk", isolate_recompiles=True)
            torch.testing.assert_close(step(rows), linear(rows))
