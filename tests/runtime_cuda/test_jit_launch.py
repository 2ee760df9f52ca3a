"""Single CUDA kernels up to the launch: compiled for an H200, loaded and launched on the fake driver."""

import struct
from typing import Any

import pytest
import torch

from torch_mpk import _C
from torch_mpk.errors import KernelCompileError, KernelSignatureError, LaunchError
from torch_mpk.jit import Kernel, kernel, module

SOURCE = """
template <class T, int kBlock>
__global__ void scaled(const T* __restrict__ x, T* y, int n, int64_t rows, float alpha, double beta, bool flag) {
  const int i = blockIdx.x * kBlock + threadIdx.x;
  if (i < n) y[i] = T(float(x[i]) * alpha + float(beta) * flag);
}
"""


def declare(launch: str, **options: Any) -> Kernel:
    def scaled(x, y, *, alpha: float = 0.5, beta: float = 3, flag: bool = True, BLOCK: int = 128):  # noqa: N803
        """What SOURCE does."""

    return kernel(SOURCE, "x[M, K]: T=float32|bfloat16, y[M, K]!: T", launch, **options)(scaled)


ARGUMENTS = "(x, y, M * K, M, alpha, beta, flag)"
LAUNCH = f"scaled<T, BLOCK><<<(cdiv(M * K, BLOCK), max(M // 4, 1)), BLOCK, 4 * K>>>{ARGUMENTS}"


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as context:
        context.setenv("TORCH_MPK_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def on_fake_device(fake):
    """Makes a kernel take tensors of the CPU, which stand for the device's; its declaration still says CUDA."""
    fake.set_parameters(8, 8, 4, 8, 4, 8, 1)

    def convert(declared: Kernel):
        class OnCpu:
            is_cuda = False

            def __getattr__(self, name):
                return getattr(declared.declaration, name)

        return _C.JitKernel(OnCpu(), declared.load, declared.op)

    return convert


def test_the_launch_is_what_its_declaration_says(fake, on_fake_device):
    scaled = on_fake_device(declare(LAUNCH, pdl=True, cluster=2))
    x, y = torch.zeros(9, 100), torch.zeros(9, 100)
    version = y._version
    scaled(x, y, BLOCK=256, alpha=0.25)
    assert (fake.grid[:], fake.block[:], fake.shared_bytes) == ([4, 2, 1], [256, 1, 1], 400)
    assert (fake.programmatic, fake.cooperative, fake.cluster[:]) == (1, 0, [2, 1, 1])
    values = struct.unpack_from("<QQiqfd?", bytes(fake.params))
    assert values == (x.data_ptr(), y.data_ptr(), 900, 9, 0.25, 3.0, True)
    assert b"scaledIfLi256E" in fake.kernel
    assert y._version == version + 1
    assert fake.num_allocations == fake.max_dynamic_shared == fake.non_portable_cluster == 0


@pytest.mark.slow
def test_a_grid_by_multiprocessors_and_a_branch_between_kernels(fake, on_fake_device):
    """The branch that is not taken has no blocks, and is not launched."""
    wide = f"scaled<T, 256><<<min(cdiv(M * K, 256), 2 * num_sms) if K % 4 == 0 else 0, 256>>>{ARGUMENTS}"
    narrow = f"scaled<T, 32><<<cdiv(M * K, 32) * (K % 4 != 0), 32>>>{ARGUMENTS}"
    scaled = on_fake_device(declare(f"{wide}; {narrow}"))
    for columns, grid, block in ((40960, 2 * fake.num_sms, 256), (4, 1, 256), (33, 10, 32)):
        before = fake.num_launches
        x = torch.zeros(9, columns)
        scaled(x, x.clone())
        assert (fake.grid[0], fake.block[0], fake.num_launches - before) == (grid, block, 1)


@pytest.mark.slow
def test_each_choice_of_template_arguments_is_loaded_once(fake, on_fake_device):
    scaled = on_fake_device(declare(LAUNCH))
    for dtype, block, symbol in [
        (torch.float32, 128, b"IfLi128E"),
        (torch.bfloat16, 128, b"I13__nv_bfloat16Li128E"),
        (torch.float32, 64, b"IfLi64E"),
    ]:
        x = torch.zeros(3, 5, dtype=dtype)
        scaled(x, x.clone(), BLOCK=block)
        assert symbol in fake.kernel
    fake.kernel = b""
    scaled(torch.zeros(7, 1), torch.zeros(7, 1))
    assert fake.kernel == b""
    assert fake.num_launches == 4


def test_shared_memory_and_clusters_beyond_the_usual_are_asked_for(fake, on_fake_device):
    scaled = on_fake_device(declare(f"scaled<T, BLOCK><<<16, BLOCK, 1024 * K>>>{ARGUMENTS}", cluster=(16, 1, 1)))
    for columns, allowed in [(48, 0), (100, 102400), (80, 102400), (200, 204800)]:
        scaled(torch.zeros(2, columns), torch.zeros(2, columns))
        assert (fake.shared_bytes, fake.max_dynamic_shared) == (1024 * columns, allowed)
    assert fake.non_portable_cluster == 1
    with pytest.raises(LaunchError, match=r"scaled needs 245760 \+ 16 bytes of shared memory, a block on Fake GPU has"):
        scaled(torch.zeros(2, 240), torch.zeros(2, 240))


def test_a_cooperative_launch(fake, on_fake_device):
    on_fake_device(declare(LAUNCH, cooperative=True))(torch.zeros(2, 2), torch.zeros(2, 2))
    assert (fake.cooperative, fake.programmatic, fake.cluster[:]) == (1, 0, [0, 0, 0])


def test_nothing_is_launched_for_an_empty_tensor(fake, on_fake_device):
    scaled = on_fake_device(declare(LAUNCH))
    scaled(torch.zeros(0, 3), torch.zeros(0, 3))
    assert fake.num_launches == 0


def test_a_first_call_in_a_capture_breaks_nothing(fake, on_fake_device):
    scaled = on_fake_device(declare(LAUNCH))
    fake.capturing_stream, fake.capture_id = 7, 1
    scaled(torch.zeros(2, 2), torch.zeros(2, 2))
    assert (fake.num_launches, fake.num_violations, fake.num_allocations) == (1, 0, 0)


def test_a_refused_launch_says_what_was_asked(fake, on_fake_device):
    scaled = on_fake_device(declare(LAUNCH))
    fake.fail_call, fake.fail_result = b"cuLaunchKernelEx", 1
    message = r"launching kernel scaled with grid \(1, 1, 1\), block \(128, 1, 1\) and 8 bytes of dynamic shared memory"
    with pytest.raises(LaunchError, match=message):
        scaled(torch.zeros(2, 2), torch.zeros(2, 2))


def test_sizes_that_no_launch_can_have(fake, on_fake_device):
    scaled = on_fake_device(declare(f"scaled<T, BLOCK><<<M - 5, BLOCK // (K - 4)>>>{ARGUMENTS}"))
    with pytest.raises(KernelSignatureError, match="the grid's 'M - 5' is -3"):
        scaled(torch.zeros(2, 2), torch.zeros(2, 2))
    with pytest.raises(KernelSignatureError, match=r"'BLOCK // \(K - 4\)' divides by 0"):
        scaled(torch.zeros(6, 4), torch.zeros(6, 4))
    wide = on_fake_device(declare(f"scaled<T, BLOCK><<<M, (BLOCK, K)>>>{ARGUMENTS}"))
    for columns in (0, 9):
        with pytest.raises(
            KernelSignatureError, match=rf"block is \(128, {columns}, 1\), expected 1 to 1024 threads in all"
        ):
            wide(torch.zeros(2, columns), torch.zeros(2, columns))
    huge = torch.empty(2**31, 1, dtype=torch.bfloat16)  # never touched
    with pytest.raises(KernelSignatureError, match=r"'M \* K' is 2147483648, which parameter 3 \(32 bits\) cannot"):
        on_fake_device(declare(LAUNCH))(huge, huge)
    assert fake.num_launches == 0


@pytest.mark.slow
def test_a_negative_number_for_an_unsigned_parameter_is_refused(fake, on_fake_device):
    source = "struct Sizes { int n; unsigned long rest; };\n"
    source += "__global__ void sized(const int8_t* x, unsigned m, Sizes sizes) {}"

    def sized(x): ...

    launch = "sized<<<1, 32>>>(x, M - 4, {.n = M - 9, .rest = M - 3})"
    declared = on_fake_device(kernel(source, "x[M]: int8", launch)(sized))
    fake.set_parameters(8, 4, 16)
    for size, message in [
        (3, r"'M - 4' is -1, which parameter 2 \(unsigned\) cannot hold: declare it int64_t"),
        (2**32 + 4, r"'M - 4' is 4294967296, which parameter 2 \(unsigned\) cannot hold"),
    ]:
        with pytest.raises(KernelSignatureError, match=f"sized: {message}"):
            declared(torch.empty(size, dtype=torch.int8))  # never touched
    declared(torch.zeros(4, dtype=torch.int8))
    assert struct.unpack_from("<QIi4xq", bytes(fake.params))[1:] == (
        0,
        -5,
        1,
    )
    other = on_fake_device(kernel(source, "x[M]: int8", launch.replace("M - 4", "M"))(sized))
    with pytest.raises(KernelSignatureError, match=r"'M - 3' is -1, which parameter 3's rest \(unsigned\) cannot hold"):
        other(torch.zeros(2, dtype=torch.int8))
    assert fake.num_launches == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("M * K, M,", "M, M * K, 1,"), "the launch passes 8 arguments"),
        (("(x, y,", "(y, x,"), r"parameter 2: x is float32 and only read, declare it const float\* or const void\*"),
        (("alpha, beta", "M, beta"), "parameter 5: M is an integer, declare it int or int64_t"),
        (("M, alpha", "beta, alpha"), "parameter 4: beta is a float, declare it float or double"),
    ],
)
def test_parameters_that_do_not_fit_the_launch(change, message):
    with pytest.raises(KernelCompileError, match=message):
        declare(LAUNCH.replace(*change)).compile(90, T=torch.float32)


