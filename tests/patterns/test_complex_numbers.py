"""Complex rotary embeddings become real ones; other complex graphs stay as they are."""

import pytest
import torch

from tests.patterns.rewriting import graph_of
from torch_mpk import patterns


def rotary(x: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As DeepSeek-V2 and Llama 4 write it."""
    angles = position[:, None].float() * torch.arange(1.0, 5.0)
    turn = torch.polar(torch.ones_like(angles), angles) * 1.5
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return (torch.view_as_real(pairs * turn.unsqueeze(1)[:, :, :]).flatten(2).type_as(x),)


def is_complex(gm: torch.fx.GraphModule) -> bool:
    values = [node.meta.get("val") for node in gm.graph.nodes]
    return any(isinstance(value, torch.Tensor) and value.is_complex() for value in values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_complex_rope_is_computed_in_real_numbers(dtype):
    x, position = torch.randn(2, 3, 8, dtype=dtype), torch.tensor([3, 40])
    captured = graph_of(rotary, x, position)
    assert is_complex(captured)
    gm = patterns.apply(captured)
    gm.graph.lint()
    assert not is_complex(gm)
    torch.testing.assert_close(gm(x, position), list(rotary(x, position)))


def conjugate_product(x):
    pairs = torch.view_as_complex(x)
    return (torch.view_as_real((pairs * pairs.conj()).resolve_conj() - pairs),)


def written_through_a_view(x):
    pairs = torch.view_as_complex(x)
    x.add_(1)
    return (torch.view_as_real(pairs * pairs),)


def modulus(x):
    return (torch.view_as_complex(x).abs(),)


def returned(x):
    return (torch.view_as_complex(x) * 2,)


@pytest.mark.parametrize("function", [conjugate_product, written_through_a_view, modulus, returned])
def test_other_complex_graphs_keep_their_meaning(function):
    x = torch.randn(3, 2)
    gm = patterns.apply(graph_of(function, x.clone()))
    gm.graph.lint()
    ours, eager = x.clone(), x.clone()
    torch.testing.assert_close(gm(ours), list(function(eager)))
    assert torch.equal(ours, eager)
