"""Random tiny models, and steps of them over random batches, lengths and masks: what each computes beside eager."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from torch_mpk.testing.decode import copy_cache
from torch_mpk.testing.tiny import Decoding, random_ids, tiny_model

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
NUM_NEARBY = 16
MOST_ROWS = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 16}


@dataclass(frozen=True)
class Drawn:
    """What a build is for: a model, and how many rows its steps have."""

    model: dict[str, Any]
    batch: int
    positions: int  # of each sequence, at most
    mask: str
    cache: int

    @classmethod
    def draw(cls, rng: random.Random) -> Drawn:
        dtype = rng.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
        groups, shared = rng.choice([1, 2, 4]), rng.choice([1, 2, 3, 4, 8])
        least = math.lcm(64, groups * shared)
        model = {
            "arch": rng.choice(["qwen3", "llama"]),
            "attention": rng.choice(["sdpa", "eager"]),
            "dtype": dtype,
            "num_layers": rng.choice([1, 2]),
            "hidden_size": least * rng.randint(1, max(320 // least, 1)),
            "intermediate_size": rng.choice([128, 200, 320, 1024, 4096]),
            "head_dim": rng.choice([16, 32, 64, 128]),
            "num_key_value_heads": groups,
            "num_attention_heads": groups * shared,
            "max_position_embeddings": 1024,
        }
        positions = rng.choice([1, 1, 1, rng.randint(2, 16)])
        batch = 1 if positions > 1 else rng.choice([1, 2, 3, rng.randint(4, 16), rng.randint(17, 64), 64])
        # Eager attention adds its mask, of which generate makes numbers: to one of booleans it would add 1.
        masks = ["none", "2d"] if model["attention"] == "eager" else ["none", "2d", "4d"]
        mask = "none" if positions > 1 else rng.choice(masks)
        return cls(model, min(batch, MOST_ROWS[dtype]), positions, mask, rng.choice([32, 64, 300, 1000]))

    def on(self, device: torch.device) -> Drawn:
        """The same in sizes that there are kernels for: on a GPU more than 16 rows take weights of 64 columns each."""
        if device.type == "cpu" or self.batch <= 16:
            return self
        columns = -(-self.model["intermediate_size"] // 64) * 64
        sizes = {"intermediate_size": columns, "head_dim": max(self.model["head_dim"], 64)}
        return replace(self, model=self.model | sizes)


def present_in(prompt: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Rows padded to the left by lengths of their own, some of them altogether, and here and there a hole."""
    present = torch.ones_like(prompt)
    length = prompt.shape[1]
    for row in present:
        row[: rng.choice([0, rng.randint(0, length), rng.randint(0, length)])] = 0
        if rng.random() < 0.2:
            row[rng.randrange(length)] = 0
    return present


def errors_of_rows(results: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    return (results.to(exact.dtype) - exact).flatten(1).norm(dim=1)


def difference(
    ours: torch.Tensor, eagers: torch.Tensor, exact: torch.Tensor, nearby: Sequence[torch.Tensor] = ()
) -> str:
    """Of the row that is worst; empty where each is as near to the exact one as eager's, but for chance.

    A row whose sums cancel each other hangs on single roundings, and eager's may happen to be small ones. How far from
    the exact one a row comes beside others of its step, ``nearby`` says: what models of slightly other weights compute.
    """
    norm = exact.flatten(1).norm(dim=1)
    error, eagers_error = (errors_of_rows(t, exact) for t in (ours, eagers))
    usual = eagers_error
    for each in nearby:
        nears_error = errors_of_rows(each, exact)
        usual = torch.maximum(usual, (eagers_error.median() / nears_error.median() * nears_error).nan_to_num(0))
    unit = torch.finfo(eagers.dtype).eps
    excess = error - 3 * usual - 4 * unit * norm
    row = int(excess.nan_to_num(torch.inf).argmax())
    if excess[row] <= 0:
        return ""
    return (
        f"row {row} differs by {error[row]:.2e} of {norm[row]:.2e}, eager's by {eagers_error[row]:.2e}, and one of "
        f"{len(nearby)} nearby by as much as {usual[row]:.2e} of eager's would"
    )


def copied(decoding: Decoding, model: PreTrainedModel) -> Decoding:
    """The same in a cache of its own, with keys and values as wide as the model's weights."""
    decoding = copy.copy(decoding)
    decoding.cache = copy_cache(decoding.cache, model.config, model.dtype)
    return decoding


def perturbed(model: PreTrainedModel, unit: float) -> PreTrainedModel:
    """Of weights that differ by at most half a unit from the model's."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + unit * (torch.rand_like(weight) - 0.5))
    return model


def check_model(seed: int, device: torch.device, num_calls: int) -> None:
    """Calls of one model's step, each on a cache of its own length. Raises AssertionError, naming what is wrong."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    drawn = Drawn.draw(rng).on(device)
    model = tiny_model(device=device, **drawn.model)
    dtype, wider = drawn.model["dtype"], WIDER[drawn.model["dtype"]]
    exact_model = copy.deepcopy(model).to(wider)
    torch.compiler.reset()
    step = torch.compile(model, backend="mpk", options={"fallback": "error", "while_building": "wait"})
    for call in range(num_calls):
        new = rng.randint(2, drawn.positions) if drawn.positions > 1 else 1
        length = drawn.cache - new if rng.random() < 0.1 else rng.randint(1, drawn.cache - new)
        prompt = random_ids(drawn.batch, length, device)
        given: dict[str, Any] = {"mask": drawn.mask, "max_cache_len": drawn.cache}
        if drawn.mask != "none":
            given["present"] = present_in(prompt, rng)
        before = Decoding(model, prompt, **given)
        tokens = random_ids(drawn.batch, new, device)
        with torch.inference_mode():
            ours, eager, exact = (copied(before, m) for m in (model, model, exact_model))
            results = [d.step(m, tokens) for d, m in ((ours, step), (eager, model), (exact, exact_model))]
        states = zip(*(d.state() for d in (ours, eager, exact)), strict=True)
        for which, tensors in enumerate([results, *states]):
            name = f"{drawn}, call {call} over {length} positions, result {which}"
            if tensors[0].dtype == torch.int64:
                assert torch.equal(tensors[0], tensors[1]), f"{name}: a counter"
                continue
            assert tensors[0].dtype == dtype, name
            if difference(*tensors):
                nearby = []
                for _ in range(NUM_NEARBY):
                    near = copied(before, exact_model)
                    with torch.inference_mode():
                        logits = near.step(perturbed(exact_model, torch.finfo(dtype).eps), tokens)
                    nearby.append([logits, *near.state()][which])
                wrong = difference(*tensors, nearby)
                assert not wrong, f"{name}: {wrong}"
