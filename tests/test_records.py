"""Recorded runs keep one form, pages show what they say, and a benchmark adds its run to the others."""

import argparse
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.test_docs import PAGES

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import records

    return records


@pytest.fixture
def tables(records: ModuleType) -> ModuleType:
    import tables

    return tables


def test_tables_and_charts_of_pages_are_those_of_the_records(tables: ModuleType) -> None:
    changed = [page.name for page, text in tables.pages().items() if page.read_text() != text]
    assert changed == [], "run python benchmarks/tables.py"
    assert tables.stale_charts() == [], "run python benchmarks/tables.py"
    shown = {name for page in tables.PAGES for name in re.findall(r"<!-- table: (\w+) -->", page.read_text())}
    assert shown == tables.TABLES.keys()


def test_a_table_that_differs_is_seen(tables: ModuleType) -> None:
    text = "<!-- table: experts -->\n\n| 1.23 |\n\n<!-- end of table -->\n"
    written = tables.TABLE.sub(lambda m: m[1] + tables.TABLES[m[2]]() + m[3], text)
    assert "| ms a step | **1.057** | **2.937** | **4.601** |" in written and "1.23 |" not in written


def test_each_run_says_where_it_was_made(records: ModuleType) -> None:
    files = sorted(records.RESULTS.glob("*.jsonl"))
    assert len(files) > 10
    for file in files:
        runs = records.runs(file)
        names = [run["run"] for run in runs]
        assert names == sorted(set(names)), file
        for run in runs:
            assert run["run"].startswith(run["environment"]["date"]), (file, run["run"])
            stem = f"{run['benchmark']}_{records.as_name(run['environment']['device'])}"
            assert stem == file.stem and ("results" in run or "text" in run)
            assert run["environment"].keys() >= {"command", "commit", "torch"} or "text" in run


def test_pages_name_runs_that_there_are(records: ModuleType) -> None:
    named = {name for page in PAGES for name in re.findall(r"`([a-z_]+_[a-z0-9-]+_2\d{3}-[\w-]+)`", page.read_text())}
    assert len(named) > 20
    for name in named:
        assert records.find(name)["run"] in name


def test_a_run_that_is_not_there_is_named_with_those_that_are(records: ModuleType) -> None:
    with pytest.raises(LookupError, match=r"decode_nvidia-h200.jsonl has no run 2020-01-01; it has 2026-11-23, "):
        records.find("decode_nvidia-h200_2020-01-01")
    with pytest.raises(
        LookupError, match=r"no file has a run decode_abacus_2020-01-01; the files are cpu_decode_amd-epyc"
    ):
        records.find("decode_abacus_2020-01-01")


def test_a_benchmark_adds_its_run_or_replaces_it(records: ModuleType, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    records.add_arguments(parser)
    environment = {"date": "2026-11-28", "device": "Abacus (R) 2", "command": ["a", "b"]}
    report = {"title": "Beads", "environment": environment, "setting": {}, "ceiling": {"beads": 2}}

    def write(ms: float, *arguments: str) -> None:
        asked = parser.parse_args(["--out", str(tmp_path), *arguments])
        result = {"case": "a\nb", "variant": "mpk", "step_ms": {"median": ms, "p10": ms, "p90": ms}}
        records.write(report | {"results": [result | {"gb_per_s": 1.0, "of_ceiling": 0.5}]}, asked, "cpu_linear")

    write(1.0)
    write(2.0, "--label", "long")
    write(3.0)
    file = tmp_path / "cpu_linear_abacus-r-2.jsonl"
    assert [*tmp_path.iterdir()] == [file] and len(file.read_text().splitlines()) == 2
    times = {run["run"]: run["results"][0]["step_ms"]["median"] for run in records.runs(file)}
    assert times == {"2026-11-28_long": 2.0, "2026-11-28": 3.0}
    page = records.as_text(records.find("cpu_linear_abacus-r-2_2026-11-28", tmp_path))
    assert page.startswith("# Beads\n\n- date: 2026-11-28\n") and "- command: a\n- command: b\n- beads: 2\n" in page
    assert "| mpk | 3.000 (3.000–3.000) | 1.0 | 50 % |" in page


def test_tables_are_made_without_torch() -> None:
    """So that a page is written in a moment."""
    for file in ("records.py", "tables.py"):
        assert not re.search(r"^(import|from) (torch|harness|chart)", (BENCHMARKS / file).read_text(), re.MULTILINE)
