"""Long runs of random programs: ``python -m tests.fuzz --programs 20000``, on a GPU with ``--device cuda --processes
16``.

Each program is drawn from a seed of its own. One whose results are wrong, or that fails, is shortened and printed, and
``--programs 1 --seed <its seed>`` runs it again.
"""

import argparse
import time
from collections import Counter

from tests.fuzz.judging import KINDS, Verdict, judge
from tests.fuzz.running import exit_with, judge_all


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument(
        "--kind",
        choices=KINDS,
        default="models",
        help="integers: near the ends of their ranges; experts: routers, too; formats: of quantised weights",
    )
    parser.add_argument("--seed", type=int, default=0, help="the first program's; the others count on from it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    start, counts = time.monotonic(), Counter()

    def report(seed: int, verdict: Verdict) -> bool:
        kind = ("wrong" if verdict.is_wrong else "error") if verdict.error else "right"
        counts[f"{verdict.way}: {kind}"] += 1
        counts["with a segment of ours"] += verdict.num_segments > 0
        if verdict.error:
            print(f"seed {seed} ({verdict.way}) {kind}: {verdict.error}", flush=True)
        if sum(counts.values()) % 500 == 0:
            print(dict(counts), flush=True)
        return bool(verdict.error)

    seeds = range(args.seed, args.seed + args.programs)
    done, wrong = judge_all(judge, seeds, args.device, args.kind, report=report, num_processes=args.processes)
    minutes = (time.monotonic() - start) / 60
    print(f"{done} programs in {minutes:.1f} minutes: {dict(sorted(counts.items()))}")
    return wrong > 0


if __name__ == "__main__":
    exit_with(main)
