"""Ctrl-C ends ``python -m torch_mpk serve``, whatever it is at, and says nothing of its inside."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.continuous_batching.server import Server, post

LIMIT = 20  # seconds: of a busy machine; one that waits for a thread takes for ever


def check_that_it_ends(server: Server, count: int = 1) -> None:
    for _ in range(count):
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    try:
        status = server.process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        server.process.kill()
        raise AssertionError(server.log.read_text()) from None
    log = server.log.read_text()
    assert "Traceback" not in log, log
    assert status in (0, 130)


def check_in_the_middle_of_a_stream(server: Server, count: int) -> None:
    """And with a client that waits for a first step's build, or for its turn."""
    stream = server.ask("a long reply", 100, stream=True)
    next(stream)
    waiting: list[tuple[int, Any]] = []
    body = {"prompt": "another, in a step of another size", "max_tokens": 90}
    client = threading.Thread(target=lambda: waiting.append(post(server.connection(), "/v1/completions", body)))
    client.start()
    time.sleep(0.05)  # some steps: all tokens of both take some tenths of a second
    check_that_it_ends(server, count)
    with pytest.raises((openai.APIError, openai.APIConnectionError)):
        list(stream)
    client.join(LIMIT)
    if waiting:  # a second Ctrl-C may close connections first
        status, answer = waiting[0]
        if status == 200:  # the interrupt came late
            assert answer["usage"]["completion_tokens"] == 90
        else:
            assert (status, answer["error"]["message"]) == (503, "the server is stopping")


@pytest.mark.slow
def test_in_the_middle_of_a_stream_twice(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.wait(120)
    check_in_the_middle_of_a_stream(server, 2)


@pytest.mark.slow
def test_while_sizes_are_built(tmp_path: Path) -> None:
    server = Server(tmp_path, "--warmup")
    server.wait(120, "building")
    status, answer = server.health() or (0, {})
    assert (status, answer) == (503, {"status": "building"})
    check_that_it_ends(server)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1, 3])
def test_before_it_listens(tmp_path: Path, seconds: float) -> None:
    """From when Python has loaded PyTorch, whose own import nothing of ours surrounds."""
    server = Server(tmp_path)
    code = "import torch_mpk.__main__ as m, sys; print('begun', flush=True); m.main(sys.argv[1:])"
    server.end()
    with server.log.open("w") as log:
        server.process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", server.name, "--device", "cpu", "--port", f"{server.port}"],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    while "begun" not in server.log.read_text():
        time.sleep(0.1)
    time.sleep(seconds)
    check_that_it_ends(server)
