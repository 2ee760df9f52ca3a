"""Times many requests at once in Hugging Face's continuous batching: with its own steps, and with mpk's.

    python benchmarks/serving.py --models qwen3-0.6b qwen3-8b
    python benchmarks/serving.py --models tiny --requests 6 --arrivals 12 --rate 20 --prompts 4 40 --new-tokens 12 \\
        --page-size 16 --blocks 64 --batch-tokens 64 --variants sdpa mpk --limit 120  # on a CPU

Four parts: ``--requests`` that are there at once; ``--arrivals`` that come one by one, ``--rate`` a second, at random
times (Poisson), both with prompts of random lengths within ``--prompts``; few requests of very different lengths, and
of equal ones; and attention over pages alone, beside what PyTorch has for it. Models have random weights. Each variant
has a process of its own, whose engine serves the first three parts one after the other, each within ``--limit``
seconds. Records the run (records.py); what the columns mean is in benchmarks/results/README.md.
"""

from __future__ import annotations

import argparse
import collections
import functools
import inspect
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import records
import torch
import torch.nn.functional as F
from harness import Report, Result, environment, run_child, run_parts, table
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

import torch_mpk.continuous_batching as mpk_cb
from torch_mpk import registry
from torch_mpk.task_kernel import kernel_of
from torch_mpk.testing.bench import microseconds
from torch_mpk.testing.decode import device_events
from torch_mpk.testing.models import CONFIGS, random_model
from torch_mpk.testing.tiny import tiny_model

Case = dict[str, Any]
IS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if IS_CUDA else "cpu"
ATTENTION_ROWS = (1, 8, 32, 64)
# Equally many positions in all, whatever the rows' shares: those that attention is timed with, and requests end with.
MIXED = {
    "8 rows of 64 to 8192": [64, 64, 128, 256, 512, 1024, 4096, 8192],
    "8 rows of 1792": [1792] * 8,
}
# As Qwen3's own configuration has it.
LIKELY = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
BUSY_TOKENS = 64  # new ones of each request while a profiler watches the device
PARTS = ["at once", "stream", "mixed", "attention"]

# By their names: the attention, and what the engine's configuration has besides what all have.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sdpa": ("sdpa", {}),  # eager steps
    "sdpa, CUDA graphs": ("sdpa", {"use_cuda_graph": True}),
    "sdpa, Inductor": ("sdpa", {"default_compile_level": 1}),
    "sdpa, Inductor and CUDA graphs": ("sdpa", {"default_compile_level": 1, "use_cuda_graph": True}),
    "mpk": (mpk_cb.ATTENTION, {}),
    "mpk, CUDA graphs": (mpk_cb.ATTENTION, {"use_cuda_graph": (False, True)}),
    "mpk, CUDA graphs, eager prompts": (
        mpk_cb.ATTENTION,
        {"use_cuda_graph": (False, True), "compile_prompts": False},
    ),
}
MEASURED = ["sdpa, CUDA graphs", "sdpa, Inductor and CUDA graphs", "mpk, CUDA graphs"]


# Requests, in a child process.


def made_model(name: str) -> PreTrainedModel:
    if name != "tiny":
        return random_model(CONFIGS[name](), DEVICE)
    return tiny_model("qwen3", dtype=torch.float32, num_layers=2).to(DEVICE)


def configured(case: Case, settings: dict[str, Any]) -> ContinuousBatchingConfig:
    sizes = {"page_size": case["page_size"], "num_blocks": case["blocks"], "max_batch_tokens": case["batch_tokens"]}
    common = {"max_requests_per_batch": mpk_cb.MAX_ROWS} | {k: v for k, v in sizes.items() if v} | settings
    if case["variant"].startswith("mpk"):
        return mpk_cb.config({"fallback": "error", "while_building": "wait"}, **common)
    return ContinuousBatchingConfig(auto_switch_to_flash=False, **common)


def prompts_of(case: Case, vocabulary: int, number: int) -> list[list[int]]:
    """The same for all variants. Those of other numbers are as long and otherwise different: steps are of the same
    sizes, and the engine has nothing of them in its pages already."""
    tokens = random.Random(f"{case['seed']} {number}")
    return [[tokens.randrange(vocabulary) for _ in range(length)] for length in case["prompts"]]


def arrivals_of(case: Case) -> list[float]:
    """Seconds from the beginning on; all 0 without a rate."""
    if not case["rate"]:
        return [0.0] * len(case["prompts"])
    chosen = random.Random(case["seed"] + 1)
    return list(itertools.accumulate(chosen.expovariate(case["rate"]) for _ in case["prompts"]))


