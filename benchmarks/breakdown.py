"""Where a decode step's time goes, phase by phase, from clock stamps that every worker takes.

    python benchmarks/breakdown.py --models qwen3-0.6b llama-1b --position 512 --traces traces
    torchrun --nproc-per-node 2 benchmarks/breakdown.py --models qwen3-8b --layers 8

The tables are those of ``torch_mpk.profile`` (docs/profiling.md), and so are the timelines, of three steps in a row.
Several processes of ``torchrun`` share each model out, and each prints its own tables. Needs a GPU for each.
"""

import argparse
import os
import statistics
from pathlib import Path

import torch
from ceiling import measure_ceiling
from decode import Clock, alone, make_model, num_ranks, rank

import torch_mpk
from torch_mpk.generate import rewind
from torch_mpk.profile import kernel_times, record
from torch_mpk.testing.decode import bytes_read, chosen_experts, prefill
from torch_mpk.testing.models import CONFIGS
from torch_mpk.testing.quantized import quantize_linears


@torch.inference_mode()
def measure(name: str, args: argparse.Namespace, ceiling: float) -> None:
    with alone():
        model = make_model({"model": name, "ranks": int(os.environ.get("WORLD_SIZE", "1")), "layers": args.layers})
        if args.weights != "bf16":
            quantize_linears(model, args.weights)
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(model.config.vocab_size, (args.batch, args.position), generator=generator).cuda()
        cache, _ = prefill(model, tokens, args.cache)
    token = tokens[:, :1].contiguous()

    def clock_of(options: dict[str, bool]) -> Clock:
        torch.compiler.reset()
        step = torch.compile(model, backend="mpk", options=options)
        clock = Clock(lambda: step(input_ids=token, past_key_values=cache), cache, args.position)
        clock.loop_ms(5)
        return clock

    def device_ms(clock: Clock) -> float:
        with alone():
            return statistics.median(clock.device_ms(1.0) for _ in range(args.steps))

    plain_ms = device_ms(clock_of({}))
    rewind(cache, args.position)
    chosen = chosen_experts(model, lambda: model(input_ids=token, past_key_values=cache))
    share = bytes_read(model, cache, args.position, chosen) / ceiling / plain_ms / 1e9
    title = f"{name}, {args.weights}, {model.config.num_hidden_layers} layers, position {args.position}"
    title += f", batch {args.batch}" + (f", rank {rank()} of {num_ranks()}" if num_ranks() > 1 else "")
    title += f": {plain_ms:.4f} ms, {100 * share:.1f} % of the ceiling"

    clock, times = clock_of({"profile": True}), []
    with alone():
        [recording] = record(lambda: times.extend(clock.device_ms(1.0) for _ in range(args.steps)))
    table = kernel_times(recording, 1e12 * ceiling)
    print(f"\n{title}\n{statistics.median(times):.4f} ms with stamps; {table}", flush=True)
    if args.traces:
        args.traces.mkdir(parents=True, exist_ok=True)
        clock.loop_ms(1)
        torch_mpk.profile(clock.step, args.traces / f"{name}_{rank()}.json.gz")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(CONFIGS), default=["qwen3-0.6b"])
    parser.add_argument("--layers", type=int, help="build only so many")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--weights", choices=["bf16", "fp8", "int8", "int4"], default="bf16")
    parser.add_argument("--position", type=int, default=512)
    parser.add_argument("--cache", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--traces", type=Path, help="folder to leave timelines in")
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    ceiling = measure_ceiling()["tb_per_s"]
    print(f"ceiling {ceiling:.2f} TB/s")
    for name in args.models:
        measure(name, args, ceiling)


if __name__ == "__main__":
    main()
