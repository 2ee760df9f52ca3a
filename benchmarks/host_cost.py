"""What a call costs the host beyond a backend that does nothing, for the decode step of a 28-layer model.

    python benchmarks/host_cost.py [--model qwen3-0.6b]
    python benchmarks/host_cost.py --generate

The null backend returns outputs made beforehand; both are called as Dynamo calls them, with the same arguments, in
turn, and under ``torch.inference_mode()``. On a GPU a call includes the launch, and the stream is never full. Without
one, the CUDA path runs up to a driver that does nothing, so that launching itself is not included.

``--generate`` says what a token takes in Hugging Face's ``generate``: with a forward that returns the same object every
time, which is their loop alone, with Dynamo around the null backend, and around ours; also with what PyTorch offers to
leave out of Dynamo's guards. On a GPU tokens include the kernel. Without one the model's width is cut, since the prompt
runs in earnest, and what the host does is the same.
"""

import argparse
import itertools
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, CompileConfig, StaticCache
from transformers.generation import BaseStreamer

from torch_mpk.backend import mpk
from torch_mpk.testing.models import CONFIGS, random_model

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
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv = torch.empty(1, config.num_key_value_heads, 1, head_size, dtype=torch.bfloat16, device=device)
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


class Clock(BaseStreamer):
    """When tokens came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def null(gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Call:
    """A backend that gives the first call's results to every call."""
    first, results = mpk(gm, inputs, **kwargs), []

    def call(*args: Any) -> Any:
        if not results:
            results.append(first(*args))
        return results[0]

    return call


def forwards(model: torch.nn.Module) -> dict[str, Call]:
    """What ``generate`` may be given to call, each with a code object of its own, by which Dynamo keeps graphs."""

    def forward(**inputs: Any) -> Any:
        return model(**inputs)

    def compiled(backend: Call, guards: Call | None = None, **options: Any) -> Call:
        own = types.FunctionType(forward.__code__.replace(), globals(), closure=forward.__closure__)
        options |= {"fallback": "error"} | ({"guard_filter_fn": guards} if guards else {})
        return torch.compile(own, backend=backend, fullgraph=True, options=options)

    made: list[Any] = []
    plain = compiled(null)

    def constant(**inputs: Any) -> Any:
        made[:] = made or [plain(**inputs)]
        return type(made[0])(**made[0])

    tensors, modules = torch.compiler.keep_tensor_guards_unsafe, torch.compiler.skip_guard_on_all_nn_modules_unsafe
    return {
        "no forward: the loop": constant,
        "null, all guards": plain,
        "null, none on modules": compiled(null, modules),
        "null, tensors' guards alone": compiled(null, tensors),
        "mpk, all guards": compiled(mpk),
        "mpk, freeze, none on modules": compiled(mpk, modules, freeze=True),
        "mpk, freeze, tensors' guards alone": compiled(mpk, tensors, freeze=True),
    }


def report_generate(name: str, device: str, num_rounds: int, num_tokens: int = 120) -> None:
    """Prints the median token of each forward; the fastest of several rounds in turns, since machines are busy."""
    config = CONFIGS[name]()
    if device == "cpu":
        config.hidden_size, config.intermediate_size, config.vocab_size = 64, 128, 256
    model = random_model(config, device, torch.bfloat16)
    prompt = torch.ones(1, 8, dtype=torch.int64, device=device)
    compile_config = CompileConfig()
    compile_config._compile_all_devices = True
    best: dict[str, float] = {}
    chosen = forwards(model)
    for is_warm in [False] + [True] * num_rounds:
        for label, forward in chosen.items():
            model.get_compiled_call = lambda config, forward=forward: forward
            clock = Clock()
            model.generate(
                prompt,
                max_new_tokens=num_tokens if is_warm else 8,
                do_sample=False,
                cache_implementation="static",
                max_cache_len=512,
                compile_config=compile_config,
                streamer=clock,
            )
            gaps = [(b - a) * 1e6 for a, b in itertools.pairwise(clock.times[8:])]
            if is_warm:
                best[label] = min(best.get(label, float("inf")), statistics.median(gaps))
    print(f"{name}, a token in Hugging Face's generate")
    for label, us in best.items():
        print(f"{label:36} {us:6.0f} µs, {us - next(iter(best.values())):+5.0f} to the loop")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-0.6b")
    parser.add_argument("--repeat", type=int, default=1000)
    parser.add_argument("--generate", action="store_true", help="what a token takes in Hugging Face's generate")
    parser.add_argument("--rounds", type=int, default=10, help="of --generate")
    options = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    if not is_cuda:
        simulated_gpu.install()
    if options.generate:
        report_generate(options.model, "cuda" if is_cuda else "cpu", options.rounds)
        return
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
