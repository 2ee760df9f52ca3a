"""FP8Experts whose activations have given scales: one launch, against the format's definition in float64."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.integrations import finegrained_fp8

from tests.models.test_quantized import SIZES, relative_error
from tests.models.test_quantized_activations import BLOCK, COLUMNS, rounded, spread
from tests.thinned import thinned
from torch_mpk.capture import fp8_experts
from torch_mpk.errors import MpkWarning
from torch_mpk.tasks.quantized_linear import E4M3, LARGEST_E4M3
from torch_mpk.testing.quantized import quantize_linears


def experts_of(implementation: str, block: tuple[int, int] | None) -> Any:
    sizes = SIZES | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": BLOCK}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes), dtype=torch.bfloat16).eval()
    model.set_experts_implementation(implementation)
    quantize_linears(model, "fp8", activation_scheme="static", weight_block_size=block)
    return model.model.layers[0].mlp.experts


@pytest.mark.parametrize("implementation", thinned(["grouped_mm", "batched_mm", "eager"], 0))
@pytest.mark.parametrize("block", [None, (BLOCK, BLOCK)], ids=["tensor", "blocks"])
def test_experts_are_one_launch(block: tuple[int, int] | None, implementation: str) -> None:
    """FP8Experts with an activation scale for each expert, which Transformers multiplies by its loop alone."""
    experts = experts_of(implementation, block)
    x, ids, weights = torch.randn(9, COLUMNS).bfloat16(), torch.rand(9, 8).topk(2).indices, torch.rand(9, 2).bfloat16()
    torch.compiler.reset()
    run = torch.compile(experts, backend="mpk", fullgraph=True, options={"fallback": "error"})
    for _ in range(2):
        experts.gate_up_proj_activation_scale.data.uniform_(0.004, 0.02)
        experts.down_proj_activation_scale.data.uniform_(0.0002, 0.002)
        with torch.inference_mode():
            got, eager = run(x, ids, weights), inspect.unwrap(type(experts).forward)(experts, x, ids, weights)
        want = experts_by_definition(experts, x, ids, weights)
        assert relative_error(got, want) < 0.03 and relative_error(got, want) <= 1.1 * relative_error(eager, want)


def experts_by_definition(experts: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    def multiply(name: str, e: int, x: torch.Tensor) -> torch.Tensor:
        weight, scale = getattr(experts, name)[e], getattr(experts, f"{name}_scale_inv")[e]
        x = rounded(x, getattr(experts, f"{name}_activation_scale")[e].double())
        return (weight.double() * spread(scale, weight.shape)) @ x

    y = torch.zeros(x.shape, dtype=torch.float64)
    for r, chosen in enumerate(ids.tolist()):
        for e, weight in zip(chosen, weights[r].tolist(), strict=True):
            gate, up = multiply("gate_up_proj", e, x[r].double()).chunk(2)
            y[r] += weight * multiply("down_proj", e, torch.nn.functional.silu(gate) * up)
    return y


@torch.no_grad()
def test_programs_round_as_the_cast_does() -> None:
    """All numbers of bfloat16, at ties and between them. A product makes it worth a launch."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[~numbers.isnan()].float()
    both, weight = torch.stack([numbers, numbers / 0.3]), torch.randn(16, len(numbers))
    run = torch.compile(
        lambda x, weight: (fp8_experts._e4m3(x), x.clamp(-1, 1) @ weight.t()),
        backend="mpk",
        options={"fallback": "error"},
    )
    want = both.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3).float()
    torch.testing.assert_close(run(both, weight)[0], want, rtol=0, atol=0)


@torch.no_grad()
def test_experts_of_4_bits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    implementations = finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS._global_mapping
    monkeypatch.setitem(implementations, "grouped_mm", lambda experts, x, ids, weights: x + 1)
    experts = experts_of("grouped_mm", None)
    experts.down_proj = torch.nn.Parameter(experts.down_proj.view(torch.int8), requires_grad=False)
    x = torch.randn(2, COLUMNS)
    with pytest.warns(MpkWarning, match="transformers.FP8Experts to their package: they store FP4"):
        assert torch.equal(torch.compile(experts, backend="mpk")(x, torch.zeros(2, 2).long(), torch.ones(2, 2)), x + 1)
