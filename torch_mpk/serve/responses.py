"""OpenAI's responses, by transformers' own builder of their events, from the pieces of our engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, cast

from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseGenerateManager, _StreamError

from torch_mpk.serve.errors import Refusal
from torch_mpk.serve.text import Piece


class _Pieces:
    """Takes a manager's place in transformers' handler, and a streamer's: for one reply, which is under way."""

    def __init__(self, pieces: AsyncGenerator[tuple[int, Piece], None]) -> None:
        self.total_tokens = 0
        self._pieces = pieces

    def generate_streaming(self, *args: Any, **kwargs: Any) -> tuple[asyncio.Queue[Any], _Pieces]:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.create_task(self._fill(queue))
        return queue, self

    async def _fill(self, queue: asyncio.Queue[Any]) -> None:
        last: Any = None  # which ends a reply
        try:
            async with aclosing(self._pieces) as pieces:
                async for _, piece in pieces:
                    self.total_tokens += piece.num_tokens
                    for part in piece.parts:
                        queue.put_nowait(part)
        except Refusal as refusal:
            last = _StreamError(str(refusal))
        queue.put_nowait(last)

    def cancel(self) -> None:
        self._task.cancel()


async def response_events(
    pieces: AsyncGenerator[tuple[int, Piece], None], name: str, request_id: str, prompt: Sequence[int]
) -> AsyncIterator[str]:
    """The events of a response, as a stream has them."""
    manager = cast(BaseGenerateManager, _Pieces(pieces))
    handler = ResponseHandler(None, None)
    # It would make a parser of replies, which the pieces have behind them: hence a model of a family that has none.
    stream = handler._streaming(request_id, _NoModel(), _NoModel(), name, {}, {"input_ids": prompt}, None, manager)
    async with aclosing(stream.body_iterator) as events:
        async for event in events:
            yield str(event)


class _NoModel:
    """Of a family without a parser of replies."""

    config = property(lambda self: self)
    model_type = ""


async def last_response(events: AsyncIterator[str]) -> dict[str, Any]:
    """The whole response, which its last event brings. Raises Refusal where that says that it failed."""
    last = ""
    async for text in events:
        last = text
    event = json.loads(last.strip().rpartition("\n\n")[2].removeprefix("data: "))
    response: dict[str, Any] = event["response"]
    if response["status"] == "failed":
        raise Refusal(response["error"]["message"], status=500)
    return response
