"""Times the linears of Qwen3-0.6B on the CPU in each format of weights, beside a plain read of the same bytes.

    python benchmarks/cpu_formats.py [--formats gptq awq ...] [--rows 1 8] [--threads 1 2] [--layers 28] [--torchao]

Weights are random and larger than the caches: those of all layers, each read once per call. With one thread times are
CPU time, which other work on the machine prolongs little; with several they are what a clock shows. The least of all
calls is printed, and the rate at which weights and scales are read over that of the read.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from harness import table
from torch import Tensor

from torch_mpk import _C
from torch_mpk.tasks.quantized_linear import E4M3, quantized_linear

SIZES = [(1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024)]  # K and N of qkv, o, gate and up, down
Operands = dict[str, Tensor | None]
Made = tuple[Operands, dict[str, int]]


def bits(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, (rows, columns), dtype=dtype)


def scales(n: int, k: int, group: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(k // group, n) * 0.01).to(dtype).T


def fp8(block: int) -> Callable[[int, int], Made]:
    def make(n: int, k: int) -> Made:
        scale = torch.rand(n // block, k // block) if block else torch.rand(n, 1)
        attrs = {"block_rows": block or 1, "block_columns": block, "x_columns": block or -1}
        return {"weight": torch.randn(n, k).to(E4M3), "weight_scale": scale}, attrs

    return make


def integers(packed: int, group: int) -> Callable[[int, int], Made]:
    """int8 with ``packed`` numbers to a byte, in groups with zero points, or rows without."""

    def make(n: int, k: int) -> Made:
        weight = bits(n, k // packed, torch.int8)
        scale = scales(n, k, group or k, torch.bfloat16).contiguous()
        zero = torch.randn_like(scale) if group else None
        return {"weight": weight, "weight_scale": scale, "zero": zero}, {"block_rows": 1, "block_columns": group}

    return make


def words(of_rows: bool = False, in_order: bool = True) -> Callable[[int, int], Made]:
    """As AWQ has them (``of_rows``), or GPTQ, with act-order or without."""

    def make(n: int, k: int) -> Made:
        weight = bits(k, n // 8, torch.int32).T if of_rows else bits(k // 8, n, torch.int32).T
        groups = None if in_order else (torch.randperm(k) // 128).int()
        operands = {"weight": weight, "weight_scale": scales(n, k, 128), "zero": bits(k // 128, n // 8, torch.int32).T}
        return operands | {"column_groups": groups}, {"block_rows": 1, "block_columns": 128}

    return make


def nf4(is_nested: bool) -> Callable[[int, int], Made]:
    def make(n: int, k: int) -> Made:
        operands: Operands = {"weight": bits(n, k // 2, torch.uint8), "codebook": torch.randn(16).sort().values}
        attrs = {"block_rows": 1, "block_columns": 64}
        if not is_nested:
            return operands | {"weight_scale": torch.rand(n, k // 64)}, attrs
        of_scales = {"scale_code": torch.rand(256), "scale_scale": torch.rand(n * k // 64 // 256)}
        operands |= {"weight_scale": bits(n, k // 64, torch.uint8), "scale_offset": torch.rand(1), **of_scales}
        return operands, attrs | {"scale_block": 256}

    return make


FORMATS: dict[str, tuple[Callable[[int, int], Made], torch.dtype]] = {
    "fp8-blocks": (fp8(128), torch.bfloat16),
    "fp8-rows": (fp8(0), torch.bfloat16),
    "int8": (integers(1, 0), torch.bfloat16),
    "int8-groups": (integers(1, 128), torch.bfloat16),
    "int4": (integers(2, 128), torch.bfloat16),
    "int4-32": (integers(2, 32), torch.bfloat16),
    "gptq": (words(), torch.float16),
    "gptq-act-order": (words(in_order=False), torch.float16),
    "awq": (words(of_rows=True), torch.float16),
    "nf4": (nf4(False), torch.bfloat16),
    "nf4-nested": (nf4(True), torch.bfloat16),
}


def linears(name: str, rows: int, layers: int, threads: int) -> tuple[Callable[[], None], list[Tensor]]:
    """A call of all linears, and their weights, scales and tables."""
    make, dtype = FORMATS[name]
    graph, inputs, outputs, read = _C.TBGraph(), list[Tensor](), list[Tensor](), list[Tensor]()

    def external(kind: str, t: Tensor) -> _C.Tensor:
        tensors = inputs if kind == "input" else outputs
        buffer = graph.add_buffer(f"{kind}{len(tensors)}", kind, len(tensors), t.numel() * t.element_size())
        tensors.append(t)
        return _C.Tensor(buffer, str(t.dtype).removeprefix("torch."), list(t.shape), list(t.stride()))

    x = {k: external("input", torch.randn(rows, k).to(dtype)) for k, _ in SIZES}
    for k, n in SIZES * layers:
        operands, attrs = make(n, k)
        given = {o.name: t for o in quantized_linear.inputs if (t := operands.get(o.name)) is not None}
        read += given.values()
        reads = [("x", x[k], True, False), *((name, external("input", t), True, False) for name, t in given.items())]
        y = ("y", external("output", torch.empty(rows, n, dtype=dtype)), False, True)
        graph.add_node("quantized_linear", [*reads, y], {"x_columns": 0} | attrs, None, "")
    schedule = _C.make_schedule(graph, _C.Target("cpu", num_workers=threads, fuse=False))
    executable = _C.CpuExecutable(schedule, threads)
    return lambda: executable.run(inputs, outputs), read


class Linears(torch.nn.Module):
    """The same in torchao's format, in bfloat16."""

    def __init__(self, name: str, rows: int, layers: int) -> None:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        configs = {"fp8-rows": Float8WeightOnlyConfig, "int8": Int8WeightOnlyConfig}
        configs["int4"] = PrototypeInt4WeightOnlyConfig  # groups of 128 with zero points, packed for processors
        super().__init__()
        self.depths = [k for k, _ in SIZES * layers]
        made = (torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16) for k, n in SIZES * layers)
        self.linears = torch.nn.ModuleList(made)
        self.x = {k: torch.randn(rows, k, dtype=torch.bfloat16) for k, _ in SIZES}
        quantize_(self, configs[name]())

    def forward(self) -> list[Tensor]:
        return [linear(self.x[k]) for linear, k in zip(self.linears, self.depths, strict=True)]


