"""Times decode kernels apart from their models: built without a GPU, and launched in seconds where there is one.

    python benchmarks/offline.py build NEW --models qwen3-0.6b llama-1b
    python benchmarks/offline.py build NEW --tokens 128 512 2048
    python benchmarks/offline.py time OLD NEW --models qwen3-0.6b llama-1b --profile

``build`` writes what the checkout at hand makes of a step, or of a prompt of ``--tokens``, into a folder; ``time``
compares such folders, with the same random inputs, and ``--position`` tokens in the cache. Results are compared with
the first folder's, not with eager's: that is for tests.
"""

import argparse
import itertools
import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import records
import torch
from ceiling import bulk_copies
from harness import Log, environment
from torch._guards import tracing
from transformers import AutoModelForCausalLM, StaticCache

from torch_mpk import _C
from torch_mpk.capture.graph import capture
from torch_mpk.jit import compile_cuda
from torch_mpk.lowering import lower
from torch_mpk.partition.segments import partition
from torch_mpk.patterns import apply
from torch_mpk.plan import Kernel, pack, unpack
from torch_mpk.profile import kernel_times
from torch_mpk.runtime.timeline import Recording
from torch_mpk.testing.decode import bytes_read
from torch_mpk.testing.models import CONFIGS

H200 = {"arch": 90, "num_workers": 132, "smem_bytes": 232448}
KINDS = {"plain": False, "profiled": True}


def case_of(name: str, batch: int, tokens: int) -> str:
    return f"{name}-{batch}" + (f"x{tokens}" if tokens > 1 else "")


class _Built(Exception):
    """Ends the call that was only made to be captured."""


def build(folder: Path, name: str, batch: int, tokens: int, cache_length: int) -> list[tuple[Path, str]]:
    """Leaves the programs of a model's step over ``tokens`` of each sequence; returns the sources to compile."""
    config = CONFIGS[name]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model = model.to_empty(device="cpu")  # never written, so of no size
    model.tie_weights()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sources = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        captured = capture(gm, inputs).graph_module
        with tracing(None):
            [segment] = [s for s in partition(apply(captured), None).segments if s.ours]
            lowered = lower(segment.gm)
        schedule = _C.make_schedule(lowered.graph, _C.Target("cuda", fuse=True, polled=True, **H200))
        _C.validate(schedule)
        for kind, profiled in KINDS.items():
            target = folder / f"{case_of(name, batch, tokens)}.{kind}"
            target.mkdir(parents=True, exist_ok=True)
            files = pack(_C.generate_cuda(schedule, profiled))
            for file, content in files.items():
                (target / file).write_bytes(content)
            sources.append((target, files["kernel.cu"].decode()))
        values = [node.meta["val"] for node in lowered.inputs]
        inputs = [(str(v.dtype).removeprefix("torch."), list(v.shape)) for v in values]
        outputs = [(str(f.dtype).removeprefix("torch."), list(f.shape)) for f in lowered.fresh]
        description = {"inputs": inputs, "outputs": outputs, "bytes": [bytes_read(model, cache, n) for n in (0, 1)]}
        (folder / f"{case_of(name, batch, tokens)}.json").write_text(json.dumps(description))
        raise _Built

    cache = StaticCache(config=config, max_cache_len=cache_length)
    state = torch.zeros(batch, config.num_key_value_heads, 1, head_dim, dtype=torch.bfloat16)
    for layer in cache.layers:
        layer.lazy_initialization(state, state)
        for held in ("keys", "values"):  # zeros take the memory that they are written to, gigabytes for a large batch
            unwritten = torch.empty_like(getattr(layer, held))
            torch._dynamo.mark_static_address(unwritten)
            setattr(layer, held, unwritten)
    torch.compiler.reset()
    with torch.inference_mode():
        try:
            torch.compile(model, backend=backend)(
                input_ids=torch.zeros(batch, tokens, dtype=torch.int64), past_key_values=cache, logits_to_keep=1
            )
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, _Built):
                raise
    return sources


def compile_one(folder: Path, source: str) -> None:
    cubin = compile_cuda(source, H200["arch"])
    (folder / "kernel.cubin").write_bytes(cubin.image)
    print(f"{folder.name}: {cubin.resources}", flush=True)


