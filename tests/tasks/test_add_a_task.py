"""What docs/add-a-task.md shows works as it is written."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from torch_mpk.jit import Cache

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_add_a_task(tmp_path: Path) -> None:
    """Blocks that begin with a file's name are written there, commands run, in the order of the page."""
    commands = []
    environment = dict(os.environ, TORCH_MPK_CACHE_DIR=str(tmp_path / "cache"))
    for kind, text in BLOCK.findall((ROOT / "docs" / "add-a-task.md").read_text()):
        named = re.match(r"(?:#|//) (\w+\.\w+)\n", text)
        if named:
            (tmp_path / named[1]).write_text(text)
        elif kind == "sh":
            for line in text.splitlines():
                program, *arguments = shlex.split(line)
                assert program == "python"
                done = subprocess.run(
                    [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
                )
                assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
                commands.append(arguments[:3])
    assert len(commands) == 5
    entries = Cache(tmp_path / "cache", 2**30).entries()
    named = [entry.report["names"] for entry in entries]
    assert all(named), "the cache lists what was compiled by a name, by which it can be cleared"
    assert len([names for names in named if "l2_norm" in names]) > 3
    assert {path.name for path in tmp_path.iterdir()} >= {"l2_norm.py", "l2_norm.cuh", "use.py"}
