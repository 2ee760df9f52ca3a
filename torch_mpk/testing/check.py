"""Whether tasks compute what their references do, in every way in which they can run on this machine."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch._dynamo  # here, so that the processes that checks run in need not import it each
from torch._dynamo.exc import BackendCompilerFailed
from torch.testing._internal.optests.generate_tests import OpCheckError

from torch_mpk import _C
from torch_mpk.config import env
from torch_mpk.errors import CompileError, KernelCompileError, MpkError, TaskError, UnsupportedError, first_line
from torch_mpk.jit import compile_cuda, find_compiler
from torch_mpk.jit.compile import Order as Asked
from torch_mpk.registry import Attr, Task
from torch_mpk.registry.calls import Call
from torch_mpk.runtime import cpu
from torch_mpk.testing.checker import Checker, Findings, Report, grouped
from torch_mpk.testing.emulator import EmulatedKernel, Order, compile_kernels, threads_of_tiles
from torch_mpk.testing.guarded import Block, LeftOut, run_in_turns
from torch_mpk.testing.tasks import DTYPES, Calls, compare, copies

AS_DECLARED, DEFAULTS, ZERO_ROWS, STRIDES = "", "at the default attributes", "with zero rows", "with strides"

_WORKERS = 3  # of an emulated kernel, and threads on the CPU
# The oldest generations with a copy engine and without: device code of tiles sees no other difference.
ARCHS = sorted({arch.has_bulk_copies: arch.number for arch in reversed(_C.archs())}.values())
_CODE = {max(ARCHS): "device code"}  # as reports call it; of others by the number
_TURNS = [
    f"threads run in {order} order or operands lie elsewhere: does a barrier (threads.sync()) miss, or is memory read "
    "that nobody has written?"
    for order in get_args(Order)
]
_PADDING = 3  # elements behind a row of a strided operand
# What decides whether a warp or all warps take a tile: kernels are made for both.
_TILE_BYTES = re.compile(r"(constexpr int kTileBytes = )\d+;")


def check_task(
    task: Task, dtypes: Sequence[torch.dtype] = DTYPES, report: Report = lambda passed: None, seconds: float = 60
) -> list[str]:
    """``check_tasks`` of one task. Returns what was not run; raises AssertionError where anything fails."""
    findings = check_tasks([task], dtypes, report, seconds)
    if findings.failures:
        raise AssertionError("\n".join(findings.failures))
    return findings.not_run


def check_tasks(
    tasks: Sequence[Task],
    dtypes: Sequence[torch.dtype] = DTYPES,
    report: Report = lambda passed: None,
    seconds: float = 60,
) -> Findings:
    """Run every sample of every task, in each dtype and way; ``report`` is told of what has passed.

    A sample is run as it is declared, at the default attributes, with zero rows and with strides. The ways: the
    reference; the operator, by ``torch.library.opcheck``; the tiles in random order, by the reference; C++ code on the
    CPU; device code on the CPU, emulated with 32 threads and with all threads of a CTA, in several orders of threads;
    for a task with ``pattern=True``, a model of its operations; the device code compiled for each architecture, where
    there is a compiler; a CUDA kernel, where there is a device. All but the last two run in processes of their own, on
    memory that ends where the operands do, no longer than ``seconds`` a sample.

    Raises TaskError where a task has no samples.
    """
    for task in tasks:
        if not task.samples:
            raise TaskError(f"{task.name}: there is nothing to check it with: declare samples=[{{...}}]")
    checker = _Checker(report, seconds)
    samples = [sample for task in tasks for dtype in _dtypes_of(task, dtypes) for sample in _samples(task, dtype)]
    samples = checker.run("reference", samples, _check_reference)
    checker.run("operator", [s for s in samples if s.kind in (AS_DECLARED, ZERO_ROWS)], _check_operator)
    runnable = checker.lowered(samples)
    checker.run("tiles in any order", runnable, lambda sample: sample.calls.check_schedule(seed=0))
    checker.check_cpu(runnable)
    has_compiler = has_cuda_compiler()
    checker.check_device_code([s for s in runnable if s.has_device_code], has_compiler)
    checker.run("lifted from a model", [s for s in samples if s.can_be_lifted], _check_lifting)
    checker.compile_for_cuda([s for s in runnable if s.has_device_code], has_compiler)
    checker.check_cuda([s for s in runnable if s.has_device_code])
    return checker.findings


# ---- samples ----


@dataclass(frozen=True, eq=False)
class Sample:
    """One of a task's samples, as it is declared or changed."""

    task: Task
    number: int
    values: Mapping[str, Any]
    kind: str
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def owner(self) -> str:
        return f"task {self.task.name}"

    @property
    def file(self) -> str:
        return self.task.file

    def __str__(self) -> str:
        return f"{self.types}, sample {self.number} {dict(self.values)}{self.kind and ' '}{self.kind}"

    @property
    def types(self) -> str:
        fixed = {str(o.dtype) for o in self.task.inputs if o.dtype is not None and o.dtype.is_floating_point}
        types = {str(self.dtype)} if any(o.dtype is None for o in self.task.inputs) else fixed
        return " and ".join(sorted(name.removeprefix("torch.") for name in types)) or "integers"

    @property
    def has_device_code(self) -> bool:
        return self.task.role == "tile" and bool(self.task.header or self.task.headers)

    @property
    def can_be_lifted(self) -> bool:
        return self.task.pattern and self.kind in (AS_DECLARED, DEFAULTS)

    @functools.cached_property
    def call(self) -> Call:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.number)
            operands, attrs = self.task.sample(self.values, self.dtype)
        if self.kind == STRIDES:
            operands = [None if t is None else _padded(t) for t in operands]
        return Call(self.task, operands, attrs)

    @functools.cached_property
    def calls(self) -> Calls:
        """The call as a segment of its own."""
        return Calls([self.call])

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """Of the operands that are there, and of what ``calls`` allocates for results."""
        operands = [o.name for o, t in zip(self.task.inputs, self.call.operands, strict=True) if t is not None]
        made = {o.index: spec.name for o, spec in zip(self.calls.lowered.outputs, self.task.outputs, strict=True)}
        return operands, [made[i] for i in range(len(self.calls.lowered.fresh))]


