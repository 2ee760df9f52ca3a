"""Where a decode step's time goes, phase by phase, from clock stamps that every worker takes.

    python benchmarks/breakdown.py --models qwen3-0.6b llama-1b --position 512 --traces traces

The tables are those of ``torch_mpk.profile`` (docs/profiling.md), and so are the timelines, of three steps in a row.
Needs a GPU.
"""

import argparse
import statistics
from pathlib import Path

import torch
from ceiling import measure_ceiling
from decode import Clock, alone

import torch_mpk
from torch_mpk.generate import rewind
from torch_mpk.profile import kernel_times, record
from torch_mpk.testing.decode import bytes_read, chosen_experts, prefill
from torch_mpk.testing.models import CONFIGS, keep_layers, random_model
from torch_mpk.testing.quantized import quantize_linears


@torch.inference_mode()
def measure(name: str, args: argparse.Namespace, ceiling: float) -> None:
    config = CONFIGS[name]()
    if args.layers:
        keep_layers(config, args.layers)
    with alone():
        model = random_model(config, "cuda")
        if args.weights != "bf16":
            quantize_linears(model, args.weights)
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
        with alone():
            return statistics.median(clock.device_ms(1.0) for _ in range(args.steps))

    plain_ms = device_ms(clock_of({}))
    rewind(cache, args.position)
    chosen = chosen_experts(model, lambda: model(input_ids=token, past_key_values=cache))
    share = bytes_read(model, cache, args.position, chosen) / ceiling / plain_ms / 1e9
    print(f"\n{name}, {args.weights}, {config.num_hidden_layers} layers, position {args.position}", end=", ")
    print(f"batch {args.batch}:", end=" ")
    print(f"{plain_ms:.4f} ms, {100 * share:.1f} % of the ceiling")

    clock, times = clock_of({"profile": True}), []
    with alone():
        [recording] = record(lambda: times.extend(clock.device_ms(1.0) for _ in range(args.steps)))
    print(f"{statistics.median(times):.4f} ms with stamps; {kernel_times(recording, 1e12 * ceiling)}")
    if args.traces:
        args.traces.mkdir(parents=True, exist_ok=True)
        clock.loop_ms(1)
        torch_mpk.profile(clock.step, args.traces / f"{name}.json.gz")


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
    ceiling = measure_ceiling()["tb_per_s"]
    print(f"ceiling {ceiling:.2f} TB/s")
    for name in args.models:
        measure(name, args, ceiling)


if __name__ == "__main__":
    main()