def answered(manager: Any, prompts: list[list[int]], arrivals: list[float], count: int, limit_s: float) -> list[Any]:
    """What becomes of the requests, each sent when it is due."""
    outputs: list[Any] = []
    begin = time.perf_counter()
    waiting = list(zip(arrivals, prompts, strict=True))
    while len(outputs) < len(prompts):
        now = time.perf_counter() - begin
        if not manager.is_running():
            raise SystemExit("the engine has ended")
        if now > limit_s:
            raise SystemExit(f"{len(outputs)} of {len(prompts)} requests were answered in {limit_s:.0f} s")
        while waiting and waiting[0][0] <= now:
            manager.add_request(waiting.pop(0)[1], max_new_tokens=count, record_timestamps=True)
        due = waiting[0][0] - now if waiting else 0.1
        output = manager.get_result(timeout=max(1e-3, min(0.1, due)))
        if output is not None and output.is_finished():
            outputs.append(output)
    return outputs


def percentiles(values: list[float]) -> dict[str, float]:
    """In milliseconds."""
    ordered = sorted(values)
    return {f"p{p}": 1e3 * ordered[min(len(ordered) - 1, p * len(ordered) // 100)] for p in (50, 99)}


def judged(outputs: list[Any], count: int) -> Result:
    failed = [output.error for output in outputs if output.error or len(output.generated_tokens) != count]
    times = [output.timestamps for output in outputs if output.timestamps]
    if failed or not times:
        return {"error": f"{len(failed)} of {len(outputs)} requests failed: {failed[:1]}"}
    begin, end = min(o.created_time for o in outputs), max(t[-1] for t in times)
    return {
        "seconds": end - begin,
        "tokens_per_s": sum(map(len, times)) / (end - begin),
        "first_ms": percentiles([o.timestamps[0] - o.created_time for o in outputs]),
        "next_ms": percentiles([b - a for each in times for a, b in itertools.pairwise(each)]),
    }


def serve(case: Case, result_file: Path) -> None:
    """A line of results for each of the case's loads."""
    attention, settings = VARIANTS[case["variant"]]
    torch.manual_seed(0)
    model = made_model(case["model"])
    model.set_attn_implementation(attention)
    chosen = LIKELY if case["sampled"] else {"do_sample": False}
    choice = GenerationConfig(max_new_tokens=case["new_tokens"], eos_token_id=-1, pad_token_id=0, **chosen)
    begin = time.perf_counter()
    with model.continuous_batching_context_manager(
        generation_config=choice, continuous_batching_config=configured(case, settings), warmup=case["warmup"]
    ) as manager:
        for load in case["loads"]:
            result = load_engine(manager, case | load, model.config.vocab_size, begin)
            with result_file.open("a") as file:
                file.write(json.dumps(result) + "\n")
            begin = time.perf_counter()


def load_engine(manager: Any, case: Case, vocab_size: int, since: float) -> Result:
    first, prompts, last = (prompts_of(case, vocab_size, number) for number in range(3))
    arrivals = arrivals_of(case)
    # What is left to be compiled, and allocated: without a warm-up all sizes that the requests need.
    few = min(4, len(prompts)) if case["warmup"] else len(prompts)
    count = 8 if case["warmup"] else case["new_tokens"]
    answered(manager, first[:few], [0.0] * few, count, case["limit"])
    build_s = time.perf_counter() - since
    outputs = answered(manager, prompts, arrivals, case["new_tokens"], case["limit"])
    result = judged(outputs, case["new_tokens"]) | {"build_s": build_s}
    if IS_CUDA and not case["rate"]:  # else it waits for requests
        again = functools.partial(answered, manager, last, arrivals, BUSY_TOKENS, case["limit"])
        result |= watched(device_events(again))
    return result


def watched(events: list[Any]) -> Result:
    """The kernels among them, and of the time from the first to the last that in which the device runs one."""
    kernels = sorted((e.time_range.start, e.time_range.end, e.name) for e in events if not e.name.startswith("Mem"))
    busy, until = 0.0, kernels[0][0]
    ms: dict[str, list[float]] = collections.defaultdict(list)  # of those of a name
    for begin, end, name in kernels:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
        ms[name[:60]].append((end - begin) / 1e3)
    most = sorted(ms, key=lambda name: -sum(ms[name]))[:5]
    return {
        "busy": busy / (until - kernels[0][0]),
        "kernels": len(kernels),
        "kernel_ms": statistics.median(ms[most[0]]),
        "most": {name: {"kernels": len(ms[name]), "ms": sum(ms[name])} for name in most},
    }


# Attention alone, in a child process.


def attention_operands(case: Case, heads: int, groups: int, size: int) -> dict[str, torch.Tensor]:
    """Their pages in any order. As the engine's, a position has its heads side by side."""
    lengths, page_size = case["lengths"], case["page_size"] or 256
    rows = len(lengths)
    table_width = -(-max(lengths) // page_size)
    dtype = torch.bfloat16
    pages = [rows * table_width, page_size, groups, size]
    order = torch.randperm(rows * table_width, generator=torch.Generator().manual_seed(0))
    return {
        "q": torch.randn(rows, heads, size, dtype=dtype, device=DEVICE),
        **{name: torch.randn(pages, dtype=dtype, device=DEVICE) for name in ("k_pages", "v_pages")},
        "block_table": order.view(rows, -1).to(DEVICE, torch.int32),
        "length": torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
    }


def gathered(operands: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Keys and values of all rows, as static caches have them: [rows, groups, longest, size]."""
    pages = operands["block_table"].long()
    return [operands[name][pages].flatten(1, 2).transpose(1, 2).contiguous() for name in ("k_pages", "v_pages")]


def attention_variants(operands: dict[str, torch.Tensor]) -> dict[str, Callable[[], torch.Tensor]]:
    q, length = operands["q"], operands["length"]
    scale = q.shape[-1] ** -0.5
    k, v = gathered(operands)
    static = kernel_of(registry.get("attention"))
    limit = length.long()
    mask = torch.arange(k.shape[2], device=DEVICE) < limit[:, None, None, None]
    variants: dict[str, Callable[[], torch.Tensor]] = {
        "mpk": lambda: torch.ops.mpk.paged_attention(
            q, None, None, *(operands[n] for n in ("k_pages", "v_pages", "block_table", "length")), scale=scale
        ),
        "mpk, static caches": lambda: static(q, None, None, None, k, v, None, limit, scale=scale),
        "sdpa, static caches": lambda: F.scaled_dot_product_attention(
            q.unsqueeze(2), k, v, attn_mask=mask, scale=scale, enable_gqa=True
        ).squeeze(2),
    }
    if not IS_CUDA:
        return variants
    from torch.nn.attention.varlen import varlen_attn

    attend_to_all = mpk_cb.varlen_attention()
    if attend_to_all is None:
        return variants
    ends = torch.arange(len(q) + 1, dtype=torch.int32, device=DEVICE)
    longest = int(length.max())
    if {"seqused_k", "block_table"} <= inspect.signature(varlen_attn).parameters.keys():
        pages = operands["k_pages"], operands["v_pages"]
        places = {"seqused_k": length, "block_table": operands["block_table"]}
        variants["varlen_attn"] = lambda: attend_to_all(q, *pages, ends, None, 1, longest, scale=scale, **places)
    else:  # PyTorch 2.11 knows no pages
        packed = [t.transpose(1, 2)[mask[:, 0, 0]] for t in (k, v)]
        starts = F.pad(length.cumsum(0, dtype=torch.int32), (1, 0))
        variants["varlen_attn, no pages"] = lambda: attend_to_all(q, *packed, ends, starts, 1, longest, scale=scale)
    return variants


@torch.inference_mode()
def attend(case: Case) -> Result:
    config = made_model("tiny").config if case["model"] == "tiny" else CONFIGS[case["model"]]()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    operands = attention_operands(case, config.num_attention_heads, config.num_key_value_heads, size)
    read = 2 * int(operands["length"].sum()) * config.num_key_value_heads * size * 2
    variants = attention_variants(operands)
    expected = variants["mpk, static caches"]().float()
    times: dict[str, Any] = {}
    for name, run in variants.items():
        try:
            error = ((run().float() - expected).norm() / expected.norm()).item()
            us = microseconds({name: run}, torch.device(DEVICE), rounds=10)[name]["median"]
            times[name] = {"us": us, "differs": error}
        except Exception as failure:
            times[name] = {"error": f"{type(failure).__name__}: {failure}".splitlines()[0][:100]}
    return {"bytes_read": read, "times": times}


# All of them, in the parent.

COLUMNS = [
    "case", "variant", "tokens/s", "first token ms, p50", "p99", "next token ms, p50", "p99", "seconds", "build s",
    "GPU busy", "kernels", "ms of one, p50",
]  # fmt: skip
ATTENTION_COLUMNS = ["case", "variant", "µs", "TB/s", "differs"]


def row(result: Result) -> list[str]:
    if "error" in result:
        return [result["case"], result["variant"], result["error"]]
    first, after = result["first_ms"], result["next_ms"]
    numbers = [result["tokens_per_s"], first["p50"], first["p99"], after["p50"], after["p99"]]
    rest = [result["seconds"], result["build_s"]]
    busy = []
    if "busy" in result:
        busy = [f"{100 * result['busy']:.0f} %", str(result["kernels"]), f"{result['kernel_ms']:.3f}"]
    return [result["case"], result["variant"], *(f"{n:.2f}" for n in numbers), *(f"{n:.1f}" for n in rest), *busy]


def attention_rows(result: Result) -> list[list[str]]:
    if "error" in result:
        return [[result["case"], "–", result["error"]]]
    rows = []
    for name, each in result["times"].items():
        if "error" in each:
            rows.append([result["case"], name, each["error"]])
            continue
        speed = result["bytes_read"] / each["us"] / 1e6
        rows.append([result["case"], name, f"{each['us']:.1f}", f"{speed:.2f}", f"{each['differs']:.1e}"])
    return rows


def text_of(results: list[Result]) -> str:
    served = [row(r) for r in results if "loads" in r]
    alone = [each for r in results if "lengths" in r for each in attention_rows(r)]
    return "\n\n".join([table(COLUMNS, served), table(ATTENTION_COLUMNS, alone)])


def cases_of(args: argparse.Namespace) -> list[Case]:
    shared = {name: getattr(args, name) for name in ("page_size", "blocks", "batch_tokens", "new_tokens")}
    shared |= {name: getattr(args, name) for name in ("seed", "limit", "warmup", "sampled")}
    cases: list[Case] = []
    for model in args.models:
        low, high = args.prompts
        loads = []
        for part, requests, rate in (("at once", args.requests, 0), ("stream", args.arrivals, args.rate)):
            about = f" at {rate:g}/s" if rate else " at once"
            name = f"{model}, {requests} requests{about}, prompts of {low} to {high}, {args.new_tokens} new tokens"
            chosen = random.Random(args.seed)
            prompts = [chosen.randint(low, high) for _ in range(requests)]
            loads += [{"case": name, "prompts": prompts, "rate": rate}] if part in args.parts else []
        for about, lengths in MIXED.items() if "mixed" in args.parts else ():
            name = f"{model}, {about} at once, the last {args.new_tokens} of each new"
            prompts = [max(1, length - args.new_tokens) for length in lengths]
            loads.append({"case": name, "prompts": prompts, "rate": 0})
        if loads:
            cases += [shared | {"model": model, "loads": loads, "variant": variant} for variant in args.variants]
        if "attention" not in args.parts:
            continue
        chosen = random.Random(args.seed)
        longest = high + args.new_tokens
        attended = {
            f"{rows} rows of {low} to {longest}": [chosen.randint(low, longest) for _ in range(rows)]
            for rows in ATTENTION_ROWS
        } | MIXED
        for name, lengths in attended.items():
            cases.append(shared | {"model": model, "lengths": lengths, "case": f"{model}, attention of {name}"})
    return cases


def results_of(case: Case, limit_s: float) -> Iterator[Result]:
    if "lengths" in case:
        yield case | run_child(case, limit_s)
        return
    results, error = run_parts(case, limit_s, deadline=float("inf"))
    missing = [{"error": error or "left no result"}] * (len(case["loads"]) - len(results))
    for load, result in zip(case["loads"], results + missing, strict=True):
        yield case | load | result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["tiny", *sorted(CONFIGS)], default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=MEASURED)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--arrivals", type=int, default=200)
    parser.add_argument("--rate", type=float, default=10, help="requests a second")
    parser.add_argument("--prompts", type=int, nargs=2, default=[128, 1024], help="the shortest and the longest")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--page-size", type=int, default=256)
    parser.add_argument("--blocks", type=int, help="of the cache; by default what memory there is")
    parser.add_argument("--batch-tokens", type=int, help="of a step; by default the engine's choice")
    parser.add_argument(
        "--warmup",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="build all sizes of steps first; without, those that a first pass of the requests needs",
    )
    parser.add_argument("--sampled", action="store_true", help=f"draw tokens, with {LIKELY}, instead of the likeliest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=300, help="seconds for one part of one variant")
    records.add_arguments(parser)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        case = json.loads(args.child[0])
        result_file = Path(args.child[1])
        if "lengths" in case:
            result_file.write_text(json.dumps(attend(case)))
        else:
            serve(case, result_file)
        return
    report: Report = {
        "title": f"Continuous batching, bfloat16, random weights, {'drawn tokens' if args.sampled else 'greedy'}",
        "environment": environment(),
        "setting": {"page_size": args.page_size, "new_tokens": args.new_tokens, "seed": args.seed},
        "ceiling": {},
        "results": [],
    }
    for case in cases_of(args):
        print(case.get("case") or f"{case['model']} {case['variant']}", file=sys.stderr, flush=True)
        report["results"] += results_of(case, args.limit)
        records.write(report, args, "serving")  # what is known so far
    print(text_of(report["results"]))


if __name__ == "__main__":
    main()
