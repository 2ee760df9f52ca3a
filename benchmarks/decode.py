"""Times one decode step of full-size models with random weights: eager, torch.compile in several modes, and mpk.

    python benchmarks/decode.py --models qwen3-0.6b llama-1b qwen3-8b --batch 1 8 --position 512 4096
    python benchmarks/decode.py --baselines eager default reduce-overhead max-autotune
    python benchmarks/decode.py --batch 1 2 4 8 16 32 64 --baselines eager graph reduce-overhead --budget 1200
    python benchmarks/decode.py --models qwen3-8b --batch 1 8 --weights fp8 int4 --baselines reduce-overhead --jobs 4
    python benchmarks/decode.py --ranks 2 --models llama-1b qwen3-8b --baselines eager

With --ranks each variant runs in so many processes, each with a GPU and its part of the weights; figures are rank 0's.

Each variant runs in a process of its own, with all the batches that are asked for, each under a time limit: what one
variant breaks, leaks or leaves compiled touches no other. With --jobs so many of them compile side by side. One at a
time has the GPUs, to make its model and to be timed, and memory is not measured. Records the run (records.py), and
prints its table last. With --weights linears are quantised, and the baselines compute with what PyTorch has for that
format (quantized_baselines.py). What the columns mean is in benchmarks/results/README.md. Without a GPU
the times are the host's; the benchmark made for the CPU is benchmarks/cpu_decode.py.
"""

import argparse
import copy
import fcntl
import functools
import gc
import itertools
import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import quantized_baselines
import records
import torch
from ceiling import measure_ceiling
from harness import Report, Result, environment, run_parts, spread, table
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from torch_mpk.generate import rewind
from torch_mpk.testing.bench import summary
from torch_mpk.testing.decode import (
    Step,
    bytes_read,
    chosen_experts,
    copy_cache,
    count_launches,
    decode_logits,
    in_float32,
    prefill,
)
from torch_mpk.testing.models import CONFIGS, keep_layers, random_model, random_sharded_model
from torch_mpk.testing.quantized import quantize_linears, widened

NUM_WARMUP_STEPS = 5
NUM_ACCURACY_STEPS = 8
STEPS_BETWEEN_EVENTS = 10  # of ranks, which take each step together
LONGEST_LOOP_MS = 1000  # of steps that take so long, as eager's, fewer are timed
GPU_CYCLES_PER_MS = 2_000_000  # at most: only sets how long the GPU sleeps while the host enqueues a step


class OuterGraph:
    """A step in a CUDA graph of its own, captured at the first call and replayed on that call's cache."""

    def __init__(self, step: Step):
        self.step = step
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, input_ids: Tensor, past_key_values: StaticCache) -> Any:
        if self.graph is None:
            position = int(past_key_values.layers[0].cumulative_length)
            self.input_ids = input_ids.clone()
            for _ in range(3):  # compiles, and lets kernels be tuned
                self.step(input_ids=self.input_ids, past_key_values=past_key_values)
                rewind(past_key_values, position)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.output = self.step(input_ids=self.input_ids, past_key_values=past_key_values)
        self.input_ids.copy_(input_ids)
        self.graph.replay()
        return self.output


def captured(step: Step) -> Step:
    return OuterGraph(step) if torch.cuda.is_available() else step


BASELINES: dict[str, Callable[[PreTrainedModel], Step]] = {
    "eager": lambda model: model,
    "graph": captured,  # eager in a CUDA graph
    "default": lambda model: torch.compile(model),
    "reduce-overhead": lambda model: torch.compile(model, mode="reduce-overhead"),
    "max-autotune": lambda model: captured(torch.compile(model, mode="max-autotune-no-cudagraphs")),
}
VARIANTS = BASELINES | {"mpk": lambda model: torch.compile(model, backend="mpk")}


# One variant of one model and position, in the child process.


