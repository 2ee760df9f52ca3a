"""What an OpenAI client gets from ``python -m torch_mpk serve``."""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tests.continuous_batching.engine import alone
from tests.models.letters import letters
from torch_mpk.testing.tiny import tiny_model

pytestmark = pytest.mark.slow

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
PAGE, NUM_PAGES = 16, 8
REASON = f"its {PAGE * NUM_PAGES + 1} tokens are more than the {PAGE * NUM_PAGES} that the cache holds"


class Server:
    """A process that serves a tiny model."""

    def __init__(self, folder: Path):
        torch.manual_seed(0)
        # Not Qwen3, whose replies the server takes apart by a template of its own.
        self.model = tiny_model("llama", dtype=torch.float32, num_layers=1)
        self.tokenizer = letters(chat_template=TEMPLATE)
        self.name = str(folder / "model")
        for part in (self.model, self.tokenizer):
            part.save_pretrained(self.name)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        sizes = ["--cb-block-size", f"{PAGE}", "--cb-num-blocks", f"{NUM_PAGES}", "--cb-max-batch-tokens", "64"]
        command = [sys.executable, "-m", "torch_mpk", "serve", self.name, "--device", "cpu", "--port", f"{self.port}"]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen([*command, *sizes], stdout=log, stderr=subprocess.STDOUT)

    def wait(self, seconds: float) -> None:
        """Until it answers; an AssertionError with its log where it does not."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise AssertionError(self.log.read_text())

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=120)

    def ask(self, prompt: str, max_tokens: int = 12, **options: Any) -> Any:
        messages = [{"role": "user", "content": prompt}]
        return self.client().chat.completions.create(
            model=self.name, messages=messages, max_tokens=max_tokens, temperature=0, **options
        )

    def alone(self, prompt: str, max_tokens: int = 12) -> str:
        return self.tokenizer.decode(alone(self.model, self.tokenizer(prompt).input_ids, max_tokens))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    try:
        server.wait(120)
        yield server
    finally:
        server.process.terminate()
        try:
            server.process.wait(20)
        except subprocess.TimeoutExpired:
            server.process.kill()


def text(reply: Any) -> str:
    return reply.choices[0].message.content


def pieces(stream: Any) -> list[str]:
    return [c.delta.content for chunk in stream for c in chunk.choices if c.delta.content]


def test_a_client_gets_the_tokens_of_eager_generate(server: Server) -> None:
    assert text(server.ask("a first question")) == server.alone("a first question")


def test_a_stream_brings_the_same_text_in_pieces(server: Server) -> None:
    got = pieces(server.ask("tell me more", stream=True))
    assert len(got) > 1
    assert "".join(got) == server.alone("tell me more")


def test_two_clients_at_once_get_what_each_gets_alone(server: Server) -> None:
    prompts = ["one of two", "and the other, longer one"]
    with ThreadPoolExecutor(2) as clients:
        got = list(clients.map(lambda prompt: "".join(pieces(server.ask(prompt, 40, stream=True))), prompts))
    assert got == [server.alone(prompt, 40) for prompt in prompts]


def test_a_stream_that_is_closed_frees_its_pages(server: Server) -> None:
    """Each could have all pages but a few to itself, so that a leak would keep the last ones from being served."""
    for number in range(4):
        stream = server.ask(f"{number} is closed early", 80, stream=True)
        assert len(list(islice(stream, 5))) == 5
        stream.close()
    assert text(server.ask("after them", 80)) == server.alone("after them", 80)


def test_a_prompt_beyond_the_cache_is_refused_and_others_are_served(server: Server) -> None:
    with pytest.raises(openai.InternalServerError):
        server.ask("x" * (PAGE * NUM_PAGES + 1))
    end = time.monotonic() + 10
    while REASON not in server.log.read_text() and time.monotonic() < end:  # which follows the answer
        time.sleep(0.1)
    assert REASON in server.log.read_text()
    assert text(server.ask("and one that fits")) == server.alone("and one that fits")
