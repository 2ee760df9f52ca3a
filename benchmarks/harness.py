"""The benchmarks share these: child processes, medians and spread, the environment, tables. ``records`` keeps runs."""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

Report = dict[str, Any]
Result = dict[str, Any]


def spread(times: dict[str, float] | None) -> str:
    return f"{times['median']:.3f} ({times['p10']:.3f}–{times['p90']:.3f})" if times else "–"


def run_child(case: dict[str, Any], limit_s: float) -> Any:
    """This script again, with ``--child``: what it wrote into its result file, or {"error": why there is nothing}.

    What one case breaks, leaks or leaves compiled touches no other.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as result_file:
        child = [sys.executable, sys.argv[0], "--child", json.dumps(case), result_file.name]
        try:
            process = subprocess.run(child, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"error": f"did not finish in {limit_s:.0f} s"}
        if process.returncode:
            return {"error": f"exit status {process.returncode}, see the log"}
        return json.loads(Path(result_file.name).read_text())


def run_parts(case: dict[str, Any], limit_s: float, deadline: float) -> tuple[list[Any], str]:
    """The same where the child writes a line of JSON for each of several parts: these, and why there are no more.

    Each part has ``limit_s``, and all of them have until ``deadline``, of ``time.monotonic``.
    """
    with tempfile.NamedTemporaryFile(mode="r", suffix=".json") as file:

        def lines() -> list[str]:
            file.seek(0)
            return [line for line in file if line.endswith("\n")]

        process = subprocess.Popen([*launcher(case), sys.argv[0], "--child", json.dumps(case), file.name])
        num_parts, since, error = 0, time.monotonic(), ""
        while process.poll() is None:
            time.sleep(0.1)
            now = time.monotonic()
            if len(lines()) > num_parts:
                num_parts, since = len(lines()), now
            if now > min(since + limit_s, deadline):
                end(process)
                error = f"did not finish in {now - since:.0f} s"
        if process.returncode and not error:
            error = f"exit status {process.returncode}, see the log"
        return [json.loads(line) for line in lines()], error


class Log:
    """Prints lines, and keeps them."""

    text = ""

    def __call__(self, line: str) -> None:
        print(line, flush=True)
        self.text += f"{line}\n"


def launcher(case: dict[str, Any]) -> list[str]:
    """The command in front of a script: it starts a process for each of the case's ranks, where it has some."""
    if case.get("ranks", 1) == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case["ranks"])]


def end(process: subprocess.Popen) -> None:
    """Ends a process, and what it has started, if it sees to that when it is asked to end."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def output_of(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())


def environment() -> dict[str, str]:
    is_cuda = torch.cuda.is_available()
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if is_cuda else processor(),
        "cores": str(os.cpu_count()),
        "driver": output_of("nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader")
        if is_cuda
        else "-",
        "nvcc": output_of("nvcc", "--version").splitlines()[-1],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "torch_mpk": version("torch_mpk"),
        "commit": output_of("git", "describe", "--always", "--dirty"),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown. Rows that are too short end in empty cells."""
    lines = [columns, ["---"] * len(columns), *([*row, *[""] * (len(columns) - len(row))] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
