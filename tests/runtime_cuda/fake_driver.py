"""A CUDA driver without a device, compiled from fake_libcuda.cpp."""

import ctypes
import subprocess
from pathlib import Path


class Fake(ctypes.Structure):
    """``struct Fake`` of fake_libcuda.cpp."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("version", "arch", "num_sms", "smem_optin", "occupancy", "num_devices")),
        ("static_shared", ctypes.c_int),
        ("fail_result", ctypes.c_int),
        ("fail_call", ctypes.c_char * 64),
        ("capturing_stream", ctypes.c_uint64),
        ("capture_id", ctypes.c_uint64),
        ("param_bytes", ctypes.c_int * 16),
        ("foreign_context", ctypes.c_int),
        *((f"num_{name}", ctypes.c_int) for name in ("launches", "allocations", "live", "context_pushes")),
        ("context_depth", ctypes.c_int),
        ("num_violations", ctypes.c_int),
        *((name, ctypes.c_uint * 3) for name in ("grid", "block", "cluster")),
        ("shared_bytes", ctypes.c_uint),
        *(
            (name, ctypes.c_int)
            for name in ("cooperative", "programmatic", "max_dynamic_shared", "non_portable_cluster")
        ),
        ("stream", ctypes.c_uint64),
        ("kernel", ctypes.c_char * 64),
        ("image", ctypes.c_char * 256),
        ("params", ctypes.c_ubyte * 32768),
    ]

    def reset(self) -> None:
        """An H200 without memory of what was done, and a kernel that takes 2 inputs and 1 output."""
        ctypes.memset(ctypes.addressof(self), 0, ctypes.sizeof(self))
        self.version, self.arch, self.num_sms, self.smem_optin = 13000, 90, 132, 232448
        self.occupancy, self.num_devices, self.static_shared = 1, 1, 16
        self.set_pointers(3)

    def set_pointers(self, count: int) -> None:
        """How many tensors the megakernel takes."""
        self.set_parameters(192 + 8 * count)

    def set_parameters(self, *sizes: int) -> None:
        """The bytes of each of the kernel's parameters."""
        self.param_bytes[:] = [*sizes, *[0] * (16 - len(sizes))]


def build(folder: Path) -> Path:
    """Compiles the library, which TORCH_MPK_LIBCUDA may then name."""
    library = folder / "libfakecuda.so"
    source = Path(__file__).with_name("fake_libcuda.cpp")
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", "-O1", source, "-o", library], check=True)
    return library


def state_of(library: Path) -> Fake:
    return Fake.in_dll(ctypes.CDLL(str(library)), "fake")


def destroy_graphs(library: Path, capture: int = 0) -> None:
    """Destroys a capture's graph, and all that was instantiated from it; by default those of all captures."""
    ctypes.CDLL(str(library)).fake_destroy_graph(ctypes.c_uint64(capture))
