"""Graphs that are ours in part: what the backend estimates of both ways, beside what calls take.

    python benchmarks/partial.py --constants     # those of this machine, for torch_mpk/partition/costs.py
    python benchmarks/partial.py                 # the table, by the constants of torch_mpk/partition/costs.py
    python benchmarks/partial.py --measured --how eager inductor     # by this machine's, beside both

Calls are those of Dynamo's graphs, without its guards, the same for all ways. A time is the least of several rounds, in
which the ways take turns: the question is which way is faster, and others on the machine only add to either.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import records
import torch
import torch.nn.functional as F
from harness import Result, environment, table
from torch import nn
from torch._guards import tracing

from torch_mpk.backend.calls import compile_call
from torch_mpk.builds.dump import Dump
from torch_mpk.capture.graph import Captured, capture, written_inputs
from torch_mpk.config import Options
from torch_mpk.dispatch.compiled_graph import CompiledGraph
from torch_mpk.dispatch.fallback import compile_others
from torch_mpk.errors import MpkWarning
from torch_mpk.partition.costs import COSTS, Costs, Estimate, estimate
from torch_mpk.partition.segments import Partitioned, partition
from torch_mpk.patterns import apply
from torch_mpk.runtime.backend import backend_of
from torch_mpk.verify.comparison import copied

Call = Callable[..., Any]


# ---- models ----


class Sorting(nn.Module):
    """Something that is not ours in each of many layers."""

    def __init__(self, width: int, layers: int, every: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers))
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.every = every

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, (norm, up, down) in enumerate(zip(self.norms, self.ups, self.downs, strict=True)):
            h = up(norm(x))
            x = x + down(h.sort(-1).values if i % self.every == 0 else F.silu(h))
        return x


class Convolving(nn.Module):
    """Layers of convolutions, and a head that is ours."""

    def __init__(self, channels: int, layers: int, classes: int) -> None:
        super().__init__()
        sizes = [3, *[channels] * layers]
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(sizes))
        self.head = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x.mean((2, 3)))


def experts(rows: int, layers: int, width: int, count: int) -> tuple[nn.Module, Sequence[Any]]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, StaticCache

    config = Qwen3MoeConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        moe_intermediate_size=width,
        num_experts=count,
        num_experts_per_tok=4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128),
        head_dim=64,
        vocab_size=4096,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    cache = StaticCache(config=config, max_cache_len=256)

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids, past_key_values=cache).logits

    step = Step()
    step.prepare = lambda parameter: cache.early_initialization(  # type: ignore[assignment]
        rows, config.num_key_value_heads, 64, parameter.dtype, parameter.device
    )
    return step, [torch.randint(0, 4096, (rows, 1))]


def vision(batch: int, layers: int, width: int) -> tuple[nn.Module, Sequence[Any]]:
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": width // 64}
    model = ViTModel(ViTConfig(**sizes, num_hidden_layers=layers, image_size=64, patch_size=8)).eval()
    return model, [torch.randn(batch, 3, 64, 64)]


MODELS: dict[str, Callable[[], tuple[nn.Module, Sequence[Any]]]] = {
    "experts, 1 row": lambda: experts(1, 2, 512, 16),
    "experts, 8 rows": lambda: experts(8, 2, 512, 16),
    "small experts, 1 row": lambda: experts(1, 2, 128, 8),
    "image transformer": lambda: vision(1, 2, 384),
    "image transformer, small": lambda: vision(1, 2, 64),
    "a sort in each layer": lambda: (Sorting(256, 12, 1), [torch.randn(1, 256)]),
    "a sort in each small layer": lambda: (Sorting(32, 12, 1), [torch.randn(1, 32)]),
    "a sort in every sixth layer": lambda: (Sorting(256, 12, 6), [torch.randn(1, 256)]),
    "a sort in one of 12 small layers": lambda: (Sorting(32, 12, 12), [torch.randn(1, 32)]),
    "convolutions with a head": lambda: (Convolving(64, 6, 100), [torch.randn(1, 3, 16, 16)]),
    "few convolutions, large head": lambda: (Convolving(256, 1, 8192), [torch.randn(1, 3, 8, 8)]),
}


# ---- calls ----


def graph_of(model: Call, args: Sequence[Any]) -> tuple[torch.fx.GraphModule, list[Any]]:
    """Dynamo's graph of a call, and its inputs."""
    found: list[tuple[torch.fx.GraphModule, list[Any]]] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Call:
        found.append((gm, list(inputs)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*args)
    return found[0]


def in_parts(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], device: torch.device, options: Options
) -> tuple[Call, Partitioned, Estimate]:
    """Our segments regardless of whether they pay together, and what is estimated of that."""
    captured = capture(gm, inputs)
    how = str(options.fallback)
    with tracing(None):
        target = backend_of(device).target(device, options)
        partitioned = partition(apply(captured.graph_module), options.min_segment_nodes, target, how)
        call = built(partitioned, captured, gm, device, options)
    return call, partitioned, estimated(partitioned, captured, device, how)


