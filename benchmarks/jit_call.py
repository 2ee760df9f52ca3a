"""What a call of a single kernel with ten tensors costs the host beyond a call of an empty pybind11 function.

    python benchmarks/jit_call.py [--device cuda]

Each number is the least of many rounds, in which the calls take turns: on a busy machine the others say more about the
machine. The kernel does nothing; on a GPU the launch is included.
"""

import argparse
import importlib.util
import sysconfig
import time
from collections.abc import Callable
from typing import Any

import pybind11
import torch

from torch_mpk.jit import compile_host, kernel

NAMES = [f"x{i}" for i in range(10)]
ROUNDS, CALLS = 200, 1000


def bare_function() -> Callable[..., None]:
    """An empty function of ten objects, bound by pybind11."""
    parameters = ", ".join(["py::handle"] * len(NAMES))
    source = f"""
#include <pybind11/pybind11.h>
namespace py = pybind11;
PYBIND11_MODULE(bare, m) {{ m.def("bare", []({parameters}) {{}}); }}
"""
    library = compile_host(source, include_dirs=[pybind11.get_include(), sysconfig.get_path("include")])
    spec = importlib.util.spec_from_file_location("bare", library)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.bare


def empty_kernel(device: str) -> Any:
    """A kernel of ten tensors, the last of them written, that does nothing."""
    parameters = ", ".join([*["const float*"] * (len(NAMES) - 1), "float*", "int64_t"])
    signature = ", ".join([f"{name}[N]: float32" for name in NAMES[:-1]] + [f"{NAMES[-1]}[N]!: float32"])
    qualifier, config = ("__global__ ", "<<<cdiv(N, 256), 256>>>") if device == "cuda" else ("", "")

    def empty(x0, x1, x2, x3, x4, x5, x6, x7, x8, x9): ...

    launch = f"empty{config}({', '.join(NAMES)}, N)"
    return kernel(f"{qualifier}void empty({parameters}) {{}}\n", signature, launch)(empty)


def least_seconds(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            least[name] = min(least[name], (time.perf_counter() - start) / CALLS)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    bare, empty = bare_function(), empty_kernel(device)
    tensors = [torch.zeros(1000, device=device) for _ in NAMES]

    calls = {
        "pybind11 function": lambda: bare(*tensors),
        "kernel": lambda: empty(*tensors),
        "kernel, through the dispatcher": lambda: empty.op(*tensors),
    }
    for call in calls.values():
        call()
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode():
            seconds = least_seconds(calls)
        for name, value in seconds.items():
            beyond = value - seconds["pybind11 function"]
            print(f"{mode.__name__:15} {name:31} {1e6 * value:6.2f} µs  {1e6 * beyond:+6.2f} µs")


if __name__ == "__main__":
    main()
