"""Recorded runs: a file of results/ for each benchmark and device, in it a line of JSON for each run.

A run has ``run`` (its date, and the label that was asked for), ``benchmark``, ``title``, ``environment``, ``setting``,
``ceiling`` and ``results``, a dictionary for each case and variant. Benchmarks that leave a log have ``text``, and so
have runs whose table had other columns. ``note`` is what somebody has to say about a run. A run's name is that of its
file, ``_``, and ``run``: decode_nvidia-h200_2026-11-28.
"""

import argparse
import hashlib
import importlib
import json
import re
from operator import itemgetter
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
NAME = re.compile(r"([a-z_]+_[a-z0-9-]+)_(\d{4}-\d\d-\d\d(?:_[\w-]+)?)")
Run = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where a run is recorded, and what it is called."""
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the records")
    parser.add_argument("--label", help="of the run, behind its date: a run replaces that of its date and label")


def write(report: Run, asked: argparse.Namespace, benchmark: str) -> None:
    """Records the run, in the place of an earlier one of its name."""
    run = "_".join(filter(None, [report["environment"]["date"], asked.label]))
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / f"{benchmark}_{as_name(report['environment']['device'])}.jsonl"
    others = [other for other in runs(path) if other["run"] != run] if path.exists() else []
    save(path, sorted([*others, {"run": run, "benchmark": benchmark} | report], key=itemgetter("run")))


def as_name(device: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())


def save(path: Path, runs: list[Run]) -> None:
    lines = [json.dumps(run, ensure_ascii=False, separators=(",", ":")) for run in runs]
    path.write_text("".join(f"{line}\n" for line in lines))


def runs(path: Path) -> list[Run]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def find(name: str, folder: Path = RESULTS) -> Run:
    """The run of that name. LookupError, with the names of the file's runs, where there is none."""
    match = NAME.fullmatch(name)
    path = folder / f"{match[1]}.jsonl" if match else folder / name
    if match is None or not path.is_file():
        files = ", ".join(sorted(file.stem for file in folder.glob("*.jsonl")))
        raise LookupError(f"no file has a run {name}; the files are {files}")
    found = {run["run"]: run for run in runs(path)}
    if match[2] not in found:
        raise LookupError(f"{path.name} has no run {match[2]}; it has {', '.join(found)}")
    return found[match[2]]


def digest(run: Run) -> str:
    """A chart of the run carries this, so that a test sees whether it is the run's."""
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()


def as_text(run: Run) -> str:
    """The run in Markdown: what it is, where it was measured, and its table."""
    if "text" in run:
        return str(run["text"])
    module = BENCHMARKS.get(run["benchmark"], str(run["benchmark"]))
    table = importlib.import_module(module).text_of(run["results"])
    return page(run, table)


def page(run: Run, body: str) -> str:
    return "\n\n".join(filter(None, [f"# {run['title']}", run.get("note"), _facts(run), body])) + "\n"


BENCHMARKS = {"cpu_linear": "cpu_decode"}  # the modules of those that are another one's


def _facts(run: Run) -> str:
    facts = [
        (name, value)
        for name, values in (run["environment"] | run["ceiling"]).items()
        for value in (values if isinstance(values, list) and name == "command" else [values])
    ]
    return "\n".join(f"- {name}: {value}" for name, value in facts)
