"""Stage 8 on the CPU: a schedule run by persistent worker threads."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torch_mpk import _C
from torch_mpk.builds.dump import Dump
from torch_mpk.builds.timing import stage
from torch_mpk.config import Options, env
from torch_mpk.errors import MegakernelTimeout, NoHostCompilerError
from torch_mpk.jit import compile_host
from torch_mpk.jit.compile import Order
from torch_mpk.jit.host import tier_flags
from torch_mpk.plan import Plan
from torch_mpk.registry import Task, get
from torch_mpk.runtime.timeout import OverdueError, call_within, keep  # noqa: F401  (``keep`` is part of a backend)
from torch_mpk.runtime.watchdog import watchdog_seconds
from torch_mpk.warn_once import warn

logger = logging.getLogger(__name__)

_TILE_CODE_BYTES = 16  # of mpk::TileCode, a pointer and a size


def num_threads(options: Options) -> int:
    return options.num_threads or env.num_threads or torch.get_num_threads()


def target(device: torch.device, options: Options) -> _C.Target:
    return _C.Target("cpu", num_workers=num_threads(options), fuse=False)


def compile_plan(plan: Plan, device: torch.device) -> None:
    """Nothing: what a plan needs of a compiler takes ``load`` a second."""


def load(plan: Plan, device: torch.device, options: Options, dump: Dump) -> _C.CpuExecutable:
    schedule = plan.schedule
    assert schedule is not None  # threads walk through it
    with stage("compile"):
        compiled = compile_tiles(schedule.graph, dump)
    with stage("load"):
        executable = _C.CpuExecutable(schedule, num_threads(options), env.cpu_isa or "", compiled)
    watchdog = watchdog_seconds(options), executable.num_threads
    for name in executable.missing_references:
        executable.set_reference(name, functools.partial(_run_reference, get(name), *watchdog))
    for bound in plan.index_bounds:
        executable.expect_index(*bound)
    return executable


def compile_tiles(graph: _C.TBGraph, dump: Dump) -> dict[int, int]:
    """The addresses of the code of nodes whose tasks have a C++ body; none where there is no compiler."""
    source, functions = _C.generate_cpu_tiles(graph)
    if not source:
        return {}
    dump.write("6.tiles.cpp", source)
    tasks = sorted({graph.nodes[node].task for node, _ in functions})
    try:
        library = tile_library(source, tasks)
    except NoHostCompilerError as error:
        warn(f"torch_mpk runs {', '.join(tasks)} by their references, not by their C++ code: {error}")
        return {}
    return tile_addresses(library, [(node, place) for node, place in functions if _runs_code(graph.nodes[node])])


def tile_library(source: str, tasks: Iterable[str]) -> ctypes.CDLL:
    """What ``_C.generate_cpu_tiles`` wrote for tasks, compiled for the machine's instruction set. It is never unloaded.

    Raises what ``compile_host`` raises.
    """
    return ctypes.CDLL(str(compile_host(source, flags=tier_flags(), order=Order(names=tuple(tasks)))))


def tile_addresses(library: ctypes.CDLL, functions: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Of each node, where its code is in a library of ``_C.generate_cpu_tiles``."""
    table = ctypes.addressof(ctypes.c_char.in_dll(library, "torch_mpk_tiles"))
    return {node: table + place * _TILE_CODE_BYTES for node, place in functions}


def _runs_code(node: Any) -> bool:
    task = get(node.task)
    runs = task.runs_code(getattr(torch, operand.tensor.dtype) for operand in node.operands)
    if not runs:
        logger.info("task %s runs by its reference: operands are float64, and its C++ computes in float", task)
    return runs


def _run_reference(
    task: Task,
    seconds: float,
    num_workers: int,
    operands: dict[str, tuple[int, str, list[int], list[int]]],
    attrs: dict[str, Any],
    phase: str,
) -> None:
    """Runs a task that has no CPU kernel by its reference, on the memory of its operands.

    Raises MegakernelTimeout when that takes longer than ``seconds``, unless they are 0.
    """
    tensors = {name: _tensor_at(*operand) for name, operand in operands.items()}
    call = functools.partial(task, *(tensors.get(operand.name) for operand in task.inputs), **attrs)
    try:
        result = call_within(seconds, call)
    except OverdueError:
        raise MegakernelTimeout(
            f"the reference of task {task.name} has run for {seconds:g} s and was aborted: the call has no results, "
            "and its in-place updates may be made, or still come. The reference's thread goes on until it returns, and "
            f"keeps the call's tensors.\n{_who_waits(task, num_workers, phase)}\n{_remedy(task)}"
        ) from None
    with torch.inference_mode():
        for output, value in zip(task.outputs, task.results(result), strict=True):
            tensors[output.name].copy_(value)


def _remedy(task: Task) -> str:
    if task.is_ours:
        return MegakernelTimeout.remedy
    return f"It is declared at {task.place}: make it return sooner, or raise watchdog_seconds."


def _who_waits(task: Task, num_workers: int, phase: str) -> str:
    rows = [("workers", "in phase", "waits for"), ("0", phase, f"the reference of task {task.name}")]
    if num_workers > 1:
        rows.append((f"1-{num_workers - 1}", phase, f"event of phase {phase}"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


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


def check(executable: _C.CpuExecutable) -> None:
    """Nothing: a run that is aborted says so itself."""