class Clock:
    """Times steps that start at ``position`` of the cache, by CUDA events or, on the CPU, by the host's clock."""

    def __init__(self, step: Callable[[], object], cache: StaticCache, position: int):
        self.step, self.cache, self.position = step, cache, position
        self.is_cuda = torch.cuda.is_available()
        self.between_events = 1 if num_ranks() == 1 else STEPS_BETWEEN_EVENTS

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def loop_ms(self, num_steps: int) -> tuple[float, float]:
        """Steps one after another, as a decode loop runs them: (ms per step, ms per step until the host was free)."""
        rewind(self.cache, self.position)
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        enqueued = time.perf_counter()
        self.synchronize()
        return 1e3 * (time.perf_counter() - begin) / num_steps, 1e3 * (enqueued - begin) / num_steps

    def device_ms(self, host_ms: float) -> float:
        """One step's time on the GPU, without the host's: the GPU sleeps until everything is enqueued. The ranks' GPUs
        wake up at different times, and meet in a step before the first event."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        rewind(self.cache, self.position)
        torch.cuda._sleep(int((1.5 * host_ms * (self.between_events + 1) + 0.5) * GPU_CYCLES_PER_MS))
        if num_ranks() > 1:
            self.step()
        begin.record()
        for _ in range(self.between_events):
            self.step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / self.between_events


def num_ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def as_on_rank_0(value: int) -> int:
    """A number that all ranks must have in common."""
    if num_ranks() == 1:
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values)
    return values[0]


def make_model(case: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    config = CONFIGS[case["model"]]()
    if case.get("layers"):
        keep_layers(config, case["layers"])
    if case["ranks"] == 1:
        return random_model(config, "cuda" if torch.cuda.is_available() else "cpu", dtype)
    local_rank = os.environ["LOCAL_RANK"]
    return random_sharded_model(config, f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu", dtype)


def used_bytes() -> int:
    """Memory in use: as the driver counts it on a GPU, else the process's peak."""
    if not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    free, total = torch.cuda.mem_get_info()
    return total - free


def relative_l2(logits: Tensor, exact: Tensor) -> float:
    return ((logits - exact).norm() / exact.norm()).item()


class Start:
    """Where a batch's steps begin: a cache that is filled up to ``position``, and the tokens behind it."""

    def __init__(self, model: PreTrainedModel, case: dict[str, Any], batch: int):
        generator = torch.Generator().manual_seed(1)
        size = batch, case["position"] + NUM_ACCURACY_STEPS
        tokens = torch.randint(model.config.vocab_size, size, generator=generator).to(model.device)
        self.cache, _ = prefill(model, tokens[:, : case["position"]], case["cache"])
        self.decoded = tokens[:, case["position"] :]


def exact_file(case: dict[str, Any], batch: int) -> Path:
    return Path(case["exact_folder"], f"{case['model']}_{case['weights']}_{case['position']}_{batch}.pt")


def save_exact(model: PreTrainedModel, case: dict[str, Any]) -> None:
    """The logits of the same model in float32, from the same caches, unless another variant has left them."""
    missing = [batch for batch in case["batches"] if not exact_file(case, batch).is_file()]
    if case["ranks"] > 1:
        torch.distributed.barrier()  # all have seen which are missing
    if missing:
        with exact_of(model, case) as exact_model:
            for batch in missing:
                start = Start(model, case, batch)
                exact_cache = copy_cache(start.cache, model.config, torch.float32)
                logits = decode_logits(exact_model, exact_cache, start.decoded).cpu()
                if rank() == 0:
                    torch.save(logits, exact_file(case, batch))
    if case["ranks"] > 1:
        torch.distributed.barrier()


@contextmanager
def exact_of(model: PreTrainedModel, case: dict[str, Any]) -> Iterator[PreTrainedModel]:
    """The model in float32. Where linears are quantised or sharded, it is another one."""
    if case["ranks"] > 1:  # their modules' functions are the model's own, also in a copy of it
        yield make_model(case, torch.float32)
    elif case["weights"] != "bf16":
        yield widened(copy.deepcopy(model))
    else:
        with in_float32(model):
            yield model


def forget() -> None:
    """What the batch before has left: compiled code, graphs, caches."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@functools.cache
def hosts() -> torch.distributed.ProcessGroup:
    """The ranks' group for waits that keep no GPU busy."""
    return torch.distributed.new_group(backend="gloo")


