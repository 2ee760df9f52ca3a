"""Times every task alone, in each way that it can be run.

    python benchmarks/tasks.py [--tasks linear attention ...] [--dtype bfloat16]
    python benchmarks/tasks.py --rows 1 2 4 8 16 32 64 --variants op library

"eager" is the task's reference, "op" the operator torch.ops.mpk.<task>, "mpk" a kernel of that one call, "inductor" the
compiled reference (on a GPU Triton's code), and "library" what PyTorch has for it: cuBLAS, the fused attention kernels.
Bytes are those of all operands and results, each counted once. Tasks of other packages are run on the samples that they
declare; `python -m torch_mpk bench-task` does that for those of one file. Records the run (records.py).
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import records
import torch
import torch.nn.functional as F
from harness import Report, Result, environment, table

import torch_mpk.tasks  # noqa: F401 - registers the tasks
from torch_mpk import _C, registry
from torch_mpk.registry import Task
from torch_mpk.task_kernel import kernel_of
from torch_mpk.testing.bench import microseconds

Shape = Mapping[str, Any]  # as in Task.sample; and an int for an operand fills it; see _CAUSAL

_CAUSAL = "causal"  # the i-th position sees i
_VECTORS = [{"...": (rows,), "N": 151936} for rows in (1, 2, 4, 8)]
_GATES = [{"...": (rows, size)} for rows, size in ((1, 3072), (1, 12288), (8, 12288), (16, 14336))]
_CACHES = [(1, 16, 8, 1024), (1, 32, 8, 4096), (4, 32, 8, 4096), (1, 32, 8, 32768)]  # batch, heads, groups, length
SHAPES: dict[str, list[Shape]] = {
    "argmax": _VECTORS,
    "softmax": _VECTORS,
    "silu_mul": _GATES,
    "gelu_mul": [shape | {"approximate": "tanh"} for shape in _GATES],
    "embedding": [
        {"...": (rows, 1), "V": 151936, "H": size} for rows, size in ((1, 1024), (1, 4096), (8, 4096), (16, 5120))
    ],
    "linear": [
        {"R": rows, "K": k, "N": n, "bias": None}
        for rows, k, n in ((1, 1024, 4096), (1, 4096, 4096), (1, 4096, 24576), (1, 12288, 4096), (8, 4096, 4096))
    ],
    "rms_norm": [
        {"R": rows, "H": size, "eps": 1e-6, "style": "torch"}
        for rows, size in ((1, 1024), (1, 4096), (16, 4096), (64, 128))
    ],
    "rope": [{"B": b, "H": h, "D": d} for b, h, d in ((1, 16, 128), (1, 32, 64), (8, 32, 128), (16, 40, 128))],
    "kv_write": [{"B": b, "G": g, "L": length, "D": 128} for b, _, g, length in _CACHES],
    "attention": [
        {"B": b, "H": h, "G": g, "L": length, "D": 128, "scale": 128**-0.5}
        | dict.fromkeys(("k_new", "v_new", "slot", "mask", "limit"))
        for b, h, g, length in _CACHES
    ],
    "prefill_attention": [
        {"B": b, "S": s, "H": h, "G": g, "L": s, "D": d, "scale": d**-0.5, "mask": None, "limit": _CAUSAL}
        for b, s, h, g, d in ((1, 2048, 16, 8, 128), (1, 2048, 32, 8, 128), (1, 512, 16, 8, 128), (4, 512, 32, 8, 64))
    ],
    "paged_decode": [
        {"N": b, "G": g, "R": h // g, "D": 128, "P": b * length // 64, "S": 64, "M": length // 64, "scale": 128**-0.5}
        | {"first": 0, "limit": length}
        for b, h, g, length in _CACHES[:3]
    ]
    + [{"N": 1, "G": 8, "R": 4, "D": 128, "P": 32, "S": 128, "M": 32, "scale": 128**-0.5, "first": 0, "limit": 4096}],
    "paged_kv_write": [
        {"P": pages, "S": 64, "G": 8, "D": 128, "N": n} for pages, n in ((16, 1), (64, 1), (256, 8), (256, 16))
    ],
}


def _attention(q, k_new, v_new, slot, k_cache, v_cache, mask=None, limit=None, *, scale, style="sdpa"):
    y = F.scaled_dot_product_attention(q.unsqueeze(2), k_cache, v_cache, scale=scale, enable_gqa=True)
    return y.squeeze(2)


def _prefill_attention(q, k, v, mask=None, limit=None, *, scale, style="sdpa"):
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, scale=scale, enable_gqa=True)


VARIANTS = ["mpk", "op", "eager", "inductor", "library"]
LIBRARY: dict[str, Callable[..., Any]] = {
    "argmax": lambda x: torch.argmax(x, -1),
    "attention": _attention,
    "embedding": lambda ids, weight: F.embedding(ids, weight),
    "linear": lambda x, weight, bias: F.linear(x, weight, bias),
    "prefill_attention": _prefill_attention,
    "rms_norm": lambda x, weight, *, eps, style: F.rms_norm(x, x.shape[-1:], weight, eps),
    "softmax": lambda x: torch.softmax(x, -1),
}


# Linears of a decode step, K and N of each: qkv, o, gate and up, down, the LM head.
MODELS = {
    "qwen3-0.6b": [(1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (1024, 151936)],
    "llama-1b": [(2048, 3072), (2048, 2048), (2048, 16384), (8192, 2048), (2048, 128256)],
    "qwen3-1.7b": [(2048, 4096), (2048, 2048), (2048, 12288), (6144, 2048), (2048, 151936)],
    "qwen3-8b": [(4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096), (4096, 151936)],
}


def shapes_of_rows(rows: list[int]) -> dict[str, list[Shape]]:
    """Of the tasks whose batches are measured: every linear of four models, and what picks a token of a vocabulary."""
    sizes = dict.fromkeys(size for linears in MODELS.values() for size in linears)
    vocabularies: list[Shape] = [{"...": (r,), "N": 151936} for r in rows]
    linears: list[Shape] = [{"R": r, "K": k, "N": n, "bias": None} for r in rows for k, n in sizes]
    return {"linear": linears, "softmax": vocabularies, "argmax": vocabularies}


def operands_of(task: Task, shape: Shape, dtype: torch.dtype, device: str) -> tuple[list[Any], dict[str, Any]]:
    operands, attrs = task.sample(shape, dtype, device)
    for operand, tensor in zip(task.inputs, operands, strict=True):
        if tensor is not None and isinstance(shape.get(operand.name), int):
            tensor.fill_(shape[operand.name])
        if shape.get(operand.name) == _CAUSAL:
            tensor.copy_(torch.arange(1, tensor.shape[-1] + 1))
    return operands, attrs


def variants_of(task: Task, operands: list[Any], attrs: dict[str, Any]) -> dict[str, Callable]:
    compiled = torch.compile(task.reference, dynamic=False)
    op, kernel = getattr(torch.ops.mpk, task.name).default, kernel_of(task)
    variants = {
        "mpk": lambda: kernel(*operands, **attrs),
        "op": lambda: op(*operands, **attrs),
        "eager": lambda: task.reference(*operands, **attrs),
        "inductor": lambda: compiled(*operands, **attrs),
    }
    if library := LIBRARY.get(task.name):
        variants["library"] = lambda: library(*operands, **attrs)
    return variants


def bytes_of(task: Task, operands: list[Any], results: Any) -> int:
    """Of operands and results. Rows of a table and of a cache count as far as they are touched."""
    tensors = {o.name: t for o, t in zip(task.inputs, operands, strict=True) if t is not None}
    results = task.results(results)
    if task.name == "embedding":
        del tensors["weight"]
        results *= 2
    if task.is_mutating and not results:  # a write into a cache
        return 2 * tensors["new"].nbytes
    return sum(t.nbytes for t in (*tensors.values(), *results))


def flops_of(task: Task, shape: Shape) -> int:
    """Of tasks that are matrix products."""
    if task.name == "linear":
        return 2 * shape["R"] * shape["K"] * shape["N"]
    if task.name == "attention":
        return 4 * shape["B"] * shape["H"] * shape["L"] * shape["D"]
    if task.name == "prefill_attention":
        return 2 * shape["B"] * shape["H"] * shape["S"] * (shape["S"] + 1) * shape["D"]
    return 0


def cpu_gb_per_s() -> float:
    """What all threads read of 1 GiB: the fastest of five runs."""
    data = torch.ones(1 << 27, dtype=torch.int64)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        _C.cpu_read_words(data.data_ptr(), data.nbytes // 8, torch.get_num_threads())
        times.append(time.perf_counter() - begin)
    return data.nbytes / min(times) / 1e9


@torch.inference_mode()
def measure(
    task: Task, shape: Shape, dtype: torch.dtype, device: torch.device, ceiling: float, rounds: int, names: list[str]
) -> list[Result]:
    operands, attrs = operands_of(task, shape, dtype, str(device))
    variants = variants_of(task, operands, attrs)
    num_bytes, flops = bytes_of(task, operands, variants["eager"]()), flops_of(task, shape)
    times = microseconds({name: run for name, run in variants.items() if name in names}, device, rounds)
    results = []
    for name, us in times.items():
        rate = num_bytes / us["median"] / 1e3
        step_ms = {edge: value / 1e3 for edge, value in us.items()}
        result = {"variant": name, "step_ms": step_ms, "gb_per_s": rate, "of_ceiling": rate / ceiling}
        results.append(result | {"tflop_per_s": flops / us["median"] / 1e6} if flops else result)
    return results


def against_library(results: list[Result]) -> str:
    """The library's times over the op's: geometric means of each task and number of rows; empty without both."""
    times = {(r["case"], r["variant"]): r["step_ms"]["median"] for r in results}
    ratios: dict[tuple[str, int], list[float]] = {}
    for r in results:
        if r["variant"] == "op" and (r["case"], "library") in times:
            ratios.setdefault((r["task"], r["rows"]), []).append(times[r["case"], "library"] / r["step_ms"]["median"])
    rows = [
        [task, str(rows), f"{statistics.geometric_mean(each):.2f}", f"{min(each):.2f}–{max(each):.2f}", str(len(each))]
        for (task, rows), each in ratios.items()
    ]
    return table(["task", "rows", "× library, geometric mean", "range", "shapes"], rows) if rows else ""


COLUMNS = ["case", "variant", "µs", "GB/s", "of the ceiling", "TFLOP/s"]


def row(result: Result) -> list[str]:
    us = {edge: 1e3 * ms for edge, ms in result["step_ms"].items()}
    time = f"{us['median']:.1f} ({us['p10']:.1f}–{us['p90']:.1f})"
    cells = [
        result["case"],
        result["variant"],
        time,
        f"{result['gb_per_s']:.1f}",
        f"{100 * result['of_ceiling']:.0f} %",
    ]
    return [*cells, f"{result['tflop_per_s']:.2f}"] if "tflop_per_s" in result else cells


def text_of(results: list[Result]) -> str:
    return "\n\n".join(filter(None, [against_library(results), table(COLUMNS, [row(result) for result in results])]))


def main() -> None:
    known = {task.name: task for task in registry.tasks() if task.name in SHAPES or task.samples}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=sorted(known), default=sorted(known))
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        help="instead: linears of four models, softmax and argmax, with so many rows each",
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--budget", type=float, default=86400, help="seconds; cases that have not begun are left out")
    records.add_arguments(parser)
    args = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        from ceiling import measure_ceiling

        ceiling = measure_ceiling()
        gb_per_s = 1e3 * float(ceiling["tb_per_s"])
    else:
        gb_per_s = cpu_gb_per_s()
        ceiling = {"method": "a read by all threads", "gb_per_s": gb_per_s}
    report: Report = {
        "title": f"Tasks alone, {args.dtype}",
        "environment": environment(),
        "setting": {"dtype": args.dtype, "rounds": args.rounds},
        "ceiling": ceiling,
        "results": [],
    }
    shapes = shapes_of_rows(args.rows) if args.rows else SHAPES
    deadline = time.monotonic() + args.budget
    for name in args.tasks if not args.rows else [name for name in args.tasks if name in shapes]:
        task = known[name]
        for shape in shapes.get(name, task.samples):
            if time.monotonic() > deadline:
                break
            dims = " ".join(f"{dim}={size}" for dim, size in shape.items() if isinstance(size, (int, tuple)))
            print(name, dims, file=sys.stderr, flush=True)
            case = {"case": f"{name} {dims}", "task": name, "rows": shape.get("R", math.prod(shape.get("...", ())))}
            dtype = getattr(torch, args.dtype)
            for result in measure(task, shape, dtype, device, gb_per_s, args.rounds, args.variants):
                report["results"].append(case | result)
            # What is known so far: a case whose variants are all to be compiled takes several seconds.
            records.write(report, args, "tasks")
    print(text_of(report["results"]))


if __name__ == "__main__":
    main()
