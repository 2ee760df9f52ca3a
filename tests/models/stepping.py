"""Decode steps of a model under ``torch.compile(backend="mpk")`` beside eager ones."""

import torch

from torch_mpk.testing.tiny import Decoding, random_ids

STRICT = {"fallback": "error", "while_building": "wait"}


def compiled(model, **options):
    return torch.compile(model, backend="mpk", options=STRICT | options)


def run_both(model, step, *, batch=1, mask="none", num_steps=4, prompt_length=5):
    """Decodes the same tokens with ``step`` and eagerly; compares logits and everything a step writes."""
    prompt = random_ids(batch, prompt_length, model.device)
    ours, eager = Decoding(model, prompt, mask=mask), Decoding(model, prompt, mask=mask)
    results = []
    with torch.inference_mode():
        for _ in range(num_steps):
            token = random_ids(batch, 1, model.device)
            actual, expected = ours.step(step, token), eager.step(model, token)
            assert actual.dtype == expected.dtype
            assert_close(actual, expected)
            results.append(actual)
    for actual, expected in zip(ours.state(), eager.state(), strict=True):
        assert_close(actual, expected)
    assert all(layer.cumulative_length == prompt_length + num_steps for layer in ours.cache.layers)
    assert len({result.data_ptr() for result in results}) == num_steps, "a later step reused an output's memory"


def assert_close(actual, expected):
    if actual.dtype == torch.int64:
        assert torch.equal(actual, expected)
        return
    # Both round at the same places and differ in the order of sums; a wrong position or mask is off by whole values.
    unit = expected.float().abs().max().clamp(min=1e-3) * torch.finfo(expected.dtype).eps
    assert (actual.float() - expected.float()).abs().max() <= (32 if expected.dtype == torch.float32 else 8) * unit


def assert_as_near(ours: torch.Tensor, eagers: torch.Tensor, exact: torch.Tensor) -> None:
    """To what a wider dtype gives as eager's, but for chance."""
    error, eagers_error = ((t.to(exact.dtype) - exact).norm() for t in (ours, eagers))
    assert error <= 1.5 * eagers_error + 1e-6 * exact.norm()