def _dtypes_of(task: Task, dtypes: Sequence[torch.dtype]) -> Sequence[torch.dtype]:
    if all(o.dtype is not None for o in task.inputs):
        return dtypes[:1]
    if task.float64 and tuple(dtypes) == DTYPES:
        return [*dtypes, torch.float64]
    return dtypes


def _samples(task: Task, dtype: torch.dtype) -> Iterator[Sample]:
    bounds = {o.bound for o in task.inputs}  # below 0 there is no index
    first = next((o.dims[:1] for o in task.inputs), ())
    rows = [dim for dim in dict.fromkeys((*first, *itertools.islice(task.tile, 1))) if dim not in bounds]
    for number, values in enumerate(task.samples):
        yield Sample(task, number, values, AS_DECLARED, dtype)
        plain = {name: v for name, v in values.items() if not _is_optional(task.attrs.get(name))}
        if plain.keys() != values.keys():
            yield Sample(task, number, plain, DEFAULTS, dtype)
        for dim in rows:
            size = values.get(dim)
            if size:  # neither a literal nor no leading dimensions at all
                empty = (0, *size[1:]) if dim == "..." else 0
                yield Sample(task, number, {**values, dim: empty}, ZERO_ROWS, dtype)
        if any(len(o.dims) > 1 and values.get(o.name, o) is not None for o in task.inputs):
            yield Sample(task, number, values, STRIDES, dtype)


def _is_optional(attr: Attr | None) -> bool:
    return attr is not None and not attr.required


def _padded(t: torch.Tensor) -> torch.Tensor:
    """The same values, apart from each other in memory in every dimension but the last."""
    if t.dim() < 2:
        return t
    sizes = [t.shape[0], *(n + 1 for n in t.shape[1:-1]), t.shape[-1] + _PADDING]
    view = t.new_empty(sizes)
    for d, n in enumerate(t.shape):
        view = view.narrow(d, 0, n)
    return view.copy_(t)


# ---- ways ----


