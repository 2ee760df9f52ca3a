"""The real compilers, on kernels of a few lines."""

import pytest

from torch_mpk.errors import CompileError, NoCompilerError, OptionError
from torch_mpk.jit import compile_cuda, find_compiler
from torch_mpk.jit.headers import find_cuda_headers, include_dir
from torch_mpk.jit.report import parse_resources

KERNEL = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "torch_mpk/abi/launch.h"
extern "C" __global__ void __launch_bounds__(128, 1) kernel(const __grid_constant__ mpk::LaunchParams params) {
  __shared__ float tile[128];
  auto* data = reinterpret_cast<__nv_bfloat16*>(params.workspace);
  tile[threadIdx.x] = __bfloat162float(data[threadIdx.x]);
  __syncthreads();
  data[threadIdx.x] = __float2bfloat16(tile[127 - threadIdx.x]);
}
"""

# setmaxnreg exists on sm_90a only, not on sm_90.
SM_90A_ONLY = 'asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");'


def compilers() -> list[str]:
    found = []
    for name in ("nvcc", "nvrtc"):
        try:
            find_compiler(name)
        except CompileError:
            continue
        found.append(name)
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(params=compilers())
def compiler(request):
    return find_compiler(request.param)


def test_cubin(compiler):
    cubin = compile_cuda(KERNEL, 90, compiler=compiler)
    assert cubin.kind == "cubin"
    assert cubin.image[:4] == b"\x7fELF"
    assert b"kernel" in cubin.image
    assert 0 < cubin.resources.registers <= 64
    assert cubin.resources.shared_bytes >= 512
    assert (cubin.resources.stack_bytes, cubin.resources.spill_store_bytes, cubin.resources.warnings) == (0, 0, ())
    assert cubin.compiler.startswith(f"{compiler.name} 1")
    assert cubin.seconds > 0


@pytest.mark.slow
def test_sm_90_means_sm_90a(compiler):
    compile_cuda(KERNEL.replace("__syncthreads();", SM_90A_ONLY + "__syncthreads();"), 90, compiler=compiler)


@pytest.mark.slow
def test_ptx_for_newer_devices(compiler):
    cubin = compile_cuda(KERNEL, 80, ptx=True, compiler=compiler)
    assert cubin.kind == "ptx"
    assert b".target sm_80" in cubin.image
    assert b".entry kernel" in cubin.image
    assert b"\0" not in cubin.image


def test_every_device_header_compiles(compiler):
    root = include_dir()
    device = root / "torch_mpk" / "device"
    headers = sorted(header for header in device.rglob("*.*h") if not (device / "arch").samefile(header.parent))
    headers.append(device / "arch" / "arch.cuh")  # which includes that of the generation
    includes = "".join(f'#include "{header.relative_to(root)}"\n' for header in headers)
    compile_cuda(f"#define MPK_CONSUMER_WARPS 11\n#define MPK_LOADER_WARPS 1\n{includes}", 90, compiler=compiler)


def test_error(compiler):
    with pytest.raises(CompileError, match='identifier "nonsense" is undefined'):
        compile_cuda(KERNEL.replace("__syncthreads()", "nonsense"), 90, compiler=compiler)


def test_spills_are_reported(compiler):
    body = "float v[200];\n" + "\n".join(f"v[{i}] = data[{i}];" for i in range(200))
    uses = " + ".join(f"v[{i}] * v[{(7 * i + 3) % 200}]" for i in range(200))
    head = 'extern "C" __global__ void __launch_bounds__(1024, 1) kernel(volatile float* data)'
    source = f"{head} {{ {body}\n data[0] = {uses}; }}"
    resources = compile_cuda(source, 90, compiler=compiler).resources
    assert resources.registers == 64
    assert resources.stack_bytes > 0
    assert resources.spill_store_bytes > 0
    assert resources.spill_load_bytes > 0


def test_performance_warnings_are_reported():
    log = """ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
    128 bytes stack frame, 160 bytes spill stores, 224 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 128 bytes stack frame, 1024 bytes smem
ptxas info    : Function properties for b
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 24 registers
"""
    resources = parse_resources(log)
    assert resources.registers == 168
    assert resources.shared_bytes == 1024
    assert (resources.stack_bytes, resources.spill_store_bytes, resources.spill_load_bytes) == (128, 164, 228)
    assert len(resources.warnings) == 1
    assert "C7510" in resources.warnings[0]


def test_unknown_compiler():
    with pytest.raises(OptionError, match="expected auto, nvcc, nvrtc or .* got 'clang'"):
        find_compiler("clang")


def test_an_old_nvcc_is_refused(tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.4, V12.4.131\n")
    nvcc.chmod(0o755)
    with pytest.raises(CompileError, match=r"nvcc is version 12\.4\.131, torch_mpk needs 12\.8 or newer"):
        find_compiler(str(nvcc))


def test_no_compiler_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("torch_mpk.jit.nvcc.cuda_roots", list)
    with pytest.raises(NoCompilerError, match=r"nvcc is not on PATH.*Install the CUDA toolkit 12\.8"):
        find_compiler("nvcc")


def test_headers_nearest_to_the_compiler_are_chosen(monkeypatch, tmp_path):
    roots = []
    for version in (12080, 13010, 13000):
        include = tmp_path / str(version) / "include"
        include.mkdir(parents=True)
        (include / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n")
        for name in ("cuda_bf16.h", "cuda_fp16.h"):
            (include / name).write_text("")
        roots.append(include.parent)
    monkeypatch.setattr("torch_mpk.jit.headers.cuda_roots", lambda: roots)
    monkeypatch.setattr("torch_mpk.jit.headers.nvidia_packages", list)
    assert find_cuda_headers((13, 0)) == tmp_path / "13000" / "include"
    assert find_cuda_headers((13, 2)) == tmp_path / "13010" / "include"
    assert find_cuda_headers((12, 9)) == tmp_path / "12080" / "include"


def test_include_dir_has_what_kernels_include():
    assert (include_dir() / "torch_mpk" / "abi" / "launch.h").is_file()
