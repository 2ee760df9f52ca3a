"""What ``torch_mpk.jit`` refuses, where it is declared or called, with what was expected instead."""

import pytest
import torch

from torch_mpk import jit
from torch_mpk.errors import ArgumentError, KernelCompileError, KernelSignatureError


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as context:
        context.setenv("TORCH_MPK_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


SUM = "void g(const float* x, const float* y, float* z, int64_t n) { for (int i = 0; i < n; i++) z[i] = x[i] + y[i]; }"


def declared(source=SUM, signature="x[N]: float32, y[N]: float32 -> z[N]: float32", launch="g(x, y, z, N)", **options):
    def g(x, y): ...

    return jit.kernel(source, signature, launch, **options)(g)


def test_code_may_be_one_line():
    x, y = torch.randn(2, 5)
    assert torch.equal(declared()(x, y), x + y)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"flags": "-O2"}, r"jit.kernel: flags: expected a list of strings; of one word \['-O2'\], got '-O2'"),
        ({"flags": [2]}, r"jit.kernel: flags: expected a list of strings, got \[2\]"),
        ({"include_dirs": "folder"}, r"jit.kernel: include_dirs: expected a list of folders; .* got 'folder'"),
        ({"source": None}, "jit.kernel: source=None, expected code, the path of a file, or a list of paths"),
        ({"source": ["a", 5]}, r"jit.kernel: source=\['a', 5\], expected code, the path of a file, or a list of paths"),
        (
            {"source": "none.cpp"},
            "g: there is no file .*none.cpp; code would have a line break, a brace, a semicolon or",
        ),
        ({"signature": 5}, "g: the signature is 5, expected a string"),
        ({"launch": None}, "g: the launch is None, expected a string"),
        ({"require": 5}, "g: require=5, expected a condition as a string, or a list of them"),
        ({"require": [5]}, r"g: require=\[5\], expected a condition as a string, or a list of them"),
        ({"cluster": "2"}, "g: cluster='2', expected a number of blocks, or up to three"),
        ({"pdl": 5}, "g: cooperative=False and pdl=5, expected True or False, and of pdl also a condition"),
        ({"launch": "g<<<1, 2048>>>(x, y, z, N)"}, r"the block is \(2048, 1, 1\), expected .* at most 1024 in all"),
        ({"launch": "g<<<1, (32, 64)>>>(x, y, z, N)"}, r"the block is \(32, 64, 1\), expected .* at most 1024 in all"),
        ({"launch": "g<<<1, 0>>>(x, y, z, N)"}, r"the block is \(0, 1, 1\), expected 1 to"),
        ({"launch": "g<<<(1, 70000), 1>>>(x, y, z, N)"}, r"the grid is \(1, 70000, 1\), expected 0 to .*65535, 65535"),
        ({"launch": "g<<<1, 1, 300000>>>(x, y, z, N)"}, "the shared memory is 300000, expected 0 to 232448"),
        ({"launch": "g<<<1, 4 // 0>>>(x, y, z, N)"}, "4 // 0.* divides by 0"),
        ({"launch": "g<<<1, 1>>>(x, y, z, N)", "cluster": 32}, r"the cluster is \(32, 1, 1\), expected .* at most 16"),
    ],
)
def test_declarations_that_no_call_could_have(options, match):
    with pytest.raises(KernelSignatureError, match=match):
        declared(**options)


@pytest.mark.parametrize("function", [5, len, torch.nn.Linear])
def test_what_is_no_function(function):
    with pytest.raises(KernelSignatureError, match="jit.kernel: expected a function to decorate, got"):
        jit.kernel(SUM, "x[N]: float32 -> y[N]: float32", "g(x, y, N)")(function)


def test_folders_that_are_not_there(tmp_path):
    with pytest.raises(KernelSignatureError, match="g: include_dirs has '.*none', and there is no such folder"):
        declared(include_dirs=[tmp_path / "none"]).compile()


def test_tensors_on_a_device_and_on_meta():
    g, x, meta = declared(), torch.randn(3), torch.empty(3, device="meta")
    for tensors in ((x, meta), (meta, x)):
        with pytest.raises(KernelSignatureError, match="g: y is on .*, but x is on .*: put both on one"):
            g(*tensors)
    assert g(meta, meta).is_meta


def added(x, *, K: int = 1, T: torch.dtype = torch.float32): ...  # noqa: N803


ADDED = (
    "template <int K> void added(const float* x, float* y, int64_t n) { for (int i = 0; i < n; i++) y[i] = x[i] + K; }"
)


def test_numbers_that_template_arguments_cannot_be():
    kernel = jit.kernel(ADDED, "x[N]: float32 -> y[N]: float32", "added<K>(x, y, N)")(added)
    match = (
        r"added: the source has no function added<4294967296>: its name or .* \(K=4294967296 has more than 32 bits\)"
    )
    for call in (lambda: kernel(torch.ones(3), K=2**32), lambda: kernel.compile(K=2**32)):
        with pytest.raises(KernelCompileError, match=match) as caught:
            call()
        assert str(caught.value).count("error:") == 1  # the compiler's first; log.txt has the others
    for value in ("3", 2.5, True):
        with pytest.raises(KernelSignatureError, match=f"added: K is {value!r}, expected a value of type int"):
            kernel.compile(K=value)
    assert torch.equal(kernel(torch.ones(3), K=2**31 - 1), torch.full((3,), 2.0**31))


def test_values_that_make_a_launch_that_no_device_has():
    source = "template <int K> __global__ void added(const float* x, float* y, int n) {}"
    kernel = jit.kernel(source, "x[N]: float32 -> y[N]: float32", "added<K><<<1, 32 * K>>>(x, y, N)")(added)
    with pytest.raises(KernelSignatureError, match=r"added: the block is \(3200, 1, 1\), expected .* 1024 in all"):
        kernel.compile(arch=90, K=100)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: jit.compile_host("", flags="-O2"), "flags: expected a list of strings"),
        (lambda: jit.compile_cuda("", 90, flags="-O2"), "flags: expected a list of strings"),
        (lambda: jit.compile_cuda("", "90"), "arch: expected an int, as 90 for sm_90a, got '90'"),
        (lambda: jit.compile_host(None), "source: expected C.. code as a string, got None"),
    ],
)
def test_arguments_of_the_compilers(call, match):
    with pytest.raises(ArgumentError, match=match):
        call()
