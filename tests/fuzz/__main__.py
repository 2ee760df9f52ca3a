"""Long runs of random programs: ``python -m tests.fuzz --programs 20000``, on a GPU with ``--device cuda --processes
16``.

Each program is drawn from a seed of its own. One whose results are wrong, or that fails, is shortened and printed, and
``--programs 1 --seed <its seed>`` runs it again.
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter

from tests.fuzz.judging import judge, start_process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first program's; the others count on from it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    start, counts, failed = time.monotonic(), Counter(), 0
    remaining = set(range(args.seed, args.seed + args.programs))
    try:
        for verdict in verdicts(sorted(remaining), args.device, args.processes):
            remaining.discard(verdict.seed)
            kind = ("wrong" if verdict.is_wrong else "error") if verdict.error else "right"
            counts[f"{verdict.way}: {kind}"] += 1
            counts["with a segment of ours"] += verdict.num_segments > 0
            failed += bool(verdict.error)
            if verdict.error:
                print(f"seed {verdict.seed} ({verdict.way}) {kind}: {verdict.error}", flush=True)
            if sum(counts.values()) % 500 == 0:
                print(dict(counts), flush=True)
    except concurrent.futures.process.BrokenProcessPool:
        failed += 1
        print(f"a process died in one of the programs {sorted(remaining)[: 4 * args.processes]}", flush=True)
    minutes = (time.monotonic() - start) / 60
    print(f"{args.programs - len(remaining)} programs in {minutes:.1f} minutes: {dict(sorted(counts.items()))}")
    return failed > 0


def verdicts(seeds: list[int], device: str, num_processes: int):
    if num_processes == 1:
        start_process()
        yield from (judge(seed, device) for seed in seeds)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(num_processes, context, start_process) as pool:
        yield from pool.map(judge, seeds, [device] * len(seeds), chunksize=4)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TORCH_MPK_CACHE_DIR", folder)  # kernels that nobody will run again
        sys.exit(main())
