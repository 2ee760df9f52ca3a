"""Where a decode step's time goes, phase by phase, from clock stamps that every worker takes.

    python benchmarks/breakdown.py --models qwen3-0.6b llama-1b --position 512

A phase is split, per worker, into coming to its code and waiting for the worker's own warps (join), waiting for its
event, bringing the activations into shared memory, and computing, until the warp that stamps is done. Phases of the
same tasks are averaged; in parentheses the least and the most of a worker. Needs a GPU.
"""

import argparse
import collections
import statistics
from collections.abc import Sequence

import numpy as np
import torch
from ceiling import measure_ceiling
from decode import Clock

from torch_mpk import _C
from torch_mpk.runtime.segment import live_segments
from torch_mpk.testing.decode import bytes_read, prefill
from torch_mpk.testing.models import CONFIGS, random_model

PARTS = ("join", "wait", "stage", "compute")


def durations(executable: _C.CudaExecutable) -> np.ndarray:
    """Cycles[phase, worker, part] of the latest launch of a profiled kernel, from its PhaseStamps[worker, phase]."""
    stamps = np.frombuffer(executable.stamps(), dtype=np.uint32).reshape(-1, len(executable.phase_names), 5)
    begin, joined, ready, staged, computed = (stamps[..., i] for i in range(5))
    staged = np.where(staged == 0, ready, staged)
    parts = [joined - begin, ready - joined, staged - ready, computed - staged]
    return np.stack(parts, axis=-1).astype(np.float64).transpose(1, 0, 2)  # differences of a wrapping clock are right


def kinds_of(phase_name: str) -> str:
    """The phase's tasks without the number of their layer."""
    kinds = [task.split()[0] + " " + task.split(".")[-1] for task in phase_name.split(", ")]
    return ", ".join(dict.fromkeys(kinds))[:60]


def print_phases(names: Sequence[str], cycles: np.ndarray, ms: float) -> None:
    """The table of a step that took ``ms``; ``cycles`` as ``durations`` gives them."""
    per_us = cycles.sum(axis=(0, 2)).max() / (1e3 * ms)
    print(f"{len(names)} phases, {ms:.4f} ms with stamps, {per_us:.0f} cycles per us; us per phase:")
    groups = collections.defaultdict(list)
    for phase, phase_name in enumerate(names):
        groups[kinds_of(phase_name)].append(cycles[phase] / per_us)
    print(f"{'tasks':<62}{'count':>6}{'total':>8}" + "".join(f"{part:>24}" for part in PARTS))
    for kinds, phases in groups.items():
        means = np.mean(phases, axis=0)  # [worker, part]
        cells = [f"{m:.2f} ({lo:.2f}-{hi:.2f})" for m, lo, hi in zip(means.mean(0), means.min(0), means.max(0))]
        print(f"{kinds:<62}{len(phases):>6}{means.sum(1).mean():>8.2f}" + "".join(f"{cell:>24}" for cell in cells))
    totals = cycles.mean(axis=1).sum(axis=0) / per_us
    print("of the step, us: " + ", ".join(f"{part} {total:.0f}" for part, total in zip(PARTS, totals)))


@torch.inference_mode()
def measure(name: str, args: argparse.Namespace, ceiling: float) -> None:
    config = CONFIGS[name]()
    config.num_hidden_layers = args.layers or config.num_hidden_layers
    model = random_model(config, "cuda")
    tokens = torch.randint(config.vocab_size, (args.batch, args.position), device="cuda")
    cache, _ = prefill(model, tokens, args.cache)
    token = tokens[:, :1].contiguous()

    def clock_of(options: dict[str, bool]) -> Clock:
        torch.compiler.reset()
        step = torch.compile(model, backend="mpk", options=options)
        clock = Clock(lambda: step(input_ids=token, past_key_values=cache), cache, args.position)
        clock.loop_ms(5)
        return clock

    def device_ms(clock: Clock) -> float:
        return statistics.median(clock.device_ms(1.0) for _ in range(args.steps))

    plain_ms = device_ms(clock_of({}))
    share = bytes_read(model, cache, args.position) / ceiling / plain_ms / 1e9
    print(f"\n{name}, {config.num_hidden_layers} layers, position {args.position}, batch {args.batch}:", end=" ")
    print(f"{plain_ms:.4f} ms, {100 * share:.1f} % of the ceiling")

    clock = clock_of({"profile": True})
    profiled_ms = device_ms(clock)
    [executable] = [s.executable for s in live_segments() if len(s.executable.stamps())]
    runs = []
    for _ in range(args.steps):
        clock.device_ms(1.0)
        runs.append(durations(executable))
    print_phases(executable.phase_names, np.median(runs, axis=0), profiled_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(CONFIGS), default=["qwen3-0.6b"])
    parser.add_argument("--layers", type=int, help="build only so many")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--position", type=int, default=512)
    parser.add_argument("--cache", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    ceiling = measure_ceiling()["tb_per_s"]
    print(f"ceiling {ceiling:.2f} TB/s")
    for name in args.models:
        measure(name, args, ceiling)


if __name__ == "__main__":
    main()