def _check_reference(sample: Sample) -> None:
    task, operands, attrs = sample.task, sample.call.operands, sample.call.attrs
    try:
        expected = task.results(task(*copies(operands), **attrs))
    except Exception as error:
        zero = [dim for dim, size in sample.values.items() if size == 0 or (dim == "..." and 0 in size)]
        written = [o.dims for o in (*task.inputs, *task.outputs) if o.is_write]
        if sample.kind == DEFAULTS or (zero and not all(set(zero) & set(dims) for dims in written)):
            raise LeftOut(f"the reference has no value for it: {first_line(error)}") from None
        raise
    if sample.kind != STRIDES:
        return
    for change in (torch.Tensor.contiguous, lambda t: t.mT.contiguous().mT if t.dim() > 1 else t):
        got = task.results(task(*(None if t is None else change(t).clone() for t in operands), **attrs))
        for output, a, b in zip(task.outputs, got, expected, strict=True):
            compare(f"{sample.task} {output.name}", a, b)


def _check_operator(sample: Sample) -> None:
    op = getattr(torch.ops.mpk, sample.task.name).default
    try:
        torch.library.opcheck(op, tuple(copies(sample.call.operands)), sample.call.attrs)
    except OpCheckError as error:
        raise AssertionError(f"torch.library.opcheck: {error}") from None


def _on_guarded_memory(sample: Sample, alignment: Sequence[int], run: Callable[[int, list[Block]], None]) -> None:
    """``run(turn, blocks)`` with inputs and results in blocks, in each turn placed differently, and always the same
    results."""
    names = list(itertools.chain(*sample.names))

    def launch(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], _: Sequence[int]) -> None:
        run_in_turns(names, [*inputs, *outputs], [*alignment, *[16] * len(outputs)], run, _TURNS)

    sample.calls.check_graph(launch)


def _check_emulated(kernels: Mapping[Sample, EmulatedKernel], sample: Sample) -> None:
    kernel = kernels[sample]

    def run(turn: int, blocks: list[Block]) -> None:
        places = [block.address for block in blocks]
        count = kernel.program.num_inputs
        kernel.launch(places[:count], places[count:], seed=turn, order=get_args(Order)[turn])

    _on_guarded_memory(sample, kernel.program.input_alignment, run)


def _check_compiled(code: Mapping[Sample, int], sample: Sample) -> None:
    graph = sample.calls.lowered.graph
    schedule = _C.make_schedule(graph, _C.Target("cpu", num_workers=_WORKERS, fuse=False))
    [node] = [node.id for node in graph.nodes if node.task == sample.task.name]
    executable = _C.CpuExecutable(schedule, _WORKERS, env.cpu_isa or "", {node: code[sample]})

    def run(_: int, blocks: list[Block]) -> None:
        places = [block.address for block in blocks]
        count = len(sample.names[0])
        executable.run(places[:count], places[count:])

    _on_guarded_memory(sample, [1] * len(sample.names[0]), run)


def _check_lifting(sample: Sample) -> None:
    task, call = sample.task, sample.call

    def model(*present: torch.Tensor) -> Any:
        given = iter(present)
        return task.reference(*(None if t is None else next(given) for t in call.operands), **call.attrs)

    present = [t for t in call.operands if t is not None]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        os.environ["TORCH_MPK_DUMP"] = folder  # of this process alone
        torch.compiler.reset()
        try:
            result = torch.compile(model, backend="mpk", options={"fallback": "error"})(*present)
        except (MpkError, BackendCompilerFailed) as error:
            inner = getattr(error, "inner_exception", error)
            why = str(inner) if isinstance(inner, MpkError) else first_line(inner)
            raise AssertionError(f"a model of the reference's operations is not taken: {why}") from None
        graphs = [json.loads(path.read_text()) for path in Path(folder).rglob("4.graph.json")]
    if not any(node.get("task") == task.name for graph in graphs for node in graph["nodes"]):
        raise AssertionError("pattern=True, but in a model of the reference's operations the task is not taken")
    for output, got, want in zip(task.outputs, task.results(result), task.results(model(*present)), strict=True):
        compare(f"{task} {output.name}", got, want)


