"""Random routers and experts, judged beside float64 on the routes that were taken.

A flipped route is a large error, in eager as in ours, and rounding flips routes. So the choice is judged by the exact
scores of what was chosen, weights by the exact ones of those experts, and results by exact experts on these routes.
Scores of half of the programs are exact in every dtype: there the choice must be the right one, ties included.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations import moe

TopK = Callable[..., tuple[Tensor, Tensor]]

ROUTERS = ["softmax", "of logits", "sigmoid", "groups of sums", "groups of maxima", "biased softmax"]
CHOICES = ["by router", "random", "one", "last", "equal"]
LAYOUTS = ["weight", "transposed", "interleaved"]
FORMS = ["batched", "grouped", "stacked", "modules"]
INPUTS = ["random", "exact", "exact", "nan", "not a number of one expert"]
MARGIN = 8


def stable_topk(x: Tensor, k: int, sorted: bool = True) -> tuple[Tensor, Tensor]:  # noqa: A002 - as torch.topk's
    """Of equal elements those with the lowest indices, NaN above all numbers: CUDA's ``torch.topk``."""
    values, ids = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], ids[..., :k]


@dataclass(frozen=True)
class ExpertProgram:
    """A router, experts, or both, in one of the ways in which models write them."""

    rows: int
    experts: int
    choices: int
    hidden: int
    width: int
    dtype: torch.dtype
    router: str
    chosen: str  # "by router", or as given
    form: str
    layout: str
    has_gate: bool
    has_bias: bool
    values: str
    is_normed: bool  # weights of a row's experts sum to one
    groups: int
    weights_in_fp32: bool

    may_divide_by_zero = is_exact = False

    @classmethod
    def draw(cls, rng: random.Random, is_small: bool = False) -> ExpertProgram:
        groups = rng.choice([1, 2, 4])
        experts = groups * rng.randint(2, 3 if is_small else rng.choice([4, 8, 32]))
        choices = rng.choice([1, 2, experts, rng.randint(1, experts), min(8, experts), min(4, experts)])
        unit = rng.choice([1, 1, 8, 16, 32])  # kernels for tensor cores take multiples of 16 and 32
        return cls(
            rows=rng.choice([1, 1, 2, rng.randint(1, 8), 9, rng.choice([9, 17] if is_small else [33, 64, 65, 130])]),
            experts=experts,
            choices=min(choices, 8) if is_small else choices,
            hidden=unit * rng.randint(1, max(64 // unit, 2)),
            width=unit * rng.randint(1, max(48 // unit, 2)),
            dtype=rng.choice([torch.bfloat16, torch.float16, torch.float32]),
            router=rng.choice(ROUTERS),
            chosen=rng.choice(["by router", *CHOICES]),
            form=rng.choice(FORMS if experts <= 8 else FORMS[:2]),
            layout=rng.choice(LAYOUTS),
            has_gate=rng.random() < 0.7,
            has_bias=rng.random() < 0.3,
            values=rng.choice(INPUTS),
            is_normed=rng.random() < 0.5,
            groups=groups,
            weights_in_fp32=rng.random() < 0.3,
        )

    def shortened(self, is_still_wrong: Callable[[ExpertProgram], bool]) -> ExpertProgram:
        smallest = {"rows": 1, "choices": 1, "hidden": 1, "width": 1, "has_gate": False, "has_bias": False}
        smallest |= {"values": "random", "is_normed": False, "form": "batched", "layout": "weight"}
        program = self
        for name, value in smallest.items():
            simpler = dataclasses.replace(program, **{name: value})
            if simpler != program and is_still_wrong(simpler):
                program = simpler
        return program

    # ---- the program ----

    @property
    def input_names(self) -> list[str]:
        names = ["x", "router_weight", "correction", "ids", "scores", "up", "down"]
        return names + ["up_bias", "down_bias"] * self.has_bias

    @property
    def inner(self) -> int:
        return 2 * self.width if self.has_gate else self.width

    def inputs(self, device: torch.device | str, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        def integers(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator).float()

        x = normal(self.rows, self.hidden)
        router, correction = normal(self.experts, self.hidden) / self.hidden**0.5, 0.1 * normal(self.experts)
        if self.values == "exact":  # few scores, and each of them of several experts
            x = torch.zeros_like(x)
            x[:, 0] = integers(-2, 3, self.rows)
            router, correction = integers(-2, 3, self.experts, self.hidden), torch.zeros(self.experts)
        elif self.values == "nan":
            x[int(integers(0, self.rows, 1))] = torch.nan
        elif self.values == "not a number of one expert":
            router[int(integers(0, self.experts, 1))] = torch.nan
        k_of = {"up": self.hidden, "down": self.width}
        up = normal(self.experts, self.inner, self.hidden) / k_of["up"] ** 0.5
        down = normal(self.experts, self.hidden, self.width) / k_of["down"] ** 0.5
        if self.layout != "weight":
            up, down = up.mT.contiguous(), down.mT.contiguous()
        tensors = [x, router, correction, self._given_ids(generator)]
        tensors += [torch.rand(self.rows, self.choices, generator=generator), up, down]
        tensors += [normal(self.experts, self.inner), normal(self.experts, self.hidden)] * self.has_bias
        return [(t.to(self.dtype) if t.is_floating_point() else t).to(device) for t in tensors]

    def _given_ids(self, generator: torch.Generator) -> Tensor:
        size = self.rows, self.choices
        if self.chosen == "one":
            return torch.randint(self.experts, (1, 1), generator=generator).expand(size).clone()
        if self.chosen == "last":
            return torch.randint(max(0, self.experts - 2), self.experts, size, generator=generator)
        ids = torch.rand(self.rows, self.experts, generator=generator).argsort(-1)[:, : self.choices]
        return ids[:1].expand(size).clone() if self.chosen == "equal" else ids

    def run(self, *tensors: Tensor, noise: torch.Generator | None = None) -> tuple[Tensor, ...]:
        given = dict(zip(self.input_names, tensors, strict=True))
        if self.chosen == "by router":
            _, ids, scores = self.route(given)
        else:
            ids, scores = given["ids"] + 0, given["scores"] + 0
        return self.mixed(given, ids, scores), ids, scores

    def route(self, given: dict[str, Tensor], topk: TopK = torch.topk) -> tuple[Tensor, Tensor, Tensor]:
        """What is chosen by, [rows, experts]; the ids, and their weights."""
        x, correction = given["x"], given["correction"].float()
        is_wide = x.dtype == torch.float64
        logits = F.linear(x, given["router_weight"])
        if self.router.startswith("groups"):  # as DeepSeek's: a product in float32
            logits = F.linear(x.float(), given["router_weight"].float()) if not is_wide else logits
        logits = logits if is_wide else logits.float()
        if self.router == "of logits":
            values, ids = topk(logits, self.choices)
            return logits, ids, values.softmax(-1).to(x.dtype)
        scores = logits.sigmoid() if self.router in ("sigmoid", "groups of sums") else logits.softmax(-1)
        by = scores + correction if self.router in ("sigmoid", "groups of sums", "biased softmax") else scores
        if self.router.startswith("groups"):
            by = self._of_best_groups(by, topk)
        _, ids = topk(by, self.choices, sorted=False)
        weights = scores.gather(1, ids)
        if self.is_normed:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return by, ids, weights if self.weights_in_fp32 else weights.to(x.dtype)

    def _of_best_groups(self, scores: Tensor, topk: TopK) -> Tensor:
        grouped = scores.view(self.rows, self.groups, -1)
        best = topk(grouped, 2)[0].sum(-1) if self.router == "groups of sums" else grouped.max(-1).values
        chosen = topk(best, max(1, self.groups // 2), sorted=False)[1]
        mask = torch.zeros_like(best).scatter_(1, chosen, 1)
        mask = mask.unsqueeze(-1).expand_as(grouped).reshape(self.rows, -1)
        return scores.masked_fill(~mask.bool(), float("-inf"))

    def gate(self, h: Tensor) -> Tensor:
        if not self.has_gate:
            return F.silu(h)
        if self.layout == "interleaved":
            gate, up = h[..., ::2].clamp(max=3), h[..., 1::2].clamp(-3, 3)
            return (up + 1) * gate * torch.sigmoid(1.5 * gate)
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up

    def mixed(self, given: dict[str, Tensor], ids: Tensor, scores: Tensor) -> Tensor:
        if self.form == "modules":
            return self._of_modules(given, ids, scores)
        holder = _Holder(self, given)
        with _grouped_where_it_takes_them(self):
            forward = moe.grouped_mm_experts_forward if self.form == "grouped" else moe.batched_mm_experts_forward
            return forward(holder, given["x"], ids, scores)  # type: ignore[arg-type]

    def matrices(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """[experts, columns, depth], wherever they lie."""
        up, down = given["up"], given["down"]
        return (up, down) if self.layout == "weight" else (up.mT, down.mT)

    def _of_modules(self, given: dict[str, Tensor], ids: Tensor, scores: Tensor) -> Tensor:
        """Every expert for every row, each with weights of its own."""
        x, (up, down) = given["x"], self.matrices(given)
        total = torch.zeros_like(x)
        for expert in range(self.experts):
            biases = [given[name][expert] if self.has_bias else None for name in ("up_bias", "down_bias")]
            y = F.linear(self.gate(F.linear(x, up[expert], biases[0])), down[expert], biases[1])
            share = ((ids == expert) * scores).sum(-1, keepdim=True)
            total = total + (y * share).to(x.dtype)
        return total

    # ---- what is right ----

    def difference(self, inputs: list[Tensor], results: list[Tensor], has_our_ties: bool = True) -> str:
        """Says what is wrong with the results for these inputs; empty: nothing. PyTorch's CPU takes any of equal
        scores."""
        given = {name: t.double().cpu() if t.is_floating_point() else t.cpu() for name, t in
                 zip(self.input_names, inputs, strict=True)}  # fmt: skip
        y, ids, scores = (t.cpu() for t in results)
        if ids.shape != (self.rows, self.choices) or not ((ids >= 0) & (ids < self.experts)).all():
            return f"ids are {ids}, of {self.experts} experts"
        if self.chosen == "by router":
            error = self._wrong_choice(given, ids, scores, has_our_ties)
            if error:
                return error
        return self._wrong_results(given, y, ids, scores)

    def _wrong_choice(self, given: dict[str, Tensor], ids: Tensor, scores: Tensor, has_our_ties: bool) -> str:
        if (ids.sort(-1).values.diff(dim=-1) == 0).any():
            return f"an expert is chosen twice by a row: {ids}"
        by, exact, _ = self.route(given, stable_topk)
        if self.values == "exact" and has_our_ties:
            right, found = exact.sort(-1).values, ids.sort(-1).values
            if not torch.equal(right, found):
                return f"chosen are {found}, expected {right} of {by}"
        elif not self.router.startswith("groups"):  # where a group more or less changes all
            unit = MARGIN * torch.finfo(self.dtype).eps * (1 + by.nan_to_num(0, 0, 0).abs().amax())
            order = by.nan_to_num(nan=torch.inf)
            least = order.gather(1, exact).amin(-1, keepdim=True)
            if not (order.gather(1, ids) >= least - unit).all():
                return f"chosen are {ids}, expected {exact} of {by}"
        _, _, weights = self.route(given, lambda x, k, sorted=True: self._as_chosen(x, k, ids))  # noqa: A006
        logits = torch.einsum("rh,eh->re", given["x"].square(), given["router_weight"].square()).nan_to_num(0).sqrt()
        unit = MARGIN * torch.finfo(self.dtype).eps * (1 + logits.amax(-1, keepdim=True))
        return _unlike("weights", scores, weights, 2 * unit * weights + torch.finfo(self.dtype).tiny)

    def _as_chosen(self, x: Tensor, k: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        if x.shape == (self.rows, self.experts):
            return x.gather(1, ids), ids
        return stable_topk(x, k)

    def _wrong_results(self, given: dict[str, Tensor], y: Tensor, ids: Tensor, scores: Tensor) -> str:
        up, down = self.matrices(given)
        x, scores = given["x"], scores.double()
        h, h_scale = (torch.einsum("rk,rcnk->rcn", power(x), power(up[ids])) for power in (lambda t: t, torch.square))
        if self.has_bias:
            h = h + given["up_bias"][ids]
            h_scale = h_scale + given["up_bias"][ids].square()
        inner = self.gate(h)
        # How large rounding is beside terms that cancel each other.
        parts = h_scale.sqrt()
        if self.has_gate:
            gate, rest = (parts[..., ::2], parts[..., 1::2]) if self.layout == "interleaved" else parts.chunk(2, -1)
            parts = (gate + 1) * (rest + 1)
        exact = torch.einsum("rck,rcnk->rcn", inner, down[ids])
        scale = torch.einsum("rck,rcnk->rcn", parts.square(), down[ids].square()).sqrt()
        if self.has_bias:
            exact = exact + given["down_bias"][ids]
            scale = scale + given["down_bias"][ids].abs()
        total = (exact * scores.unsqueeze(-1)).sum(1)
        # A choice that a row makes again has the same product, and so the same error.
        chosen = F.one_hot(ids, self.experts).double()
        shares = torch.einsum("rce,rc->re", chosen, scores.abs()) / chosen.sum(1).sqrt()
        allowed = (scale * shares.gather(1, ids).unsqueeze(-1)).square().sum(1).sqrt()
        unit = torch.finfo(self.dtype).eps * (self.hidden**0.5 if self.dtype == torch.float32 else 1)
        return _unlike("results", y, total, MARGIN * unit * (1 + allowed))


class _Holder:
    """What transformers' forms of experts read."""

    act_fn = staticmethod(F.silu)
    _is_expert_parallel = has_post_expert_norm = False

    def __init__(self, program: ExpertProgram, given: dict[str, Tensor]) -> None:
        self.num_experts, self.is_transposed = program.experts, program.layout != "weight"
        self.has_bias, self.has_gate = program.has_bias, program.has_gate
        self._apply_gate = program.gate
        name = "gate_up_proj" if program.has_gate else "up_proj"
        up, down = given["up"], given["down"]
        if program.form == "stacked":  # of modules with weights of their own
            up, down = torch.stack(up.unbind()), torch.stack(down.unbind())
        setattr(self, name, up)
        setattr(self, f"{name}_bias", given.get("up_bias"))
        self.down_proj, self.down_proj_bias = down, given.get("down_bias")


@contextmanager
def _grouped_where_it_takes_them(program: ExpertProgram) -> Iterator[None]:
    """As while Dynamo compiles: PyTorch's grouped product in bfloat16, of rows of whole 16 bytes."""
    is_whole = all(size % 8 == 0 for size in (program.hidden, program.width))
    known = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda *_: program.dtype == torch.bfloat16 and is_whole
    try:
        yield
    finally:
        moe._can_use_grouped_mm = known


def _unlike(name: str, found: Tensor, exact: Tensor, allowed: Tensor | float) -> str:
    if found.shape != exact.shape:
        return f"{name} are {list(found.shape)}, expected {list(exact.shape)}"
    found = found.double()
    is_right = ((found - exact).abs() <= allowed) | (found == exact) | (found.isnan() & exact.isnan())
    if is_right.all():
        return ""
    where: Any = (~is_right).nonzero()[0].tolist()
    return f"{(~is_right).sum()} {name} are wrong, at {where} {found[tuple(where)]}, expected {exact[tuple(where)]}"
