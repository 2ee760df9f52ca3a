"""What the stages before scheduling make of a model's call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._guards import tracing
from transformers import StaticCache

from torch_mpk import _C, lowering
from torch_mpk.capture.graph import capture
from torch_mpk.dispatch.buckets import Numbers, Prompt
from torch_mpk.patterns import apply
from torch_mpk.testing.models import CONFIGS, keep_layers, random_model


@torch.inference_mode()
def graph_of(model: Callable[..., Any], call: Callable[[Any], object], bucket: int | None = None) -> _C.TBGraph:
    """Of the one graph that is in ``call``, which gets the compiled model and may run it on any device; that of a
    bucket where it is over a number of positions."""
    graphs = []

    def backend(gm, inputs):
        captured = capture(gm, inputs)
        if bucket is not None:
            captured = Prompt(captured, Numbers.of(captured).length).graph(bucket)
        with tracing(None):
            graphs.append(lowering.lower(apply(captured.graph_module)).graph)
        return gm.forward

    torch.compiler.reset()
    call(torch.compile(model, backend=backend))
    [graph] = graphs
    return graph


def graph_of_a_prompt(
    name: str, batch: int, length: int, is_bucket: bool = False, positions: int | None = None
) -> _C.TBGraph:
    """A prompt's graph, of ``length`` or of any in a bucket of it, for an empty cache of twice as many positions or of
    ``positions``, by a model of ``CONFIGS`` with one layer. A prompt of one token is a decode step. It takes no memory
    for weights."""
    config = CONFIGS[name]()
    keep_layers(config, 1)
    model = random_model(config, "meta")
    cache = StaticCache(config=config, max_cache_len=positions or 2 * length)
    cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, model.dtype, model.device)
    ids = torch.zeros(batch, length, dtype=torch.int64, device="meta")
    if is_bucket:
        torch._dynamo.mark_dynamic(ids, 1)
    return graph_of(model, lambda run: run(input_ids=ids, past_key_values=cache), length if is_bucket else None)