@contextmanager
def alone() -> Iterator[None]:
    """One benchmark at a time is in here on a machine, with all of its ranks, for which rank 0 takes the turn. Before
    they have a group the others go ahead, and wait for rank 0 as they make one."""
    group = hosts() if torch.distributed.is_initialized() else None
    with Path(tempfile.gettempdir(), "torch_mpk_benchmark.lock").open("w") as file:
        if os.environ.get("RANK", "0") == "0":
            fcntl.flock(file, fcntl.LOCK_EX)
        if group:
            torch.distributed.barrier(group)
        try:
            yield
        finally:  # a rank that raised keeps no others here
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # others need the memory
            if group:
                torch.distributed.barrier(group)


def time_steps(model: PreTrainedModel, step: Step, start: Start, case: dict[str, Any]) -> Result:
    cache, position, is_cuda = start.cache, case["position"], torch.cuda.is_available()
    token = start.decoded[:, :1].contiguous()
    clock = Clock(lambda: step(input_ids=token, past_key_values=cache), cache, position)
    step_ms, _ = clock.loop_ms(NUM_WARMUP_STEPS)
    num_steps = as_on_rank_0(min(case["steps"], max(NUM_WARMUP_STEPS, int(LONGEST_LOOP_MS / step_ms))))
    loops = [clock.loop_ms(num_steps) for _ in range(5)]
    result: Result = {
        "loop_ms": summary([loop for loop, _ in loops]),
        "host_ms": summary([host for _, host in loops]),
    }
    if is_cuda:
        host_ms = result["host_ms"]["median"]
        times = num_steps if clock.between_events == 1 else 10
        result["device_ms"] = summary([clock.device_ms(host_ms) for _ in range(times)])
        rewind(cache, position)
        result["launches"] = count_launches(clock.step)
    rewind(cache, position)
    chosen = chosen_experts(model, lambda: model(input_ids=start.decoded[:, :1], past_key_values=cache))
    result["bytes_read"] = bytes_read(model, cache, position, chosen)
    return result


def measure_batch(model: PreTrainedModel, case: dict[str, Any], batch: int, used_before: int) -> Result:
    with alone():
        start = Start(model, case, batch)
    step = VARIANTS[case["variant"]](model)
    begin = time.perf_counter()
    logits = [decode_logits(step, start.cache, start.decoded[:, :1]).cpu()]
    result: Result = {"build_s": time.perf_counter() - begin}

    with alone():
        logits.append(decode_logits(step, start.cache, start.decoded[:, 1:]).cpu())
        result["relative_l2"] = relative_l2(torch.cat(logits), torch.load(exact_file(case, batch)))
        result |= time_steps(model, step, start, case)
    if case["jobs"] == 1:
        result["memory_bytes"] = used_bytes() - used_before
    return result


@torch.inference_mode()
def measure(case: dict[str, Any], result_file: Path) -> None:
    """A line of results for each batch."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        torch.zeros(1, device="cuda")
    used_before = used_bytes()
    with alone():
        model = make_model(case)
        if case["weights"] != "bf16":
            quantize_linears(model, case["weights"])
        save_exact(model, case)
    if case["weights"] != "bf16" and case["variant"] != "mpk":
        quantized_baselines.use(model, case["weights"], model.device.type)
    for batch in case["batches"]:
        forget()
        result = measure_batch(model, case, batch, used_before)
        if rank() == 0:
            with result_file.open("a") as file:
                file.write(json.dumps(result) + "\n")


# All of them, in the parent.


def finish(result: Result, tb_per_s: float | None) -> Result:
    """Adds what the chart draws: the step's time, and the share of the ceiling it reaches."""
    if "error" not in result:
        result["step_ms"] = result.get("device_ms", result["loop_ms"])
        floor_ms = result["bytes_read"] / tb_per_s / 1e9 if tb_per_s else None
        result["of_ceiling"] = floor_ms and floor_ms / result["step_ms"]["median"]
    return result


def run_batches(
    case: dict[str, Any], batches: list[int], limit_s: float, deadline: float
) -> Iterator[tuple[int, Result]]:
    """A result for each batch; one that breaks the child, or takes too long, is left out by the next child."""
    while batches and time.monotonic() < deadline:
        print(case | {"batches": batches}, file=sys.stderr, flush=True)
        results, error = run_parts(case | {"batches": batches}, limit_s, deadline)
        if len(results) < len(batches):
            results.append({"error": error or "left no result"})
        yield from zip(batches, results, strict=False)
        batches = batches[len(results) :]
    for batch in batches:
        yield batch, {"error": "not begun: the budget was spent"}