@pytest.mark.slow
def test_a_name_that_two_kernels_have(fake, on_fake_device):
    def scaled(x): ...

    fake.set_parameters(8)
    source = "namespace a { __global__ void scaled(float* x) {} }\n__global__ void scaled(float* x) {}"
    on_fake_device(kernel(source, "x[N]!: float32", "a::scaled<<<1, 1>>>(x)")(scaled))(torch.zeros(1))
    assert fake.kernel == b"_ZN1a6scaledEPf"
    with pytest.raises(KernelSignatureError, match=r"has 2 kernels scaled \(.*\), expected one"):
        on_fake_device(kernel(source, "x[N]!: float32", "scaled<<<1, 1>>>(x)")(scaled))(torch.zeros(1))


SEED = """
template <class T>
struct Params {
  const T* __restrict__ input;
  int32_t count;
  struct { float alpha; double beta; } by;
  T* output;
};
template <class T, float kAlpha, class Other>
struct Scaled {
  static __device__ void run(const Params<T> p, int64_t row) { p.output[0] = T(float(p.input[0]) * kAlpha + p.count); }
};
template <class, int> struct Pair {};
template <int kStep> __global__ void finish(float* y, double half) { y[0] += kStep * half; }
"""


@pytest.mark.slow
def test_a_member_of_a_class_template_and_a_struct_by_value(fake, on_fake_device):
    @kernel(
        SEED,
        "x[N]: T=float32|bfloat16, y[N]!: T",
        "Scaled<T, ALPHA, Pair<T, 3>>::run<<<1, 32>>>({.input = x, .count = N, .by = {.beta = ALPHA}, .output = y}, 7)",
    )
    def scaled(x, y, *, ALPHA: float = 0.5): ...  # noqa: N803

    fake.set_parameters(40, 8)
    run = on_fake_device(scaled)
    x, y = torch.zeros(9, dtype=torch.bfloat16), torch.zeros(9, dtype=torch.bfloat16)
    for alpha in (0.1, -2.0, float("inf"), float("-inf"), float("nan")):
        run(x, y, ALPHA=alpha)
        values = struct.unpack_from("<Qi4xf4xdQq", bytes(fake.params))
        assert values[:3] == (x.data_ptr(), 9, 0.0) and values[4:] == (y.data_ptr(), 7)
        assert struct.pack("<d", values[3]) == struct.pack("<d", alpha)
    assert b"scaled_run_0" in fake.kernel
    assert fake.num_launches == 5


