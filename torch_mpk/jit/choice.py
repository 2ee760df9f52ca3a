"""One function with an implementation for CPUs and another for GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast, overload

import torch

from torch_mpk.errors import KernelSignatureError
from torch_mpk.jit.kernels import Kernel

Declare = Callable[[Callable[..., Any]], Kernel]  # what ``jit.kernel`` returns


@overload
def by_device(cpu: Kernel, cuda: Kernel) -> ByDevice: ...
@overload
def by_device(cpu: Declare, cuda: Declare) -> Callable[[Callable[..., Any]], ByDevice]: ...
def by_device(cpu: Kernel | Declare, cuda: Kernel | Declare) -> ByDevice | Callable[[Callable[..., Any]], ByDevice]:
    """A kernel that is ``cpu`` for tensors on a CPU and ``cuda`` for those on a GPU, in eager mode and under
    ``torch.compile``.

    Of two ``jit.kernel(...)`` that decorate nothing yet it is a decorator, whose function both take.

    Args:
        cpu: declared by ``jit.kernel`` with a launch without ``<<<>>>``.
        cuda: declared with one, the same signature and the same keyword-only parameters.

    Raises:
        KernelSignatureError: they are no such kernels, or differ in what they take. A call raises what the chosen one
            does, or where its first tensor is on another device.
    """
    if isinstance(cpu, FunctionType) and isinstance(cuda, FunctionType):
        return lambda function: ByDevice(cpu(function), cuda(function))
    return ByDevice(cast(Kernel, cpu), cast(Kernel, cuda))  # which refuses others


class ByDevice:
    """What ``by_device`` returns: called as each of its two kernels is."""

    def __init__(self, cpu: Kernel, cuda: Kernel) -> None:
        for name, kernel, is_cuda in (("cpu", cpu, False), ("cuda", cuda, True)):
            if not isinstance(kernel, Kernel) or kernel.declaration.is_cuda != is_cuda:
                launch = "with a launch in <<<>>>" if is_cuda else "without <<<>>> in its launch"
                raise KernelSignatureError(f"jit.by_device: {name}={kernel!r}, expected a jit.kernel {launch}")
        ours, theirs = (kernel.declaration for kernel in (cpu, cuda))
        for what, one, other in (
            ("signature", str(ours.signature), str(theirs.signature)),
            ("parameters", ours.attributes and _parameters(cpu), theirs.attributes and _parameters(cuda)),
        ):
            if one != other:
                raise KernelSignatureError(
                    f"jit.by_device: the {what} of cpu, {one}, and of cuda, {other}, differ; give both the same"
                )
        functools.update_wrapper(self, cpu)
        self.cpu, self.cuda, self.reference = cpu, cuda, cpu.reference

    def __reduce__(self) -> str:
        return self.cpu.__reduce__()  # copied and pickled as the function would be

    def __repr__(self) -> str:
        return f"<torch_mpk.jit.by_device {self.cpu!r}, {self.cuda!r}>"

    def __call__(self, *tensors: torch.Tensor | None, **attributes: Any) -> Any:
        first = next((tensor for tensor in tensors if isinstance(tensor, torch.Tensor)), None)
        if first is None or first.device.type == "cpu":
            return self.cpu(*tensors, **attributes)
        if first.device.type == "cuda":
            return self.cuda(*tensors, **attributes)
        name = self.cpu.declaration.name
        raise KernelSignatureError(f"{name}: its first tensor is on {first.device}, expected a CPU or a CUDA device")


def _parameters(kernel: Kernel) -> list[tuple[str, type, Any]]:
    return [(each.name, each.type, each.default) for each in kernel.declaration.attributes]
