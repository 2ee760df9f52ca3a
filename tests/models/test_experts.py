"""Models of experts: one launch in every family but those listed, and right where one flipped route would show.

A flipped route is a large error, in eager as in ours, and rounding flips routes. So whole models are compared in
float32, and in 16-bit dtypes routers on equal inputs and experts on equal routes.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import StaticCache

import torch_mpk
from tests.models.expert_families import CHOSEN, EXPERTS, Calls, families, make
from tests.models.test_architectures import assert_close
from tests.thinned import thinned
from torch_mpk.errors import MpkWarning
from torch_mpk.testing.tiny import random_ids

NOT_ONE_LAUNCH = {
    "glm5_next": "Dynamo ends graphs in its sparse attention's index, which branches on values",
    "inkling2": "one of its tensors has no elements",
    "qwen4_exp": "Dynamo ends graphs in its sparse attention's index, which branches on values",
    "unlimited_ocr": "a loop of its attention computes tensors that tracing does not see",
    "zaya": "its attention has a convolution over groups of channels",
}
# Unlike each other: a plain one, transposed and interleaved with biases, groups and a shared expert, top-k of logits.
UNLIKE = ["deepseek_v3", "gpt_oss", "granitemoe", "qwen3_moe"]
FAMILIES = families()
IMPLEMENTATIONS = {1: "grouped_mm", 4: "batched_mm"}
LOOPS = {2: "eager"}
OPTIONS = {"max_positions": 64, "while_building": "wait"}


def segments_of(folder: Path) -> list[str]:
    """Whose the segments are in the graphs built so far."""
    texts = (path.read_text() for path in folder.glob("*/3.segments.txt"))
    return [whose for text in texts for whose in re.findall(r"^segment_\d+ \((\w+)\)$", text, flags=re.MULTILINE)]


def test_no_family_is_listed_that_is_none() -> None:
    assert NOT_ONE_LAUNCH.keys() <= set(FAMILIES)


EACH = [(family, IMPLEMENTATIONS) for family in FAMILIES] + [(family, LOOPS) for family in FAMILIES]


@pytest.mark.parametrize(("family", "implementations"), thinned(EACH, FAMILIES.index(UNLIKE[0])), ids=str)
def test_decode_steps_are_one_launch(
    family: str, implementations: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(family)
    for batch, implementation in implementations.items():
        monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path / implementation))
        model.set_experts_implementation(implementation)  # type: ignore[operator]
        torch.compiler.reset()
        step = torch.compile(model, backend="mpk", options=OPTIONS)
        prompt = random_ids(batch, 4)
        ours, eager = (Calls(family, model, prompt) for _ in range(2))
        with torch.inference_mode():
            for number in range(2):
                token = random_ids(batch, 1)
                assert_close(ours.call(step, token), eager.call(model, token))
                if number == 0:  # a cache of another state may be another graph
                    assert (segments_of(tmp_path / implementation) != ["ours"]) == (family in NOT_ONE_LAUNCH)


@pytest.mark.parametrize("family", thinned(UNLIKE))
def test_prompts_are_one_launch(family: str) -> None:
    model, options = make(family), OPTIONS | {"fallback": "error"}
    for implementation in IMPLEMENTATIONS.values():
        model.set_experts_implementation(implementation)  # type: ignore[operator]
        torch.compiler.reset()
        run = torch.compile(model, backend="mpk", options=options)
        ours, eager = (StaticCache(config=model.config, max_cache_len=40) for _ in range(2))  # type: ignore[arg-type]
        for length in (16, 5):
            ids = random_ids(3, length)
            with torch.inference_mode():
                logits = [m(input_ids=ids, past_key_values=c).logits for m, c in ((run, ours), (model, eager))]
            assert_close(*logits)


@pytest.mark.slow
@pytest.mark.parametrize("family", UNLIKE[:2])
def test_experts_of_long_prompts(family: str) -> None:
    """8,192 rows, whose products are in groups, and with two choices each more pairs than a group has."""
    model = make(family)
    block = block_of(model)
    wide = copy.deepcopy(block).double()
    wide.experts.config._experts_implementation = "batched_mm"  # grouped products take no float64
    x = torch.randn(1, 8192, model.config.hidden_size)  # type: ignore[union-attr]
    with torch.inference_mode():
        ours = first(torch.compile(block, backend="mpk", options={"fallback": "error"})(x))
        expected, exact = first(block(x)), first(wide(x.double()))
    errors = [(t - exact).flatten(0, -2).norm(dim=-1) for t in (ours, expected)]
    assert errors[0].median() <= 2 * errors[1].median()
    assert (errors[0] > 1e-3).sum() <= 2 + 2 * (errors[1] > 1e-3).sum()  # rows whose routes rounding flips


@pytest.mark.slow
@pytest.mark.parametrize("family", ["granitemoe", "qwen3_moe"])
def test_several_positions_and_drafts(family: str) -> None:
    """Steps over several positions of one sequence, and the tokens that generation with drafts gives."""
    model = make(family)
    run = torch.compile(model, backend="mpk", options={"fallback": "error"})
    ours, eager = (StaticCache(config=model.config, max_cache_len=32) for _ in range(2))  # type: ignore[arg-type]
    with torch.inference_mode():
        for length in (6, 5, 1, 5):
            ids = random_ids(1, length)
            assert_close(*(m(input_ids=ids, past_key_values=c).logits for m, c in ((run, ours), (model, eager))))
    prompt = random_ids(1, 6).repeat(1, 2)
    expected = torch_mpk.generate(model, prompt, 16)
    assert torch.equal(torch_mpk.generate(model, prompt, 16, prompt_lookup_num_tokens=4), expected)


def test_loops_over_experts_stay_what_they_are_elsewhere() -> None:
    """Eager calls and other backends have the loop, also of a model that this backend has traced without it."""
    model = make("qwen3_moe")
    model.set_experts_implementation("eager")  # type: ignore[operator]
    x = torch.randn(3, 1, model.config.hidden_size)  # type: ignore[union-attr]
    block, graphs = block_of(model), []

    def other(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    with torch.inference_mode():
        expected = first(block(x))
        assert_close(first(torch.compile(block, backend="mpk", options={"fallback": "error"})(x)), expected)
        assert torch.equal(first(torch.compile(block, backend=other)(x)), expected)
        assert len(graphs) > 1


def test_where_a_graph_ends_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where experts are no class that Transformers' decorator knows."""
    monkeypatch.setattr("torch_mpk.capture.expert_loops.is_traced_for_us", lambda: False)
    model = make("qwen3_moe")
    model.set_experts_implementation("eager")  # type: ignore[operator]
    x = torch.randn(2, 1, model.config.hidden_size)  # type: ignore[union-attr]
    torch.compiler.reset()
    with torch.inference_mode(), pytest.warns(MpkWarning, match=r"modeling_qwen3_moe.py:\d+, in forward: .*grouped_mm"):
        torch.compile(block_of(model), backend="mpk", options=OPTIONS)(x)


