"""One function of two kernels: the device of its first tensor says which runs."""

import copy

import pytest
import torch
from torch._subclasses import FakeTensorMode

from torch_mpk import jit
from torch_mpk.errors import KernelSignatureError

LOOP = "for (int64_t i = 0; i < n; i++) y[i] = x[i] + by;"
SIGNATURE = "x[N]: float32 -> y[N]: float32"


def declare(is_cuda: bool, signature: str = SIGNATURE, default: int = 1) -> jit.Kernel:
    def shifted(x, *, by: int = default):
        """x plus a number."""

    qualifier, config = ("__global__ ", "<<<1, 1>>>") if is_cuda else ("", "")
    source = f"{qualifier}void shift(const float* x, float* y, int64_t n, int64_t by) {{ {LOOP} }}"
    return jit.kernel(source, signature, f"shift{config}(x, y, N, by)")(shifted)


def test_the_device_chooses() -> None:
    shifted = jit.by_device(cpu=declare(False), cuda=declare(True))
    x = torch.randn(7)
    assert torch.equal(shifted(x, by=3), x + 3)
    compiled = torch.compile(lambda x: shifted(x, by=2) * 2, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), (x + 2) * 2)
    with FakeTensorMode():  # needs no GPU: what is traced for one goes to the other kernel
        assert shifted(torch.empty(3, device="cuda")).device.type == "cuda"
    with pytest.raises(KernelSignatureError, match="its first tensor is on meta, expected a CPU or a CUDA device"):
        shifted(torch.empty(3, device="meta"))


def test_as_a_decorator_both_take_the_function() -> None:
    source = f"void shift(const float* x, float* y, int64_t n, int64_t by) {{ {LOOP} }}"

    @jit.by_device(
        cpu=jit.kernel(source, SIGNATURE, "shift(x, y, N, by)"),
        cuda=jit.kernel(f"__global__ {source}", SIGNATURE, "shift<<<1, 1>>>(x, y, N, by)"),
    )
    def shifted(x, *, by: int = 1):
        return x + by

    x = torch.randn(7)
    assert torch.equal(shifted(x, by=3), shifted.reference(x, by=3))
    assert shifted.cpu.reference is shifted.cuda.reference is shifted.reference
    assert copy.deepcopy(shifted) is shifted


@pytest.mark.gpu
def test_it_chooses_on_a_gpu() -> None:
    shifted = jit.by_device(cpu=declare(False), cuda=declare(True))
    x = torch.randn(7, device="cuda")
    assert torch.equal(shifted(x, by=3), x + 3)


def test_kernels_that_do_not_belong_together() -> None:
    with pytest.raises(KernelSignatureError, match="cuda=.*expected a jit.kernel with a launch in <<<>>>"):
        jit.by_device(cpu=declare(False), cuda=declare(False))
    with pytest.raises(KernelSignatureError, match="the signature of cpu, .*float32.*, and of cuda, .*float64"):
        jit.by_device(cpu=declare(False), cuda=declare(True, SIGNATURE.replace("x[N]: float32", "x[N]: float64")))
    with pytest.raises(KernelSignatureError, match="the parameters of cpu, .* 1.*, and of cuda, .* 2.*, differ"):
        jit.by_device(cpu=declare(False), cuda=declare(True, default=2))