class _Checker(Checker[Sample]):
    def lowered(self, samples: Sequence[Sample]) -> list[Sample]:
        """Those that torch_mpk takes. What has no elements to compute is PyTorch's."""
        taken = []
        for sample in samples:
            try:
                sample.calls.lowered  # noqa: B018  is made here
            except UnsupportedError as error:
                if sample.kind != ZERO_ROWS:
                    self.leave_out("torch_mpk", sample, f"it is left to PyTorch: {error}")
            else:
                taken.append(sample)
        return taken

    def check_cpu(self, samples: Sequence[Sample]) -> None:
        code: dict[Sample, int] = {}
        # What has an empty operand is PyTorch's, as nothing is at an empty tensor's address.
        by_reference = [sample for sample in samples if not sample.task.cpu_body and sample.kind != ZERO_ROWS]
        way = "C++ on the CPU"
        try:
            built = _in_groups([sample for sample in samples if sample.task.cpu_body], _compile_cpu)
        except CompileError as error:
            self.findings.not_run.append(f"{way}: {error}")
            built = []
        for group, compiled in built:
            if isinstance(compiled, tuple):
                self.fail_to_compile(way, group[0], compiled)
            else:
                code |= compiled
        self.run(way, list(code), functools.partial(_check_compiled, code))
        run = functools.partial(Calls.check_pipeline, device=torch.device("cpu"))
        self.run("reference on the CPU", by_reference, lambda sample: run(sample.calls))

    def check_device_code(self, samples: Sequence[Sample], has_compiler: bool) -> None:
        for arch, group in _by_header(samples):
            way = f"device code for sm_{arch} on the CPU"
            try:
                built = _in_groups(self.generated(way, group, arch), functools.partial(_compile_emulated, arch=arch))
            except CompileError as error:
                self.findings.not_run.append(f"{way}: {error}")
                continue
            kernels: dict[int, dict[Sample, EmulatedKernel]] = {}
            for part, compiled in built:
                if not isinstance(compiled, tuple):
                    for threads, of_samples in compiled.items():
                        kernels.setdefault(threads, {}).update(of_samples)
                elif has_compiler:  # which knows whether the code is wrong, or more than the emulator has
                    self.leave_out(way, part[0], f"the emulator does not compile it: {compiled[0]}")
                else:
                    self.fail_to_compile(way, part[0], compiled)
            for threads, of_samples in sorted(kernels.items()):
                check = functools.partial(_check_emulated, of_samples)
                code = _CODE.get(arch, f"device code for sm_{arch}")
                self.run(f"{code} with {threads} threads", list(of_samples), check)

    def generated(self, way: str, samples: Sequence[Sample], arch: int) -> list[Sample]:
        """Those that a kernel can be generated of."""
        taken = []
        for sample in samples:
            try:
                sample.calls.program(arch)
            except UnsupportedError as error:
                self.leave_out(way, sample, f"it is left to PyTorch: {error}")
            else:
                taken.append(sample)
        return taken

    def compile_for_cuda(self, samples: Sequence[Sample], has_compiler: bool) -> None:
        names = ", ".join(dict.fromkeys(sample.task.name for sample in samples))
        if not names:
            return
        if not has_compiler:
            self.findings.not_run.append(f"{names}: not compiled for CUDA, as there is no CUDA compiler here")
            return
        for arch in _archs(samples):
            way = f"compiled for sm_{arch}"
            meant = [sample for sample in samples if arch in ARCHS or arch in sample.task.headers]
            taken = self.generated(way, [sample for sample in meant if sample.task.header_for(arch)], arch)
            for group, failure in _in_groups(taken, functools.partial(_compile_cuda, arch=arch)):
                if failure:
                    self.fail_to_compile(way, group[0], failure)
                    continue
                compiled = ", ".join(dict.fromkeys(sample.task.name for sample in group))
                self.report(f"{compiled}: compiles for sm_{arch}")
                if not torch.cuda.is_available() or not _C.runs_on(arch, device_arch()):
                    self.findings.not_run.append(f"{compiled}: compiled for sm_{arch} and not run: no such GPU is here")

    def check_cuda(self, samples: Sequence[Sample]) -> None:
        """In this process: CUDA does not survive a fork."""
        if not torch.cuda.is_available():
            return
        device = torch.device("cuda", torch.cuda.current_device())
        for sample in samples:
            if sample.kind not in (AS_DECLARED, DEFAULTS):
                continue
            try:
                operands, attrs = sample.task.sample(sample.values, sample.dtype, "cuda")
                Calls([Call(sample.task, operands, attrs)]).check_pipeline(device)
            except (AssertionError, MpkError, RuntimeError) as error:
                self.fail("CUDA kernel", sample, str(error))
                return  # an access beyond memory ends all work on the device
            self.report(f"{sample.task.name}: CUDA kernel, {sample}: passes")


