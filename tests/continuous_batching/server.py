"""A process that serves a tiny model, and what its clients say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import openai
import torch

from tests.models.letters import letters
from torch_mpk.testing.tiny import tiny_model

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
PAGE, NUM_PAGES = 16, 8


class Server:
    """``python -m torch_mpk serve`` of a model of one layer, in a folder of its own."""

    def __init__(self, folder: Path, *options: str):
        torch.manual_seed(0)
        # Of a family whose replies transformers takes apart by a template, of which this tokenizer knows nothing.
        self.model = tiny_model("qwen3", dtype=torch.float32, num_layers=1)
        self.model.generation_config.update(eos_token_id=None, bos_token_id=None)
        self.tokenizer = letters(chat_template=TEMPLATE)
        self.name = str(folder / "model")
        for part in (self.model, self.tokenizer):
            part.save_pretrained(self.name)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        sizes = ["--cb-block-size", f"{PAGE}", "--cb-num-blocks", f"{NUM_PAGES}", "--cb-max-batch-tokens", "16"]
        command = [sys.executable, "-m", "torch_mpk", "serve", self.name, "--device", "cpu", "--host", "127.0.0.1"]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--port", f"{self.port}", *sizes, *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def health(self) -> tuple[int, dict[str, Any]] | None:
        """None where nobody listens yet."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except OSError:
            return None

    def wait(self, seconds: float, status: str = "ready") -> None:
        """Until it says so; an AssertionError with its log where it does not."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            found = self.health()
            if found is not None and found[1]["status"] == status:
                return
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def connection(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=120)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=120)

    def ask(self, prompt: str, max_tokens: int | None = 12, temperature: float | None = 0, **options: Any) -> Any:
        """In a chat. Fields that openai's client does not know are sent as well."""
        ours = {name: options.pop(name) for name in ("top_k", "min_p") if name in options}
        return self.client().chat.completions.create(
            model=self.name,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=max_tokens,
            temperature=temperature,
            extra_body=ours,
            **options,
        )

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


def post(connection: HTTPConnection, path: str, body: Any) -> tuple[int, Any]:
    text = body if isinstance(body, str) else json.dumps(body)
    connection.request("POST", path, text, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def text(reply: Any) -> str:
    return reply.choices[0].message.content


def pieces(stream: Any) -> list[str]:
    return [c.delta.content for chunk in stream for c in chunk.choices if c.delta.content]
