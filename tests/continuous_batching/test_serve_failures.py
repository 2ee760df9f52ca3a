"""What a client is told when a step fails, when the engine ends, and when there is none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

import httpx
import pytest
from transformers.cli.serving.server import build_server

from tests.continuous_batching.engine import SIZES, alone, faulty_steps, raising, serving_model, sized
from tests.continuous_batching.server import TEMPLATE
from tests.models.letters import letters
from torch_mpk.errors import MegakernelTimeout
from torch_mpk.serve.generation import Engine
from torch_mpk.serve.replies import Routes
from torch_mpk.serve.server import install
from torch_mpk.serve.text import TextOfTokens

CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 6}


class Served:
    """A server without a socket."""

    def __init__(self, **settings: Any) -> None:
        self.model, self.tokenizer = serving_model(), letters(chat_template=TEMPLATE)
        self.model.generation_config.update(eos_token_id=None)
        self.engine = Engine(self.model, self.tokenizer, sized(compile_prompts=False, **settings), warmup=False)
        self.routes = Routes(self.engine, "tiny", self.tokenizer, {})
        self.app: Any = build_server(*[None] * 6, generation_state=None)  # type: ignore[arg-type]
        install(self.app, self.engine, self.routes)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test", timeout=120)

    async def ask(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=CHAT | fields)

    async def check_that_it_answers(self) -> None:
        answer = await self.ask()
        assert answer.status_code == 200, answer.text
        wanted = self.tokenizer.decode(alone(self.model, self.tokenizer("abc").input_ids, 6))
        assert answer.json()["choices"][0]["message"]["content"] == wanted


def run(served: Served, test: Callable[[Served], Awaitable[None]]) -> None:
    served.engine.start()
    try:
        asyncio.run(test(served))  # type: ignore[arg-type]
    finally:
        served.engine.stop(20)


def error_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


def test_a_step_that_fails_is_its_requests_error_alone() -> None:
    async def test(served: Served) -> None:
        await served.check_that_it_answers()
        failing = raising(MegakernelTimeout("stalled"))
        with faulty_steps({("before", 2): failing}):
            status, message = error_of(await served.ask())
        assert (status, message) == (500, "stalled")
        with faulty_steps({("before", 2): failing}):
            lines = (await served.ask(stream=True)).text.split("\n\n")
        assert '"error"' in lines[-2]
        assert lines[-1] == ""
        with mock.patch.object(TextOfTokens, "add", side_effect=ZeroDivisionError("for one")):
            assert error_of(await served.ask()) == (500, "the server failed: ZeroDivisionError: for one")
        await served.check_that_it_answers()

    run(Served(), test)


def test_an_engine_that_has_ended_says_so() -> None:
    async def test(served: Served) -> None:
        with faulty_steps({("before", 1): raising(RuntimeError("nobody knows"))}):
            status, message = error_of(await served.ask())
        assert message == "nobody knows"
        while served.engine.state != "failed":  # which follows the answer
            await asyncio.sleep(0.01)
        status, message = error_of(await served.ask())
        assert (status, message) == (503, "the engine has ended: nobody knows")
        health = await served.client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "failed", "reason": "nobody knows"})

    run(Served(), test)


def test_an_engine_that_cannot_be_built_says_so() -> None:
    async def test(served: Served) -> None:
        status, message = error_of(await served.ask())
        assert status == 503
        assert message.startswith("the engine has ended: ")
        assert (await served.client.get("/health")).json()["status"] == "failed"

    run(Served(page_size=SIZES["page_size"], max_batch_tokens=-1), test)


def test_what_nobody_foresaw_is_an_error_of_openais_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError("for one")

    async def test(served: Served) -> None:
        monkeypatch.setattr(served.routes, "models", fail)
        answer = await served.client.get("/v1/models")
        assert error_of(answer) == (500, "the server failed: ZeroDivisionError: for one")

    served = Served()
    asyncio.run(test(served))  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_client_that_goes_ends_its_request(stream: bool) -> None:
    """In the middle of 900 tokens."""

    async def test(served: Served) -> None:
        body = json.dumps(CHAT | {"max_tokens": 900, "stream": stream}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            while not served.engine.num_running():
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        answers: list[Any] = []

        async def send(message: Any) -> None:
            answers.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
        await served.app(scope, receive, send)
        assert not answers or answers[0]["status"] in (200, 499), answers
        while served.engine.num_running() or served.engine.num_waiting():
            await asyncio.sleep(0.01)
        assert served.engine.metrics.prompt_tokens._value.get() == len("abc")
        assert served.engine.metrics.generated_tokens._value.get() < 900
        assert not served.engine.manager.output_router.result_handlers
        await served.check_that_it_answers()

    served = Served()
    served.model.config.max_position_embeddings = 1024
    run(served, test)
