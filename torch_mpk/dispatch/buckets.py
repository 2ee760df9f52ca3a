"""Prompts of many lengths by one build: each runs in the smallest bucket that holds it.

Where Dynamo has made the length of a prompt a symbol, the captured graph becomes one over as many positions as a bucket
has. It pads its inputs in front, by a number of the call, and the last positions of its results are the prompt's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor

from torch_mpk.capture.graph import Captured, Conditions, source_line
from torch_mpk.capture.tracing import graph_module
from torch_mpk.dispatch.padding import Padding
from torch_mpk.dispatch.position_check import PositionCheck
from torch_mpk.dispatch.prompts import looked_up, positions_of
from torch_mpk.errors import UnsupportedError

SMALLEST = 16
MOST = 32  # that there are, up to 8,192 positions
# Of each doubling in length. A padded position costs its share of products: on a CPU much, beside its short builds.
_STEPS = {"cpu": 4, "cuda": 1}
# As many positions take as long as a launch does before it is bound by arithmetic: docs/internals/capture.md.
_LAUNCH_POSITIONS = {"cpu": 16, "cuda": 256}


def bucket_of(length: int, most: int, device: str) -> int:
    """The bucket of a prompt of up to ``most`` positions: its length rounded up to 16, 32, 64, 128 and so on, on a CPU
    to quarters of the way between them, too; ``most`` if that is less."""
    step = max(SMALLEST, (1 << (length - 1).bit_length()) // 2 // _STEPS[device])
    return min(-(-length // step) * step, most)


def chunks_of(length: int, most: int, device: str) -> list[int]:
    """The lengths of the chunks in which a prompt takes least time: each but the last fills its bucket, and there are
    several where ``most`` is less than the prompt, or padding would take longer than one more launch."""
    if length > most:
        return [most, *chunks_of(length - most, most, device)]
    whole = bucket_of(length, most, device)
    part = 1 << (length.bit_length() - 1)
    if not SMALLEST <= part < length:
        return [length]
    rest = chunks_of(length - part, most, device)
    split = part + sum(bucket_of(each, most, device) for each in rest) + len(rest) * _LAUNCH_POSITIONS[device]
    return [part, *rest] if split < whole else [length]


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Which of a graph's inputs say how large a prompt is; None: its sequences are as many in every call."""

    length: int
    batch: int | None

    @classmethod
    def of(cls, captured: Captured) -> Numbers | None:
        """None where no number is how many positions the graph is over."""
        places = captured.symbols
        for sizes in (*looked_up(captured), *(found[:2] for found in positions_of(captured))):
            if isinstance(sizes[1], int):
                continue
            batch, length = (None if isinstance(n, int) else places.get(n.node.expr, -1) for n in sizes)
            return cls(length, batch) if length is not None and -1 not in (batch, length) else None
        return None


class Prompt:
    """A captured graph over a number of positions that is known at a call only, checked to run in any bucket."""

    def __init__(self, captured: Captured, number: int) -> None:
        """``number``: the length's place among the graph's inputs.

        Raises UnsupportedError, with the operation that does not run on padded positions.
        """
        self.captured, self.number = captured, number
        length = captured.inputs[number].value
        assert isinstance(length, torch.SymInt)
        self._check = check = PositionCheck(length.node.expr, captured)
        for node in captured.graph_module.graph.nodes:
            try:
                check.visit(node)
            except UnsupportedError as error:
                raise UnsupportedError(error.reason, node.name, source_line(node)) from error
        self.conditions = Conditions(captured)

    def graph(self, size: int) -> Captured:
        """The graph over ``size`` positions, with the same inputs; its results have ``size`` positions, too.

        Raises UnsupportedError: it would hold only for some lengths.
        """
        gm, inputs = self.captured.graph_module, self.captured.inputs
        fake_mode: Any = next(each.value.fake_mode for each in inputs if isinstance(each.value, FakeTensor))
        guards = fake_mode.shape_env.guards
        num_guards = len(guards)
        with fake_mode, torch.no_grad(), enable_python_dispatcher():  # by which symbols reach PyTorch's Python code
            graph = Padding(self._check, gm, self.number, size).run()
        if len(guards) > num_guards:
            raise UnsupportedError(f"its sizes must satisfy {guards[-1].expr}")
        return Captured(graph_module(gm, graph), inputs)

    def callable(self, padded: Callable[..., Sequence[Any]]) -> Callable[..., list[Any]]:
        """What gives the prompt's positions of the results of ``padded``, which runs the graph of a bucket."""

        def call(*args: Any) -> list[Any]:
            results, length = list(padded(*args)), args[self.number]
            for index, dim, is_contiguous in found:
                last = results[index].narrow(dim, results[index].shape[dim] - length, length)
                results[index] = last.contiguous() if is_contiguous else last
            return results

        found = [dataclasses.astuple(result) for result in self._check.results]
        return call
