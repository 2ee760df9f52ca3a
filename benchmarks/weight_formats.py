"""Bytes and accuracy of formats of weights: ``python -m benchmarks.weight_formats``.

Perplexity per byte is that of the small model in examples/, on the text beside it that it never saw; the error is that
of a random model's logits, relative to those of the same model in float32. Quantised models run by the backend.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen3Config

import torch_mpk
from torch_mpk.testing.quantized import quantize_linears

TINY = Path(__file__).parents[1] / "examples" / "tiny-qwen3-bytes"
FORMATS = {"bfloat16": "", "fp8": "fp8", "int8": "int8", **{f"int4, groups of {n}": n for n in (128, 64, 32)}}
CROPS, CONTEXT = 64, 256


def crops() -> torch.Tensor:
    text = torch.frombuffer(bytearray((TINY / "heldout.txt").read_bytes()), dtype=torch.uint8).long()
    starts = torch.linspace(0, len(text) - CONTEXT - 1, CROPS).long().tolist()
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts])


@torch.inference_mode()
def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    torch._dynamo.reset()
    step = torch.compile(model, backend="mpk")
    return torch.cat([step(input_ids=batch, use_cache=False).logits.float() for batch in tokens.split(8)])


def quantised(model: Any, weights: str | int) -> Any:
    """``weights``: a format of ``torch_mpk.quantize``, or the size of groups of 4 bits."""
    if isinstance(weights, int):
        return quantize_linears(model, "int4", group=weights)
    return torch_mpk.quantize(model, weights) if weights else model


def loaded() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16).eval()


def random_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 16}
    config = Qwen3Config(**sizes, num_key_value_heads=8, head_dim=64, vocab_size=512, tie_word_embeddings=False)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def bits(model: Any) -> float:
    """Bits of an element of the layers' linears, with its share of scales and zero points."""
    linears = [
        module for module in model.model.layers.modules() if hasattr(module, "weight") and module.weight.dim() == 2
    ]
    stored = count = 0
    for module in linears:
        weight = module.weight
        is_tensor = hasattr(weight, "qdata")
        names = ("qdata", "scale", "zero_point") if is_tensor else ("weight", "scale", "zero")
        parts = [getattr(weight if is_tensor else module, name, None) for name in names]
        stored += sum(part.numel() * part.element_size() for part in parts if part is not None)
        count += weight.numel() * (2 if getattr(module, "zero", None) is not None else 1)
    return 8 * stored / count


def main() -> None:
    tokens, ids = crops(), torch.randint(512, (8, 32), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        exact = random_model().float()(input_ids=ids, use_cache=False).logits
    print("| format | bits of a weight | perplexity per byte | error of logits |\n|---|---|---|---|")
    for name, weights in FORMATS.items():
        model = quantised(random_model(), weights)
        error = ((logits_of(model, ids) - exact).norm() / exact.norm()).item()
        perplexity = ""
        if weights != 128:  # rows of the small model have 192 columns
            logits = logits_of(quantised(loaded(), weights), tokens[:, :-1])
            perplexity = f"{math.exp(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()):.3f}"
        print(f"| {name} | {bits(model):.2f} | {perplexity} | {error:.1%} |", flush=True)


if __name__ == "__main__":
    main()
