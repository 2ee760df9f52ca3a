"""Times one decode step of full-size models with random weights: eager, torch.compile with CUDA graphs, and mpk.

    python benchmarks/decode.py --models qwen3-0.6b llama-1b qwen3-8b --batch 1 --position 512

Each variant of each model runs in a process of its own, under a time limit: what one breaks, leaks or leaves compiled
touches no other. Writes decode_<device>_<date>.json and .md, and prints the table last. What the columns mean is in
benchmarks/results/README.md. Without a GPU the times are the host's.
"""

import argparse
import copy
import datetime
import gc
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from ceiling import measure_ceiling
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from torch_mpk.testing.decode import Step, copy_cache, count_launches, decode_logits, prefill, rewind
from torch_mpk.testing.models import CONFIGS, random_model

VARIANTS: dict[str, Callable[[PreTrainedModel], Step]] = {
    "eager": lambda model: model,
    "reduce-overhead": lambda model: torch.compile(model, mode="reduce-overhead"),
    "mpk": lambda model: torch.compile(model, backend="mpk"),
}
NUM_WARMUP_STEPS = 5
NUM_ACCURACY_STEPS = 8
GPU_CYCLES_PER_MS = 2_000_000  # at most: only sets how long the GPU sleeps while the host enqueues a step


# One variant of one model, in the child process.


class Clock:
    """Times steps that start at ``position`` of the cache, by CUDA events or, on the CPU, by the host's clock."""

    def __init__(self, step: Callable[[], object], cache: StaticCache, position: int):
        self.step, self.cache, self.position = step, cache, position
        self.is_cuda = torch.cuda.is_available()

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
        """One step's time on the GPU, without the host's: the GPU sleeps until everything is enqueued."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        rewind(self.cache, self.position)
        torch.cuda._sleep(int((1.5 * host_ms + 0.5) * GPU_CYCLES_PER_MS))
        begin.record()
        self.step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "median": statistics.median(ordered),
        "p10": ordered[len(ordered) // 10],
        "p90": ordered[-1 - len(ordered) // 10],
    }


def used_bytes() -> int:
    """Memory in use: as the driver counts it on a GPU, else the process's peak."""
    if not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    free, total = torch.cuda.mem_get_info()
    return total - free


