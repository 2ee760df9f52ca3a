"""The stages behind capture, one after the other: a captured graph becomes what runs it."""

from __future__ import annotations

import logging

import torch
from torch._guards import tracing

from torch_mpk.builds import timing
from torch_mpk.builds.dump import Dump
from torch_mpk.capture.graph import Captured
from torch_mpk.config import Options
from torch_mpk.dispatch.compiled_graph import CompiledGraph
from torch_mpk.dispatch.fallback import announce_fallbacks, check_coverage, choice_for_parts, compile_others
from torch_mpk.partition.segments import partition
from torch_mpk.patterns import apply
from torch_mpk.runtime.backend import backend_of

logger = logging.getLogger(__name__)


def build(captured: Captured, device: torch.device, options: Options) -> CompiledGraph:
    """Stages 2 to 8; ``CompiledGraph.build`` has 4 to 8 of each segment."""
    dump = Dump.next()
    dump.write("1.capture.txt", captured.__str__)
    with tracing(None):  # Dynamo's context, whose fake mode is not the captured graph's
        with timing.stage("patterns"):
            tasks = apply(captured.graph_module)
        dump.write("2.tasks.txt", lambda: tasks.print_readable(print_output=False))
        with timing.stage("partition"):
            target, how = backend_of(device).target(device, options), choice_for_parts(captured, options)
            partitioned = partition(tasks, options.min_segment_nodes, target, how)
        dump.write("3.segments.txt", partitioned.__str__)
        partitioned.estimate = check_coverage(partitioned, captured, options, device)
        compiled = CompiledGraph.build(partitioned, device, options, dump)
        announce_fallbacks(partitioned, captured, options)
        if partitioned.fallbacks:
            with timing.stage("fallback"):
                compiled.others = compile_others(partitioned, captured, options)
    parts = [(segment.num_operations, segment.ours) for segment in partitioned.segments]
    total, num_ours = sum(count for count, _ in parts), sum(is_ours for _, is_ours in parts)
    rest = sum(count for count, is_ours in parts if not is_ours)
    logger.info("a graph of %d operations is %d megakernel(s); %d operations fall back", total, num_ours, rest)
    return compiled
