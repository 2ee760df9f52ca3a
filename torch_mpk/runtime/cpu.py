"""Stage 8 on the CPU: a schedule run by persistent worker threads."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from torch_mpk import _C
from torch_mpk.config import Options, env
from torch_mpk.dump import Dump
from torch_mpk.errors import NoHostCompilerError
from torch_mpk.jit import compile_host
from torch_mpk.registry import Task, get
from torch_mpk.timing import stage

if TYPE_CHECKING:
    from torch_mpk.runtime.plan import Plan

logger = logging.getLogger(__name__)

_TILE_CODE_BYTES = 16  # of mpk::TileCode, a pointer and a size


def num_threads(options: Options) -> int:
    return options.num_threads or env.num_threads or torch.get_num_threads()


def target(device: torch.device, options: Options) -> _C.Target:
    return _C.Target("cpu", num_workers=num_threads(options), fuse=False)


def generate(schedule: _C.Schedule, options: Options, dump: Dump) -> _C.Schedule:
    """The schedule is the program: threads walk through it."""
    return schedule


def load(plan: Plan, device: torch.device, options: Options, dump: Dump) -> _C.CpuExecutable:
    with stage("compile"):
        compiled = _compile_tiles(plan.program.graph, dump)
    with stage("load"):
        executable = _C.CpuExecutable(plan.program, num_threads(options), env.cpu_isa or "", compiled)
    for name in executable.missing_references:
        executable.set_reference(name, functools.partial(_run_reference, get(name)))
    for bound in plan.index_bounds:
        executable.expect_index(*bound)
    return executable


def _compile_tiles(graph: _C.TBGraph, dump: Dump) -> dict[int, int]:
    """The addresses of the code of nodes whose tasks have a C++ body; none where there is no compiler."""
    source, functions = _C.generate_cpu_tiles(graph)
    if not source:
        return {}
    dump.write("6.tiles.cpp", source)
    try:
        library = ctypes.CDLL(str(compile_host(source)))  # which is never unloaded
    except NoHostCompilerError as error:
        logger.info("tasks with C++ bodies run by their references: %s", error)
        return {}
    table = ctypes.addressof(ctypes.c_char.in_dll(library, "torch_mpk_tiles"))
    return {node: table + place * _TILE_CODE_BYTES for node, place in functions}


def _run_reference(
    task: Task, operands: dict[str, tuple[int, str, list[int], list[int]]], attrs: dict[str, Any]
) -> None:
    """Runs a task that has no CPU body by its reference, on the memory of its operands."""
    tensors = {name: _tensor_at(*operand) for name, operand in operands.items()}
    with torch.inference_mode():
        result = task(*(tensors.get(operand.name) for operand in task.inputs), **attrs)
        for output, value in zip(task.outputs, task.results(result), strict=True):
            tensors[output.name].copy_(value)


def _tensor_at(address: int, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    element_type = getattr(torch, dtype)
    if 0 in shape:
        return torch.empty(shape, dtype=element_type)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (extent * element_type.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=element_type, count=extent).as_strided(shape, strides)


def current_stream(device: torch.device) -> int:
    return 0


def synchronize(executable: _C.CpuExecutable, device: torch.device) -> None:
    """Nothing to wait for: a run on the CPU returns when it is done."""