TORCHAO = "fp8-rows", "int8", "int4"


def torchao_linears(name: str, rows: int, layers: int, threads: int) -> Callable[[], object]:
    torch.set_num_threads(threads)
    compiled = torch.compile(Linears(name, rows, layers).eval())

    def call() -> None:
        with torch.inference_mode():
            compiled()

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--torchao", action="store_true", help="beside torchao's products")
    args = parser.parse_args()
    lines = []
    for threads, name, rows in ((t, f, r) for t in args.threads for f in args.formats for r in args.rows):
        clock = time.thread_time if threads == 1 else time.perf_counter
        call, tensors = linears(name, rows, args.layers, threads)
        large = [t for t in tensors if t.nbytes >= 1 << 16]

        def read_all(threads: int = threads, large: list[Tensor] = large) -> None:
            for t in large:
                _C.cpu_read_words(t.data_ptr(), t.nbytes // 8, threads)

        calls: dict[str, Callable[[], object]] = {"ours": call, "read": read_all}
        if args.torchao and name in TORCHAO:
            calls["torchao"] = torchao_linears(name, rows, args.layers, threads)
            calls["torchao"]()
        call()
        time.sleep(4)  # weights move to huge pages
        times: dict[str, list[float]] = {of: [] for of in calls}
        for _ in range(args.rounds):
            for of, run in calls.items():
                begin = clock()
                run()
                times[of].append(clock() - begin)
        least = {of: min(seconds) for of, seconds in times.items()}
        rate, read = sum(t.nbytes for t in tensors) / least["ours"], sum(t.nbytes for t in large) / least["read"]
        cells = f"{1e3 * least['ours']:.1f}", f"{rate / 1e9:.1f}", f"{read / 1e9:.1f}", f"{rate / read:.2f}"
        theirs = f"{1e3 * least['torchao']:.1f}" if "torchao" in least else "–"
        lines.append([str(threads), name, str(rows), *cells, theirs])
    print(table(["threads", "format", "rows", "ms", "GB/s", "read GB/s", "of the read", "torchao ms"], lines))


if __name__ == "__main__":
    main()
