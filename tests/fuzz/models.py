"""Long runs of steps of random models: ``python -m tests.fuzz.models --cases 1000``, on a GPU with ``--device cuda
--processes 8 --minutes 5``.

A case is a call, over a batch, lengths and a mask of its own; each model is compiled once, for ``--calls`` of them. It
is drawn from a seed, which is printed where a result is wrong, and ``--cases 1 --seed <that>`` draws it again.
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
import tempfile
import time

import torch

from tests.fuzz.judging import start_process
from tests.fuzz.random_models import check_model


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
    parser.add_argument("--minutes", type=float, default=1440, help="models that have not begun by then are left out")
    args = parser.parse_args()
    num_models = -(-args.cases // args.calls)
    start, failed, done = time.monotonic(), 0, 0
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.processes, context, start_process) as pool:
        running = {
            pool.submit(judge_model, seed, args.device, args.calls): seed
            for seed in range(args.seed, args.seed + num_models)
        }
        try:
            for future in concurrent.futures.as_completed(running, timeout=60 * args.minutes):
                done += 1
                if error := future.result():
                    failed += 1
                    print(f"seed {running[future]}: {error}", flush=True)
        except TimeoutError:
            pool.shutdown(wait=False, cancel_futures=True)
        except concurrent.futures.process.BrokenProcessPool:
            failed += 1
            print(f"a process died; not done: {sorted(s for f, s in running.items() if not f.done())[:32]}", flush=True)
    minutes = (time.monotonic() - start) / 60
    print(f"{done * args.calls} cases of {done} models in {minutes:.1f} minutes, {failed} models wrong")
    return failed > 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TORCH_MPK_CACHE_DIR", folder)  # kernels that nobody will run again
        sys.exit(main())