def bytes_read(model: PreTrainedModel, batch: int, position: int) -> int:
    """What a step cannot avoid reading: every weight but an untied embedding, and the keys and values so far."""
    config = model.config
    weights = sum(p.nbytes for p in model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.nbytes
    kv_row = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    return weights + batch * position * kv_row


def relative_l2(logits: Tensor, exact: Tensor) -> float:
    return ((logits - exact).norm() / exact.norm()).item()


@torch.inference_mode()
def measure(args: argparse.Namespace, model_name: str, variant: str, exact_file: Path) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.zeros(1, device=device)
    used_before = used_bytes()
    model = random_model(CONFIGS[model_name](), device)
    generator = torch.Generator().manual_seed(1)
    shape = (args.batch, args.position + NUM_ACCURACY_STEPS)
    tokens = torch.randint(model.config.vocab_size, shape, generator=generator).to(device)
    cache, _ = prefill(model, tokens[:, : args.position], args.cache)
    decoded = tokens[:, args.position :]
    if variant == "eager":  # others compare with the same exact run
        exact_model = copy.deepcopy(model).float()
        exact_cache = copy_cache(cache, model.config, torch.float32)
        torch.save(decode_logits(exact_model, exact_cache, decoded).cpu(), exact_file)
        del exact_model, exact_cache
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()

    step = VARIANTS[variant](model)
    begin = time.perf_counter()
    logits = decode_logits(step, cache, decoded).cpu()
    first_steps_s = time.perf_counter() - begin
    result: dict[str, Any] = {"build_s": first_steps_s}
    if exact_file.is_file():
        result["relative_l2"] = relative_l2(logits, torch.load(exact_file))

    token = decoded[:, :1].contiguous()
    clock = Clock(lambda: step(input_ids=token, past_key_values=cache), cache, args.position)
    clock.loop_ms(NUM_WARMUP_STEPS)
    loops = [clock.loop_ms(args.steps) for _ in range(5)]
    result["loop_ms"] = summary([loop for loop, _ in loops])
    result["host_ms"] = summary([host for _, host in loops])
    if device == "cuda":
        host_ms = result["host_ms"]["median"]
        result["device_ms"] = summary([clock.device_ms(host_ms) for _ in range(args.steps)])
        result["memory_bytes"] = used_bytes() - used_before
        rewind(cache, args.position)
        result["launches"] = count_launches(clock.step)
    else:
        result["memory_bytes"] = used_bytes() - used_before
    result["bytes_read"] = bytes_read(model, args.batch, args.position)
    return result


# All of them, in the parent.


def run_child(model_name: str, variant: str, exact_file: Path, limit_s: float) -> dict[str, Any]:
    """What ``measure`` returned in a process of its own, or {"error": why there is none}."""
    with tempfile.NamedTemporaryFile(suffix=".json") as result_file:
        child = ["--child", model_name, variant, str(exact_file), result_file.name]
        try:
            process = subprocess.run([sys.executable, *sys.argv, *child], timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"error": f"did not finish in {limit_s:.0f} s"}
        if process.returncode:
            return {"error": f"exit status {process.returncode}, see the log"}
        return json.loads(Path(result_file.name).read_text())


def output_of(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def environment() -> dict[str, str]:
    is_cuda = torch.cuda.is_available()
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if is_cuda else f"CPU, {torch.get_num_threads()} threads",
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if is_cuda else "-",
        "nvcc": output_of("nvcc", "--version").splitlines()[-1],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "torch_mpk": version("torch_mpk"),
        "commit": output_of("git", "describe", "--always", "--dirty"),
        "command": " ".join(["python", "benchmarks/decode.py", *sys.argv[1:]]),
    }


def table(report: dict[str, Any]) -> str:
    """The results as Markdown, one row per model and variant."""
    ceiling = report["ceiling"]["tb_per_s"]

    def ms(times: dict[str, float] | None) -> str:
        return f"{times['median']:.3f} ({times['p10']:.3f}–{times['p90']:.3f})" if times else "–"

    columns = [
        "model",
        "variant",
        "device ms",
        "loop ms",
        "host ms",
        "launches",
        "of the ceiling",
        "rel. L2",
        "GB",
        "build s",
    ]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for model_name, variants in report["models"].items():
        for variant, result in variants.items():
            if "error" in result:
                lines.append(f"| {model_name} | {variant} | {result['error']} " + "| " * (len(columns) - 3) + "|")
                continue
            best = result.get("device_ms", result["loop_ms"])["median"]
            share = f"{100 * result['bytes_read'] / ceiling / best / 1e9:.0f} %" if ceiling else "–"
            accuracy = f"{result['relative_l2']:.2e}" if "relative_l2" in result else "–"
            lines.append(
                f"| {model_name} | {variant} | {ms(result.get('device_ms'))} | {ms(result['loop_ms'])} "
                f"| {result['host_ms']['median']:.3f} | {result.get('launches', '–')} | {share} "
                f"| {accuracy} | {result['memory_bytes'] / 1e9:.3f} | {result['build_s']:.1f} |"
            )
    return "\n".join(lines)


def markdown(report: dict[str, Any]) -> str:
    setting = report["setting"]
    facts = [f"- {name}: {value}" for name, value in (report["environment"] | report["ceiling"]).items()]
    title = f"# Decode, batch {setting['batch']}, position {setting['position']}, bfloat16, random weights"
    return "\n\n".join([title, "\n".join(facts), table(report)]) + "\n"


def write(report: dict[str, Any], folder: Path) -> None:
    device = report["environment"]["device"].split(",")[0].lower().replace(" ", "-")
    stem = folder / f"decode_{device}_{report['environment']['date']}_batch{report['setting']['batch']}"
    stem.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")
    stem.with_suffix(".md").write_text(markdown(report))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(CONFIGS), default=["qwen3-0.6b", "llama-1b", "qwen3-8b"])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--position", type=int, default=512, help="tokens in the cache when the step begins")
    parser.add_argument("--cache", type=int, default=1024, help="positions that the StaticCache holds")
    parser.add_argument(
        "--steps", type=int, default=100, help="steps timed, five times over in a loop and once one by one"
    )
    parser.add_argument("--limit", type=float, default=240, help="seconds for one variant of one model")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.position + max(args.steps, NUM_ACCURACY_STEPS) > args.cache:
        parser.error("the cache is too short for the position and the steps")

    if args.child:
        model_name, variant, exact_file, result_file = args.child
        Path(result_file).write_text(json.dumps(measure(args, model_name, variant, Path(exact_file))))
        return

    args.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "environment": environment(),
        "setting": {name: getattr(args, name) for name in ("batch", "position", "cache", "steps")},
        "ceiling": measure_ceiling() if torch.cuda.is_available() else {"method": "not measured", "tb_per_s": None},
        "models": {},
    }
    for model_name in args.models:
        results = report["models"][model_name] = {}
        with tempfile.TemporaryDirectory() as folder:
            for variant in args.variants:
                print(f"{model_name}, {variant}", file=sys.stderr, flush=True)
                results[variant] = run_child(model_name, variant, Path(folder, "exact.pt"), args.limit)
                write(report, args.out)  # what is known so far, should a later one take the machine down
    print(table(report))


if __name__ == "__main__":
    main()