def _in_groups(samples: list[Sample], build: Callable[[list[Sample]], Any]) -> list[tuple[list[Sample], Any]]:
    """What ``build`` makes of all samples at once. Where that does not compile, of smaller groups, in the end with a
    tuple of the compiler's errors in place of the result."""
    if not samples:
        return []
    try:
        return [(samples, build(samples))]
    except KernelCompileError as error:
        for key in (lambda sample: sample.task, lambda sample: sample.kind):
            groups = grouped(samples, key)
            if len(groups) > 1:
                parts = [part for group in groups.values() for part in _in_groups(group, build)]
                one_task = key(samples[0]) is not samples[0].task
                same = one_task and isinstance(parts[0][1], tuple) and all(part[1] == parts[0][1] for part in parts)
                return [(samples, parts[0][1])] if same else parts
        lines = dict.fromkeys(line for line in error.errors.splitlines() if re.search(r"\berror\b", line))
        return [(samples, tuple(lines) or (str(error),))]


def _names(samples: Sequence[Sample]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(sample.task.name for sample in samples))


def _compile_cpu(samples: Sequence[Sample]) -> dict[Sample, int]:
    """The addresses of the samples' code."""
    together = Calls([sample.call for sample in samples])
    source, functions = _C.generate_cpu_tiles(together.lowered.graph)
    library = cpu.tile_library(source, _names(samples))
    return dict(zip(samples, cpu.tile_addresses(library, functions).values(), strict=True))


def _compile_emulated(samples: Sequence[Sample], arch: int) -> dict[int, dict[Sample, EmulatedKernel]]:
    """By the number of threads that take a tile, the samples' kernels."""
    made: list[tuple[Sample, _C.Schedule, _C.CudaProgram]] = []
    sources = []
    for sample in samples:
        schedule = sample.calls.schedule(arch, _WORKERS)
        program = _C.generate_cuda(schedule)
        for tile_bytes in (0, 1 << 30):
            made.append((sample, schedule, program))
            sources.append(_TILE_BYTES.sub(rf"\g<1>{tile_bytes};", program.source))
    library = compile_kernels(sources, arch, ["-O0"], names=_names(samples))
    kernels: dict[int, dict[Sample, EmulatedKernel]] = {}
    for number, (sample, schedule, program) in enumerate(made):
        of_samples = kernels.setdefault(threads_of_tiles(library, number), {})
        of_samples[sample] = EmulatedKernel(schedule, program, library, number)
    return kernels


def _compile_cuda(samples: Sequence[Sample], arch: int) -> None:
    program = Calls([sample.call for sample in samples]).program(arch)
    compile_cuda(program.source, program.arch, order=Asked(names=_names(samples)))


def _archs(samples: Sequence[Sample]) -> list[int]:
    """Those that kernels are generated for, and those that tasks have code for."""
    return sorted({*ARCHS, *(arch for sample in samples for arch in sample.task.headers)})


def _by_header(samples: Sequence[Sample]) -> Iterator[tuple[int, list[Sample]]]:
    """For each architecture, newest first, the samples whose device code no newer one has."""
    seen: set[tuple[Task, str]] = set()
    for arch in reversed(_archs(samples)):
        fresh = {sample.task for sample in samples if sample.task.header_for(arch)}
        fresh -= {task for task in fresh if (task, task.header_for(arch)) in seen}
        seen |= {(task, task.header_for(arch)) for task in fresh}
        if fresh:
            yield arch, [sample for sample in samples if sample.task in fresh]


def has_cuda_compiler() -> bool:
    try:
        find_compiler(env.compiler)
    except CompileError:
        return False
    return True


def device_arch() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor
