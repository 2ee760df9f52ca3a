"""Runs that go on for minutes: many seeds, in several processes, of which one may die."""

from __future__ import annotations

import concurrent.futures
import faulthandler
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch


def start_process() -> None:
    faulthandler.enable()
    torch.set_num_threads(1)


def judge_all(
    judge: Callable[..., Any],
    seeds: Iterable[int],
    *args: Any,
    report: Callable[[int, Any], bool],
    num_processes: int,
    minutes: float | None = None,
) -> tuple[int, int]:
    """Has ``report`` say of each seed whether ``judge(seed, *args)`` found something wrong, as they end.

    Returns how many have been judged, and how many were wrong, a process that dies being one more. What has not begun
    after so many ``minutes`` is left out.
    """
    done = wrong = 0
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(num_processes, context, start_process) as pool:
        running = {pool.submit(judge, seed, *args): seed for seed in seeds}
        try:
            for future in concurrent.futures.as_completed(running, minutes and 60 * minutes):
                wrong += report(running[future], future.result())
                done += 1
        except TimeoutError:
            pool.shutdown(wait=False, cancel_futures=True)
        except BrokenProcessPool:
            wrong += 1
            left = sorted(seed for future, seed in running.items() if not future.done() or future.exception())
            print(f"a process died in one of these seeds: {left[: 4 * num_processes]}", flush=True)
    return done, wrong


def exit_with(main: Callable[[], int]) -> None:
    """Runs it with a cache of its own, for kernels that nobody will run again."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TORCH_MPK_CACHE_DIR", folder)
        sys.exit(main())
