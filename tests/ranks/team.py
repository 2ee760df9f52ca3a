"""Functions that run in a process for each of several ranks."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Team:
    """The processes of one call. ``results`` has what each function returned, as JSON keeps it, or None where the
    process has died; ``logs`` what each wrote."""

    def __init__(self, ranks: int, process: subprocess.Popen, folder: Path) -> None:
        self.ranks, self.process, self.folder = ranks, process, folder

    def wait(self, seconds: float) -> Team:
        try:
            self.process.wait(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self

    @property
    def logs(self) -> list[str]:
        return [(self.folder / f"{name}.log").read_text() for name in ("all", *range(self.ranks))]

    @property
    def results(self) -> list[Any]:
        files = [self.folder / f"{rank}.json" for rank in range(self.ranks)]
        return [json.loads(file.read_text()) if file.is_file() else None for file in files]


def start(ranks: int, function: Callable[..., Any], folder: Path, *args: Any, **env: str) -> Team:
    """Calls ``function(rank, *args)``, of a module, in each of ``ranks`` processes. They have a group, of gloo, and of
    NCCL as well where there is a GPU for each."""
    for rank in range(ranks):
        (folder / f"{rank}.log").touch()
    own = {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.ranks.team", function.__module__, function.__name__]
    with (folder / "all.log").open("w") as log:
        process = subprocess.Popen(
            [*command, str(folder), json.dumps(args)],
            cwd=ROOT,
            env=os.environ | own | env,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return Team(ranks, process, folder)


def run(
    ranks: int, function: Callable[..., Any], folder: Path, *args: Any, seconds: float = 300, **env: str
) -> list[Any]:
    """What ``function(rank, *args)`` returns on each rank."""
    team = start(ranks, function, folder, *args, **env).wait(seconds)
    assert None not in team.results, "\n".join(team.logs)
    return team.results


def main() -> None:
    """Forks a process for each rank, so that they import all there is but once."""
    module, name, folder, args = sys.argv[1:]
    import torch
    import torch._dynamo
    from transformers import AutoModelForCausalLM  # noqa: F401

    import torch_mpk.backend  # noqa: F401

    torch.set_num_threads(1)
    function, ranks = getattr(importlib.import_module(module), name), int(os.environ["WORLD_SIZE"])
    children = []
    for rank in range(ranks):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                serve(rank, ranks, function, Path(folder), json.loads(args))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)  # whatever the others do
    for child in children:
        os.waitpid(child, 0)


def serve(rank: int, ranks: int, function: Callable[..., Any], folder: Path, args: list[Any]) -> None:
    import torch
    import torch.distributed as dist

    log = os.open(folder / f"{rank}.log", os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= ranks else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    result = function(rank, *args)
    (folder / f"{rank}.new").write_text(json.dumps(result))
    (folder / f"{rank}.new").rename(folder / f"{rank}.json")


if __name__ == "__main__":
    main()
