"""Decode steps of Hugging Face models: everything is lifted, and the bits stay."""

from __future__ import annotations

import pytest
import torch

from tests.patterns.rewriting import assert_same, clones, operands_of, tasks_of
from tests.thinned import thinned
from torch_mpk import patterns
from torch_mpk.capture.graph import capture
from torch_mpk.testing.tiny import Decoding, random_ids, tiny_model

aten = torch.ops.aten
LAYERS = 2
COMPUTE = (
    aten.linear.default,
    aten.matmul.default,
    aten.scaled_dot_product_attention.default,
    aten.softmax.int,
    aten.silu.default,
    aten.rsqrt.default,
    aten.embedding.default,
    aten.index_copy_.default,
)


def decode_graph(arch, attention, mask, batch, dtype):
    """The last graph that some decode steps compile, with arguments of a call."""
    model = tiny_model(arch, attention=attention, dtype=dtype, num_layers=LAYERS)
    calls = []

    def backend(gm, example_inputs):
        captured = capture(gm, example_inputs).graph_module

        def run(*args):
            calls.append((captured, clones(args)))
            return gm.forward(*args)

        return run

    decoding = Decoding(model, random_ids(batch, 6), mask=mask)
    step = torch.compile(model, backend=backend)
    with torch.inference_mode():
        for _ in range(3 if mask == "2d" else 1):  # from the second step on, the mask's length is a symbol
            decoding.step(step, random_ids(batch, 1))
    return calls[-1]


@pytest.mark.parametrize(
    ("arch", "attention", "mask", "batch", "dtype"),
    thinned(
        [
            ("qwen3", "sdpa", "none", 1, torch.bfloat16),
            ("qwen3", "sdpa", "2d", 3, torch.bfloat16),
            ("qwen3", "sdpa", "4d", 3, torch.float32),
            ("qwen3", "eager", "none", 3, torch.float32),
            ("qwen3", "eager", "2d", 1, torch.bfloat16),
            ("llama", "sdpa", "none", 3, torch.float32),
            ("llama", "sdpa", "2d", 1, torch.float32),
            ("llama", "sdpa", "4d", 1, torch.bfloat16),
            ("llama", "eager", "none", 1, torch.bfloat16),
            ("llama", "eager", "2d", 3, torch.float16),
        ],
        8,
    ),
)
def test_decode_step(arch, attention, mask, batch, dtype):
    captured, args = decode_graph(arch, attention, mask, batch, dtype)
    gm = patterns.apply(captured)
    assert_same(captured, gm, *args)
    assert tasks_of(gm) == {
        "embedding": 1,
        "linear": 7 * LAYERS + 1,
        "rms_norm": (4 if arch == "qwen3" else 2) * LAYERS + 1,
        "rope": 2 * LAYERS,
        "attention": LAYERS,
        "silu_mul": LAYERS,
    }
    assert not [node for node in gm.graph.nodes if node.target in COMPUTE]
    for call in operands_of(gm, "attention"):
        assert {"k_new", "v_new", "slot", "limit"} <= call.keys()
        assert ("mask" in call) == (mask != "none")
        assert call["style"] == attention
    lifts = [lift for lift in gm.meta["lifts"] if lift.pattern != "outer"]  # the angles of older rotary embeddings
    assert len(lifts) == sum(tasks_of(gm).values())
    assert all("transformers" in lift.where for lift in gm.meta["lifts"])


def test_a_bool_mask_added_to_scores_is_left_alone():
    """What eager attention does with the 4-D mask that is meant for sdpa."""
    captured, args = decode_graph("llama", "eager", "4d", 2, torch.float32)
    gm = patterns.apply(captured)
    assert_same(captured, gm, *args)
    assert "attention" not in tasks_of(gm)
