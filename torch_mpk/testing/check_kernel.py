"""Whether single kernels compute what the bodies of their functions do, in every way in which they can run here."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_mpk import _C
from torch_mpk.errors import CompileError, KernelCompileError, KernelSignatureError, MpkError, first_line
from torch_mpk.jit import ByDevice, Kernel
from torch_mpk.jit import samples as jit_samples
from torch_mpk.jit.declaration import Declaration, Operand
from torch_mpk.testing.check import ARCHS, AS_DECLARED, device_arch
from torch_mpk.testing.checker import Checker, Findings, Report, grouped
from torch_mpk.testing.guarded import Block, LeftOut, run_in_turns
from torch_mpk.testing.tasks import compare, copies, poison

_DEFAULTS = "at the default parameters"
_RESULT_ALIGNMENT = 64  # bytes, of what PyTorch allocates
_BORDER = 1024  # bytes around a tensor on a GPU
_TURNS = ["", *["memory lies elsewhere: is memory read that nobody has written?"] * 2]


def check_kernel(
    kernel: Kernel | ByDevice,
    dtypes: Sequence[torch.dtype] = (),
    report: Report = lambda passed: None,
    seconds: float = 60,
    archs: Sequence[int] = ARCHS,
) -> list[str]:
    """``check_kernels`` of one kernel. Returns what was not run; raises AssertionError where anything fails."""
    findings = check_kernels([kernel], dtypes, report, seconds, archs)
    if findings.failures:
        raise AssertionError("\n".join(findings.failures))
    return findings.not_run


def check_kernels(
    kernels: Sequence[Kernel | ByDevice],
    dtypes: Sequence[torch.dtype] = (),
    report: Report = lambda passed: None,
    seconds: float = 60,
    archs: Sequence[int] = ARCHS,
) -> Findings:
    """Run every sample of every kernel, in each dtype that its signature has, or those of them that ``dtypes`` names.

    A sample is run as it is declared, at the default parameters, and with each of its sizes at 0, at 1 and odd, where
    ``require`` allows that. Results, and what is written in place, must be the reference's, which is the body of the
    kernel's function, and what is only read must be as before. A kernel for CPUs runs in a process of its own, no
    longer than ``seconds`` a sample, on memory that ends where its tensors do; results and scratch memory begin as NaN.
    A CUDA kernel is compiled for ``archs``, and runs where there is a GPU.

    Raises KernelSignatureError where a kernel has no samples.
    """
    checker = _Checker(report, seconds)
    samples = [
        sample
        for each in kernels
        for kernel, given in implementations(each)
        for sample in _samples(kernel, given, dtypes)
    ]
    samples = checker.check_references(samples)
    on_cpu = checker.compiled("C++ on the CPU", [s for s in samples if not s.kernel.declaration.is_cuda], None)
    checker.run("C++ on the CPU", on_cpu, _check_cpu)
    checker.check_cuda([s for s in samples if s.kernel.declaration.is_cuda], archs)
    return checker.findings


def implementations(kernel: Kernel | ByDevice) -> list[tuple[Kernel, Sequence[Mapping[str, Any]]]]:
    """The kernels that it is, each with its samples. Raises KernelSignatureError where there are none."""
    kernels = [kernel.cpu, kernel.cuda] if isinstance(kernel, ByDevice) else [kernel]
    samples = next((each.samples for each in kernels if each.samples), None)
    if samples is None:
        kernels[0].declaration.fail("there is nothing to check or time it with: declare samples=[{...}]")
    return [(each, each.samples or samples) for each in kernels]


# ---- samples ----


@dataclass(frozen=True, eq=False)
class Sample:
    """One of a kernel's samples, as it is declared or changed."""

    kernel: Kernel
    number: int
    call: jit_samples.Sample
    kind: str = AS_DECLARED

    @property
    def name(self) -> str:
        return self.kernel.declaration.name

    @property
    def owner(self) -> str:
        return f"kernel {self.name}"

    @property
    def file(self) -> str:
        return self.kernel.reference.__code__.co_filename

    @property
    def types(self) -> str:
        return " and ".join(dict.fromkeys(self.call.dtypes.values())) or self.kernel.declaration.operands[0].dtypes[0]

    def __str__(self) -> str:
        return f"{self.types}, sample {self.number} {dict(self.call.given)}{self.kind and ' '}{self.kind}"

    @functools.cached_property
    def inputs(self) -> list[torch.Tensor | None]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.number)
            return self.call.inputs()

    @property
    def attributes(self) -> dict[str, Any]:
        """As the reference takes them."""
        enums = self.kernel.declaration.enums
        return {name: enums[name](v) if name in enums else v for name, v in self.call.attributes.items()}

    def fresh(self, device: torch.device | str = "cpu") -> list[torch.Tensor]:
        """Memory for results and scratch, with values that nobody computes."""
        return [poison(self.call.tensor(o, device)) for o in self.kernel.declaration.operands if o.is_output]

    def expected(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Results, and the inputs behind the call, by the reference. Raises AssertionError where that is none."""
        declaration = self.kernel.declaration
        inputs = copies(self.inputs)
        given = self.kernel.reference(*inputs, **self.attributes)
        results = _listed(given)
        names = ", ".join(operand.name for operand in declaration.outputs) or "None"
        if len(results) != len(declaration.outputs) or not all(isinstance(each, torch.Tensor) for each in results):
            raise AssertionError(
                f"the body of {self.name}'s function returns {type(given).__name__}, expected {names}: write there, in "
                "PyTorch, what the kernel computes"
            )
        for operand, got in zip(declaration.outputs, results, strict=True):
            want = self.call.tensor(operand, "meta")
            if (got.shape, got.dtype) != (want.shape, want.dtype):
                shapes = f"{got.dtype} {tuple(got.shape)}, and the signature {want.dtype} {tuple(want.shape)}"
                raise AssertionError(f"{operand.name}: the body of {self.name}'s function gives {shapes}")
        return results, inputs

    def check(self, function: Callable[..., Any], device: torch.device | str) -> None:
        """Compares a call on a device with the reference's. Raises AssertionError naming the tensor that differs."""
        inputs = [None if t is None else t.clone().to(device) for t in self.inputs]
        results = _listed(function(*inputs, **self.attributes))
        self.compare([t for t in inputs if t is not None], results)

    def compare(self, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Compares what a call has left of the inputs that are there, and returned, with what the reference does.

        Raises AssertionError naming the tensor that differs.
        """
        declaration = self.kernel.declaration
        expected, after = self.expected()
        for operand, got, want in zip(declaration.outputs, results, expected, strict=True):
            compare(f"{self.name} {operand.name}", got.cpu(), want)
        given = [(o, want) for o, want in zip(declaration.inputs, after, strict=True) if want is not None]
        for (operand, want), got in zip(given, inputs, strict=True):
            if operand.is_write:
                compare(f"{self.name} {operand.name}", got.cpu(), want)
            elif not torch.equal(got.cpu(), want):
                raise AssertionError(f"{operand.name} is changed: mark what is written with '!' in the signature")

    def compare_all(self, present: Sequence[torch.Tensor]) -> None:
        """The same of inputs that are there, and behind them results and scratch memory."""
        num_inputs = sum(t is not None for t in self.inputs)
        made = [operand for operand in self.kernel.declaration.operands if operand.is_output]
        written = zip(made, present[num_inputs:], strict=True)
        self.compare(present[:num_inputs], [t for operand, t in written if not operand.is_scratch])


def _listed(results: Any) -> list[Any]:
    return [*results] if isinstance(results, (tuple, list)) else [] if results is None else [results]


def samples_of(
    kernel: Kernel, given: Sequence[Mapping[str, Any]], dtypes: Sequence[torch.dtype] = ()
) -> Iterator[Sample]:
    """As they are declared, in each of the dtypes."""
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    for choice in jit_samples.dtype_choices(kernel.declaration, names):
        for number, values in enumerate(given):
            yield Sample(kernel, number, jit_samples.Sample(kernel.declaration, values, choice))


def _samples(kernel: Kernel, given: Sequence[Mapping[str, Any]], dtypes: Sequence[torch.dtype]) -> Iterator[Sample]:
    """These, and changed ones that the kernel's conditions allow."""
    declaration = kernel.declaration
    optional = {attribute.name for attribute in declaration.attributes if attribute.default is not None}
    in_key = {declaration.slots[slot] for slot in declaration.key_slots}  # others need no code of their own
    for sample in samples_of(kernel, given, dtypes):
        yield sample
        values = sample.call.given
        changes: dict[str, Mapping[str, Any]] = {}
        if optional & values.keys():
            changes[_DEFAULTS] = {name: value for name, value in values.items() if name not in optional}
        sizes = {name for operand in declaration.operands for name in operand.dims} & values.keys() - in_key
        for name in sorted(sizes):
            size = values[name]
            for other in ((), (0, 3)) if name == "..." else (0, 1, size + 1 + size % 2):
                changes[f"with {name}={other}"] = {**values, name: other}
        for kind, changed in changes.items():
            call = jit_samples.Sample(declaration, changed, sample.call.dtypes)
            if changed != values and call.fulfils_requirements:
                yield Sample(kernel, sample.number, call, kind)


# ---- ways ----


def _check_reference(sample: Sample) -> None:
    declaration = sample.kernel.declaration
    try:
        _, after = sample.expected()
    except AssertionError:
        raise
    except Exception as error:
        if sample.kind != AS_DECLARED:
            raise LeftOut(f"the reference has no value for it: {first_line(error)}") from None
        raise
    for operand, before, now in zip(declaration.inputs, sample.inputs, after, strict=True):
        if before is None or now is None or not before.numel():
            continue
        is_same = torch.equal(before, now)
        if not operand.is_write and not is_same:
            raise AssertionError(f"the body of {sample.name}'s function changes {operand.name}, which has no '!'")
        if operand.is_write and is_same and not declaration.outputs:
            raise AssertionError(
                f"the body of {sample.name}'s function does not change {operand.name}: write there, in PyTorch, what "
                "the kernel does"
            )


class _Placed:
    """A declaration whose results and scratch memory the caller gives, so that checks say where they lie."""

    def __init__(self, declaration: Declaration) -> None:
        self._declaration = declaration
        self.operands: list[Operand] = [
            dataclasses.replace(operand, is_read=True, is_scratch=False) for operand in declaration.operands
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._declaration, name)


def _run(sample: Sample, present: Sequence[torch.Tensor]) -> None:
    """One call with the inputs that are there, and behind them results and scratch memory."""
    kernel = sample.kernel
    given = iter(present)
    inputs = [None if t is None else next(given) for t in sample.inputs]
    placed: Any = _Placed(kernel.declaration)
    _C.JitKernel(placed, kernel.load, kernel.op)(*inputs, *given, **sample.call.attributes)


def _check_cpu(sample: Sample) -> None:
    operands = sample.kernel.declaration.operands
    inputs = [t for t in copies(sample.inputs) if t is not None]
    fresh = sample.fresh()
    is_there = [*(t is not None for t in sample.inputs), *[True] * len(fresh)]
    names = [operand.name for operand, there in zip(operands, is_there, strict=True) if there]
    alignment = [*[1] * len(inputs), *[_RESULT_ALIGNMENT] * len(fresh)]

    def run(_: int, blocks: list[Block]) -> None:
        _run(sample, [block.tensor for block in blocks])

    run_in_turns(names, [*inputs, *fresh], alignment, run, _TURNS)
    sample.compare_all([*inputs, *fresh])


class _Bordered:
    """A copy of a tensor on a device, with bytes around it that nobody may write."""

    def __init__(self, name: str, t: torch.Tensor, device: torch.device | str) -> None:
        extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        self.name, self._nbytes = name, extent * t.itemsize
        self._bytes = torch.full((self._nbytes + 2 * _BORDER,), 0xFF, dtype=torch.uint8, device=device)
        flat = self._bytes[_BORDER : _BORDER + self._nbytes].view(t.dtype)
        self.tensor = flat.as_strided(t.shape, t.stride(), flat.storage_offset())
        self.tensor.copy_(t)

    def check(self) -> None:
        """Raises AssertionError where a byte before or behind the tensor has been written."""
        for where, part in (("before", self._bytes[:_BORDER]), ("behind", self._bytes[_BORDER + self._nbytes :])):
            if not bool((part == 0xFF).all()):
                raise AssertionError(f"{self.name}: the code writes memory {where} it")


def check_on_device(sample: Sample, device: torch.device | str) -> None:
    """A call in this process: CUDA does not survive a fork. Raises AssertionError naming the tensor that differs."""
    operands = sample.kernel.declaration.operands
    tensors = [*sample.inputs, *sample.fresh()]
    placed = [_Bordered(o.name, t, device) for o, t in zip(operands, tensors, strict=True) if t is not None]
    _run(sample, [each.tensor for each in placed])
    for each in placed:
        each.check()
    sample.compare_all([each.tensor for each in placed])


class _Checker(Checker[Sample]):
    def check_references(self, samples: Sequence[Sample]) -> list[Sample]:
        """Those whose references pass. Kernels that are one by device have the same ones, which are run once."""
        alike = grouped(samples, lambda sample: (sample.kernel.reference, str(sample)))
        firsts = self.run("reference", [group[0] for group in alike.values()], _check_reference)
        passed = {id(first) for first in firsts}
        good = {id(sample) for group in alike.values() if id(group[0]) in passed for sample in group}
        return [sample for sample in samples if id(sample) in good]

    def fail(self, way: str, sample: Sample, what: str) -> None:
        """Told of once where changed samples fail in the same way."""
        if (sample.owner, f"{way}, {sample.types}: {what}") not in self._told:
            super().fail(way, sample, what)
        self._told.add((sample.owner, f"{way}, {sample.types}: {what}"))

    def leave_out(self, way: str, sample: Sample, why: str) -> None:
        """Told of once for each change of samples, whatever their dtypes."""
        if (sample.owner, why) not in self._told:
            super().leave_out(way, sample, why)
        self._told.add((sample.owner, why))

    def compiled(self, way: str, samples: Sequence[Sample], arch: int | None) -> list[Sample]:
        """Those whose code compiles, for the CPU or for a compute capability."""
        good: list[Sample] = []
        for group in grouped(samples, lambda s: (s.kernel, *sorted(s.call.key().items(), key=str))).values():
            try:
                image = group[0].kernel.compile(arch, **group[0].call.key())
            except KernelCompileError as error:
                lines = dict.fromkeys(line for line in error.errors.splitlines() if re.search(r"\berror\b", line))
                self.fail_to_compile(way, group[0], [*lines] or [error.errors])
            except KernelSignatureError as error:
                self.fail(way, group[0], str(error))
            except CompileError as error:
                self.findings.not_run.append(f"{group[0].owner}, {way}: {error}")
                return []
            else:
                good += group
                if arch is not None:
                    self.report(f"{group[0].name}: {way}, {group[0].types}: {_used(image)}")
        return good

    def check_cuda(self, samples: Sequence[Sample], archs: Sequence[int]) -> None:
        fitting = []
        for sample in samples:
            try:
                sample.kernel.declaration.check_geometry(sample.call.values())
            except KernelSignatureError as error:
                self.fail("launch", sample, str(error))
            else:
                fitting.append(sample)
        here = [device_arch()] if torch.cuda.is_available() else []
        for arch in dict.fromkeys([*archs, *here]):
            good = self.compiled(f"compiled for sm_{arch}", fitting, arch)
            if arch in here:
                self._run_on_gpu(good)
            elif not here:
                for name in dict.fromkeys(sample.name for sample in good):
                    self.findings.not_run.append(f"kernel {name}: compiled for sm_{arch} and not run: no GPU is here")

    def _run_on_gpu(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            try:
                check_on_device(sample, "cuda")
            except (AssertionError, MpkError, RuntimeError) as error:
                self.fail("CUDA kernel", sample, str(error))
                return  # an access beyond memory ends all work on the device
            self.report(f"{sample.name}: CUDA kernel, {sample}: passes")


def _used(image: Any) -> str:
    resources = image.resources
    spilled = resources.spill_store_bytes
    return f"{resources.registers} registers, {f'{spilled} bytes spilled' if spilled else 'nothing spilled'}"
