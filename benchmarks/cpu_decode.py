"""Times one decode step on the CPU: eager, Inductor, mpk, and a plain read of the same bytes.

    python benchmarks/cpu_decode.py --models qwen3-0.6b llama-1b --dtypes bfloat16 float32 --threads 2
    python benchmarks/cpu_decode.py --models qwen3-0.6b --batch 1 2 4 8 16 --tokens 1
    python benchmarks/cpu_decode.py --models qwen3-0.6b --batch 1 --tokens 2 8 16
    python benchmarks/cpu_decode.py --models qwen3-0.6b --beside-operators
    python benchmarks/cpu_decode.py --models olmoe-1b-7b --batch 1 8 --dtypes bfloat16 --one-copy
    python benchmarks/cpu_decode.py --linear --threads 1 2 4 8 16

All variants of a case run in one process, in rounds of changing order, so that whatever else the machine does meets
each of them alike. mpk has a copy of the model to itself, because it moves its weights to huge pages; with --one-copy,
for models that do not fit twice, all of them have these. With --beside-operators each call comes behind operators of
PyTorch, which are not timed; what their threads do then is. With --linear the times are those of one large matrix times
one row, per instruction-set tier. Records the run (records.py); benchmarks/results/README.md explains the columns.
"""

import argparse
import copy
import itertools
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import records
import torch
import torch.nn.functional as F
from harness import Report, Result, environment, processor, run_child, spread, table
from torch import Tensor
from transformers import PreTrainedModel

import torch_mpk.tasks  # noqa: F401 - registers the tasks
from torch_mpk import _C
from torch_mpk.generate import rewind
from torch_mpk.testing.bench import summary
from torch_mpk.testing.decode import Step, bytes_read, chosen_experts, prefill
from torch_mpk.testing.models import CONFIGS, keep_layers, random_model

BASELINES: dict[str, Callable[[PreTrainedModel], Step]] = {
    "eager": lambda model: model,
    "inductor": lambda model: torch.compile(model),
    "inductor-freezing": lambda model: torch.compile(model, options={"freezing": True}),
}
SHARED = "position", "layers", "rounds", "calls", "baselines", "beside_operators", "one_copy"  # by all cases
LINEAR_BYTES = 256 << 20  # far beyond the caches
LINEAR_SIZES = (1024, 4096)


def interleave(
    variants: dict[str, Callable[[], object]], rounds: int, calls: int, between: Callable[[], object] = lambda: None
) -> dict[str, dict[str, float]]:
    """Milliseconds per call: each round runs every variant once to wake its threads, then ``calls`` times, each time
    behind ``between``."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, call in random.sample(list(variants.items()), len(variants)):
            call()
            seconds = 0.0
            for _ in range(calls):
                between()
                begin = time.perf_counter()
                call()
                seconds += time.perf_counter() - begin
            times[name].append(1e3 * seconds / calls)
    return {name: summary(ms) for name, ms in times.items()}


def operators() -> Callable[[], object]:
    """Some work for all of PyTorch's threads, as a host has between steps."""
    x, weight = torch.randn(64, 1024), torch.randn(1024, 1024)
    return lambda: F.linear(x, weight).softmax(-1).sort(-1)


def readers(tensors: list[Tensor], num_threads: int) -> dict[str, Callable[[], object]]:
    """Two ways to read all of the tensors with all threads; the faster one is the ceiling."""
    words = [t.detach().flatten().view(torch.float32) for t in tensors]
    return {
        "read by mpk's threads": lambda: [_C.cpu_read_words(t.data_ptr(), t.nbytes // 8, num_threads) for t in tensors],
        "read by torch.sum": lambda: [t.sum() for t in words],
    }


def wait_for_huge_pages(limit_s: float = 120) -> float:
    """Waits until no more memory moves to huge pages. Returns how many bytes of the process lie in them."""

    def huge_bytes() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))

    deadline, before, now = time.monotonic() + limit_s, -1, huge_bytes()
    while now != before and time.monotonic() < deadline:
        time.sleep(2)
        before, now = now, huge_bytes()
    return now


# A decode step, in the child process.


def make_model(case: dict[str, Any]) -> torch.nn.Module:
    config = CONFIGS[case["model"]]()
    if case["layers"]:
        keep_layers(config, case["layers"])
    return random_model(config, "cpu", getattr(torch, case["dtype"]))