@pytest.mark.slow
def test_two_launches_of_one_template(fake, on_fake_device):
    @kernel(
        SEED,
        "x[N]!: float32",
        "finish<1><<<N, 32>>>(x, HALF); finish<2><<<N + BAD, 64>>>(x, HALF)",
        pdl="PDL",
    )
    def finish(x, *, HALF: float = 0.5, PDL: bool = False, BAD: int = 1): ...  # noqa: N803

    fake.set_parameters(8, 8)
    run = on_fake_device(finish)
    for pdl in (False, True, False):
        run(torch.zeros(3), PDL=pdl)
        assert (fake.grid[0], fake.block[0], fake.programmatic) == (4, 64, pdl)
        assert b"finishILi2E" in fake.kernel
    assert fake.num_launches == 6
    with pytest.raises(KernelSignatureError, match=r"the grid's 'N \+ BAD' is -6"):
        run(torch.zeros(3), BAD=-9)
    assert fake.num_launches == 6


def test_kernels_of_one_module_are_one_image(fake, on_fake_device):
    both = module(
        "__device__ int total;\n__global__ void add(int n) { total += n; }\n__global__ void get(int* x) { *x = total; }"
    )

    @both.kernel("x[N]: int32", "add<<<1, 1>>>(N)")
    def add(x): ...

    @both.kernel("x[1]!: int32", "get<<<1, 1>>>(x)")
    def get(x): ...

    cubin = add.compile(90)
    assert cubin == get.compile(90)
    assert len(cubin.kernels) == 2
    fake.set_parameters(8)
    on_fake_device(get)(torch.zeros(1, dtype=torch.int32))
    assert fake.kernel == b"_Z3getPi"


