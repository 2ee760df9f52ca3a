"""``transformers serve`` with our engine under it: its options, loading of models and application; our routes."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

import typer
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response
from transformers import ContinuousBatchingConfig
from transformers.cli.serve import Serve
from transformers.cli.serving.model_manager import split_model_id
from transformers.cli.serving.utils import Modality

from torch_mpk.continuous_batching import ATTENTION, config
from torch_mpk.serve import errors, interrupts
from torch_mpk.serve.errors import Refusal
from torch_mpk.serve.generation import Engine
from torch_mpk.serve.replies import Routes

SECONDS_TO_STOP = 1  # for replies in the middle, and then for the engine's step

# Options of transformers' that have one value here, and such as concern what is not served.
FIXED = {"continuous_batching": True, "attn_implementation": ATTENTION, "non_blocking": True}
NOT_OURS = {"compile", "model_timeout", "decision_config"}
WARMUP = inspect.Parameter(
    "warmup",
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    default=None,
    annotation=Annotated[
        bool | None, typer.Option(help="Build steps of all sizes before the first answer. [default: on a GPU]")
    ],
)


def _parameters() -> list[inspect.Parameter]:
    theirs = inspect.signature(Serve).parameters
    # Required: without one transformers' server loads whatever a request names.
    model = theirs["force_model"].replace(name="model", default=inspect.Parameter.empty)
    dropped = FIXED.keys() | NOT_OURS | {"force_model"}
    return [model, *(parameter for name, parameter in theirs.items() if name not in dropped), WARMUP]


class _Uvicorn(uvicorn.Server):
    """Ends replies in the middle with an error that their clients can read, before it would cancel them."""

    def __init__(self, config: uvicorn.Config, close: Callable[[], None]) -> None:
        super().__init__(config)
        self._close = close

    async def shutdown(self, *args: Any, **kwargs: Any) -> None:
        self._close()
        await super().shutdown(*args, **kwargs)


class Server(Serve):
    """transformers' command, whose last step, to run its application, is ours."""

    __signature__ = inspect.Signature(_parameters())  # which becomes the command's options

    def __init__(self, model: str, warmup: bool | None = None, **options: Any) -> None:
        self._warmup = warmup
        try:
            super().__init__(force_model=model, **options, **FIXED)  # which has it call start_server
        except OSError as error:  # how transformers says that there is no such model
            raise typer.BadParameter(f"{model}: {error}") from error

    def start_server(self) -> None:
        """Until it is stopped."""
        name = self._model_manager.force_model
        repo, gguf_file = split_model_id(name)
        model, processor = self._model_manager.load_model_and_processor(
            self._model_manager.process_model_name(repo), gguf_file=gguf_file
        )
        if self._model_manager.get_model_modality(model, processor=processor) is not Modality.LLM:
            raise typer.BadParameter(f"{name} is a {type(model).__name__}, and the server is for language models")
        warmup = model.device.type == "cuda" if self._warmup is None else self._warmup
        tokenizer = getattr(processor, "tokenizer", processor)
        engine = Engine(model, tokenizer, _settings(self._generation_state._cb_config), warmup)
        routes = Routes(engine, name, processor, self._chat_handler.chat_template_kwargs)
        uvicorn_config = self.server.config
        install(uvicorn_config.app, engine, routes)
        uvicorn_config.timeout_graceful_shutdown = SECONDS_TO_STOP
        uvicorn_config.lifespan = "off"  # in which transformers frees the model, while steps may run
        engine.start()
        with interrupts.are_exceptions():  # uvicorn takes them, and raises them again behind its end
            _Uvicorn(uvicorn_config, engine.close).run()
        engine.stop(SECONDS_TO_STOP)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        # At once: a build or a long step may be in the middle, and to take all modules apart takes seconds.
        os._exit(0)


def _settings(given: ContinuousBatchingConfig | None) -> ContinuousBatchingConfig:
    """Those of options, and for the others ours."""
    usual = ContinuousBatchingConfig()
    names = [field.name for field in dataclasses.fields(usual)]
    said = {name: getattr(given, name) for name in names if given is not None}
    return config(**{name: value for name, value in said.items() if value != getattr(usual, name)})


def install(app: FastAPI, engine: Engine, routes: Routes) -> None:
    """Puts our routes in place of the application's; what it does around them stays."""
    app.router.routes.clear()
    errors.install(app)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _unless_gone(request, routes.chat(await _body(request), request.state.request_id))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _unless_gone(request, routes.completion(await _body(request), request.state.request_id))

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await _unless_gone(request, routes.response(await _body(request), request.state.request_id))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return routes.models()

    @app.get("/health")
    async def health() -> Response:
        body = {"status": engine.state}
        if (failure := engine.failure()) is not None:
            body["reason"] = str(failure)
        return JSONResponse(body, 200 if engine.state == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return engine.metrics.response()

    known = {route.path for route in app.router.routes}  # type: ignore[attr-defined]

    @app.middleware("http")
    async def count(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call_next(request)
        route = request.url.path if request.url.path in known else "other"
        engine.metrics.requests.labels(route, response.status_code).inc()
        return response


async def _body(request: Request) -> Any:
    try:
        return json.loads(await request.body())
    except ValueError as error:
        raise Refusal(f"the body is not JSON: {error}") from None


async def _unless_gone(request: Request, answering: Awaitable[Response]) -> Response:
    """An answer, unless its client goes before it is there: then nothing is made for nobody."""
    task = asyncio.ensure_future(answering)
    tasks = task, asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Refusal("the client has gone", status=499)
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _gone(request: Request) -> None:
    """Waits until it is. ``request.is_disconnected`` does not see it from behind a middleware."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


HELP = """Serve a language model to OpenAI's clients.

\b
    POST /v1/chat/completions, /v1/completions, /v1/responses
    GET  /v1/models, /health, /metrics

docs/serving.md says which fields of requests are supported.
"""


def command(arguments: Sequence[str]) -> None:
    """Runs with these arguments until it is stopped."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=HELP)(Server)
    app(list(arguments), prog_name="python -m torch_mpk serve")
