"""Decode steps of models as their generated kernels compute them, run thread by thread on the CPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.codegen.emulated_calls import allocate, reference, relative_error, tensors
from tests.thinned import thinned
from torch_mpk import _C
from torch_mpk.capture.graph import capture
from torch_mpk.lowering import lower
from torch_mpk.partition.segments import partition
from torch_mpk.patterns import apply
from torch_mpk.testing.emulator import SMEM_BYTES, aligned, emulate
from torch_mpk.testing.zoo import MODELS, Decoder, see_graphs

SeeStep = Callable[[Callable[[torch.fx.GraphModule, list[Any]], None]], None]  # shows a step's graph
TARGET = _C.Target("cuda", 90, 132, SMEM_BYTES, True, True)


def lowered_step(see_step: SeeStep) -> tuple[_C.TBGraph, list[torch.Tensor]]:
    """A step that is one launch on a GPU, and its inputs."""
    found = []

    def see(gm: torch.fx.GraphModule, inputs: list[Any]) -> None:
        with torch._guards.tracing(None):
            parts = partition(apply(capture(gm, inputs).graph_module), None, TARGET)
        assert parts.fallbacks == []
        [segment] = parts.segments
        lowered = lower(segment.gm)
        given = dict(zip(segment.gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
        found.append((lowered.graph, [in_aligned_memory(given[node]) for node in lowered.inputs]))

    see_step(see)
    [step] = found
    return step


def in_aligned_memory(x: torch.Tensor) -> torch.Tensor:
    assert x.is_contiguous()
    return aligned(x.numel() * x.element_size(), 0).view(x.dtype).view(x.shape).copy_(x)


HYBRIDS = [name for name, entry in MODELS.items() if isinstance(entry, Decoder) and entry.is_hybrid]


@pytest.mark.parametrize(("name", "batch"), thinned([(name, (1, 3)[i % 2]) for i, name in enumerate(HYBRIDS)]))
def test_recurrent_layers(name: str, batch: int) -> None:
    """Their state is written in place, and each step reads what the one before has left."""
    check_steps(step_of(name, batch))


@pytest.mark.parametrize(("name", "batch"), thinned([("Qwen3-MoE", 3), ("gpt-oss", 1), ("GLM-4-MoE", 2)], 0))
def test_experts(name: str, batch: int) -> None:
    check_steps(step_of(name, batch))


@pytest.mark.parametrize(("name", "batch"), thinned([("DeepSeek-V2", 3), ("DeepSeek-V3", 1)]))
def test_latents(name: str, batch: int) -> None:
    """Decodes with sizes that tensor cores take."""
    model = MODELS[name]
    assert isinstance(model, Decoder)
    config = {**model.config, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "head_dim": 16}
    config |= {"qk_nope_head_dim": 32, "v_head_dim": 32, "num_hidden_layers": 1}
    wide = dataclasses.replace(model, config=config)
    schedule = check_steps(functools.partial(see_graphs, wide, batch=batch, dtype=torch.bfloat16))
    kernels = [job.cut.kernel for phase in schedule.phases for job in phase.jobs]
    assert kernels.count("latent_attention.split_kv") == 1
    assert kernels.count("expert_linear.boxes") == 2


@pytest.mark.parametrize(("workers", "heads"), [(3, 8), (80, 4)])
def test_many_rows_of_groups_of_eight_heads(workers: int, heads: int) -> None:
    """Eight warps multiply together. Where workers have one split each, fewer heads than eight are computed together,
    since a head, a key and a value take a warp each."""
    model = MODELS["Qwen2"]
    assert isinstance(model, Decoder)
    config = {**model.config, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 1}
    wide = dataclasses.replace(model, config=config | {"num_hidden_layers": 1})
    schedule = check_steps(functools.partial(see_graphs, wide, batch=72, dtype=torch.bfloat16), workers=workers)
    cuts = [job.cut for phase in schedule.phases for job in phase.jobs]
    assert schedule.warps.consumers == 8
    assert [cut.fields["heads"] for cut in cuts if cut.kernel == "attention.split_kv"] == [heads]


def step_of(name: str, batch: int) -> SeeStep:
    return functools.partial(see_graphs, MODELS[name], batch=batch, dtype=torch.bfloat16)


def check_steps(see_step: SeeStep, tolerance: float = 2e-2, workers: int = 3) -> _C.Schedule:
    graph, inputs = lowered_step(see_step)
    kernel = emulate(graph, workers=workers, polled=True)
    for launch in range(2):
        wanted_inputs, wanted = reference(graph, inputs)
        outputs = [allocate(t) for t in tensors(graph, "output")]
        kernel.launch(inputs, outputs, seed=launch, jitter=launch, watchdog_ns=60 * 10**9)
        for got, want in zip([*outputs, *inputs], [*wanted, *wanted_inputs], strict=True):
            assert is_equal(got, want) or got.is_floating_point() and relative_error(got, want) < tolerance
    assert kernel.host_abort.sum() == 0
    return kernel.schedule


def is_equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    """By bits where they are a byte: weights of less than that are of a dtype that is not compared."""
    got, want = (t.view(torch.uint8) if t.itemsize == 1 else t for t in (got, want))
    return torch.equal(got, want)