def estimated(partitioned: Partitioned, captured: Captured, device: torch.device, how: str) -> Estimate:
    parts = [(segment.gm.graph, segment.ours) for segment in partitioned.segments]
    return estimate(COSTS[device.type], parts, captured.graph_module.graph, how, how)


def built(
    partitioned: Partitioned, captured: Captured, gm: torch.fx.GraphModule, device: torch.device, options: Options
) -> Call:
    compiled = CompiledGraph.build(partitioned, device, options, Dump(None))
    compiled.others = compile_others(partitioned, captured, options)
    return compiled.callable(gm.forward) if compiled.segments else gm.forward


def whole(gm: torch.fx.GraphModule, inputs: Sequence[Any], how: str) -> Call:
    return torch._dynamo.lookup_backend("inductor")(gm, list(inputs)) if how == "inductor" else gm.forward


def least_us(calls: Sequence[Call], inputs: Sequence[Any], rounds: int) -> list[float]:
    """Each call's time is the least of several rounds, and a round has as many calls of it as take a millisecond."""
    is_cuda = any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs)

    def seconds(call: Call, count: int) -> float:
        start = perf_counter()
        for _ in range(count):
            call(*inputs)
        if is_cuda:
            torch.cuda.synchronize()
        return (perf_counter() - start) / count

    for call in calls:
        seconds(call, 3)
    counts = [max(1, int(0.001 / seconds(call, 3))) for call in calls]
    return [
        1e6 * min(each)
        for each in zip(*([seconds(*pair) for pair in zip(calls, counts, strict=True)] for _ in range(rounds)))
    ]


# ---- constants ----


