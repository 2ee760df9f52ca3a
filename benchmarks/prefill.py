"""Times prompts: eager, Inductor, and mpk, in one call each, with the last token's logits.

    python benchmarks/prefill.py --models qwen3-0.6b --tokens 128 512 2048 --threads 2
    python benchmarks/prefill.py --models qwen3-0.6b --batch 4 --tokens 128
    python benchmarks/prefill.py --models qwen3-0.6b qwen3-8b --tokens 128 512 2048 --baselines eager graph  # on a GPU
    python benchmarks/prefill.py --models qwen3-8b --weights fp8 --tokens 512 2048 --baselines eager  # on a GPU

All variants of a case run in one process; on a CPU in rounds of changing order, as in cpu_decode.py, and on a GPU one
after the other, by the GPU's time alone, as decode.py times steps: "graph" is eager in a CUDA graph. With --weights
linears are quantised, and the baselines compute with what PyTorch has for that format, see quantized_baselines.py.
Records the run (records.py).
"""

import argparse
import copy
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import quantized_baselines
import records
import torch
from ceiling import measure_ceiling
from cpu_decode import BASELINES, interleave, make_model, wait_for_huge_pages
from decode import Clock, alone, captured, forget, used_bytes
from harness import Report, Result, environment, processor, run_child, spread, table
from torch import Tensor
from transformers import StaticCache

from torch_mpk.generate import rewind
from torch_mpk.testing.bench import summary
from torch_mpk.testing.decode import Step
from torch_mpk.testing.decode import prefill as fill
from torch_mpk.testing.models import CONFIGS, keep_layers, random_model
from torch_mpk.testing.quantized import quantize_linears

IS_CUDA = torch.cuda.is_available()
STEPS = {"eager": lambda step: step, "graph": captured, "inductor": torch.compile}


def last_logits(model: Step) -> Step:
    return lambda **inputs: model(**inputs, logits_to_keep=1)


def quantise(model: torch.nn.Module, weights: str) -> None:
    if weights != "bf16":
        quantize_linears(model, weights)


def time_on_gpu(step: Step, ids: Tensor, cache: StaticCache, rounds: int) -> tuple[Result, Tensor]:
    """What a prompt takes, and its logits. ``peak_bytes``: that the driver counts after it, and that PyTorch gave back
    in a call."""
    clock = Clock(lambda: step(input_ids=ids, past_key_values=cache), cache, 0)
    begin = time.perf_counter()
    rewind(cache, 0)
    logits = step(input_ids=ids, past_key_values=cache).logits.to(torch.float32, copy=True)
    clock.synchronize()
    build_s = time.perf_counter() - begin
    with alone():
        host_ms = max(clock.loop_ms(1)[0] for _ in range(3))
        torch.cuda.empty_cache()
        used, held = used_bytes(), torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        clock.loop_ms(1)
        peak = used + torch.cuda.max_memory_allocated() - held
        ms = summary([clock.device_ms(host_ms) for _ in range(rounds)])
    return {"prefill_ms": ms, "build_s": build_s, "peak_bytes": peak}, logits


