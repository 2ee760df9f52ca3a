"""The fake driver's state, and programs to load on it."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.runtime_cuda import simulated_gpu
from tests.runtime_cuda.fake_driver import Fake, build, destroy_graphs, state_of
from torch_mpk import _C
from torch_mpk.runtime import cuda
from torch_mpk.runtime.backend import BACKENDS


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module", autouse=True)
def _only_new_garbage() -> Iterator[None]:
    """Keeps ``gc.collect()`` to what these tests make: the libraries that earlier ones have loaded take it a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def fake(fake_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setenv("TORCH_MPK_LIBCUDA", str(fake_library))
    state = state_of(fake_library)
    gc.collect()  # executables of earlier tests, which would free under this one's counters
    _C.synchronize_captured()
    state.reset()
    yield state
    destroy_graphs(fake_library)
    assert state.num_violations == 0
    assert state.context_depth == 0


@pytest.fixture
def simulated(fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    """What would run on the CPU takes the CUDA path, up to the launch."""
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(BACKENDS, "cpu", simulated_gpu)
    monkeypatch.setattr(cuda, "compile_cuda", simulated_gpu.not_compiled)
    monkeypatch.setattr(simulated_gpu, "driver", fake, raising=False)
    return fake


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
            "stalls_offset": 288,
            "stamps_offset": 0,
            "num_inputs": 2,
            "num_outputs": 1,
            "num_scalars": 1,
            "input_alignment": [16, 8],
            "maps": [],
            "phase_names": ["embed", "qkv", "attention"],
            "phase_experts": [],
            "ranks": 1,
            "group": "",
            "exchange_key": "",
            "mailbox_bytes": 0,
        }
        return SimpleNamespace(**(fields | changes))

    return make


@pytest.fixture
def make_executable(fake: Fake, make_program: Callable) -> Callable[..., "_C.CudaExecutable"]:
    def make(watchdog_ns: int = 2 * 10**9, **changes: object) -> "_C.CudaExecutable":
        program = make_program(**changes)
        fake.set_pointers(program.num_inputs + program.num_outputs)
        return _C.CudaExecutable(program, b"// ptx\n", 0, watchdog_ns)

    return make
