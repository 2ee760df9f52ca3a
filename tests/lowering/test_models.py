"""Decode steps of Hugging Face models, lowered whole, against eager: the same bits, caches and counters included."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, StaticCache

import torch_mpk.tasks  # noqa: F401  (declares them)
from tests.lowering.harness import clone, run
from tests.thinned import thinned
from torch_mpk import _C, lowering
from torch_mpk.capture.graph import Captured, capture
from torch_mpk.patterns import apply
from torch_mpk.testing import reference_vm

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
MODELS = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


def decode_steps(
    arch: str, attention: str, batch: int, dtype: torch.dtype, padded: bool, steps: int = 3, **sizes: int
) -> list:
    """Dynamo's graphs with the arguments of each decode step: (graph module, arguments)."""
    config_type, model_type = MODELS[arch]
    config = config_type(**SIZES | sizes, attn_implementation=attention)
    model = model_type(config).to(dtype).eval()
    calls = []

    def backend(gm, _):
        def call(*args):
            calls.append((gm, clone(args)))
            return gm.forward(*args)

        return call

    torch.compiler.reset()
    step = torch.compile(model, backend=backend)
    cache = StaticCache(config=config, max_cache_len=24)
    ids = torch.randint(0, 100, (batch, 5))
    mask = torch.ones(batch, 5, dtype=torch.int64)
    mask[0, :2] = 0
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache, **({"attention_mask": mask} if padded else {}))
        for _ in range(steps):
            mask = torch.cat([mask, torch.ones(batch, 1, dtype=torch.int64)], 1)
            step(input_ids=ids[:, :1], past_key_values=cache, **({"attention_mask": mask} if padded else {}))
    return calls


def captured(gm: torch.fx.GraphModule, args: list) -> Captured:
    examples = [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]
    return capture(gm, [e if isinstance(e, torch.SymInt) else a for e, a in zip(examples, args, strict=True)])


def assert_equal(ours: list, eager: list, tolerance: float = 0) -> None:
    for a, b in zip(ours, eager, strict=True):
        if isinstance(a, torch.Tensor):
            allowed = tolerance if a.is_floating_point() else 0
            torch.testing.assert_close(a, b, rtol=allowed, atol=allowed)


@pytest.mark.parametrize(
    ("arch", "attention", "batch", "dtype", "padded"),
    thinned(
        [
            ("qwen3", "sdpa", 1, torch.bfloat16, False),
            ("qwen3", "sdpa", 3, torch.bfloat16, True),
            ("llama", "eager", 2, torch.float16, False),
            ("llama", "sdpa", 2, torch.float32, True),
        ],
        1,
        2,
    ),
)
def test_decode_is_bitwise_eager(arch: str, attention: str, batch: int, dtype: torch.dtype, padded: bool) -> None:
    lowered = {}
    for gm, args in decode_steps(arch, attention, batch, dtype, padded):
        if gm not in lowered:
            module = apply(captured(gm, args).graph_module)
            assert {n.name: r for n in module.graph.nodes if (r := lowering.supports(n))} == {}
            lowered[gm] = lowering.lower(module)
        ours, eager = clone(args), clone(args)
        expected = gm.forward(*eager)
        with torch.no_grad():
            assert_equal([*run(lowered[gm], ours), *ours], [*expected, *eager], 1e-6 if dtype == torch.float32 else 0)
    for low in lowered.values():
        tasks = Counter(node.task for node in low.graph.nodes)
        assert (tasks["linear"], tasks["attention"], tasks["rope"]) == (15, 2, 4)
        counters = [n for n in low.graph.nodes if any(o.is_read and o.is_write for o in n.operands) and n.program]
        assert len(counters) == 1  # one node for both layers' counters


@pytest.mark.parametrize("fuse", thinned([False, True], 1))
def test_schedules_of_a_decode_step_compute_its_bits(fuse: bool) -> None:
    ((gm, args),) = decode_steps("qwen3", "sdpa", 2, torch.bfloat16, padded=False, steps=1)
    lowered = lowering.lower(apply(captured(gm, args).graph_module))
    target = _C.Target("cuda", 90, 132, 200_000, True) if fuse else _C.Target("cpu", num_workers=2, fuse=False)
    schedule = _C.make_schedule(lowered.graph, target)
    _C.validate(schedule)
    eager = clone(args)
    expected = gm.forward(*eager)
    for seed in (None, 1, 2, 3):
        ours = clone(args)

        def runner(inputs, outputs, scalars, seed=seed):
            reference_vm.run(schedule, inputs, outputs, scalars, seed=seed)

        assert_equal([*run(lowered, ours, runner), *ours], [*expected, *eager])


@pytest.mark.slow
def test_a_graph_without_patterns_is_lowered_too() -> None:
    for gm, args in decode_steps("qwen3", "sdpa", 2, torch.float32, padded=True, num_hidden_layers=1):
        lowered = lowering.lower(captured(gm, args).graph_module)
        ours, eager = clone(args), clone(args)
        expected = gm.forward(*eager)
        assert_equal([*run(lowered, ours), *ours], [*expected, *eager], 1e-5)
    assert lowered.scalars  # one build holds for every length of the mask


def test_labels_are_module_paths() -> None:
    ((gm, args),) = decode_steps("llama", "sdpa", 1, torch.bfloat16, padded=False, steps=1)
    lowered = lowering.lower(apply(captured(gm, args).graph_module))
    labels = {node.label for node in lowered.graph.nodes if node.task == "linear"}
    assert {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"} <= labels
