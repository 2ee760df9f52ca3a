"""The code of docs/ runs as it is written."""

import os
import re
from pathlib import Path

import pytest

from torch_mpk.__main__ import main

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", ["test-mode.md"])
def test_blocks_of_code_run(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / name).read_text()
    blocks = re.findall(r"^```(python|console)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == text.count("\n```python\n") + text.count("\n```console\n") > 0
    names: dict[str, object] = {}
    for language, block in blocks:
        if language == "python":
            exec(compile(block, f"{os.fspath(DOCS / name)}", "exec"), names)
            continue
        for command in re.findall(r"^\$ python -m torch_mpk (.*)$", block, re.MULTILINE):
            main(command.split())
            assert capsys.readouterr().out or "--html" in command
