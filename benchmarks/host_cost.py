"""What one call costs the host beyond a backend that does nothing, for the decode step of a 28-layer model.

    python benchmarks/host_cost.py [--model qwen3-0.6b]

The null backend returns outputs made beforehand; both are called as Dynamo calls them, with the same arguments, in
turn, and under ``torch.inference_mode()``. On a GPU a call includes the launch, and the stream is never full. Without
one, the CUDA path runs up to a driver that does nothing, so that launching itself is not included.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StaticCache

from torch_mpk.backend import mpk
from torch_mpk.testing.models import CONFIGS

sys.path.append(str(Path(__file__).parents[1]))
from tests.runtime_cuda import simulated_gpu

Call = Callable[..., Any]


def uninitialised_step(name: str, device: str) -> tuple[Call, dict[str, Any]]:
    """A model and the arguments of a decode step, in memory that nothing writes to or reads: the values do not matter
    to the host."""
    config = CONFIGS[name]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model = model.to_empty(device=device)
    model.tie_weights()
    cache = StaticCache(config=config, max_cache_len=1024)
    kv = torch.empty(1, config.num_key_value_heads, 1, config.head_dim, dtype=torch.bfloat16, device=device)
    for layer in cache.layers:
        layer.lazy_initialization(kv, kv)
    return model, {"input_ids": torch.zeros(1, 1, dtype=torch.int64, device=device), "past_key_values": cache}


def calls_of(model: Call, arguments: dict[str, Any]) -> tuple[list[Call], Sequence[Any]]:
    """What the null backend and ours, plain and frozen, give Dynamo to call, and what it calls them with."""
    made: list[Call] = []
    given: list[Sequence[Any]] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Call:
        plain, frozen = (mpk(gm, inputs, options={"fallback": "error", "freeze": f}) for f in (False, True))

        def call(*args: Any) -> Any:
            results = plain(*args)
            made.extend([lambda *args: results, plain, frozen])
            given.append(args)
            return results

        return call

    torch.compile(model, backend=backend, fullgraph=True)(**arguments)
    return made, given[0]


def microseconds(call: Call, args: Sequence[Any], num_calls: int = 10) -> float:
    """Of one call, where several follow each other as fast as they can."""
    start = time.perf_counter()
    for _ in range(num_calls):
        call(*args)
    return (time.perf_counter() - start) / num_calls * 1e6


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-0.6b")
    parser.add_argument("--repeat", type=int, default=1000)
    options = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    if not is_cuda:
        simulated_gpu.install()
    calls, args = calls_of(*uninitialised_step(options.model, "cuda" if is_cuda else "cpu"))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(options.repeat):
        for call, samples in zip(calls, times, strict=True):
            if is_cuda:
                torch.cuda.synchronize()
            samples.append(microseconds(call, args))
    null = statistics.median(times[0])
    print(f"{options.model}, {len(args)} inputs, {torch.cuda.get_device_name() if is_cuda else 'no GPU: not launched'}")
    for name, samples in zip(("every address checked", "freeze"), times[1:], strict=True):
        print(f"{name}: {statistics.median(samples) - null:.1f} µs a call (fastest {min(samples) - null:.1f})")


if __name__ == "__main__":
    main()
