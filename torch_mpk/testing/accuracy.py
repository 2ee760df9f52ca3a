"""The accuracy gate: a model's error against a run in higher precision, compared with eager's own error."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from torch_mpk.testing.tiny import Decoding, Step, random_ids

LIMIT = 1.1


def error_ratio(
    make_model: Callable[[], PreTrainedModel],
    compile_step: Callable[[PreTrainedModel], Step],
    *,
    seeds: int = 16,
    positions: int = 8,
    prompt: int = 6,
) -> float:
    """Root-mean-square error of the compiled logits over that of the eager ones, pooled over seeds and positions.

    The yardstick is the same weights in float32, or in float64 where the model is float32. Each seed draws new weights
    into one model, so that it is compiled once.

    Returns:
        the ratio; ``LIMIT`` is the most a release accepts.
    """
    model = make_model()
    exact = copy.deepcopy(model).to(torch.float64 if model.dtype == torch.float32 else torch.float32)
    step = compile_step(model)
    squares = torch.zeros(2, dtype=torch.float64)  # ours, eager's
    for seed in range(seeds):
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight, exact_weight in zip(model.parameters(), exact.parameters(), strict=True):
                noise = torch.randn(weight.shape) * (0.2 if weight.dim() > 1 else 0.1)
                weight.copy_(noise if weight.dim() > 1 else 1 + noise)
                exact_weight.copy_(weight)
        tokens = random_ids(1, prompt + positions, model.device)
        runs = [Decoding(m, tokens[:, :prompt]) for m in (model, model, exact)]
        with torch.inference_mode():
            for token in tokens[:, prompt:].split(1, dim=1):
                callables = (step, model, exact)
                ours, eager, truth = (r.step(run, token).double() for r, run in zip(runs, callables, strict=True))
                squares += torch.stack([(ours - truth).square().sum(), (eager - truth).square().sum()]).cpu()
    return float((squares[0] / squares[1]).sqrt())
