"""What is generated, to be read: a change of a kernel is a change of a file in golden/. ``EXPECTTEST_ACCEPT=1 pytest``
writes it.

A variant that resembles one before it is shown as what differs (see ``resembling``).
"""

import difflib
import os
import re
from pathlib import Path

import pytest
import torch

from tests.schedule.decoder_graph import decoder
from tests.schedule.replay import describe
from torch_mpk import _C
from torch_mpk.registry import tasks
from torch_mpk.registry.calls import Call
from torch_mpk.testing.tasks import Calls

GOLDEN = Path(__file__).parent / "golden"
# Heads of 64 and 128 alone, and sums that a schedule lays out.
NOT_ALONE = {"prefill_attention", "varlen_attention", "ordered_linear"}
TASKS = sorted({task.name for task in tasks() if task.__module__.startswith("torch_mpk.")} - NOT_ALONE)
VARIANT = re.compile(r"^struct (\w+) \{\n(.*?)^\};\n", re.MULTILINE | re.DOTALL)


def resembling(source: str) -> str:
    """The source, in which a variant that has most of its lines, in order, from one before it is only what differs."""
    known: dict[str, list[str]] = {}

    def shorten(match: re.Match[str]) -> str:
        name, lines = match[1], match[2].splitlines()
        closest = max(known, key=lambda other: ratio(known[other], lines), default="")
        like = known.get(closest, [])
        known[name] = lines
        if ratio(like, lines) < 0.75:
            return match[0]
        changes = [line for line in difflib.unified_diff(like, lines, n=0, lineterm="") if line[0] in "+-"][2:]
        return "\n".join([f"struct {name} as {closest}, but", *changes, ""])

    return VARIANT.sub(shorten, source)


def ratio(before: list[str], after: list[str]) -> float:
    return difflib.SequenceMatcher(None, before, after, autojunk=False).ratio() if before else 0.0


def variants(name: str) -> str:
    """Of a job of the task's first sample, in bfloat16, and how they are called."""
    [task] = [task for task in tasks() if task.name == name]
    operands, attrs = task.sample(task.samples[0], torch.bfloat16)
    source = Calls([Call(task, operands, attrs)]).program(90).source
    calls = re.findall(r"^ +case \d+: return (.*)\n", source, re.MULTILINE)
    begin, end = source.index("using namespace mpk;"), source.index("constexpr int larger")
    return "".join(match[0] for match in VARIANT.finditer(source[begin:end])) + "".join(f"{call}\n" for call in calls)


def assert_golden(name: str, text: str) -> None:
    """The text is that of golden/<name>.txt."""
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        file.write_text(text)
    known = file.read_text() if file.exists() else ""
    changes = difflib.unified_diff(
        known.splitlines(), text.splitlines(), f"golden/{file.name}", "generated", n=2, lineterm=""
    )
    assert text == known, "\n".join([*changes, "where that is meant, EXPECTTEST_ACCEPT=1 pytest writes it down"])


@pytest.fixture(scope="module")
def schedule() -> _C.Schedule:
    """Two layers with polled vectors on four workers, of sizes that fill neither warps nor slots."""
    return _C.make_schedule(decoder(layers=2), _C.Target("cuda", 90, 4, 232448, polled=True))


def test_schedule(schedule: _C.Schedule) -> None:
    assert_golden("decoder_schedule", "\n".join([*describe(schedule.to_json(), schedule.graph), ""]))


def test_source(schedule: _C.Schedule) -> None:
    assert_golden("decoder_source", resembling(_C.generate_cuda(schedule).source))


@pytest.mark.parametrize("name", TASKS)
def test_variants_of_a_task_that_stands_alone(name: str) -> None:
    assert_golden(name, variants(name))


def test_no_file_is_left_of_what_is_gone() -> None:
    assert {file.stem for file in GOLDEN.iterdir()} == {"decoder_schedule", "decoder_source", *TASKS}


def test_a_change_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPECTTEST_ACCEPT", raising=False)
    with pytest.raises(AssertionError, match=r"\+struct Another(.|\n)*EXPECTTEST_ACCEPT=1"):
        assert_golden("argmax", (GOLDEN / "argmax.txt").read_text() + "struct Another {};\n")