@pytest.mark.slow
def test_fields_that_do_not_fit_a_struct():
    def f(x): ...

    for struct_, fields, message in [
        ("{ float* x; }", "{.x = x}", r"parameter 1's x: x is float32 and only read, declare it const float\*"),
        ("{ const float* x; float n; }", "{.x = x, .n = N}", "parameter 1's n: N is an integer, declare it int"),
        ("{ P(const P&); const float* x; }", "{.x = x}", r"parameter 1: \{...\} is passed, declare it a trivially"),
        ("{ const float* x; }", "{.y = x}", "y"),
    ]:
        source = f"struct P {struct_};\n__global__ void f(const P p) {{}}"
        with pytest.raises(KernelCompileError, match=message):
            kernel(source, "x[N]: float32", f"f<<<1, 1>>>({fields})")(f).compile(90)


def test_instructions_of_sm_90a_and_headers_of_the_user(tmp_path):
    def exact(x): ...

    (tmp_path / "part.cuh").write_text('#define PART asm volatile("setmaxnreg.inc.sync.aligned.u32 232;")\n')
    source = "#include <part.cuh>\n__global__ void __launch_bounds__(128) exact(float* x) { PART; mpk::pdl_wait(); }"
    declared = kernel(source, "x[N]!: float32", "exact<<<1, 128>>>(x)", include_dirs=[tmp_path])(exact)
    first = declared.compile(90)
    assert first.kind == "cubin"
    keys = {first.key}
    (tmp_path / "part.cuh").write_text("#define PART\n#define MORE <more.cuh>\n#include MORE\n")
    for text in ("", "// changed"):
        (tmp_path / "more.cuh").write_text(text)
        keys.add(declared.compile(90).key)
    assert len(keys) == 3


@kernel(
    """
    __global__ void probe(int* out) {
      extern __shared__ int shared[];
      unsigned cluster = 1, bytes;
    #if __CUDA_ARCH__ >= 900
      asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(cluster));
    #endif
      asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
      shared[bytes / 4 - 1 - threadIdx.x] = threadIdx.x;
      __syncthreads();
      if (threadIdx.x < 2) out[2 * blockIdx.x + threadIdx.x] = threadIdx.x ? bytes : cluster * shared[bytes / 4 - 2];
    }
    """,
    "out[B, 2]!: int32",
    "probe<<<B, 32, 1000 * KB>>>(out)",
    cluster=2,
    pdl=True,
)
def probe(out, *, KB: int): ...  # noqa: N803


@kernel(
    "__global__ void meet(int* out) {\n  atomicAdd(out, 1);\n}",
    "out[1]!: int32",
    "meet<<<B, 32>>>(out)",
    cooperative=True,
)
def meet(out, *, B: int): ...  # noqa: N803


def test_what_runs_on_a_device_compiles():
    for declared in (probe, meet):
        assert len(declared.compile(90).kernels) == 1


@pytest.mark.gpu
def test_clusters_shared_memory_and_cooperative_launches_of_a_device():
    for kilobytes in (1, 120, 60):
        out = torch.zeros(8, 2, dtype=torch.int32, device="cuda")
        probe(out, KB=kilobytes)
        assert out.tolist() == [[2, 1000 * kilobytes]] * 8
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    meet(out, B=4)
    assert out.item() == 4 * 32
    with pytest.raises(LaunchError, match=r"launching kernel meet with grid \(1000000, 1, 1\)"):
        meet(out, B=1000000)
    with pytest.raises(LaunchError, match="probe needs 1000000 . 0 bytes of shared memory"):
        probe(torch.zeros(8, 2, dtype=torch.int32, device="cuda"), KB=1000)
    meet(out, B=1)  # a launch that was refused leaves nothing behind
    assert out.item() == 5 * 32


@pytest.mark.gpu
def test_tensors_of_a_device_are_checked():
    with pytest.raises(KernelSignatureError, match="meet: out is on the CPU, expected a CUDA device"):
        meet(torch.zeros(1, dtype=torch.int32), B=1)
    scaled = declare(LAUNCH)
    x = torch.randn(9, 100, device="cuda")
    y = torch.empty_like(x)
    scaled(x, y, beta=0)
    assert torch.equal(y, x * 0.5)
    with pytest.raises(KernelSignatureError, match="scaled: y is on the CPU, expected a CUDA device"):
        scaled(x, y.cpu())