COLUMNS = "case|variant|device ms|loop ms|host ms|launches|of the ceiling|rel. L2|GB|build s".split("|")


def row(result: Result) -> list[str]:
    case = [result["case"].replace("\n", ", "), result["variant"]]
    if "error" in result:
        return [*case, result["error"]]
    return [
        *case,
        spread(result.get("device_ms")),
        spread(result["loop_ms"]),
        f"{result['host_ms']['median']:.3f}",
        str(result.get("launches", "–")),
        f"{100 * result['of_ceiling']:.0f} %" if result["of_ceiling"] else "–",
        f"{result['relative_l2']:.2e}",
        f"{result['memory_bytes'] / 1e9:.3f}" if "memory_bytes" in result else "–",
        f"{result['build_s']:.1f}",
    ]


def text_of(results: list[Result]) -> str:
    return table(COLUMNS, [row(result) for result in results])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(CONFIGS), default=["qwen3-0.6b", "llama-1b", "qwen3-8b"])
    parser.add_argument(
        "--baselines",
        nargs="*",
        choices=list(BASELINES),
        default=["eager", "reduce-overhead"],
        help="what mpk is compared with; max-autotune is max-autotune-no-cudagraphs in a CUDA graph of the benchmark's",
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--position", type=int, nargs="+", default=[512], help="tokens in the cache when the step begins"
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        choices=["bf16", "fp8", "int8", "int4"],
        default=["bf16"],
        help="how linears store theirs",
    )
    parser.add_argument("--ranks", type=int, default=1, help="processes that the weights are shared out to")
    parser.add_argument("--cache", type=int, help="positions that the StaticCache holds (default: rounded up to 1024)")
    parser.add_argument(
        "--steps",
        type=int,
        default=100,
        help="steps timed, five times over in a loop of at most a second, and once one by one",
    )
    parser.add_argument("--limit", type=float, default=240, help="seconds for one variant of one case")
    parser.add_argument(
        "--budget", type=float, default=86400, help="seconds for all: what is not begun then is left out"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile side by side, if their models fit")
    records.add_arguments(parser)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cache and max(args.position) + max(args.steps, NUM_ACCURACY_STEPS) > args.cache:
        parser.error("the cache is too short for the position and the steps")
    return args


def main() -> None:
    args = arguments()
    if args.child:
        case, result_file = args.child
        measure(json.loads(case), Path(result_file))
        return
    ceiling = measure_ceiling() if torch.cuda.is_available() else {"method": "not measured", "tb_per_s": None}
    report: Report = {
        "title": f"One decode step, bfloat16 with {', '.join(args.weights)} weights, random",
        "environment": environment(),
        "setting": {"steps": args.steps},
        "ceiling": ceiling,
        "results": [],
    }
    deadline = time.monotonic() + args.budget
    cases = list(itertools.product(args.models, args.weights, args.position, ("mpk", *args.baselines)))
    known: list[list[Result]] = [[] for _ in cases]
    recording = threading.Lock()

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:

        def run(results: list[Result], model: str, weights: str, position: int, variant: str) -> None:
            cache = args.cache or -(-(position + max(args.steps, NUM_ACCURACY_STEPS)) // 1024) * 1024
            case = {"model": model, "position": position, "cache": cache, "variant": variant, "ranks": args.ranks}
            case |= {"weights": weights}
            child = {"steps": args.steps, "exact_folder": folder, "jobs": args.jobs}
            named = model if weights == "bf16" else f"{model} {weights}"
            for batch, result in run_batches(case | child, args.batch, args.limit, deadline):
                name = f"{named}\nbatch {batch}, position {position}"
                name += f", {args.ranks} ranks" if args.ranks > 1 else ""
                result = {"case": name, "batch": batch} | case | finish(result, ceiling["tb_per_s"])
                print(row(result), file=sys.stderr, flush=True)
                with recording:  # what is known so far, should a later one take the machine down
                    results.append(result)
                    report["results"] = list(itertools.chain(*known))
                    records.write(report, args, "decode")

        for running in [pool.submit(run, results, *case) for results, case in zip(known, cases, strict=True)]:
            running.result()
    print(text_of(report["results"]))


if __name__ == "__main__":
    main()
