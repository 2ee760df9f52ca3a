"""``torch_mpk.jit.kernel``: a CUDA or C++ function as a function of Python, compiled when it is first called."""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import _profiler_enabled as is_profiling
from torch.profiler import record_function

from torch_mpk import _C
from torch_mpk.config import DEVICE_ARCHS, is_int
from torch_mpk.errors import ArgumentError, KernelCompileError, KernelSignatureError, TaskError
from torch_mpk.jit.compile import Cubin, Library, Order, check_words, compile_cuda
from torch_mpk.jit.declaration import Declaration
from torch_mpk.jit.host import build_host, tier_flags
from torch_mpk.jit.samples import check_samples
from torch_mpk.jit.unit import Entry, Unit
from torch_mpk.signature import bind_dims

_NAMESPACE = "mpk_jit"
_library = torch.library.Library(_NAMESPACE, "DEF")
Source = str | Path | Sequence[str | Path]
_kernels: dict[str, Kernel] = {}  # by the name of their operator; a cell of a notebook that runs again replaces its own


def kernel(
    source: Source,
    signature: str,
    launch: str,
    *,
    require: str | Sequence[str] = (),
    cluster: int | Sequence[int] = 1,
    cooperative: bool = False,
    pdl: bool | str = False,
    samples: Sequence[Mapping[str, Any]] = (),
    include_dirs: Sequence[str | Path] = (),
    flags: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Kernel]:
    """Declare a kernel. The decorated function gives the name, the docstring and, as keyword-only parameters, the
    template arguments and numbers it takes. A call does not run its body: that is the reference, in PyTorch, which
    ``python -m torch_mpk check-kernel`` compares the kernel with, and may be missing.

    Args:
        source: C++ code, or a file: a string is code where it has a line break, a brace, a semicolon or a ``#``. A
            relative path starts at the folder of the Python file. Several files, in a list, are compiled as one.
        signature: the tensors, ``x[M, K], y[M // 2]!, z[M]? -> w[K]``. Names in brackets are sizes, bound where they
            first stand and the same everywhere; a number is itself, an expression is computed, and ``...`` in front is
            any number of sizes. ``!`` is updated in place, ``?`` may be None, and what stands behind ``->`` is
            allocated and returned, or with ``~`` only allocated. Tensors are contiguous, unless strides are given:
            ``x[M, K; S, 1]``, with ``_`` for any. Behind a colon stands a dtype, several (``float32|bfloat16``), or a
            name for one (``T`` or ``T=float32|bfloat16``).
        launch: the call, as in CUDA: ``name<T, BLOCK><<<cdiv(M, BLOCK), BLOCK, 4 * K>>>(x, y, w, M, K)``. Without
            ``<<<>>>`` the function runs on the CPU. Template arguments are names of sizes, strides, dtypes and
            parameters, or C++; each choice of their values is compiled for itself. The rest are expressions of sizes
            and of int and bool parameters with + - * // %, ``cdiv``, ``min``, ``max`` and ``numel(x)``, conditions, and
            ``a if condition else b``; ``num_sms`` is the device's number of multiprocessors. A grid or a block of
            several dimensions is a tuple. The kernel gets the addresses of tensors (null for None), integers
            as ``int`` or ``int64_t``, and float parameters as ``float`` or ``double``; ``{.x = x, .n = N}`` is a struct
            of them. Several launches, with ``;`` between them, run one after the other.
        require: what sizes and parameters must fulfil, as in ``"K % 8 == 0 and K <= 4096"``, or several of these.
        cluster, cooperative, pdl: how blocks are launched (CUDA): in clusters of so many, all resident at once, and
            before the kernel in front has ended, for which see ``mpk::pdl_wait``. ``pdl`` may be a condition, such as
            the name of a bool parameter. They hold for each launch.
        samples: what ``check-kernel`` and ``bench-kernel`` call it with, ``[{"M": 3, "K": 100, "alpha": 2.0}]``: sizes
            and parameters by name, None for an absent tensor, and for one of integers what they stay below.
        include_dirs: searched for headers, behind the folder of the source.
        flags: for the compiler. The code is C++20.

    Raises KernelSignatureError where these do not fit each other. Calls raise it too, and what ``compile_cuda``,
    ``compile_host`` and a launch raise.
    """

    return Module(source, include_dirs, flags).kernel(
        signature, launch, require=require, cluster=cluster, cooperative=cooperative, pdl=pdl, samples=samples
    )


