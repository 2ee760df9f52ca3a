"""Lowers small functions and compares what the task graph computes with eager."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from torch_mpk import lowering
from torch_mpk.lowering import Lowered
from torch_mpk.testing import reference_vm


def capture(fn: Callable, *args: torch.Tensor, mode: str = "fake") -> fx.GraphModule:
    with torch.no_grad():
        return make_fx(fn, pre_dispatch=True, tracing_mode=mode)(*args)


def allocate(lowered: Lowered) -> list[torch.Tensor]:
    """Output buffers, poisoned."""
    empty = (torch.empty_strided(f.shape, f.stride, dtype=f.dtype) for f in lowered.fresh)
    return [t.fill_(torch.nan if t.dtype.is_floating_point else 77) for t in empty]


def run(lowered: Lowered, args: Sequence[object], runner: Callable | None = None) -> list:
    """Run a lowered segment on its arguments, in the order of the segment's placeholders; returns its results."""
    node = (*lowered.inputs, *lowered.scalars)[0] if args else None
    placeholders = [n for n in node.graph.nodes if n.op == "placeholder"] if node else []
    given = dict(zip(placeholders, args, strict=True))
    inputs, scalars = ([given[n] for n in nodes] for nodes in (lowered.inputs, lowered.scalars))
    outputs = allocate(lowered)
    (runner or functools.partial(reference_vm.run_graph, lowered.graph))(inputs, outputs, scalars)
    sources = {"input": inputs, "output": outputs, "scalar": scalars}
    results = []
    for spec in lowered.outputs:
        result = spec.value if spec.kind == "value" else sources[spec.kind][spec.index]
        if isinstance(result, torch.Tensor) and not spec.whole:
            result = torch.as_strided(result, spec.shape, spec.stride, result.storage_offset() + spec.offset)
        results.append(result)
    return results


def clone(args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies with the same strides."""
    return [
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype).copy_(a) if isinstance(a, torch.Tensor) else a
        for a in args
    ]


def check(fn: Callable, *args: torch.Tensor, exact: bool = True, tolerance: float = 1e-5) -> Lowered:
    """Assert that fn, lowered and run, gives eager's results, shapes, strides and effects on its arguments."""
    module = capture(fn, *clone(args))
    for node in module.graph.nodes:
        assert (reason := lowering.supports(node)) is None, f"{node.name} {node.target}: {reason}"
    lowered = lowering.lower(module)
    eager_args, our_args = clone(args), clone(args)
    expected = fn(*eager_args)
    expected = list(expected) if isinstance(expected, (tuple, list)) else [expected]
    actual = run(lowered, our_args)
    rtol = 0 if exact else tolerance
    assert len(actual) == len(expected)
    for ours, eager in zip([*actual, *our_args], [*expected, *eager_args], strict=False):
        if ours is None:
            assert eager is None
            continue
        assert (ours.shape, ours.dtype) == (eager.shape, eager.dtype)
        torch.testing.assert_close(ours, eager, rtol=rtol, atol=rtol, equal_nan=True)
    return lowered
