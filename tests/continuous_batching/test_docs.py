"""What docs/serving.md and the example show."""

import json
import os
import re
import runpy
import socket
import subprocess
import sys
import time
import urllib.request
from inspect import signature
from pathlib import Path

import pytest

from tests.test_docs import ROOT, run_examples
from torch_mpk.serve.fields import table
from torch_mpk.serve.server import Server

PAGE = (ROOT / "docs" / "serving.md").read_text()


@pytest.mark.slow
def test_the_page_says_what_its_example_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run_examples("serving.md")


@pytest.mark.slow
def test_the_example_answers_every_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "serve.py"))
    example["main"]()
    printed = capsys.readouterr().out
    assert printed.count("48 tokens") == len(example["PROMPTS"])
    for prompt in example["PROMPTS"]:
        assert prompt in printed


def test_the_tables_of_fields_and_options_are_whole() -> None:
    assert table() in PAGE, "python -c 'from torch_mpk.serve.fields import table; print(table())' prints it"
    options = {f"--{name.replace('_', '-')}" for name in signature(Server).parameters if name != "model"}
    rows = re.findall(r"^\| (`--.*?) \|", PAGE, re.MULTILINE)
    assert {option for row in rows for option in re.findall("`(--[a-z-]+)`", row)} == options


@pytest.mark.slow
def test_the_servers_examples_run_as_they_are_written(tmp_path: Path) -> None:
    """But for the port: the one that is written may be in use."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start, *asking = re.findall(r"^```sh\n(.*?)^```", PAGE.partition("## As a server")[2], re.DOTALL | re.MULTILINE)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with (tmp_path / "log").open("w") as log:
        command = f"exec {start.strip()} --port {port}"
        server = subprocess.Popen(["bash", "-c", command], cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end and server.poll() is None:
            try:
                urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        printed = [
            subprocess.run(
                ["bash", "-c", each.replace("localhost:8000", f"localhost:{port}")],
                cwd=ROOT,
                env=environment,
                check=True,
                capture_output=True,
                text=True,
                timeout=120,
            ).stdout
            for each in asking
        ]
    finally:
        server.terminate()
        server.wait(20)
    assert json.loads(printed[0])["usage"]["completion_tokens"] == 40, (tmp_path / "log").read_text()
    assert 0 < len(printed[1].encode()) <= 3 * 40  # a token is a byte; one that is no text is shown as three
