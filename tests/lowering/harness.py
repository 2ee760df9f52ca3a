"""Lowers small functions and compares what the task graph computes with eager."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from torch_mpk import lowering, reference_vm
from torch_mpk.lowering import Alias, Fresh, Literal, Lowered


def capture(fn: Callable, *args: torch.Tensor, mode: str = "fake") -> fx.GraphModule:
    with torch.no_grad():
        return make_fx(fn, pre_dispatch=True, tracing_mode=mode)(*args)


def allocate(lowered: Lowered) -> list[torch.Tensor]:
    """Output buffers, poisoned."""
    out = []
    for fresh in lowered.outputs:
        if isinstance(fresh, Fresh):
            t = torch.empty_strided(fresh.shape, fresh.stride, dtype=fresh.dtype)
            out.append(t.fill_(torch.nan if fresh.dtype.is_floating_point else 77))
    return out


def results(lowered: Lowered, args: Sequence[object], outputs: Sequence[torch.Tensor]) -> list:
    fresh = iter(outputs)
    out: list = []
    for spec in lowered.outputs:
        if isinstance(spec, Alias):
            base = args[spec.argument] if spec.fresh is None else outputs[spec.fresh]
            out.append(torch.as_strided(base, spec.shape, spec.stride, base.storage_offset() + spec.offset))
        elif isinstance(spec, Literal):
            out.append(spec.value)
        else:
            out.append(next(fresh) if isinstance(spec, Fresh) else args[spec])
    return out


def run(lowered: Lowered, args: Sequence[object], runner: Callable | None = None) -> list:
    """Run a lowered segment on its arguments, in the order of the segment's placeholders."""
    outputs = allocate(lowered)
    runner = runner or functools.partial(reference_vm.run_graph, lowered.graph)
    runner([args[i] for i in lowered.inputs], outputs, [args[i] for i in lowered.scalars])
    return results(lowered, args, outputs)


def clone(args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies with the same strides."""
    return [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype).copy_(a) for a in args]


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
    for ours, eager in zip([*actual, *our_args], [*expected, *eager_args]):
        if ours is None:
            assert eager is None
            continue
        assert ours.shape == eager.shape and ours.dtype == eager.dtype
        torch.testing.assert_close(ours, eager, rtol=rtol, atol=rtol, equal_nan=True)
    return lowered