def module(source: Source, *, include_dirs: Sequence[str | Path] = (), flags: Sequence[str] = ()) -> Module:
    """A source of several kernels, which its method ``kernel`` declares. The arguments are those of ``jit.kernel``."""
    return Module(source, include_dirs, flags)


class Module:
    """A source and the kernels that are declared over it.

    Those with the same names in ``<...>`` and dtypes are compiled together, once for each choice of values, and share
    the variables of the source.
    """

    def __init__(self, source: Source, include_dirs: Sequence[str | Path], flags: Sequence[str]) -> None:
        files = [source] if isinstance(source, (str, Path)) else [*source] if isinstance(source, (list, tuple)) else []
        if not files or not all(isinstance(file, (str, Path)) and str(file).strip() for file in files):
            raise KernelSignatureError(
                f"jit.kernel: source={source!r}, expected code, the path of a file, or a list of paths"
            )
        try:
            check_words(flags, include_dirs)
        except ArgumentError as error:
            raise KernelSignatureError(f"jit.kernel: {error}") from None
        self.source = source
        self.files = [str(file) for file in files]
        self.include_dirs = [Path(folder) for folder in include_dirs]
        self.flags = list(flags)
        self.kernels: dict[str, Kernel] = {}  # by the names of their functions

    def kernel(
        self,
        signature: str,
        launch: str,
        *,
        require: str | Sequence[str] = (),
        cluster: int | Sequence[int] = 1,
        cooperative: bool = False,
        pdl: bool | str = False,
        samples: Sequence[Mapping[str, Any]] = (),
    ) -> Callable[[Callable[..., Any]], Kernel]:
        """Declare a kernel of this source; see ``jit.kernel``."""

        def declare(function: Callable[..., Any]) -> Kernel:
            declaration = Declaration(function, signature, launch, require, cluster, cooperative, pdl)
            declared = self.kernels[declaration.name] = Kernel(function, declaration, self, samples)
            return declared

        return declare

    @property
    def is_code(self) -> bool:
        """Whether it is no path: code has several lines, or in its one line what paths do not have."""
        return isinstance(self.source, str) and re.search(r"[\n{};#]", self.source) is not None


