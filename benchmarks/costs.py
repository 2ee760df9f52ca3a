"""Holds what kernels are expected to take against what they take, job by job.

    python benchmarks/costs.py                                   # on a GPU: decode steps, prompts and the zoo
    python benchmarks/costs.py --models qwen3-8b --batch 1 8 32 --tokens 512 --no-zoo
    python benchmarks/costs.py --dry --models qwen3-0.6b         # what is expected on an H200, without one

The schedule of a launch has for each job the nanoseconds by which its kernel was chosen (``Cut.cost_ns``), and between
two phases a hop, or an event. A launch with stamps (docs/profiling.md) says how long each phase was: the mean over
workers of the time from the end of the phase before, its median over launches. Attention is expected to take as long as
a full cache does, so steps are near its end. A table has a line for each kernel: how many phases have it as their
longest job, what these are expected to take and take, and the mean of ``|expected - measured| / measured``. Records
the run (records.py).
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import records
import torch
from harness import Report, environment, run_child, table
from torch._guards import tracing
from transformers import StaticCache

from torch_mpk import _C, lowering
from torch_mpk.capture.graph import capture
from torch_mpk.dispatch import build_cache
from torch_mpk.generate import rewind
from torch_mpk.patterns import apply
from torch_mpk.profile import record
from torch_mpk.runtime.segment import live_segments
from torch_mpk.testing.decode import prefill
from torch_mpk.testing.models import CONFIGS, keep_layers, random_model
from torch_mpk.testing.zoo import MODELS, Decoder

H200 = _C.Target("cuda", 90, 132, 232448, True, True)
LIMIT_S = 900
ZOO = sorted(name for name, entry in MODELS.items() if isinstance(entry, Decoder) and not entry.is_hybrid)


def expected(schedule: _C.Schedule) -> list[dict[str, Any]]:
    """The kernel of each phase's longest job, and its nanoseconds."""
    arch = _C.arch_of(schedule.target.arch)
    phases = []
    for number, phase in enumerate(schedule.phases):
        longest = max(phase.jobs, key=lambda job: job.cut.cost_ns)
        hop = 0.0 if number == 0 else arch.event_ns if phase.waits else arch.hop_ns
        ns = hop + sum(job.cut.cost_ns for job in phase.jobs)
        phases.append({"kernel": longest.cut.kernel, "expected_ns": ns})
    return phases


# ---- on a GPU ----


def measured(step: Callable[[], object], rewound: Callable[[], None], launches: int) -> list[dict[str, Any]]:
    """The phases of the launches that ``step`` makes, a call of a model compiled with stamps."""

    def run(count: int) -> None:
        for _ in range(count):
            rewound()
            step()

    run(3)
    made = [segment.plan.schedule for segment in live_segments()]
    schedules = {tuple(schedule.phase_names): schedule for schedule in made if schedule is not None}
    phases = []
    for recording in record(lambda: run(launches)):
        schedule = schedules[tuple(recording.phase_names)]
        ns = recording.durations().sum(-1).mean(1).median(0).values.tolist()  # [launch, worker, phase, part]
        phases += [each | {"measured_ns": took} for each, took in zip(expected(schedule), ns, strict=True)]
    return phases


@torch.inference_mode()
def measure(case: dict[str, Any]) -> dict[str, Any]:
    name, batch, tokens = case["model"], case["batch"], case["tokens"]
    is_decode, torch_device = case["position"] > 0, "cuda"
    if name in MODELS:
        model = MODELS[name].make().to(torch_device, torch.bfloat16)
    else:
        config = CONFIGS[name]()
        keep_layers(config, case["layers"])
        model = random_model(config, torch_device)
    size = batch, case["position"] if is_decode else tokens
    ids = torch.randint(model.config.vocab_size, size, generator=torch.Generator().manual_seed(1)).to(torch_device)
    cache, _ = prefill(model, ids, size[1] + 8)
    given = ids[:, :1].contiguous() if is_decode else ids
    compiled = torch.compile(model, backend="mpk", options={"profile": True, "while_building": "wait"})
    with mock.patch.object(build_cache, "get", return_value=None):  # which keeps kernels without their schedules
        phases = measured(
            lambda: compiled(input_ids=given, past_key_values=cache, logits_to_keep=1),
            lambda: rewind(cache, case["position"]),
            case["launches"],
        )
    return {"phases": phases}


# ---- anywhere ----


