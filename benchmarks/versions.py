"""Times decode steps and prompts of two versions of torch_mpk in one run, on one GPU.

    python benchmarks/versions.py OTHER --models qwen3-0.6b llama-1b --batch 1 8 64 --tokens 128 512
    python benchmarks/versions.py OTHER --models qwen3-8b --layers 8 --batch 2 4 16
    python benchmarks/versions.py OTHER --models qwen3-8b --weights fp8 int4 --batch 1 8 16 32 --jobs 2

OTHER is a folder with the other version, built in place there (``python setup.py build_ext --inplace``). Each version
builds all cases of a model in a process of its own, beside the other's. Then both time them in turn, several times:
a step's or a prompt's time on the GPU, as a CUDA graph. With --jobs so many models or weights are built side by side.
All of their models must fit, in both versions. A call that is no launch ends the run. Records the run (records.py);
figures of a case are ``ms`` of this version and ``other_ms``.
"""

import argparse
import fcntl
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import StaticCache

HERE = Path(__file__).parent
POSITION = 512  # of decode steps
TURNS = 3  # of each version
GPU_CYCLES = 60_000_000  # that the GPU sleeps while the host enqueues a turn


@contextmanager
def alone() -> Iterator[None]:
    """As decode.py has it, which an older version of torch_mpk may lack functions for."""
    with Path(tempfile.gettempdir(), "torch_mpk_benchmark.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def rewind(cache: StaticCache, position: int) -> None:
    for layer in cache.layers:
        layer.cumulative_length.fill_(position)


def turn(graph: torch.cuda.CUDAGraph, cache: StaticCache, position: int, count: int) -> list[float]:
    """ms of each of ``count`` replays."""
    for _ in range(5):
        graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    torch.cuda._sleep(GPU_CYCLES)
    for begin, end in events:
        rewind(cache, position)
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


@torch.inference_mode()
def measure(case: dict[str, Any]) -> dict[str, list[float]]:
    """ms of each replay of each case of a model."""
    from torch_mpk.testing.models import CONFIGS, random_model

    config = CONFIGS[case["model"]]()
    if case["layers"]:
        config.num_hidden_layers = case["layers"]
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: case["layers"]]
    torch._dynamo.config.automatic_dynamic_shapes = False
    graphs = {}
    with alone():
        model = random_model(config, "cuda")
        if case["weights"] != "bf16":
            from torch_mpk.testing.quantized import quantize_linears  # which older versions lack

            quantize_linears(model, case["weights"])
        torch.cuda.empty_cache()  # of what it was made of: others need the memory
    sizes = [(f"{batch} rows", batch, POSITION) for batch in case["batch"]]
    for name, batch, tokens in [*sizes, *((f"{tokens} tokens", 1, tokens) for tokens in case["tokens"])]:
        is_prompt = name.endswith("tokens")
        ids = torch.randint(config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(1)).cuda()
        cache, position = StaticCache(config=config, max_cache_len=tokens + 512), 0 if is_prompt else tokens
        with alone():
            model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
            torch.cuda.empty_cache()
        given = {"input_ids": ids if is_prompt else ids[:, :1].contiguous(), "past_key_values": cache}
        options = case["prompt_options"] if is_prompt else {"fallback": "error"}
        step = torch.compile(model, backend="mpk", dynamic=False, options=options)
        given |= {"logits_to_keep": 1} if is_prompt else {}
        rewind(cache, position)
        step(**given)
        rewind(cache, position)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(**given)
        graphs[name] = graph, cache, position, step  # what is compiled, too, which older versions' graphs do not keep
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(TURNS):
        with alone():
            for name, (graph, cache, position, _) in graphs.items():
                times[name] += turn(graph, cache, position, 10 if position == 0 else 40)
        time.sleep(0.3)  # for the other version's
    return times


def start(folder: Path, case: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--child", json.dumps(case)]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", help="the folder of the other version")
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b"])
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the models have")
    parser.add_argument("--weights", nargs="+", choices=["bf16", "fp8", "int8", "int4"], default=["bf16"])
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--tokens", type=int, nargs="*", default=[])
    both = {"while_building": "wait", "fallback": "error"}
    parser.add_argument("--other-options", default=json.dumps(both), help="those of its prompts, as JSON")
    parser.add_argument("--jobs", type=int, default=1, help="pairs of models and weights that are built side by side")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--label")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(json.loads(args.child))))
        return
    import records
    from ceiling import measure_ceiling
    from harness import Report, environment, table

    report: Report = {
        "title": "Steps and prompts of two versions",
        "environment": environment(),
        "setting": {"other": args.other.name},
        "ceiling": measure_ceiling(),
        "results": [],
    }
    args.out = args.out or records.RESULTS

    def run(pair: tuple[str, str]) -> list[dict[str, list[float]]]:
        """Returns ms of each replay of each case, of this version and of the other."""
        model, weights = pair
        case = {"model": model, "weights": weights, "layers": args.layers, "batch": args.batch, "tokens": args.tokens}
        processes = [
            start(folder.resolve(), case | {"prompt_options": options})
            for folder, options in ((HERE.parent, both), (args.other, json.loads(args.other_options)))
        ]
        printed = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            sys.exit(f"versions.py: {model} in {weights} failed; its process says above why")
        return [json.loads(text.splitlines()[-1]) for text in printed]

    pairs = list(itertools.product(args.models, args.weights))
    with ThreadPoolExecutor(args.jobs) as pool:
        for (model, weights), (ours, others) in zip(pairs, pool.map(run, pairs), strict=True):
            for name, times in ours.items():
                ms, other_ms = statistics.median(times), statistics.median(others[name])
                named = model if weights == "bf16" else f"{model} {weights}"
                result = {"case": name, "model": named, "layers": args.layers, "ms": ms, "other_ms": other_ms}
                report["results"].append(result | {"ratio": ms / other_ms})
            records.write(report, args, "versions")
    columns = ["model", "layers", "case", "ms", "other_ms", "ratio"]
    rows = [[f"{r[c]:.4f}" if isinstance(r[c], float) else str(r[c]) for c in columns] for r in report["results"]]
    print(table(columns, rows))


if __name__ == "__main__":
    main()
