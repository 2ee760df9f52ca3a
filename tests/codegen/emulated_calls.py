"""Inputs and outputs of emulated kernels, and what they should be."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_mpk import _C
from torch_mpk.testing.emulator import aligned
from torch_mpk.testing.reference_vm import dtype_of, run_graph


def tensors(graph: _C.TBGraph, kind: str) -> list[_C.Tensor]:
    """A view of every buffer of the kind, by index: the first that a node has."""
    found = {}
    for node in graph.nodes:
        for operand in node.operands:
            buffer = graph.buffers[operand.tensor.buffer]
            if buffer.kind == kind:
                found.setdefault(buffer.index, operand.tensor)
    return [found[i] for i in sorted(found)]


def input_bytes(graph: _C.TBGraph) -> dict[str, int]:
    """Of every input: its size, by its name, in the order of their indices."""
    found = {b.index: b for b in graph.buffers if b.kind == "input"}
    return {found[i].name: found[i].bytes for i in sorted(found)}


def allocate(t: _C.Tensor) -> torch.Tensor:
    count = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.strides))
    return aligned(count * dtype_of(t.dtype).itemsize, 0xFF).view(dtype_of(t.dtype)).as_strided(t.shape, t.strides)


def reference(graph: _C.TBGraph, inputs: Sequence[torch.Tensor], scalars: Sequence[int] = ()) -> tuple[list, list]:
    """The same call by the tasks' references, on copies: the inputs after it, and the outputs."""
    copies = [t.clone() for t in inputs]
    outputs = [allocate(t) for t in tensors(graph, "output")]
    run_graph(graph, copies, outputs, scalars)
    return copies, outputs


def decoder_inputs(graph: _C.TBGraph, limits: list[int], slot: int) -> list[torch.Tensor]:
    """Random inputs of ``decoder_graph.decoder``."""
    sizes = input_bytes(graph)
    names, inputs = list(sizes), []
    for i, t in enumerate(tensors(graph, "input")):
        is_shared = names[i] == "pages"  # by views, of which none has all
        x = aligned(sizes[names[i]], 0xFF).view(dtype_of(t.dtype)) if is_shared else allocate(t)
        if names[i] in ("limit", "length"):
            x.copy_(torch.tensor(limits))
        elif names[i] == "block_table":
            x.copy_(torch.randperm(x.numel()).view(x.shape))
        elif t.dtype == "int64":
            x.fill_(slot)
        elif t.dtype == "int8":
            x.copy_(torch.randint(-127, 128, x.shape))
        elif ".scale" in names[i]:
            x.copy_((torch.rand(x.shape) + 0.5) / (100 if x.shape[1] == 1 else 1))
        else:
            x.copy_(torch.randn(x.shape) / (t.shape[-1] ** 0.5 if "weight" in names[i] and len(t.shape) > 1 else 1))
        inputs.append(x)
    return inputs


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()
