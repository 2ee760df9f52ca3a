"""The backend: ``torch.compile(model, backend="mpk")``, from Dynamo's graph to a launch, top to bottom."""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._guards import tracing

from torch_mpk import build_cache, timing
from torch_mpk.admission import check_call, check_graph, check_mutations
from torch_mpk.build_cache import Stored, build_key
from torch_mpk.capture import Captured, capture, input_sources, number_positions
from torch_mpk.config import Options, env
from torch_mpk.dump import Dump
from torch_mpk.errors import UnsupportedError
from torch_mpk.fallback import check_coverage, fall_back
from torch_mpk.partition import partition
from torch_mpk.patterns import apply
from torch_mpk.runtime import Program
from torch_mpk.specialize import per_call_numbers, warn_at_recompile_limit

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
    warn_at_recompile_limit(gm)
    with timing.build():
        return _compile(gm, example_inputs, settings)


def _compile(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], settings: Options) -> Callable[..., Any]:
    try:
        numbers = number_positions(gm, example_inputs)
        device = check_call([value for i, value in enumerate(example_inputs) if i not in numbers])
        try:
            return compile_graph(gm, example_inputs, device, settings)
        except UnsupportedError as error:
            if not numbers:
                raise
            logger.info("building for each shape, because one build cannot hold for all: %s", error)
            return per_call_numbers(
                numbers,
                build=lambda inputs: compile_graph(gm, inputs, device, settings, specialize=True),
                give_up=lambda inputs, error: fall_back(gm, inputs, settings, error),
            )
    except Exception as error:
        return fall_back(gm, example_inputs, settings, error)


def compile_graph(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], device: torch.device, options: Options, specialize: bool = False
) -> Callable[..., Any]:
    built_with = dataclasses.replace(options, freeze=False)  # which is a matter of calls
    with timing.stage("look-up"):
        key = build_key(gm, inputs, device, built_with)
        stored = build_cache.get(key, device) if key else None
    if stored is not None:
        check_mutations(input_sources(gm), stored.mutated, inputs)
        make = functools.partial(Program.of_plan, stored.plan, device, built_with)
        program = _shared((stored.graph, device, built_with), make)
    else:
        with timing.stage("capture"):
            captured = capture(gm, inputs, specialize=specialize)
        check_graph(captured)
        mutated = tuple(i for i, graph_input in enumerate(captured.inputs) if graph_input.is_mutated)
        check_mutations([graph_input.source for graph_input in captured.inputs], mutated, inputs)
        graph = captured.key()
        program = _shared((graph, device, built_with), functools.partial(build, captured, device, built_with))
        if key and program.plan is not None:
            build_cache.put(key, Stored(program.plan, graph, mutated), device)
    return program.callable(gm.forward, options.freeze)


def _shared(key: tuple[Any, ...], make: Callable[[], Program]) -> Program:
    """A graph that was built before and is still in use is not built again."""
    program = _programs.get(key)
    if program is None:
        program = _programs[key] = make()
    return program


def build(captured: Captured, device: torch.device, options: Options) -> Program:
    """Stages 2 to 8."""
    dump = Dump.next()
    dump.write("1.capture.txt", str(captured))
    with tracing(None):  # Dynamo's context, whose fake mode is not the captured graph's
        with timing.stage("patterns"):
            tasks = apply(captured.graph_module)
        dump.write("2.tasks.txt", tasks.print_readable(print_output=False))
        with timing.stage("partition"):
            partitioned = partition(tasks)
        dump.write("3.segments.txt", str(partitioned))
        check_coverage(partitioned, options)
        return Program.build(partitioned, device, options, dump)
