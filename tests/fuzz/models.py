"""Long runs of steps of random models: ``python -m tests.fuzz.models --cases 1000``, on a GPU with ``--device cuda
--processes 8 --minutes 5``.

A case is a call, over a batch, lengths and a mask of its own; each model is compiled once, for ``--calls`` of them. It
is drawn from a seed, which is printed where a result is wrong, and ``--cases 1 --seed <that>`` draws it again.
"""

import argparse
import time

import torch

from tests.fuzz.random_models import check_model
from tests.fuzz.running import exit_with, judge_all


def judge_model(seed: int, device: str, num_calls: int) -> str:
    """What is wrong; empty: nothing."""
    try:
        check_model(seed, torch.device(device), num_calls)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--calls", type=int, default=20, help="cases that share a model and its build")
    parser.add_argument("--seed", type=int, default=0, help="the first model's; the others count on from it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, help="models that have not begun by then are left out")
    args = parser.parse_args()
    start = time.monotonic()

    def report(seed: int, error: str) -> bool:
        if error:
            print(f"seed {seed}: {error}", flush=True)
        return bool(error)

    seeds = range(args.seed, args.seed - (-args.cases // args.calls))
    done, wrong = judge_all(
        judge_model, seeds, args.device, args.calls, report=report, num_processes=args.processes, minutes=args.minutes
    )
    minutes = (time.monotonic() - start) / 60
    print(f"{done * args.calls} cases of {done} models in {minutes:.1f} minutes, {wrong} models wrong")
    return wrong > 0


if __name__ == "__main__":
    exit_with(main)
