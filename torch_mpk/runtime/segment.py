"""One lowered segment with its executable, and the callable that launches it."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from torch_mpk import _C
from torch_mpk.config import Options
from torch_mpk.dump import Dump
from torch_mpk.lowering import Lowered

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

    def __init__(self, lowered: Lowered, device: torch.device, options: Options, dump: Dump) -> None:
        backend = backend_of(device)
        dump.write("4.graph.json", lowered.graph.to_json())
        schedule = _C.make_schedule(lowered.graph, backend.target(device, options))
        dump.write("5.schedule.json", schedule.to_json())
        _C.validate(schedule)
        self.lowered = lowered
        self.device = device
        self.executable = backend.load(schedule, device, options, dump)
        self._backend = backend
        self._stream = functools.partial(backend.current_stream, device)

    def launch(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], scalars: Sequence[int]) -> None:
        self.executable.run(inputs, outputs, scalars, self._stream())

    def synchronize(self) -> None:
        self._backend.synchronize(self.executable, self.device)

    def describe(self) -> dict[str, Any]:
        """What a launch passes, for the dump."""
        outputs = [
            output if isinstance(output, int) else [str(output.dtype), list(output.shape), list(output.stride)]
            for output in self.lowered.outputs
        ]
        return {
            "device": str(self.device),
            "inputs": list(self.lowered.inputs),
            "written_inputs": self.written_inputs(),
            "scalars": list(self.lowered.scalars),
            "outputs": outputs,
        }

    def written_inputs(self) -> list[int]:
        """The arguments the segment writes in place."""
        graph = self.lowered.graph
        operands = (operand for node in graph.nodes for operand in node.operands)
        buffers = {operand.tensor.buffer for operand in operands if operand.is_write}
        written = (graph.buffers[buffer] for buffer in sorted(buffers))
        return [self.lowered.inputs[buffer.index] for buffer in written if buffer.kind == "input"]

    def callable(self, eager: Callable[..., Any]) -> Callable[..., Any]:
        """What runs the segment on the arguments of its graph, or ``eager`` where the executable cannot take them.

        Outputs are new tensors at every call. There is no Python work for each argument: the executable itself asks the
        tensors for their addresses.
        """
        lowered, launch = self.lowered, self.launch
        pick_inputs, pick_scalars = _picker(lowered.inputs), _picker(lowered.scalars)
        pick_written = _picker(self.written_inputs())
        increment_version, is_inference = torch.autograd.graph.increment_version, torch.Tensor.is_inference
        is_inference_mode = torch.is_inference_mode_enabled
        makers = [
            functools.partial(torch.empty_strided, output.shape, output.stride, dtype=output.dtype, device=self.device)
            for output in lowered.outputs
            if not isinstance(output, int)
        ]
        places = [output if isinstance(output, int) else None for output in lowered.outputs]
        only_fresh = all(place is None for place in places)

        def call(*args: Any) -> Any:
            written = pick_written(args)
            if not is_inference_mode() and any(map(is_inference, written)):
                return eager(*args)  # which raises: such tensors may change in inference mode only
            outputs = [make() for make in makers]
            try:
                launch(pick_inputs(args), outputs, pick_scalars(args))
            except ValueError as error:  # nothing was launched: an input's address is not aligned as the kernel needs
                logger.debug("this call runs eagerly: %s", error)
                return eager(*args)
            increment_version(written)
            if only_fresh:
                return outputs
            fresh = iter(outputs)
            return [next(fresh) if place is None else args[place] for place in places]

        return call


def _picker(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that takes these places out of a tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda args: tuple(args[place] for place in places)
