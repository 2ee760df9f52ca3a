"""How close the CPU runtime's linears come to the memory bandwidth, alone and as the linears of one decode step.

    python benchmarks/cpu_decode.py --threads 1 2 --rows 1 8

Prints GB/s of weights for a plain read by the same threads, for PyTorch and for every instruction-set tier, then the
time of all linears of a Qwen3-0.6B decode step. Times are the best of several: others may use the machine too.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import torch_mpk.tasks  # noqa: F401 - registers the tasks
from torch_mpk import _C

WEIGHT_BYTES = 256 << 20  # far beyond the caches
HIDDEN, FFN, LAYERS, VOCAB = 1024, 3072, 28, 151936  # Qwen3-0.6B
Q_SIZE, KV_SIZE = 16 * 128, 8 * 128


def best_seconds(fn: Callable[[], object], repeats: int) -> float:
    fn()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        fn()
        times.append(time.perf_counter() - begin)
    return min(times)


class Linears:
    """A graph of linears on given tensors."""

    def __init__(self) -> None:
        self.graph, self.inputs, self.outputs = _C.TBGraph(), [], []

    def tensor(self, kind: str, t: torch.Tensor) -> _C.Tensor:
        tensors = {"input": self.inputs, "output": self.outputs}.get(kind, [])
        buffer = self.graph.add_buffer(kind, kind, -1 if kind == "workspace" else len(tensors), t.nbytes)
        tensors.append(t)
        return _C.Tensor(buffer, str(t.dtype).removeprefix("torch."), list(t.shape), list(t.stride()))

    def add(self, x: _C.Tensor, weight: torch.Tensor, kind: str = "workspace") -> _C.Tensor:
        y = self.tensor(kind, torch.empty(x.shape[0], len(weight), dtype=weight.dtype))
        operands = [("x", x, True, False), ("weight", self.tensor("input", weight), True, False), ("y", y, False, True)]
        self.graph.add_node("linear", operands)
        return y

    def compile(self, num_threads: int, isa: str = "") -> Callable[[], None]:
        schedule = _C.make_schedule(self.graph, _C.Target("cpu", num_workers=num_threads, fuse=False))
        executable = _C.CpuExecutable(schedule, num_threads, isa)
        return lambda: executable.run(self.inputs, self.outputs)


def linear_bandwidth(dtype: torch.dtype, rows: int, k: int, num_threads: int, repeats: int) -> dict[str, float]:
    """GB/s of weights by what reads them."""
    weight = torch.randn(WEIGHT_BYTES // (k * dtype.itemsize), k).to(dtype)
    x = torch.randn(rows, k).to(dtype)
    linears = Linears()
    linears.add(linears.tensor("input", x), weight, "output")
    torch.set_num_threads(num_threads)
    variants: dict[str, Callable[[], object]] = {
        "read": lambda: _C.cpu_read_words(weight.data_ptr(), weight.nbytes // 8, num_threads),
        "torch": lambda: F.linear(x, weight),
    }
    variants |= {isa: linears.compile(num_threads, isa) for isa in _C.cpu_isas()}
    return {name: weight.nbytes / best_seconds(fn, repeats) / 1e9 for name, fn in variants.items()}


def decode_step(rows: int, num_threads: int, repeats: int) -> dict[str, float]:
    """Milliseconds for the linears of one step, each on the results of the one before, as a step must run them."""

    def matrix(n: int, k: int) -> torch.Tensor:
        return torch.randn(n, k, dtype=torch.bfloat16).mul_(k**-0.5)

    shapes = ((Q_SIZE, HIDDEN), (KV_SIZE, HIDDEN), (KV_SIZE, HIDDEN), (HIDDEN, Q_SIZE), (FFN, HIDDEN), (FFN, HIDDEN))
    layers = [[matrix(*shape) for shape in (*shapes, (HIDDEN, FFN))] for _ in range(LAYERS)]
    head, token = matrix(VOCAB, HIDDEN), torch.randn(rows, HIDDEN).bfloat16()

    def eager() -> torch.Tensor:
        x = token
        for q, k, v, o, gate, up, down in layers:
            heads = F.linear(x, q)
            F.linear(x, k), F.linear(x, v)
            x = F.linear(heads, o)
            hidden = F.linear(x, gate)
            F.linear(x, up)
            x = F.linear(hidden, down)
        return F.linear(x, head)

    linears = Linears()
    x = linears.tensor("input", token)
    for q, k, v, o, gate, up, down in layers:
        heads, _, _ = (linears.add(x, w) for w in (q, k, v))
        x = linears.add(heads, o)
        hidden, _ = (linears.add(x, w) for w in (gate, up))
        x = linears.add(hidden, down)
    linears.add(x, head, "output")
    step = linears.compile(num_threads)
    torch.set_num_threads(num_threads)
    num_bytes = sum(w.nbytes for layer in layers for w in layer) + head.nbytes
    times = {"torch": 1e3 * best_seconds(eager, repeats), "mpk": 1e3 * best_seconds(step, repeats)}
    error = (linears.outputs[0].float() - eager().float()).norm() / eager().float().norm()
    assert error < 0.05, f"the results differ by {error:.1%}"
    return times | {"mpk GB/s": num_bytes / times["mpk"] / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    with torch.inference_mode():
        for num_threads in args.threads:
            for rows in args.rows:
                for dtype in (torch.bfloat16, torch.float32):
                    for k in (1024, 4096):
                        row = linear_bandwidth(dtype, rows, k, num_threads, args.repeats)
                        text = "  ".join(f"{name} {value:.1f}" for name, value in row.items())
                        print(f"{dtype} K={k} R={rows} threads={num_threads} GB/s: {text}", flush=True)
                step = decode_step(rows, num_threads, args.repeats)
                text = "  ".join(f"{name} {value:.1f}" for name, value in step.items())
                print(f"Qwen3-0.6B linears bfloat16 R={rows} threads={num_threads} ms: {text}", flush=True)


if __name__ == "__main__":
    main()
