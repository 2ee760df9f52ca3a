"""Compiles decode steps for every chip, whether it is there or not, and says what the assembler makes of them.

``python -m tests.codegen.chips`` compiles every recorded graph for every chip, which takes an hour, and prints what
takes a stack or spills; with ``--chip 120`` for one chip alone.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch_mpk.tasks  # noqa: F401  declares the tasks
from tests.schedule import replay
from torch_mpk import _C
from torch_mpk.jit import compile_cuda
from torch_mpk.jit.report import Resources


@dataclass(frozen=True)
class Chip:
    """A GPU of each compute capability that differs in what code for it is like."""

    name: str
    capability: int
    num_sms: int
    smem_bytes: int

    def target(self) -> _C.Target:
        arch = _C.arch_of_device(self.capability)
        assert arch is not None
        return _C.Target("cuda", arch.number, self.num_sms, self.smem_bytes, True, True, self.capability)


SMALL = 99 << 10
CHIPS = {
    **{
        arch.number: Chip(f"sm{arch.number}'s largest", arch.number, arch.num_sms, arch.smem_bytes)
        for arch in _C.archs()
    },
    86: Chip("RTX 3090", 86, 82, SMALL),
    89: Chip("RTX 4090", 89, 128, SMALL),
}


def resources(graph: _C.TBGraph, chip: Chip) -> Resources:
    """Of the graph's kernel, compiled for the chip's own capability."""
    schedule = _C.make_schedule(graph, chip.target())
    _C.validate(schedule)
    return compile_cuda(_C.generate_cuda(schedule).source, chip.capability).resources


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", type=int, action="append", choices=sorted(CHIPS), help="default: all")
    graphs = replay.recorded_graphs()
    for capability in parser.parse_args().chip or sorted(CHIPS):
        most = 0
        for name, graph in graphs.items():
            found = resources(graph, CHIPS[capability])
            most = max(most, found.registers)
            if found.stack_bytes or found.spill_store_bytes or found.warnings:
                print(f"{name} for {capability}: {found}", flush=True)
        print(f"{capability}: {len(graphs)} graphs, at most {most} registers", flush=True)


if __name__ == "__main__":
    main()