class Kernel:
    """A kernel that can be called with tensors, in eager mode, under ``torch.compile`` and in CUDA graphs."""

    def __init__(
        self,
        function: Callable[..., Any],
        declaration: Declaration,
        module: Module,
        samples: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        functools.update_wrapper(self, function)
        self.reference, self.samples = function, check_samples(declaration, samples)
        self._qualname = function.__qualname__
        self.declaration = declaration
        self._module = module
        home = Path(function.__code__.co_filename)
        if module.is_code:
            self._code, origin = f'#line 1 "{declaration.name} in {home.name}"\n{module.source}', str(module.source)
            self._include_dirs = module.include_dirs
        else:
            paths = [home.parent / file for file in module.files]
            for path in paths:
                if not path.is_file():
                    hint = "code would have a line break, a brace, a semicolon or a #"
                    declaration.fail(f"there is no file {path}; {hint}")
            # By names, so that a folder may move; of two with one name by their whole paths.
            names = [path.name for path in paths]
            names = names if len({*names}) == len(names) else [str(path) for path in paths]
            self._code, origin = "\n".join(f'#include "{name}"' for name in names), str(module.source)
            self._include_dirs = [*dict.fromkeys(path.parent for path in paths), *module.include_dirs]
        identity = (function.__module__, origin, declaration, module.include_dirs, module.flags)
        self.name = f"{declaration.name}_{hashlib.sha256(repr(identity).encode()).hexdigest()[:8]}"
        self.op = _define(self)
        self._attributes = {a.name: a.default for a in declaration.attributes if not a.is_finite}
        self._call = _C.JitKernel(declaration, self.load, self._dispatch)
        self._label = f"mpk.jit {declaration.name}"

    def __reduce__(self) -> str:
        return self._qualname  # copied and pickled as the function would be

    def __repr__(self) -> str:
        return f"<torch_mpk.jit.kernel {self.declaration.name}: {self.declaration.signature}>"

    def __call__(self, *tensors: torch.Tensor | None, **attributes: Any) -> Any:
        for name in self.declaration.enums:
            if name in attributes:
                attributes[name] = self.declaration.member(name, attributes[name])
        # The dispatcher takes some microseconds, which only a tracer needs.
        if torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack():
            return self._dispatch(*tensors, **attributes)
        try:
            if is_profiling():
                with record_function(self._label):
                    return self._call(*tensors, **attributes)
            return self._call(*tensors, **attributes)
        except RuntimeError:
            self._check_layouts(tensors, attributes)
            raise

    def _check_layouts(self, tensors: Sequence[Any], attributes: dict[str, Any]) -> None:
        """Sparse tensors have no memory that a kernel could be given, which PyTorch says in words of its own."""
        given = dict(zip([operand.name for operand in self.declaration.inputs], tensors)) | attributes
        for name, value in given.items():
            if isinstance(value, torch.Tensor) and value.layout != torch.strided:
                self.declaration.fail(
                    f"{name} has layout {value.layout}, expected a dense tensor: pass {name}.to_dense()"
                )

    def _dispatch(self, *tensors: torch.Tensor | None, **attributes: Any) -> Any:
        return self.op(*tensors, **(self._attributes | attributes))

    def reload(self) -> None:
        """Take the source as it is now: the next call looks its content up, headers too, and compiles it if it is new.

        Without it a process keeps what it has called once, as looking costs more than a call. CUDA graphs keep what
        they have captured.
        """
        self._call.forget()

    def compile(self, arch: int | None = None, **values: Any) -> Cubin | Library:
        """Compile without calling: a cubin for a compute capability (90 is sm_90a), or the CPU's library; of several
        launches, which may lie in several, the first one's.

        ``values`` are what the template arguments and dtypes stand for, by name, where they have no default.

        Returns a ``Cubin`` or a ``Library``. Both have ``kind``, ``key``, ``path``, a folder of the cache, ``compiler``
        and ``seconds``. Raises KernelSignatureError where a value does not fit, and what ``compile_cuda`` raises.
        """
        declaration = self.declaration
        values |= {name: declaration.member(name, values[name]) for name in declaration.enums if name in values}
        names = [declaration.slots[slot] for slot in declaration.key_slots]
        known = {attribute.name: attribute.default for attribute in declaration.attributes} | values
        missing = [name for name in names if known.get(name) is None]
        unknown = values.keys() - set(names)
        if missing or unknown:
            declaration.fail(
                f"compile takes {', '.join(names) or 'no values'}: {[*missing, *unknown][0]} is "
                f"{'missing' if missing else 'unknown'}"
            )
        if declaration.is_cuda != (arch is not None):
            declaration.fail("a CUDA kernel is compiled for an arch, as in arch=90, and no other")
        if arch is not None and not (is_int(arch) and arch in DEVICE_ARCHS):
            archs = ", ".join(map(str, sorted(DEVICE_ARCHS)))
            declaration.fail(f"compile for arch={arch!r}: known are {archs}; those from 90 on mean sm_90a and so on")
        chosen = {name: declaration.value(name, known[name]) for name in names}
        declaration.check_geometry({slot: chosen[declaration.slots[slot]] for slot in declaration.key_slots})
        first, *_ = [self._compile(unit, chosen, arch) for unit in self._units(chosen)]
        return first

    def _compile(self, unit: Unit, values: dict[str, Any], arch: int | None) -> Cubin | Library:
        for folder in self._include_dirs:
            if not folder.is_dir():
                self.declaration.fail(f"include_dirs has {str(folder)!r}, and there is no such folder")
        given = {name: f"torch.{value}" if isinstance(value, str) else repr(value) for name, value in values.items()}
        words = [f"arch={arch}"] * (arch is not None) + [f"{name}={value}" for name, value in given.items()]
        order = Order(names=unit.names, ahead=f"{self.declaration.name}.compile({', '.join(words)})")
        try:
            if arch is None:
                # What is defined nowhere is the linker's error, not the loader's.
                flags = [*tier_flags(), "-Wl,-z,defs", *self._module.flags]
                return build_host(unit.source, self._include_dirs, flags, order)
            flags = ["-std=c++20", *self._module.flags]
            return compile_cuda(unit.source, arch, include_dirs=self._include_dirs, flags=flags, order=order)
        except KernelCompileError as error:
            unknown = next((entry for entry in unit.entries if entry.is_unknown(error.errors)), None)
            if unknown is None:
                raise
            raise error.explained(self._unknown(unknown, values)) from None

    def _unknown(self, entry: Entry, values: dict[str, Any]) -> str:
        """Why the source has no function such as a launch names."""
        wide = [name for name, value in values.items() if is_int(value) and not -(2**31) <= value < 2**31]
        hint = f" ({wide[0]}={values[wide[0]]} has more than 32 bits)" if wide else ""
        parts = "its name or a template argument does not fit" if "<" in entry.function else "its name does not fit"
        return f"{self.declaration.name}: the source has no function {entry.function}: {parts}{hint}"

    def _units(self, values: dict[str, Any]) -> list[Unit]:
        """The translation units of the kernels that are compiled for these values, the one of our first launch first.

        Launches of one function with other template arguments are apart, as a symbol does not tell which it is.
        """
        kernels = [kernel for kernel in self._module.kernels.values() if kernel._goes_with(self, values)]
        units: list[list[Entry]] = [[]]
        for kernel in kernels or [self]:
            for launch in kernel.declaration.launches:
                function = launch.function_name(values)
                is_apart = self.declaration.is_cuda and not launch.is_member
                unit = next((u for u in units if not is_apart or all(e.launch.path != launch.path for e in u)), None)
                if unit is None:
                    units.append(unit := [])
                unit.append(Entry(kernel.declaration, launch, function, len(unit)))
        mine = self.declaration
        units = [unit for unit in units if any(entry.declaration is mine for entry in unit)]
        units.sort(key=lambda unit: all(entry.launch is not mine.launches[0] for entry in unit))
        return [self._unit(unit, values) for unit in units]

    def _goes_with(self, other: Kernel, values: dict[str, Any]) -> bool:
        """Whether both are compiled at once."""
        mine, theirs = self.declaration, other.declaration
        is_alike = mine.key == theirs.key and mine.is_cuda == theirs.is_cuda
        return self is other or (is_alike and self._include_dirs == other._include_dirs and mine.takes_dtypes(values))

    def _unit(self, entries: list[Entry], values: dict[str, Any]) -> Unit:
        """The source, and what instantiates the functions and checks their parameters."""
        header = "cuda.cuh" if self.declaration.is_cuda else "cpu.h"
        first = next(
            kernel for kernel in (*self._module.kernels.values(), self) if kernel.declaration is entries[0].declaration
        )
        parts = [f'#include "torch_mpk/jit/{header}"', first._code, *(entry.text(values) for entry in entries)]
        return Unit("\n".join(parts), entries, tuple(dict.fromkeys(entry.declaration.name for entry in entries)))

    def load(self, key: Sequence[int], device: int) -> list[_C.JitCode]:
        """The compiled code of each launch for a call's slots, on a device. Raises CompileError where there is none."""
        values = self.declaration.decode(key)
        arch = _C.device_info(device).arch if self.declaration.is_cuda else None
        codes: dict[int, _C.JitCode] = {}
        for unit in self._units(values):
            compiled = self._compile(unit, values, arch)
            for entry in unit.entries:
                if entry.declaration is self.declaration:
                    codes[id(entry.launch)] = self._code_of(entry, compiled, device)
        return [codes[id(launch)] for launch in self.declaration.launches]

    def _code_of(self, entry: Entry, compiled: Cubin | Library, device: int) -> _C.JitCode:
        if isinstance(compiled, Library):
            return _C.CpuCode(str(compiled.file), str(entry.index))
        symbol, arguments = entry.symbol(compiled.kernels), entry.arguments(compiled.kernels)
        name, num_parameters = self.declaration.name, entry.launch.num_parameters
        return _C.CudaCode(compiled.image, name, symbol, device, num_parameters, arguments)


def _define(kernel: Kernel) -> Any:
    """The operator ``torch.ops.mpk_jit.<name>``, through which a kernel is traced."""
    name = kernel.name
    if name not in _kernels:
        _library.define(f"{name}{kernel.declaration.schema}", tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(
            name, lambda *args, **kwargs: _kernels[name]._call.dispatched(*args, **kwargs), "CompositeExplicitAutograd"
        )
        _library.impl(name, functools.partial(_refuse_gradients, name), "Autograd")
        torch.library.register_fake(f"{_NAMESPACE}::{name}", functools.partial(_fake, name), lib=_library)
    _kernels[name] = kernel
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def _refuse_gradients(name: str, *args: Any, **kwargs: Any) -> Any:
    kernel = _kernels[name]
    for operand, tensor in zip(kernel.declaration.inputs, args):
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            kernel.declaration.fail(
                f"{operand.name} requires grad, and a kernel has no backward: call it under torch.no_grad(), or in a "
                "torch.autograd.Function that has one"
            )
    with torch._C._AutoDispatchBelowAutograd():
        return kernel.op(*args, **kwargs)


def _fake(name: str, *tensors: torch.Tensor | None, **attributes: Any) -> Any:
    declaration = _kernels[name].declaration
    tensors += (None,) * (len(declaration.inputs) - len(tensors))
    shapes = [None if tensor is None else tensor.shape for tensor in tensors]
    try:
        sizes = _bind(declaration, shapes, attributes)
    except TaskError as error:
        raise KernelSignatureError(str(error)) from None
    given = [(operand, tensor) for operand, tensor in zip(declaration.inputs, tensors) if tensor is not None]
    for operand, tensor in given:
        (first, other), device = given[0], tensor.device
        if device != other.device:
            declaration.fail(f"{operand.name} is on {device}, but {first.name} is on {other.device}: put both on one")
    results = []
    for output in declaration.outputs:
        shape: list[Any] = []
        for dim in output.dims:
            shape += sizes[dim][0] if dim == "..." else [int(dim) if dim.isdigit() else sizes[dim][0]]
        same = [tensor.dtype for operand, tensor in given if operand.dtype_slot == output.dtype_slot >= 0]
        dtype = same[0] if same else output.dtype
        results.append(torch.empty(shape, dtype=dtype, device=given[0][1].device))
    return None if not results else results[0] if len(results) == 1 else tuple(results)


def _bind(
    declaration: Declaration, shapes: Sequence[Sequence[Any] | None], attributes: dict[str, Any]
) -> dict[str, tuple[Any, str]]:
    """What every size stands for, those that are computed too, and by whom; sizes may be symbolic."""
    values = {a.slot: attributes.get(a.name, a.default) for a in declaration.attributes}
    sizes: dict[str, tuple[Any, str]] = {}
    given = iter(shapes)
    for operand in declaration.operands:
        shape = next(given) if operand.is_read else None
        # Expressions of an operand may have names that it binds itself, in front of them.
        plain = operand.dims[1:] if operand.has_leading else operand.dims
        own = dict(zip(plain, shape[len(shape) - len(plain) :])) if shape is not None else {}
        for dim, (kind, slot) in zip(plain, operand.size_extents, strict=True):
            if kind == "slot" and dim in own:
                values.setdefault(slot, own[dim])
            elif kind == "expression" and (shape is not None or operand.is_output):
                expression = declaration.extents[slot]
                names = ", ".join(f"{declaration.slots[s]}={values[s]}" for s in sorted(expression.slots))
                sizes[dim] = expression.evaluate(values), names
        if operand.is_read:
            bind_dims(declaration.name, declaration.signature, [operand], [shape], sizes)
            if operand.numel_slot >= 0 and shape is not None:
                values[operand.numel_slot] = math.prod(shape)
    for requirement in declaration.requirements:
        # Strides are not known here, and a symbolic size would be held to what this call's fulfils.
        known = {slot: values[slot] for slot in sorted(requirement.slots) if type(values.get(slot)) in (int, bool)}
        if len(known) == len(requirement.slots) and not requirement.evaluate(known):
            names = ", ".join(f"{declaration.slots[slot]}={value}" for slot, value in known.items())
            declaration.fail(f"requires {requirement.text}, but {names}")
    return sizes