@torch.inference_mode()
def measure_step(case: dict[str, Any]) -> list[Result]:
    position, num_threads, batch, tokens = (case[name] for name in ("position", "threads", "batch", "tokens"))
    torch.set_num_threads(num_threads)
    model = make_model(case)
    ids = torch.randint(model.config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(1))
    max_cache_len = -(-(position + (1 + case["calls"]) * tokens) // 1024) * 1024
    cache, _ = prefill(model, ids[:, :1], max_cache_len)
    for layer in cache.layers:  # a step costs the same whatever the keys are
        layer.keys.normal_()
        layer.values.normal_()
    rewind(cache, position)

    ours = model if case["one_copy"] else copy.deepcopy(model)
    steps = {name: BASELINES[name](model) for name in case["baselines"]}
    steps["mpk"] = torch.compile(ours, backend="mpk", options={"while_building": "wait", "fallback": "error"})

    def logits_of(step: Step) -> Tensor:
        rewind(cache, position)
        return step(input_ids=ids, past_key_values=cache).logits.to(torch.float32, copy=True)

    expected = logits_of(model)
    build_s, difference = {}, {}
    for name, step in steps.items():
        begin = time.perf_counter()
        logits = logits_of(step)
        build_s[name] = time.perf_counter() - begin
        difference[name] = ((logits - expected).norm() / expected.norm()).item()
    huge_bytes = wait_for_huge_pages()

    def decode(step: Step) -> None:
        if int(cache.layers[0].cumulative_length) > position + case["calls"] * tokens:
            rewind(cache, position)
        step(input_ids=ids, past_key_values=cache)

    large = [p for p in ours.parameters() if p.nbytes >= 1 << 16]
    calls: dict[str, Callable[[], object]] = {name: lambda step=step: decode(step) for name, step in steps.items()}
    between = {"between": operators()} if case["beside_operators"] else {}
    times = interleave(calls | readers(large, num_threads), case["rounds"], case["calls"], **between)

    rates = {name: sum(p.nbytes for p in large) / ms["median"] / 1e6 for name, ms in times.items() if "read" in name}
    chosen = chosen_experts(model, lambda: logits_of(model))
    ceiling, num_bytes = max(rates.values()), bytes_read(model, cache, position, chosen)
    results: list[Result] = []
    for name in steps:
        rate = num_bytes / times[name]["median"] / 1e6
        results.append(
            {
                "variant": name,
                "step_ms": times[name],
                "gb_per_s": rate,
                "of_ceiling": rate / ceiling,
                "mpk_is_faster_by": times[name]["median"] / times["mpk"]["median"],
                "differs_from_eager": difference[name],
                "build_s": build_s[name],
            }
        )
    fastest = times[max(rates, key=rates.__getitem__)]
    scale = num_bytes / ceiling / 1e6 / fastest["median"]  # the readers leave out small tensors and the cache
    read_ms = {edge: scale * ms for edge, ms in fastest.items()}
    results.append({"variant": "read", "step_ms": read_ms, "gb_per_s": ceiling, "of_ceiling": 1.0, "rates": rates})
    return [result | {"bytes_read": num_bytes, "huge_page_bytes": huge_bytes} for result in results]


# One linear, in the child process.


def linear(x: Tensor, weight: Tensor, num_threads: int, isa: str) -> Callable[[], None]:
    graph = _C.TBGraph()
    y = torch.empty(len(x), len(weight), dtype=x.dtype)
    operands = []
    for name, t, kind, index in (("x", x, "input", 0), ("weight", weight, "input", 1), ("y", y, "output", 0)):
        buffer = graph.add_buffer(name, kind, index, t.nbytes)
        tensor = _C.Tensor(buffer, str(t.dtype).removeprefix("torch."), list(t.shape), list(t.stride()))
        operands.append((name, tensor, kind == "input", kind == "output"))
    graph.add_node("linear", operands)
    schedule = _C.make_schedule(graph, _C.Target("cpu", num_workers=num_threads, fuse=False))
    executable = _C.CpuExecutable(schedule, num_threads, isa)
    return lambda: executable.run([x, weight], [y])


@torch.inference_mode()
def measure_linear(case: dict[str, Any]) -> list[Result]:
    k, dtype = case["k"], getattr(torch, case["dtype"])
    weight = torch.randn(LINEAR_BYTES // (k * dtype.itemsize), k).to(dtype)
    x = torch.randn(1, k).to(dtype)
    linear(x, weight, 1, _C.cpu_isas()[0])()
    wait_for_huge_pages()  # under all variants: this compares kernels
    results: list[Result] = []
    for num_threads in case["threads"]:
        torch.set_num_threads(num_threads)
        variants = {"F.linear": lambda: F.linear(x, weight)}
        variants |= {isa: linear(x, weight, num_threads, isa) for isa in _C.cpu_isas()}
        times = interleave(variants | readers([weight], num_threads), case["rounds"], case["calls"])
        ceiling = min(ms["median"] for name, ms in times.items() if name.startswith("read"))
        results += [
            {
                "variant": name,
                "threads": num_threads,
                "step_ms": ms,
                "gb_per_s": weight.nbytes / ms["median"] / 1e6,
                "of_ceiling": ceiling / ms["median"],
            }
            for name, ms in times.items()
        ]
    return results


# All of them, in the parent.


def row(result: Result) -> list[str]:
    case = [result["case"].replace("\n", ", "), result.get("variant", "–")]
    if "error" in result:
        return [*case, result["error"]]
    cells = [*case, spread(result["step_ms"]), f"{result['gb_per_s']:.1f}", f"{100 * result['of_ceiling']:.0f} %"]
    if "build_s" in result:
        cells += [
            f"{result['mpk_is_faster_by']:.2f}",
            f"{result['differs_from_eager']:.1e}",
            f"{result['build_s']:.1f}",
        ]
    return cells


def text_of(results: list[Result]) -> str:
    columns = ["case", "variant", "ms", "GB/s", "of the read"]
    if any("model" in result for result in results):
        columns += ["× mpk's time", "differs from eager", "build s"]
    return table(columns, [row(result) for result in results])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(CONFIGS), default=["qwen3-0.6b", "llama-1b"])
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, nargs="+", help="default: 2, or with --linear 1, 2, 4, 8, 16")
    parser.add_argument("--baselines", nargs="*", choices=list(BASELINES), default=list(BASELINES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="sequences of a step")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1], help="of each sequence that a step takes")
    parser.add_argument("--position", type=int, default=512, help="tokens in the cache when the step begins")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, for a quick look")
    for flag, what in {
        "--beside-operators": "each call behind operators of PyTorch",
        "--one-copy": "all variants have the same weights, in huge pages",
        "--linear": "one large linear instead of a model",
    }.items():
        parser.add_argument(flag, action="store_true", help=what)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=3, help="timed calls of each variant per round")
    parser.add_argument("--limit", type=float, default=1200, help="seconds for one case")
    records.add_arguments(parser)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        case, result_file = json.loads(args.child[0]), Path(args.child[1])
        result_file.write_text(json.dumps(measure_linear(case) if "k" in case else measure_step(case)))
        return

    if args.linear:
        dimensions = {"dtype": args.dtypes, "k": LINEAR_SIZES, "threads": [args.threads or [1, 2, 4, 8, 16]]}
        title = f"A linear of {LINEAR_BYTES >> 20} MiB times one row, on the CPU"
    else:
        dimensions = {"model": args.models, "dtype": args.dtypes, "threads": args.threads or [2]}
        dimensions |= {"batch": args.batch, "tokens": args.tokens}
        behind = ", behind operators of PyTorch" * args.beside_operators
        title = f"One decode step on the CPU, position {args.position}, random weights{behind}"
    shared = {name: getattr(args, name) for name in SHARED}
    report: Report = {
        "title": title,
        "environment": environment() | {"device": processor()},
        "setting": shared,
        "ceiling": {},
        "results": [],
    }
    for case in (dict(zip(dimensions, values, strict=True)) for values in itertools.product(*dimensions.values())):
        print(case, file=sys.stderr, flush=True)
        results = run_child(case | shared, args.limit)
        for result in results if isinstance(results, list) else [results]:
            one = case | result
            named = (f"{key} {one[key]}" if isinstance(one[key], int) else str(one[key]) for key in case)
            report["results"].append({"case": ", ".join(named)} | one)
        records.write(report, args, "cpu_linear" if args.linear else "cpu_decode")
    print(text_of(report["results"]))


if __name__ == "__main__":
    main()
