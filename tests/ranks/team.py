"""Functions that run in a process for each of several ranks, on the CPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Team:
    """The processes of one call. ``results`` has what each function returned, as JSON keeps it, or None where the
    process has died; ``logs`` what each wrote."""

    def __init__(self, processes: list[subprocess.Popen], folder: Path) -> None:
        self.processes, self.folder = processes, folder

    def wait(self, seconds: float) -> Team:
        try:
            for process in self.processes:
                process.wait(seconds)
        finally:
            for process in self.processes:
                process.kill()
        return self

    @property
    def logs(self) -> list[str]:
        return [(self.folder / f"{rank}.log").read_text() for rank in range(len(self.processes))]

    @property
    def results(self) -> list[Any]:
        files = [self.folder / f"{rank}.json" for rank in range(len(self.processes))]
        return [json.loads(file.read_text()) if file.is_file() else None for file in files]


def start(ranks: int, function: Callable[..., Any], folder: Path, *args: Any, **env: str) -> Team:
    """Calls ``function(rank, *args)``, of a module, in each of ``ranks`` processes that have a gloo group."""
    processes = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.ranks.team", function.__module__, function.__name__]
        with (folder / f"{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [*command, str(folder), json.dumps(args)],
                    cwd=ROOT,
                    env=os.environ | own | {"PYTHONPATH": str(ROOT)} | env,
                    stdout=log,
                    stderr=log,
                )
            )
    return Team(processes, folder)


def run(
    ranks: int, function: Callable[..., Any], folder: Path, *args: Any, seconds: float = 300, **env: str
) -> list[Any]:
    """What ``function(rank, *args)`` returns on each rank."""
    team = start(ranks, function, folder, *args, **env).wait(seconds)
    assert None not in team.results, "\n".join(team.logs)
    return team.results


def main() -> None:
    module, name, folder, args = sys.argv[1:]
    import torch
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    result = getattr(importlib.import_module(module), name)(rank, *json.loads(args))
    (Path(folder) / f"{rank}.new").write_text(json.dumps(result))
    (Path(folder) / f"{rank}.new").rename(Path(folder) / f"{rank}.json")
    os._exit(0)  # whatever the others do


if __name__ == "__main__":
    main()
