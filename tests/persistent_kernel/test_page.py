"""The code of docs/test-mode.md runs as it is written."""

import re
from pathlib import Path

from torch_mpk.__main__ import main

PAGE = Path(__file__).parents[2] / "docs" / "test-mode.md"


def test_blocks_of_code_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    blocks = re.findall(r"^```(python|console)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == text.count("\n```python\n") + text.count("\n```console\n") > 0
    names: dict[str, object] = {}
    for language, block in blocks:
        if language == "python":
            exec(compile(block, PAGE, "exec"), names)
            continue
        for command in re.findall(r"^\$ python -m torch_mpk (.*)$", block, re.MULTILINE):
            main(command.split())
            assert capsys.readouterr().out or "--html" in command


def test_every_file_of_a_dump_is_listed():
    sources = "".join(path.read_text() for path in (PAGE.parents[1] / "torch_mpk").rglob("*.py"))
    names = re.findall(r"""dump\.write\(f?"(.*?)[{"]""", sources)
    assert len(names) > 8
    text = PAGE.read_text()
    assert [name for name in names if f"`{name}" not in text] == []