@torch.inference_mode()
def planned(case: dict[str, Any]) -> dict[str, Any]:
    """The same schedules, from models without memory."""
    config = CONFIGS[case["model"]]()
    keep_layers(config, 1)
    model = random_model(config, "meta")
    length = (case["position"] or case["tokens"]) + 8
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = StaticCache(config=config, max_cache_len=length)
    cache.early_initialization(case["batch"], config.num_key_value_heads, head, model.dtype, model.device)
    ids = torch.zeros(case["batch"], 1 if case["position"] else case["tokens"], dtype=torch.int64, device="meta")
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        captured = capture(gm, inputs)
        with tracing(None):
            graphs.append(lowering.lower(apply(captured.graph_module)).graph)
        return gm.forward

    torch.compiler.reset()
    torch.compile(model, backend=backend)(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    return {"phases": [phase for graph in graphs for phase in expected(_C.make_schedule(graph, H200))]}


# ---- all of them ----


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    common = {"layers": args.layers, "launches": args.launches}
    for model in args.models:
        for batch in args.batch:
            yield common | {"model": model, "batch": batch, "position": args.position, "tokens": 1}
        for tokens in args.tokens:
            yield common | {"model": model, "batch": 1, "position": 0, "tokens": tokens}
    if args.zoo and not args.dry:
        for model in ZOO:
            yield common | {"model": model, "batch": 1, "position": 12, "tokens": 1}


def error_of(phase: dict[str, Any]) -> float:
    return abs(phase["expected_ns"] - phase["measured_ns"]) / phase["measured_ns"]


def rows_of(results: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each kernel, then one for all."""
    phases = [phase for result in results for phase in result["phases"]]
    rows = []
    for kernel in [*sorted({phase["kernel"] for phase in phases}), "all"]:
        own = [phase for phase in phases if kernel in (phase["kernel"], "all")]
        row = [kernel, str(len(own)), f"{statistics.median(phase['expected_ns'] for phase in own):.0f}"]
        own = [phase for phase in own if phase.get("measured_ns")]
        if own:
            ratio = sum(phase["expected_ns"] for phase in own) / sum(phase["measured_ns"] for phase in own)
            row += [f"{statistics.median(phase['measured_ns'] for phase in own):.0f}", f"{ratio:.2f}"]
            row += [f"{100 * statistics.mean(map(error_of, own)):.0f} %"]
        rows.append(row)
    return rows


COLUMNS = ["kernel", "phases", "expected, ns (median)", "measured, ns (median)", "sums' ratio", "mean error"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ["qwen3-0.6b", "llama-1b", "qwen3-8b", "olmoe-1b-7b"]
    parser.add_argument("--models", nargs="+", choices=sorted(CONFIGS), default=default)
    parser.add_argument("--layers", type=int, default=4, help="build so many at most: all are alike")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4, 16, 64], help="of decode steps")
    parser.add_argument("--tokens", type=int, nargs="*", default=[128, 512, 2048], help="of prompts")
    parser.add_argument("--position", type=int, default=1024, help="of decode steps")
    parser.add_argument("--launches", type=int, default=20)
    parser.add_argument("--zoo", action=argparse.BooleanOptionalAction, default=True, help="the zoo's tiny models, too")
    parser.add_argument("--dry", action="store_true", help="only what is expected, on an H200")
    records.add_arguments(parser)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        case = json.loads(args.child[0])
        Path(args.child[1]).write_text(json.dumps(planned(case) if case.get("dry") else measure(case)))
        return
    results, failed = [], []
    for case in cases(args):
        label = ", ".join(f"{name} {case[name]}" for name in ("model", "batch", "position", "tokens"))
        found = run_child(case | {"dry": args.dry}, LIMIT_S)
        if "error" in found:
            failed.append(f"{label}: {found['error']}")
            print(failed[-1], flush=True)
            continue
        results.append({"case": label} | found)
        print(f"{label}: {rows_of([results[-1]])[-1][2:]}", flush=True)
    print("\n\n".join([text_of(results), *failed]) if results else "\n".join(failed))
    if not args.dry:
        names = ("models", "layers", "batch", "tokens", "position", "launches", "zoo")
        report: Report = {
            "title": "What kernels are expected to take, and take",
            "environment": environment(),
            "setting": {name: getattr(args, name) for name in names},
            "ceiling": {},
            "results": results,
            "failed": failed,
        }
        records.write(report, args, "costs")


def text_of(results: list[dict[str, Any]]) -> str:
    return table(COLUMNS, rows_of(results))


if __name__ == "__main__":
    main()
