"""Times starts: from a call to its first token, and to the last kernel that it needs, and what that time goes to.

    python benchmarks/start.py [--model qwen3-0.6b] [--ways "decode step" generate generate_batch engine]

Each way runs in two processes, one after the other, which share an empty cache directory: cold, and in a second one.
Each process calls it three times: the first time, again as a program would (an engine for another number of requests),
and with another model object of the same class. Imports are done and models loaded before. ``--model tiny`` is a toy of
eight layers.

- decode step: the first call of ``torch.compile(model, backend="mpk")``.
- generate: ``torch_mpk.generate``, of which the prompt runs eagerly on a CPU.
- generate_batch: with Hugging Face's warm-up, which here waits for all sizes of steps before the first request.
- engine: one that serves while it builds all sizes of its steps, with two requests a second until all are built.
  "first token" is the first request's, by whatever way; "first by launches" the first one's whose steps are launches.
- own engine: the same engine without us, one request.

"CPU" is the process's and its compilers' time on processors, which another program's load changes least.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from harness import table
from host_cost import uninitialised_step
from torch._dynamo.utils import compilation_time_metrics as dynamo_times
from transformers import ContinuousBatchingConfig, GenerationConfig

import torch_mpk
import torch_mpk.continuous_batching as mpk_cb
from torch_mpk.batching import engine
from torch_mpk.builds import timing
from torch_mpk.testing.models import CONFIGS, random_model
from torch_mpk.testing.tiny import tiny_model

Times = dict[str, float]  # when what was there, as ``time.perf_counter`` says
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = 8  # of the toy
RUNS = ["first", "again", "another model"]
CHOICE = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
PROMPT = list(range(1, 33))


def made_model(name: str, attention: str = "sdpa") -> Any:
    if name == "tiny":
        return tiny_model(num_layers=LAYERS, attention=attention, device=DEVICE)
    model = random_model(CONFIGS[name](), DEVICE)
    model.set_attn_implementation(attention)
    return model


def decode_step(name: str) -> Callable[[int], Times]:
    """The function calls one, and says when its token was there."""
    model, arguments = uninitialised_step(name, DEVICE) if name != "tiny" else tiny_step()

    def call(number: int) -> Times:
        with torch.inference_mode():
            torch.compile(model, backend="mpk", options={"fallback": "error"}, fullgraph=True)(**arguments)
        torch_mpk.synchronize()
        return {"first token": time.perf_counter()}

    return call


def tiny_step() -> tuple[Any, dict[str, Any]]:
    from transformers import StaticCache

    model = made_model("tiny")
    cache = StaticCache(config=model.config, max_cache_len=128)
    with torch.inference_mode():
        model(input_ids=torch.tensor([PROMPT], device=DEVICE), past_key_values=cache)
    return model, {"input_ids": torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), "past_key_values": cache}


def generate(name: str) -> Callable[[int], Times]:
    model = made_model(name)

    def call(number: int) -> Times:
        begin, stats = time.perf_counter(), dict[str, float]()
        ids = torch.tensor([PROMPT], device=DEVICE)
        torch_mpk.generate(model, ids, 4, do_sample=False, eos_token_id=[], max_cache_len=128, stats=stats)
        return {"first token": begin + stats["first_token_seconds"]}

    return call


def sized(num_requests: int) -> dict[str, Any]:
    """On a CPU, where the engine does not look at how much memory there is; elsewhere it has sizes of its own."""
    size = {"num_blocks": 64 + 4 * num_requests, "page_size": 16, "max_batch_tokens": 256}
    return size if DEVICE == "cpu" else {}


def generate_batch(name: str) -> Callable[[int], Times]:
    model = made_model(name, mpk_cb.ATTENTION)

    def call(number: int) -> Times:
        prompts = [[k, *PROMPT] for k in range(1 + 4 * number)]
        outputs = model.generate_batch(
            prompts,
            generation_config=CHOICE,
            continuous_batching_config=mpk_cb.config({"while_building": "wait"}, **sized(len(prompts))),
            record_timestamps=True,
            progress_bar=False,
        )
        return {"first token": min(output.timestamps[0] for output in outputs.values())}

    return call


def running_engine(name: str) -> Callable[[int], Times]:
    model = made_model(name, mpk_cb.ATTENTION)

    def call(number: int) -> Times:
        settings = mpk_cb.config(**sized(1))
        with started(model, settings, warmup=True) as manager:
            runner = manager.batch_processor.model_runner
            times = {"first token": answer(manager)}
            while runner.builder.num_waiting or "first by launches" not in times:
                time.sleep(0.5)  # else the engine's own steps take half of the interpreter
                token = answer(manager)
                if not any(step.is_own for step in runner.steps):
                    times.setdefault("first by launches", token)
            del runner  # which would keep the cache, and leave the next engine a tenth of the memory
        return times

    return call


def own_engine(name: str) -> Callable[[int], Times]:
    model = made_model(name)

    def call(number: int) -> Times:
        with started(model, ContinuousBatchingConfig(**sized(1)), warmup=False) as manager:
            return {"first token": answer(manager)}

    return call


@contextmanager
def started(model: Any, settings: ContinuousBatchingConfig, warmup: bool) -> Iterator[Any]:
    manager = model.init_continuous_batching(generation_config=CHOICE, continuous_batching_config=settings)
    if warmup:
        manager.warmup()
    manager.start()
    yield manager
    manager.stop(block=True)
    manager.destroy()


def answer(manager: Any) -> float:
    """The time when a request's first token was there."""
    manager.add_request(PROMPT, record_timestamps=True)
    output = manager.get_result(timeout=600)
    assert output.error is None, output.error
    return output.timestamps[0]


