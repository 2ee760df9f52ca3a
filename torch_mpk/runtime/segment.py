"""One lowered segment with its executable, and the callable that launches it."""

from __future__ import annotations

import functools
import json
import logging
import operator
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from torch_mpk import _C
from torch_mpk.config import Options
from torch_mpk.dump import Dump
from torch_mpk.errors import IndexRangeError
from torch_mpk.lowering import Output, lower
from torch_mpk.runtime.bounds import index_bounds
from torch_mpk.stages import stage

logger = logging.getLogger(__name__)


def backend_of(device: torch.device) -> ModuleType:
    """The module that builds and loads for a kind of device."""
    if device.type == "cuda":
        from torch_mpk.runtime import cuda  # needs the JIT

        return cuda
    from torch_mpk.runtime import cpu

    return cpu


class Segment:
    """A segment of a captured graph as an executable. It holds no tensor: several callables may share it."""

    def __init__(self, gm: torch.fx.GraphModule, device: torch.device, options: Options, dump: Dump) -> None:
        backend = backend_of(device)
        with stage("lowering"):
            lowered = lower(gm)
        dump.write("4.graph.json", lowered.graph.to_json())
        with stage("schedule"):
            schedule = _C.make_schedule(lowered.graph, backend.target(device, options))
            dump.write("5.schedule.json", schedule.to_json())
            _C.validate(schedule)
        positions = {node: i for i, node in enumerate(node for node in gm.graph.nodes if node.op == "placeholder")}
        self.inputs = [positions[node] for node in lowered.inputs]
        self.scalars = [positions[node] for node in lowered.scalars]
        self.written = [self.inputs[index] for index in _written_inputs(lowered.graph)]
        self.fresh, self.outputs = lowered.fresh, lowered.outputs
        self.device = device
        self.schedule = schedule
        self.executable = backend.load(schedule, device, options, dump)
        if device.type == "cpu":  # a CUDA launch reads its indices on the device, where those outside are left out
            for bound in index_bounds(gm, lowered):
                self.executable.expect_index(*bound)
        self._stream = functools.partial(backend.current_stream, device)
        self._synchronize = functools.partial(backend.synchronize, self.executable, device)
        dump.write("8.launch.json", json.dumps(self.describe(), indent=2))

    def describe(self) -> dict[str, Any]:
        """What a launch passes, as positions among the segment's arguments, and what it returns."""
        fresh = [[str(buffer.dtype), list(buffer.shape), list(buffer.stride)] for buffer in self.fresh]
        outputs = [str(output) for output in self.outputs]
        return {
            "device": str(self.device),
            "inputs": self.inputs,
            "written": self.written,
            "scalars": self.scalars,
            "fresh": fresh,
            "outputs": outputs,
        }

    def launch(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], scalars: Sequence[int]) -> None:
        self.executable.run(inputs, outputs, scalars, self._stream())

    def synchronize(self) -> None:
        self._synchronize()

    def callable(self, eager: Callable[..., Any]) -> Callable[..., Any]:
        """What runs the segment on the arguments of its graph, or ``eager`` where the executable cannot take them.

        Outputs are new tensors at every call. There is no Python work for each argument: the executable itself asks the
        tensors for their addresses.
        """
        launch = self.launch
        pick_inputs, pick_scalars, pick_written = map(_picker, (self.inputs, self.scalars, self.written))
        allocate = [
            functools.partial(torch.empty_strided, buffer.shape, buffer.stride, dtype=buffer.dtype, device=self.device)
            for buffer in self.fresh
        ]
        results = [self._result(output) for output in self.outputs]
        fresh_only = [output.index for output in self.outputs] == list(range(len(self.fresh))) and all(
            output.kind == "output" and (output.shape, output.stride, output.offset) == (buffer.shape, buffer.stride, 0)
            for output, buffer in zip(self.outputs, self.fresh, strict=True)
        )
        increment_version, is_inference = torch.autograd.graph.increment_version, torch.Tensor.is_inference
        is_inference_mode = torch.is_inference_mode_enabled

        def call(*args: Any) -> Any:
            written = pick_written(args)
            if not is_inference_mode() and any(map(is_inference, written)):
                return eager(*args)  # which raises: such tensors may change in inference mode only
            fresh = [make() for make in allocate]
            try:
                launch(pick_inputs(args), fresh, pick_scalars(args))
            except ValueError as error:  # nothing was launched: an address is null, or not aligned as the kernel needs
                logger.debug("this call runs eagerly: %s", error)
                return eager(*args)
            except IndexError as error:
                raise IndexRangeError(str(error)) from None
            increment_version(written)
            return fresh if fresh_only else [result(args, fresh) for result in results]

        return call

    def _result(self, output: Output) -> Callable[[tuple[Any, ...], list[torch.Tensor]], Any]:
        """How to make one result from the call's arguments and the buffers that were allocated for it."""
        if output.kind == "value":
            return lambda args, fresh: output.value
        if output.kind == "scalar":
            position = self.scalars[output.index]
            return lambda args, fresh: args[position]
        if output.kind == "output":
            return lambda args, fresh: fresh[output.index].as_strided(output.shape, output.stride, output.offset)
        position = self.inputs[output.index]
        if output.whole:
            return lambda args, fresh: args[position]
        return lambda args, fresh: args[position].as_strided(
            output.shape, output.stride, args[position].storage_offset() + output.offset
        )


def _written_inputs(graph: _C.TBGraph) -> list[int]:
    operands = (operand for node in graph.nodes for operand in node.operands)
    written = {operand.tensor.buffer for operand in operands if operand.is_write}
    return [buffer.index for i, buffer in enumerate(graph.buffers) if i in written and buffer.kind == "input"]


def _picker(positions: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that takes these positions out of a tuple."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda args: tuple(args[position] for position in positions)