@torch.inference_mode()
def measure_on_gpu(case: dict[str, Any]) -> list[Result]:
    batch, tokens = case["batch"], case["tokens"]
    config = CONFIGS[case["model"]]()
    if case["layers"]:
        keep_layers(config, case["layers"])
    with alone():
        model = random_model(config, "cuda", getattr(torch, case["dtype"]))
        quantise(model, case["weights"])
        ids = torch.randint(model.config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(1)).cuda()
        cache: StaticCache = fill(model, ids, tokens + 128)[0]
        rewind(cache, 0)
        expected = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits.float()
    options = {"while_building": "wait", "fallback": "error"}
    makers = {"mpk": lambda: last_logits(torch.compile(model, backend="mpk", options=options))}
    makers |= {name: lambda name=name: STEPS[name](last_logits(model)) for name in case["baselines"]}
    results: list[Result] = []
    for name, make in makers.items():
        try:
            forget()
            if name != "mpk" and case["weights"] != "bf16":
                quantized_baselines.use(model, case["weights"], "cuda")
            before = used_bytes()
            result, logits = time_on_gpu(make(), ids, cache, case["rounds"])
            result["extra_bytes"] = result.pop("peak_bytes") - before
        except Exception as error:  # of a baseline, or of ours: the others still count
            results.append({"variant": name, "error": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
            continue
        difference = ((logits - expected).norm() / expected.norm()).item()
        ms = result["prefill_ms"]["median"]
        ours = ms if name == "mpk" else results[0].get("prefill_ms", {"median": float("nan")})["median"]
        rest = {"tokens_per_s": 1e3 * batch * tokens / ms, "mpk_is_faster_by": ms / ours}
        results.append({"variant": name, "differs_from_eager": difference} | result | rest)
    return results


@torch.inference_mode()
def measure(case: dict[str, Any]) -> list[Result]:
    if IS_CUDA:
        return measure_on_gpu(case)
    batch, tokens = case["batch"], case["tokens"]
    torch.set_num_threads(case["threads"])
    model = make_model(case)
    quantise(model, case["weights"])
    ids = torch.randint(model.config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(1))
    cache: StaticCache = fill(model, ids, tokens)[0]
    steps = {name: BASELINES[name](model) for name in case["baselines"]}
    options = {"while_building": "wait", "fallback": "error"}
    steps["mpk"] = torch.compile(copy.deepcopy(model), backend="mpk", options=options)

    def logits_of(step: Step) -> Tensor:
        rewind(cache, 0)
        return step(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits.to(torch.float32, copy=True)

    expected = logits_of(model)
    build_s, difference = {}, {}
    for name, step in steps.items():
        begin = time.perf_counter()
        logits = logits_of(step)
        build_s[name] = time.perf_counter() - begin
        difference[name] = ((logits - expected).norm() / expected.norm()).item()
    wait_for_huge_pages()
    calls: dict[str, Callable[[], object]] = {name: lambda step=step: logits_of(step) for name, step in steps.items()}
    times = interleave(calls, case["rounds"], 1)
    return [
        {
            "variant": name,
            "prefill_ms": times[name],
            "tokens_per_s": 1e3 * batch * tokens / times[name]["median"],
            "mpk_is_faster_by": times[name]["median"] / times["mpk"]["median"],
            "differs_from_eager": difference[name],
            "build_s": build_s[name],
        }
        for name in steps
    ]


def row(result: Result) -> list[str]:
    case = [result["case"].replace("\n", ", "), result.get("variant", "–")]
    if "error" in result:
        return [*case, result["error"]]
    numbers = [f"{result['tokens_per_s']:.0f}", f"{result['mpk_is_faster_by']:.2f}"]
    return [
        *case,
        spread(result["prefill_ms"]),
        *numbers,
        f"{result['differs_from_eager']:.1e}",
        f"{result['build_s']:.1f}",
        f"{result['extra_bytes'] / 1e6:.0f}" if "extra_bytes" in result else "–",
    ]


COLUMNS = ["case", "variant", "ms", "tokens/s", "× mpk's time", "differs from eager", "build s", "extra MB"]


def text_of(results: list[Result]) -> str:
    return table(COLUMNS, [row(result) for result in results])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(CONFIGS), default=["qwen3-0.6b"])
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="sequences")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512], help="of each sequence")
    parser.add_argument("--baselines", nargs="*", choices=[*BASELINES, "graph"], default=["eager", "inductor"])
    formats = ["bf16", "fp8", "int8", "int4"]
    parser.add_argument("--weights", choices=formats, default="bf16", help="how linears store theirs")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, for a quick look")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit", type=float, default=1200, help="seconds for one case")
    records.add_arguments(parser)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        Path(args.child[1]).write_text(json.dumps(measure(json.loads(args.child[0]))))
        return

    dimensions = {"model": args.models, "dtype": args.dtypes} | ({} if IS_CUDA else {"threads": args.threads})
    dimensions |= {"batch": args.batch, "tokens": args.tokens}
    shared = {name: getattr(args, name) for name in ("layers", "rounds", "baselines", "weights")}
    report: Report = {
        "title": f"Prompts, an empty cache, random {args.weights} weights",
        "environment": environment() | ({} if IS_CUDA else {"device": processor()}),
        "setting": shared,
        "ceiling": measure_ceiling() if IS_CUDA else {},
        "results": [],
    }
    for values in itertools.product(*dimensions.values()):
        case = dict(zip(dimensions, values, strict=True))
        print(case, file=sys.stderr, flush=True)
        results = run_child(case | shared, args.limit)
        for result in results if isinstance(results, list) else [results]:
            one = case | result
            named = (f"{key} {one[key]}" if isinstance(one[key], int) else str(one[key]) for key in case)
            name = ", ".join([*named, *([] if args.weights == "bf16" else [args.weights])])
            report["results"].append({"case": name} | one)
        records.write(report, args, "prefill")
    print(text_of(report["results"]))


if __name__ == "__main__":
    main()