# ---- in parts ----


class Routes(nn.Module):
    """In the place of experts: what each row gives each expert, in the first columns."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        is_there = ids.unsqueeze(-1) == torch.arange(x.shape[-1], device=x.device)
        return (is_there * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def block_of(model: nn.Module) -> Any:
    """The last module with experts."""
    return [module for module in model.modules() if "experts" in dict(module.named_children())][-1]


def first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


IN_PARTS = ["deepseek_v2", "deepseek_v3", "ernie4_5_moe", "gpt_oss", "granitemoe", "minimax_m2", "mixtral", "qwen3_moe"]
HALF = [(family, dtype) for family in IN_PARTS for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("family", "dtype"), thinned(HALF, 3, 6), ids=str)
def test_routers_choose_as_well_as_eager(family: str, dtype: torch.dtype) -> None:
    """Of equal scores the CPU's ``topk`` takes any, so rows are compared by what they give, whomever they give it."""
    model = make(family)
    block = block_of(model).to(dtype)
    block.experts = Routes()
    run = torch.compile(block, backend="mpk", options={"fallback": "error"})
    for rows in (1, 16):
        x = torch.randn(rows, 1, model.config.hidden_size).to(dtype)  # type: ignore[union-attr]
        with torch.inference_mode():
            ours, eager, exact = (
                first(m(v)).double() for m, v in ((run, x), (block, x), (copy.deepcopy(block).double(), x.double()))
            )
        errors = [(t.sort(-1).values - exact.sort(-1).values).abs().amax(-1).flatten() for t in (ours, eager)]
        assert errors[0].median() <= 2 * errors[1].median() + torch.finfo(dtype).eps


@pytest.mark.parametrize("family", thinned(UNLIKE, 2))
@pytest.mark.parametrize("rows", [8, pytest.param(70, marks=pytest.mark.slow)])
def test_a_row_has_the_same_bits_whatever_the_others_are(family: str, rows: int) -> None:
    """Also where they choose other experts, or all of them those of this one."""
    model = make(family)
    block = block_of(model).bfloat16()
    run = torch.compile(block, backend="mpk", options={"fallback": "error"})
    x = torch.randn(rows, 1, model.config.hidden_size).bfloat16()  # type: ignore[union-attr]
    with torch.inference_mode():
        results = [first(run(x)) for _ in range(3)]
        for others in (torch.randn_like(x), x[2:3].expand_as(x)):
            results.append(first(run(torch.cat([others[:2], x[2:3], others[3:]]))))
    assert all(torch.equal(result.view(rows, -1)[2], results[0].view(rows, -1)[2]) for result in results)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize(("family", "dtype"), thinned(HALF, 3), ids=str)
def test_experts_of_equal_routes_are_as_near_as_eager(family: str, dtype: torch.dtype) -> None:
    model = make(family)
    for implementation in IMPLEMENTATIONS.values():
        model.set_experts_implementation(implementation)  # type: ignore[operator]
        torch.compiler.reset()
        experts = block_of(model).experts
        exact, experts = copy.deepcopy(experts).double(), copy.deepcopy(experts).to(dtype)
        run = torch.compile(experts, backend="mpk", options={"fallback": "error"})
        for rows in (1, 4, 70):
            x = torch.randn(rows, model.config.hidden_size).to(dtype)  # type: ignore[union-attr]
            ids = torch.rand(rows, EXPERTS).topk(CHOSEN).indices
            weights = torch.rand(rows, CHOSEN).to(dtype)
            exact.config._experts_implementation = "batched_mm"
            with torch.inference_mode():
                wanted = exact(x.double(), ids, weights.double())
                ours, eager = ((m(x, ids, weights).double() - wanted).norm() for m in (run, experts))
            assert ours <= 1.1 * eager + torch.finfo(dtype).eps * wanted.norm() / 4
