"""The model that ships in examples/ says the same through the backend as it does eagerly, on text it never saw."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.thinned import thinned
from torch_mpk.testing.decode import copy_cache, decode_logits, prefill

TINY_MODEL = Path(__file__).parents[2] / "examples" / "tiny-qwen3-bytes"
BATCH, PROMPT, STEPS = 16, 64, 64  # excerpts of the held-out text, bytes given, bytes predicted one by one


@dataclass
class Runs:
    """Logits[STEPS, BATCH, V] for the same bytes, each from the same cache contents."""

    ours: Tensor
    eager: Tensor
    exact: Tensor  # the model in a wider dtype
    targets: Tensor  # [STEPS, BATCH], the bytes that came
    is_half: bool


def load(dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=dtype).to(device).eval()


def excerpts(device: torch.device) -> Tensor:
    """Heldout bytes[BATCH, PROMPT + STEPS + 1], evenly spaced over the text."""
    text = torch.frombuffer(bytearray((TINY_MODEL / "heldout.txt").read_bytes()), dtype=torch.uint8).long()
    length = PROMPT + STEPS + 1
    starts = torch.linspace(0, len(text) - length, BATCH).long().tolist()
    return torch.stack([text[start : start + length] for start in starts]).to(device)


def surprise(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats of each byte that came; the exponential of their mean is the perplexity."""
    return torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="none")


@pytest.fixture(scope="module", params=thinned([torch.bfloat16, torch.float32]), ids=["bfloat16", "float32"])
def runs(request: pytest.FixtureRequest) -> Runs:
    dtype = request.param
    wider = torch.float32 if dtype == torch.bfloat16 else torch.float64
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, exact_model = load(dtype, device), load(wider, device)
    tokens = excerpts(device)
    cache, _ = prefill(model, tokens[:, :PROMPT], PROMPT + STEPS)
    decoded = tokens[:, PROMPT:-1]
    return Runs(
        ours=decode_logits(
            torch.compile(model, backend="mpk", options={"num_threads": 1}), copy_cache(cache, model.config), decoded
        ),
        eager=decode_logits(model, copy_cache(cache, model.config), decoded),
        exact=decode_logits(exact_model, copy_cache(cache, model.config, wider), decoded),
        targets=tokens[:, PROMPT + 1 :].T,
        is_half=dtype == torch.bfloat16,
    )


def test_perplexity_is_eagers(runs: Runs) -> None:
    ours, eager = surprise(runs.ours, runs.targets), surprise(runs.eager, runs.targets)
    assert eager.mean().exp() < 8, "the shipped weights do not know the standard library"
    # 0.1 %, and what rounding alone may do to a mean over so few bytes: in float32 nothing; in bfloat16 a byte's
    # surprise moves by some 0.04 nats either way, as eager's own does against the exact run's.
    difference = ours - eager
    noise = difference.std().item() / len(difference) ** 0.5
    assert abs(difference.mean().item()) <= 1e-3 + 3 * noise
    assert noise < (3e-3 if runs.is_half else 1e-5)


def test_error_is_no_larger_than_eagers(runs: Runs) -> None:
    def rms(logits: Tensor) -> float:
        return (logits.double() - runs.exact.double()).square().mean().sqrt().item()

    assert rms(runs.ours) <= 1.1 * rms(runs.eager)


def test_greedy_tokens_are_eagers_wherever_the_choice_is_clear(runs: Runs) -> None:
    best = runs.eager.topk(2).values
    noise = (runs.eager - runs.exact).abs().amax(-1)
    clear = best[..., 0] - best[..., 1] > 2 * noise
    assert clear.float().mean() > 0.5
    assert torch.equal(runs.ours.argmax(-1)[clear], runs.eager.argmax(-1)[clear])