WAYS: dict[str, Callable[[str], Callable[[int], Times]]] = {
    "decode step": decode_step,
    "generate": generate,
    "generate_batch": generate_batch,
    "engine": running_engine,
    "own engine": own_engine,
}


def cpu_seconds() -> float:
    return sum(os.times()[:4])


def watch_graphs() -> Counter[str]:
    """Gets the seconds that engines take to capture CUDA graphs, with the builds that this asks for."""
    seconds: Counter[str] = Counter()
    capture = engine.Runner._capture_graph

    def timed(*args: Any, **kwargs: Any) -> None:
        begin = time.perf_counter()
        capture(*args, **kwargs)
        seconds["CUDA graphs"] += time.perf_counter() - begin

    engine.Runner._capture_graph = timed  # type: ignore[method-assign]
    return seconds


def measured(call: Callable[[int], Times], number: int, graphs: Counter[str]) -> dict[str, float]:
    """Seconds of one call. Stages on several threads may add up to more than the call."""
    timing.recent.clear()
    dynamo_times.clear()
    graphs.clear()
    cpu, begin = cpu_seconds(), time.perf_counter()
    times = call(number)
    times["last build"] = max((build.end for build in timing.recent), default=begin)
    result = {name: time - begin for name, time in times.items()}
    result |= {"all": time.perf_counter() - begin, "CPU": cpu_seconds() - cpu, "builds": len(timing.recent)}
    whole, backend = (
        sum(dynamo_times.get(name, ())) for name in ("_compile.compile_inner", "OutputGraph.call_user_compiler")
    )
    result["Dynamo"] = whole - backend
    for build in timing.recent:
        result |= {stage: result.get(stage, 0.0) + seconds for stage, seconds in build.stages.items()}
    return result | graphs


def measure(way: str, model_name: str, num_runs: int) -> list[dict[str, float]]:
    """A process's runs, each of which is printed as it ends."""
    graphs, make = watch_graphs(), WAYS[way]
    call = make(model_name)
    runs: list[dict[str, float]] = []
    for number in range(num_runs):
        if number == 2:
            call = make(model_name)
        runs.append(measured(call, number % 2, graphs))
        print(way, RUNS[number], {name: round(seconds, 2) for name, seconds in runs[-1].items()}, file=sys.stderr)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["tiny", *sorted(CONFIGS)], default="qwen3-0.6b")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--runs", type=int, choices=[1, 2, 3], default=3, help="of each process")
    parser.add_argument("--json", help="a file for the figures, too")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args.model, args.runs)))
        return
    every = {}
    for way in args.ways:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--model", args.model, "--child", way, "--runs", str(args.runs)]
            environment = os.environ | {"TORCH_MPK_CACHE_DIR": folder}
            runs = []
            for _ in range(2):
                output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
                runs += json.loads(output.splitlines()[-1])
        every[way] = runs
        stages = list(dict.fromkeys(stage for run in runs for stage in run))
        rows = [[stage, *(f"{run[stage]:.2f}" if stage in run else "" for run in runs)] for stage in stages]
        columns = [f"{process}, {run}" for process in ("cold", "second process") for run in RUNS[: args.runs]]
        print(table([f"{args.model}, {way}, s", *columns], rows), end="\n\n", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(every, file, indent=2)


if __name__ == "__main__":
    main()
