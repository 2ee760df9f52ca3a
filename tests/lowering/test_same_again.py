"""Lowering does not depend on where objects lie: ranks, and later processes, make the same graph."""

from __future__ import annotations

import pytest
import torch

from torch_mpk import _C
from torch_mpk.capture.graph import capture
from torch_mpk.lowering import lower
from torch_mpk.patterns import apply
from torch_mpk.testing.zoo import MODELS, see_graphs


@pytest.mark.slow
def test_a_graph_is_lowered_alike_again_and_again() -> None:
    """Latent attention writes two buffers, of which one is still to be filled from the other."""
    made = []

    def see(gm: torch.fx.GraphModule, inputs: list[object]) -> None:
        tasks = apply(capture(gm, inputs).graph_module)
        kept = []  # so that later objects lie elsewhere
        for _ in range(8):
            lowered = lower(tasks)
            kept.append((lowered, object()))
            target = _C.Target("cpu", num_workers=2, fuse=False)
            made.append(_C.make_schedule(lowered.graph, target).to_json())

    see_graphs(MODELS["DeepSeek-V2"], see, batch=2)
    assert len(set(made)) == 1