class Step:
    """The inputs of a model's kernels, and launches of these."""

    def __init__(self, description: dict[str, Any], position: int) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        self.inputs, self.counters = [], []
        for dtype, shape in description["inputs"]:
            if dtype == "int64":  # the token; the cache's length, and its layers', which a step advances
                tensor = torch.full(shape, position if self.inputs else 5, device="cuda")
                self.counters += [tensor] if self.inputs else []
            else:
                mean, deviation = (1.0, 0.1) if len(shape) == 1 else (0.0, 0.02)
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
                tensor.normal_(mean, deviation, generator=generator)
            self.inputs.append(tensor)
        self.outputs = [
            torch.empty(shape, dtype=getattr(torch, dtype), device="cuda") for dtype, shape in description["outputs"]
        ]
        weights, with_one = description["bytes"]
        self.bytes = weights + position * (with_one - weights)
        self.position = position

    def load(self, folder: Path) -> tuple[Kernel, _C.CudaExecutable]:
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        kernel = unpack(files)
        return kernel, _C.CudaExecutable(kernel, files["kernel.cubin"], 0, 2_000_000_000)

    def ms(self, executable: _C.CudaExecutable) -> float:
        for counter in self.counters:
            counter.fill_(self.position)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)  # until all is enqueued
        begin.record()
        executable.run(self.inputs, self.outputs, [], torch.cuda.current_stream().cuda_stream)
        end.record()
        end.synchronize()
        executable.check()
        return begin.elapsed_time(end)


def measure(folders: list[Path], case: str, args: argparse.Namespace, ceiling: float) -> None:
    step, first = Step(json.loads((folders[0] / f"{case}.json").read_text()), args.position), None
    for folder in folders:
        _, executable = step.load(folder / f"{case}.plain")
        times = sorted([step.ms(executable) for _ in range(args.steps + 5)][5:])
        logits = step.outputs[0].float()
        first = logits.clone() if first is None else first
        ms = statistics.median(times)
        args.log(
            f"{case}, {folder}: {ms:.4f} ms ({times[0]:.4f} to {times[-1]:.4f}), "
            f"{100 * step.bytes / ms / 1e9 / ceiling:.1f} % of the ceiling, "
            f"differs by {((logits - first).norm() / first.norm()).item():.1e}"
        )
        if args.profile:
            kernel, executable = step.load(folder / f"{case}.profiled")
            for _ in range(5):
                step.ms(executable)
            executable.start_recording()
            ms = statistics.median(step.ms(executable) for _ in range(args.steps))
            launches = executable.stop_recording()
            device = torch.device("cuda", 0)
            phases = kernel.phase_names, kernel.phase_bytes
            recording = Recording.read(case, device, *phases, launches, experts=kernel.phase_experts)
            args.log(f"{ms:.4f} ms with stamps; {kernel_times(recording, 1e12 * ceiling)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["build", "time"])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--models", nargs="+", choices=sorted(CONFIGS), default=["qwen3-0.6b"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="sequences, each a build")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1], help="of each sequence in a call, each a build")
    parser.add_argument("--cache", type=int, default=1024)
    parser.add_argument("--position", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--ceiling", type=float, help="TB/s, instead of measuring it")
    parser.add_argument("--record", action="store_true", help="keep what time prints as a run")
    records.add_arguments(parser)
    args = parser.parse_args()
    cases = list(itertools.product(args.models, args.batch, args.tokens))
    if args.action == "build":
        [folder] = args.folders
        sources = [source for case in cases for source in build(folder, *case, args.cache)]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda source: compile_one(*source), sources))
        return
    ceiling = args.ceiling or bulk_copies()["tb_per_s"]
    args.log = Log()
    args.log(f"ceiling {ceiling:.2f} TB/s")
    for case in cases:
        measure(args.folders, case_of(*case), args, ceiling)
        torch.cuda.empty_cache()
        if args.record:
            report = {"title": "Kernels alone, bfloat16, random weights", "environment": environment()}
            report |= {"ceiling": {"tb_per_s": ceiling}}
            records.write(report | {"text": records.page(report, f"```\n{args.log.text}```")}, args, "offline")


if __name__ == "__main__":
    main()
