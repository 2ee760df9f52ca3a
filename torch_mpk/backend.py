"""The backend: ``torch.compile(model, backend="mpk")``, from Dynamo's graph to a launch, top to bottom."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._guards import tracing

from torch_mpk.admission import check_call, check_graph, check_mutations
from torch_mpk.capture import Captured, capture, number_positions
from torch_mpk.config import Options, env
from torch_mpk.dump import Dump
from torch_mpk.errors import UnsupportedError
from torch_mpk.fallback import check_coverage, compile_others, fall_back
from torch_mpk.partition import partition
from torch_mpk.patterns import apply
from torch_mpk.runtime import Program
from torch_mpk.specialize import per_call_numbers
from torch_mpk.stages import stage, timed
from torch_mpk.verify import verified

logger = logging.getLogger(__name__)

_programs: weakref.WeakValueDictionary[tuple[Any, ...], Program] = weakref.WeakValueDictionary()


def mpk(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles one graph of Dynamo's.

    What cannot be compiled runs as ``options["fallback"]`` says, and one warning names node, source line and reason.

    Raises:
        OptionError: ``mode`` or ``options`` has a name or value that is not known.
        MpkError: with ``options={"fallback": "error"}``, what would have been a fallback.
    """
    settings = Options.parse(mode, options)
    if env.disable:
        return gm.forward
    try:
        return compile_call(gm, example_inputs, settings)
    except Exception as error:
        return fall_back(gm, example_inputs, settings, error)


def compile_call(gm: torch.fx.GraphModule, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """What runs a graph of Dynamo's. Raises whatever makes it one that we do not run."""
    numbers = number_positions(gm, inputs)
    device = check_call([value for i, value in enumerate(inputs) if i not in numbers])
    try:
        return compile_graph(gm, inputs, device, options)
    except UnsupportedError as error:
        if not numbers:
            raise
        logger.info("building for each shape, because one build cannot hold for all: %s", error)
        return per_call_numbers(
            numbers,
            build=lambda inputs: compile_graph(gm, inputs, device, options, specialize=True),
            give_up=lambda inputs, error: fall_back(gm, inputs, options, error),
        )


def compile_graph(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], device: torch.device, options: Options, specialize: bool = False
) -> Callable[..., Any]:
    with timed() as seconds:
        with stage("capture"):
            captured = capture(gm, inputs, specialize=specialize)
            check_graph(captured)
            check_mutations(captured, inputs)
        program = build(captured, device, options)
    program.seconds = program.seconds or seconds
    call = program.callable(gm.forward)
    if options.verify:
        written = [i for i, graph_input in enumerate(captured.inputs) if graph_input.is_mutated]
        call = verified(call, program, gm.forward, written, device, options)
    return call


def build(captured: Captured, device: torch.device, options: Options) -> Program:
    """Stages 2 to 8. A graph that was built before and is still in use is not built again."""
    key = (captured.key(), device, options)
    program = _programs.get(key)
    if program is None:
        dump = Dump.next()
        dump.write("1.capture.txt", str(captured))
        with tracing(None):  # Dynamo's context, whose fake mode is not the captured graph's
            with stage("patterns"):
                tasks = apply(captured.graph_module)
            dump.write("2.tasks.txt", tasks.print_readable(print_output=False))
            with stage("partition"):
                partitioned = partition(tasks, options.min_segment_nodes)
            dump.write("3.segments.txt", str(partitioned))
            check_coverage(partitioned, captured, device, options)
            program = Program(partitioned, device, options, dump)
            if partitioned.fallbacks:
                with stage("fallback"):
                    program.others = compile_others(partitioned, device, options)
            _programs[key] = program
            parts = [(segment.num_operations, segment.ours) for segment in partitioned.segments]
            total, num_ours = sum(count for count, _ in parts), sum(is_ours for _, is_ours in parts)
            rest = sum(count for count, is_ours in parts if not is_ours)
            logger.info("a graph of %d operations is %d megakernel(s); %d operations fall back", total, num_ours, rest)
    return program
