"""``python -m torch_mpk new-kernel``: the files of a single kernel, working as they are written."""

from __future__ import annotations

from pathlib import Path

from torch_mpk.tools.new_task import check_name, write_files

PYTHON = '''\
"""TODO: what {name} is."""

import torch

from torch_mpk import jit

# R, H and T are bound by the tensors, "?" may be None, and what stands behind "->" is allocated and returned.
SIGNATURE = "x[R, H]: T=float32|bfloat16|float16, weight[H]?: T -> y[R, H]: T"
SAMPLES = [{{"R": 1, "H": 96}}, {{"R": 5, "H": 1030, "weight": None, "eps": 0.01}}]  # what checks run


@jit.by_device(
    cpu=jit.kernel("{name}.cpp", SIGNATURE, "{name}<T>(x, weight, y, R, H, eps)", samples=SAMPLES),
    cuda=jit.kernel("{name}.cuh", SIGNATURE, "{name}<T, 256><<<R, 256>>>(x, weight, y, H, eps)"),
)
def {name}(x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float = 1e-6) -> torch.Tensor:
    """``x`` divided by the largest magnitude of its row, times the weight: computed in fp32, rounded once."""
    # The reference, which checks compare the kernels with. A call does not run it.
    wide = x.float()
    y = wide / (wide.abs().amax(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)
'''

CPU = """\
// For CPUs: the compiler vectorises plain loops for the instruction set of the machine.
template <class T>
void {name}(const T* x, const T* weight, T* y, int64_t rows, int64_t columns, float eps) {{
  for (int64_t row = 0; row < rows; row++, x += columns, y += columns) {{
    float most = 0;
    for (int64_t i = 0; i < columns; i++) {{
      const float value = float(x[i]), size = value < 0 ? -value : value;
      most = size > most ? size : most;
    }}
    for (int64_t i = 0; i < columns; i++) y[i] = T(float(x[i]) / (most + eps) * (weight ? float(weight[i]) : 1.0f));
  }}
}}
"""

CUDA = """\
// For GPUs: each block takes a row.
template <class T, int kBlock>
__global__ void {name}(const T* x, const T* weight, T* y, int64_t columns, float eps) {{
  __shared__ float most_of_warp[kBlock / mpk::kWarpThreads];
  x += blockIdx.x * columns;
  y += blockIdx.x * columns;
  float most = 0;
  for (int64_t i = threadIdx.x; i < columns; i += kBlock) most = fmaxf(most, fabsf(float(x[i])));
  for (int other = mpk::kWarpThreads / 2; other > 0; other /= 2)
    most = fmaxf(most, __shfl_xor_sync(mpk::kFullMask, most, other));
  if (threadIdx.x % mpk::kWarpThreads == 0) most_of_warp[threadIdx.x / mpk::kWarpThreads] = most;
  __syncthreads();
  for (float of_warp : most_of_warp) most = fmaxf(most, of_warp);
  for (int64_t i = threadIdx.x; i < columns; i += kBlock)
    y[i] = T(float(x[i]) / (most + eps) * (weight ? float(weight[i]) : 1.0f));
}}
"""

TEST = '''\
"""{name} computes what its reference does."""

import pytest
import torch

from {name} import {name}
from torch_mpk.testing import check_kernel

DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]


def test_it_passes_its_check() -> None:
    check_kernel({name})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_computes_what_its_reference_does(dtype: torch.dtype, device: str) -> None:
    x, weight = torch.randn(3, 100, device=device).to(dtype), torch.randn(100, device=device).to(dtype)
    torch.testing.assert_close({name}(x, weight), {name}.reference(x, weight))
'''


def write(name: str, folder: Path) -> list[Path]:
    """Write ``<name>.py``, ``<name>.cpp``, ``<name>.cuh`` and ``test_<name>.py``; returns their paths.

    Raises ArgumentError where the name is none or is taken, the folder is not there, or one of the files is.
    """
    check_name(name)
    templates = {f"{name}.py": PYTHON, f"{name}.cpp": CPU, f"{name}.cuh": CUDA, f"test_{name}.py": TEST}
    return write_files(name, folder, templates)
