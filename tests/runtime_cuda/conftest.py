"""A CUDA driver without a device, compiled from fake_libcuda.cpp, and programs to load on it."""

import ctypes
import gc
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from torch_mpk import _C


class Fake(ctypes.Structure):
    """``struct Fake`` of fake_libcuda.cpp."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("version", "arch", "num_sms", "smem_optin", "occupancy", "num_devices")),
        ("fail_result", ctypes.c_int),
        ("fail_call", ctypes.c_char * 64),
        ("capturing_stream", ctypes.c_uint64),
        ("capture_id", ctypes.c_uint64),
        ("param_bytes", ctypes.c_int),
        *((f"num_{name}", ctypes.c_int) for name in ("launches", "allocations", "live", "context_pushes")),
        ("context_depth", ctypes.c_int),
        ("num_violations", ctypes.c_int),
        *((name, ctypes.c_uint) for name in ("grid", "block", "shared_bytes")),
        *((name, ctypes.c_int) for name in ("cooperative", "max_dynamic_shared")),
        ("stream", ctypes.c_uint64),
        ("kernel", ctypes.c_char * 64),
        ("image", ctypes.c_char * 256),
        ("params", ctypes.c_ubyte * 32768),
    ]


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("driver") / "libfakecuda.so"
    source = Path(__file__).with_name("fake_libcuda.cpp")
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", "-O1", source, "-o", library], check=True)
    return library


@pytest.fixture(scope="module", autouse=True)
def _only_new_garbage() -> Iterator[None]:
    """Keeps ``gc.collect()`` to what these tests make: the libraries that earlier ones have loaded take it a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def fake(fake_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """The driver's state: an H200 and a kernel that takes 2 inputs and 1 output."""
    monkeypatch.setenv("TORCH_MPK_LIBCUDA", str(fake_library))
    state = Fake.in_dll(ctypes.CDLL(str(fake_library)), "fake")
    gc.collect()  # executables of earlier tests, which would free under this one's counters
    ctypes.memset(ctypes.addressof(state), 0, ctypes.sizeof(state))
    state.version, state.arch, state.num_sms, state.smem_optin = 13000, 90, 132, 232448
    state.occupancy, state.num_devices = 1, 1
    state.param_bytes = 176 + 3 * 8
    yield state
    assert state.num_violations == 0
    assert state.context_depth == 0


@pytest.fixture
def make_program() -> Callable[..., SimpleNamespace]:
    """A program as code generation returns it, with 4 workers."""

    def make(**changes: object) -> SimpleNamespace:
        fields = {
            "kernel_name": "mpk_kernel",
            "table": b"read-only table",
            "num_workers": 4,
            "num_threads": 288,
            "smem_bytes": 200_000,
            "workspace_bytes": 1024,
            "control_bytes": 512,
            "stalls_offset": 384,
            "stamps_offset": 0,
            "num_inputs": 2,
            "num_outputs": 1,
            "num_scalars": 1,
            "input_alignment": [16, 8],
            "phase_names": ["embed", "qkv", "attention"],
        }
        return SimpleNamespace(**(fields | changes))

    return make


@pytest.fixture
def make_executable(fake: Fake, make_program: Callable) -> Callable[..., "_C.CudaExecutable"]:
    def make(watchdog_ns: int = 2 * 10**9, **changes: object) -> "_C.CudaExecutable":
        program = make_program(**changes)
        fake.param_bytes = 176 + 8 * (program.num_inputs + program.num_outputs)
        return _C.CudaExecutable(program, b"// ptx\n", 0, watchdog_ns)

    return make
