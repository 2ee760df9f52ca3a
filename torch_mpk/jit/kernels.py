"""``torch_mpk.jit.kernel``: a CUDA or C++ function as a function of Python, compiled when it is first called."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_mpk import _C
from torch_mpk.errors import KernelSignatureError, TaskError
from torch_mpk.jit.compile import Cubin, compile_cuda
from torch_mpk.jit.declaration import Declaration
from torch_mpk.jit.host import compile_host, tier_flags
from torch_mpk.registry import bind_dims

_NAMESPACE = "mpk_jit"
_library = torch.library.Library(_NAMESPACE, "DEF")
_kernels: dict[str, Kernel] = {}  # by the name of their operator; a cell of a notebook that runs again replaces its own


def kernel(
    source: str | Path,
    signature: str,
    launch: str,
    *,
    cluster: int | Sequence[int] = 1,
    cooperative: bool = False,
    pdl: bool = False,
    include_dirs: Sequence[str | Path] = (),
    flags: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Kernel]:
    """Declare a kernel. The decorated function gives the name, the docstring and, as keyword-only parameters, the
    template arguments and numbers it takes; its body is not run.

    Args:
        source: C++ code, or a file; a relative path starts at the folder of the Python file.
        signature: the tensors, ``x[M, K], y[M]!, z[M]? -> w[K]``. Names in brackets are sizes, bound where they first
            stand and the same everywhere; a number is itself, and ``...`` in front any number of sizes. ``!`` is
            updated in place, ``?`` may be None, and what stands behind ``->`` is allocated and returned. Tensors are
            contiguous, unless strides are given: ``x[M, K; S, 1]``, with ``_`` for any. Behind a colon stands a dtype,
            several (``float32|bfloat16``), or a name for one (``T`` or ``T=float32|bfloat16``).
        launch: the call, as in CUDA: ``name<T, BLOCK><<<cdiv(M, BLOCK), BLOCK, 4 * K>>>(x, y, w, M, K)``. Without
            ``<<<>>>`` the function runs on the CPU. Template arguments are names of sizes, strides, dtypes and
            parameters, or C++; each choice of their values is compiled for itself. The rest are expressions of sizes
            and of int and bool parameters with + - * // %, ``cdiv``, ``min``, ``max`` and ``numel(x)``; a grid or a
            block of several dimensions is a tuple. The kernel gets the addresses of tensors (null for None), integers
            as ``int`` or ``int64_t``, and float parameters as ``float`` or ``double``.
        cluster, cooperative, pdl: how blocks are launched (CUDA): in clusters of so many, all resident at once, and
            before the kernel in front has ended, for which see ``mpk::pdl_wait``.
        include_dirs: searched for headers, behind the folder of the source.
        flags: for the compiler. The code is C++20.

    Raises KernelSignatureError where these do not fit each other. Calls raise it too, and what ``compile_cuda``,
    ``compile_host`` and a launch raise.
    """

    def declare(function: Callable[..., Any]) -> Kernel:
        declaration = Declaration(function, signature, launch, cluster, cooperative, pdl)
        return Kernel(function, declaration, source, [Path(folder) for folder in include_dirs], list(flags))

    return declare


class Kernel:
    """A kernel that can be called with tensors, in eager mode, under ``torch.compile`` and in CUDA graphs."""

    def __init__(
        self,
        function: Callable[..., Any],
        declaration: Declaration,
        source: str | Path,
        include_dirs: list[Path],
        flags: list[str],
    ) -> None:
        functools.update_wrapper(self, function)
        self._qualname = function.__qualname__
        self.declaration = declaration
        self._flags = flags
        home = Path(function.__code__.co_filename)
        if isinstance(source, str) and "\n" in source:
            self._code, origin = f'#line 1 "{declaration.name} in {home.name}"\n{source}', source
            self._include_dirs = include_dirs
        else:
            path = home.parent / source
            if not path.is_file():
                declaration.fail(f"there is no file {path}; code itself has more than one line")
            self._code, origin = f'#include "{path.name}"', str(source)
            self._include_dirs = [path.parent, *include_dirs]
        identity = (function.__module__, origin, declaration, include_dirs, flags)
        self.name = f"{declaration.name}_{hashlib.sha256(repr(identity).encode()).hexdigest()[:8]}"
        self.op = _define(self)
        self._call = _C.JitKernel(declaration, self._load, self.op)

    def __reduce__(self) -> str:
        return self._qualname  # copied and pickled as the function would be

    def __repr__(self) -> str:
        return f"<torch_mpk.jit.kernel {self.declaration.name}: {self.declaration.signature}>"

    def __call__(self, *tensors: torch.Tensor | None, **attributes: Any) -> Any:
        # The dispatcher takes some microseconds, which only a tracer needs.
        if torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack():
            return self.op(*tensors, **attributes)
        return self._call(*tensors, **attributes)

    def compile(self, arch: int | None = None, **values: Any) -> Cubin | Path:
        """Compile without calling: a cubin for a compute capability (90 is sm_90a), or the CPU's library.

        ``values`` are what the template arguments and dtypes stand for, by name, where they have no default.
        """
        declaration = self.declaration
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
        chosen = {name: known[name] for name in names}
        for name, value in chosen.items():
            if isinstance(value, torch.dtype):
                chosen[name] = str(value).removeprefix("torch.")
        return self._compile(chosen, arch)

    def _compile(self, values: dict[str, Any], arch: int | None) -> Cubin | Path:
        source = self._unit(values)
        if arch is None:
            # What is defined nowhere is the linker's error, not the loader's.
            flags = [*tier_flags(), "-Wl,-z,defs", *self._flags]
            return compile_host(source, include_dirs=self._include_dirs, flags=flags)
        return compile_cuda(source, arch, include_dirs=self._include_dirs, flags=["-std=c++20", *self._flags])

    def _unit(self, values: dict[str, Any]) -> str:
        """The translation unit: the source, and what instantiates the function and checks its parameters."""
        declaration = self.declaration
        function = declaration.function_name(values)
        parameters = list(declaration.parameters(values))
        checks = [f'static_assert(P::count == {len(parameters)}, "the launch passes {len(parameters)} arguments");']
        for i, (kind, what, type_) in enumerate(parameters):
            check = f"mpk::jit::accepts<mpk::jit::{kind}, P::at<{i}>>"
            checks.append(f'static_assert({check}, "parameter {i + 1}: {what}, declare it {type_}");')
        header = "cuda.cuh" if declaration.is_cuda else "cpu.h"
        # Whoever refers to a kernel's template instantiates it.
        entry = _CUDA_ENTRY if declaration.is_cuda else _CPU_ENTRY
        return "\n".join(
            [
                f'#include "torch_mpk/jit/{header}"',
                self._code,
                f'#line 1 "launch of {declaration.name}"',
                f"namespace mpk_launch {{ using P = mpk::jit::Parameters<decltype(&{function})>;",
                *checks,
                "}",
                entry.format(function=function),
            ]
        )

    def _load(self, key: Sequence[int], device: int) -> _C.JitCode:
        declaration = self.declaration
        values = declaration.decode(key)
        if not declaration.is_cuda:
            return _C.CpuCode(str(self._compile(values, None)))
        cubin = self._compile(values, _C.device_info(device).arch)
        assert isinstance(cubin, Cubin)
        symbol = self._symbol(cubin.kernels)
        return _C.CudaCode(cubin.image, declaration.name, symbol, device, len(declaration.arguments))

    def _symbol(self, symbols: Sequence[str]) -> str:
        name = self.declaration.function.split("::")[-1]
        # A mangled name has its parts behind their lengths.
        found = [s for s in symbols if s == name or re.search(rf"(?<!\d){len(name)}{name}(?![a-z_])", s)]
        if len(found) != 1:
            self.declaration.fail(f"the source has {len(found)} kernels {name} ({', '.join(symbols)}), expected one")
        return found[0]


_CUDA_ENTRY = "void* mpk_kernel() {{ return (void*)&{function}; }}"
_CPU_ENTRY = """using mpk_entry = mpk::jit::Entry<&{function}>;
extern "C" __attribute__((visibility("default"))) void mpk_run(void** parameters) {{ mpk_entry::run(parameters); }}
extern "C" __attribute__((visibility("default"))) const int* mpk_parameter_bytes() {{ return mpk_entry::bytes; }}"""


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


def _fake(name: str, *tensors: torch.Tensor | None, **_: Any) -> Any:
    declaration = _kernels[name].declaration
    tensors += (None,) * (len(declaration.inputs) - len(tensors))
    shapes = [None if tensor is None else tensor.shape for tensor in tensors]
    try:
        sizes = bind_dims(declaration.name, declaration.signature, declaration.inputs, shapes, {})
    except TaskError as error:
        raise KernelSignatureError(str(error)) from None
    given = [(operand, tensor) for operand, tensor in zip(declaration.inputs, tensors) if tensor is not None]
    results = []
    for output in declaration.outputs:
        shape: list[Any] = []
        for dim in output.dims:
            shape += sizes[dim][0] if dim == "..." else [int(dim) if dim.isdigit() else sizes[dim][0]]
        same = [tensor.dtype for operand, tensor in given if operand.dtype_slot == output.dtype_slot >= 0]
        dtype = same[0] if same else output.dtype
        results.append(torch.empty(shape, dtype=dtype, device=given[0][1].device))
    return None if not results else results[0] if len(results) == 1 else tuple(results)