def constants(device: torch.device, dtype: torch.dtype, rounds: int) -> Costs:
    def least(function: Call, args: Sequence[Any], way: Callable[[Any, Any], Call] | None) -> float:
        gm, inputs = graph_of(function, args)
        return least_us([gm.forward if way is None else way(gm, inputs)], inputs, rounds)[0]

    def mpk(gm: Any, inputs: Any) -> Call:
        return compile_call(gm, inputs, Options(fallback="error", while_building="wait"))

    def parts(gm: Any, inputs: Any) -> Call:
        return in_parts(gm, inputs, device, Options(fallback="eager", min_segment_nodes=1))[0]

    def chain(count: int, step: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        def run(x: torch.Tensor) -> torch.Tensor:
            for _ in range(count):
                x = step(x)
            return x

        return run

    def slope(step: Callable[[torch.Tensor], torch.Tensor], way: Callable[[Any, Any], Call] | None) -> Any:
        """One step more takes the first of these; the second is there beside the steps."""
        few, many = (least(chain(count, step), [x], way) for count in (2, 34))
        return (many - few) / 32, max(0.0, few - 2 * (many - few) / 32)

    x, weight = torch.randn(1, 64, device=device, dtype=dtype), torch.randn(64, 64, device=device, dtype=dtype) / 8
    large = torch.randn(32768 if device.type == "cuda" else 4096, 8192, device=device, dtype=dtype)
    rows = torch.randn(1, 8192, device=device, dtype=dtype)
    many_rows = torch.randn(2048 if device.type == "cuda" else 64, 8192, device=device, dtype=dtype)
    operation, _ = slope(lambda x: x + 1, None)
    phase, segment = slope(lambda x: F.linear(x, weight), mpk)
    kernel, graph = slope(lambda x: F.linear(x, weight), whole_of("inductor"))
    alternating, _ = slope(lambda x: F.linear(x, weight).sort(-1).values, parts)
    plain, _ = slope(lambda x: F.linear(x, weight).sort(-1).values, None)
    num_bytes = large.numel() * dtype.itemsize
    ours, theirs = (least(lambda x: F.linear(x, large), [rows], way) for way in (mpk, None))
    product = least(lambda x: F.linear(x, large), [many_rows], None)
    return Costs(
        segment=round(segment, 1),
        phase=round(phase, 1),
        operation=round(operation, 1),
        graph=round(graph, 1),
        kernel=round(kernel, 1),
        part=round(max(0.0, alternating - plain - segment), 1),
        bytes_per_us=round(num_bytes / (ours - segment)),
        others_bytes_per_us=round(num_bytes / theirs),
        flops_per_us=round(2 * many_rows.shape[0] * large.numel() / product),
    )


def whole_of(how: str) -> Callable[[Any, Any], Call]:
    return lambda gm, inputs: whole(gm, inputs, how)


# ---- the table ----

COLUMNS = (
    "model",
    "without us",
    "parts of ours",
    "estimated: parts",
    "whole",
    "measured: parts",
    "whole",
    "taken",
    "right",
)


def rows_of(name: str, device: torch.device, dtype: torch.dtype, how: str, rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model, args = MODELS[name]()
    model.to(device, dtype).eval()
    if hasattr(model, "prepare"):
        model.prepare(next(model.parameters()))
    args = [arg.to(device, dtype if arg.is_floating_point() else arg.dtype) for arg in args]
    gm, inputs = graph_of(model, args)
    inputs = copied(inputs, written_inputs(gm, inputs))
    results = []
    options = Options(fallback=how)  # type: ignore[arg-type]
    ways = [in_parts(gm, inputs, device, dataclasses.replace(options, min_segment_nodes=n)) for n in (None, 1)]
    if len(ways[0][1].segments) == len(ways[1][1].segments):
        ways.pop()
    measured = least_us([*(call for call, _, _ in ways), whole(gm, inputs, how)], inputs, rounds)
    for (_, partitioned, both), parts_us, kept in zip(ways, measured, ("", ", all kept"), strict=False):
        num_ours = sum(segment.ours for segment in partitioned.segments)
        results.append(
            {
                "case": name + kept,
                "how": how,
                "num_ours": num_ours,
                "num_parts": len(partitioned.segments),
                "estimated_us": [both.parts_us, both.whole_us],
                "measured_us": [parts_us, measured[-1]],
                "taken": "parts" if both.pays and num_ours else "whole",
            }
        )
    return results


def is_right(result: dict[str, Any]) -> bool:
    """Or no worse than by a tenth."""
    parts, whole = result["measured_us"]
    chosen = parts if result["taken"] == "parts" else whole
    return bool(result["num_ours"] == 0 or chosen <= 1.1 * min(parts, whole))


def cells(result: dict[str, Any]) -> list[str]:
    times = [f"{us / 1e3:.3f}" for us in (*result["estimated_us"], *result["measured_us"])]
    parts = f"{result['num_ours']} of {result['num_parts']}"
    return [result["case"], result["how"], parts, *times, result["taken"], "yes" if is_right(result) else "no"]


def text_of(results: list[Result]) -> str:
    return table(COLUMNS, [cells(result) for result in results])


def main() -> None:
    is_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--constants", action="store_true")
    parser.add_argument("--measured", action="store_true", help="estimate by constants of this machine, measured first")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--how", nargs="+", default=["inductor" if is_cuda else "eager"], choices=["eager", "inductor"])
    parser.add_argument("--dtype", default="bfloat16" if is_cuda else "float32")
    parser.add_argument("--threads", type=int, help="of the CPU; on a busy machine take 1")
    parser.add_argument("--rounds", type=int, default=60)
    records.add_arguments(parser)
    asked = parser.parse_args()
    warnings.simplefilter("ignore", MpkWarning)
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    device, dtype = torch.device("cuda", 0) if is_cuda else torch.device("cpu"), getattr(torch, asked.dtype)
    with torch.inference_mode():
        if asked.constants:
            print(f'    "{device.type}": {constants(device, dtype, asked.rounds)},')
            return
        if asked.measured:
            COSTS[device.type] = constants(device, dtype, asked.rounds)
        results = []
        for how in asked.how:
            for name in asked.models:
                results += rows_of(name, device, dtype, how, asked.rounds)
                print(*cells(results[-1]), sep=" | ", flush=True)
    print(text_of(results))
    report = {
        "title": "Graphs that are ours in part, ms a call",
        "environment": environment(),
        "setting": {
            "dtype": asked.dtype,
            "rounds": asked.rounds,
            "threads": torch.get_num_threads(),
            "costs": dataclasses.asdict(COSTS[device.type]),
        },
        "ceiling": {},
        "results": results,
    }
    records.write(report, asked, "partial")


if __name__ == "__main__":
    main()
