"""The routes that answer prompts, in place of transformers' handlers, which know one choice and no log probabilities.

They keep what those do with a prompt: messages, the chat template, and the parser of thoughts and calls of tools.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import jinja2
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import (
    BaseHandler,
    Modality,
    ReasoningText,
    ToolCall,
    build_response_parser,
    get_response_template,
)
from transformers.utils.chat_parsing.response_templates import load_response_template

from torch_mpk.serve import fields
from torch_mpk.serve.errors import Refusal
from torch_mpk.serve.fields import Chat, Completion, Sampling
from torch_mpk.serve.generation import Engine
from torch_mpk.serve.responses import last_response, response_events
from torch_mpk.serve.text import Piece, TokenText

Pieces = AsyncGenerator[tuple[int, Piece], None]


class Reply:
    """What a route sends back: one answer, or a stream of chunks, from the same pieces."""

    kind: str  # of the object
    chunk_kind: str
    prefix: str  # of its name

    def __init__(self, request: Chat | Completion, model: str, request_id: str, num_prompt_tokens: int) -> None:
        self._request = request
        self._head = {"id": f"{self.prefix}-{request_id}", "created": int(time.time()), "model": model}
        self._num_prompt_tokens, self._num_tokens, self._num_calls = num_prompt_tokens, 0, 0

    def choice(self, number: int, piece: Piece) -> dict[str, Any]:
        """One of the answer's choices, of all its pieces in one."""
        raise NotImplementedError

    def chunk(self, number: int, piece: Piece) -> dict[str, Any]:
        """One of a chunk's choices."""
        raise NotImplementedError

    def first_chunk(self) -> dict[str, Any] | None:
        """Of a choice whose first piece has come; None where there is nothing to say."""
        return None

    def _usage(self) -> dict[str, int]:
        prompt, made = self._num_prompt_tokens, self._num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    async def whole(self, pieces: Pieces, count: int) -> JSONResponse:
        found = [Piece() for _ in range(count)]
        async for number, piece in pieces:
            one = found[number]
            one.parts += piece.parts
            one.tokens += piece.tokens
            one.finish_reason = piece.finish_reason
            self._num_tokens += piece.num_tokens
        choices = [self.choice(number, piece) | {"index": number} for number, piece in enumerate(found)]
        return JSONResponse(self._head | {"object": self.kind, "choices": choices, "usage": self._usage()})

    async def stream(self, pieces: Pieces) -> AsyncIterator[str]:
        begun: set[int] = set()
        head = self._head | {"object": self.chunk_kind}
        try:
            async with aclosing(pieces) as source:
                async for number, piece in source:
                    self._num_tokens += piece.num_tokens
                    first = self.first_chunk()
                    if number not in begun and first is not None:
                        yield _event(head | {"choices": [first | {"index": number}]})
                    begun.add(number)
                    if piece.parts or piece.tokens or piece.finish_reason is not None:
                        yield _event(head | {"choices": [self.chunk(number, piece) | {"index": number}]})
        except Refusal as refusal:
            yield _event(refusal.body)
            return
        if self._request.has_usage_in_stream():
            yield _event(head | {"choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _texts(piece: Piece) -> tuple[str, str]:
    """What it says, and what it thinks."""
    said = [part for part in piece.parts if isinstance(part, str)]
    thought = "".join(part for part in said if isinstance(part, ReasoningText))
    return "".join(part for part in said if not isinstance(part, ReasoningText)), thought


class ChatReply(Reply):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, number: int, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": None, "refusal": None} | self._message(piece)
        if not message.get("tool_calls"):
            message["content"] = message["content"] or ""
        return self._choice(piece, "message", message)

    def chunk(self, number: int, piece: Piece) -> dict[str, Any]:
        message = self._message(piece)
        for call in message.get("tool_calls", ()):
            call["index"] = self._num_calls
            self._num_calls += 1
        return self._choice(piece, "delta", message)

    def first_chunk(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def _choice(self, piece: Piece, name: str, message: dict[str, Any]) -> dict[str, Any]:
        logprobs = {"content": [_logprob(token) for token in piece.tokens], "refusal": None}
        shown = logprobs if self._request.has_logprobs() else None
        return {name: message, "logprobs": shown, "finish_reason": piece.finish_reason}

    def _message(self, piece: Piece) -> dict[str, Any]:
        content, thought = _texts(piece)
        calls = [part for part in piece.parts if isinstance(part, ToolCall)]
        message: dict[str, Any] = {}
        if content:
            message["content"] = content
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call-{self._head['id']}-{self._num_calls + number}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(calls)
            ]
        return message


def _logprob(token: TokenText) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()), "top_logprobs": []}


class CompletionReply(Reply):
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def choice(self, number: int, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self._request.has_logprobs():
            logprobs = {
                "tokens": [token.text for token in piece.tokens],
                "token_logprobs": [token.logprob for token in piece.tokens],
                "text_offset": [token.offset for token in piece.tokens],
                "top_logprobs": None,
            }
        return {"text": _texts(piece)[0], "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def chunk(self, number: int, piece: Piece) -> dict[str, Any]:
        return self.choice(number, piece)


class Routes:
    """Of one served model."""

    def __init__(self, engine: Engine, name: str, processor: Any, template_kwargs: dict[str, Any]) -> None:
        self._engine, self._name, self._template_kwargs = engine, name, template_kwargs
        self._processor = processor
        self._tokenizer = getattr(processor, "tokenizer", processor)

    async def chat(self, body: dict[str, Any], request_id: str) -> Response:
        request = Chat.of(body)
        self._check_model(request)
        messages, tools = (
            [message.model_dump(exclude_none=True) for message in request.messages],
            request.offered_tools(),
        )
        prompt = self._prompt_of(messages, tools, request.chat_template_kwargs)
        return await self._answer(request, [prompt], [self._parser_of(prompt, tools)], ChatReply, request_id)

    async def completion(self, body: dict[str, Any], request_id: str) -> Response:
        request = Completion.of(body)
        self._check_model(request)
        given = request.prompts()
        prompts = [self._tokenizer(one).input_ids if isinstance(one, str) else one for one in given]
        return await self._answer(request, prompts, [_no_parser] * len(prompts), CompletionReply, request_id)

    async def response(self, body: dict[str, Any], request_id: str) -> Response:
        request = fields.Response.of(body)
        self._check_model(request)
        try:
            messages = ResponseHandler._normalize_input(body)
            _check_parts(messages)
            tools = ResponseHandler._normalize_tools(request.offered_tools())
        except (KeyError, TypeError, AttributeError, HTTPException) as error:
            raise Refusal(f"input: {type(error).__name__}: {error}", param="input") from error
        prompt = self._prompt_of(messages, tools, request.chat_template_kwargs)
        choosing = await self._engine.choosing(request, [prompt])
        pieces = self._engine.choices([prompt], 1, choosing, bool(request.stream), [self._parser_of(prompt, tools)])
        events = response_events(pieces, self._name, request_id, prompt)
        if request.stream:
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(await last_response(events))

    def models(self) -> dict[str, Any]:
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "torch_mpk"}
        return {"object": "list", "data": [model]}

    def _check_model(self, request: Sampling) -> None:
        if request.model not in (None, self._name):
            message = f"model: {request.model!r} is not served here, {self._name!r} is"
            raise Refusal(message, status=404, param="model", code="model_not_found")

    async def _answer(
        self,
        request: Chat | Completion,
        prompts: Sequence[Sequence[int]],
        parsers: Sequence[Callable[[], Any]],
        kind: type[Reply],
        request_id: str,
    ) -> Response:
        choosing = await self._engine.choosing(request, prompts)
        count = request.n or 1
        pieces = self._engine.choices(prompts, count, choosing, bool(request.stream), parsers)
        reply = kind(request, self._name, request_id, sum(map(len, prompts)))
        if request.stream:
            return StreamingResponse(reply.stream(pieces), media_type="text/event-stream")
        return await reply.whole(pieces, len(prompts) * count)

    def _prompt_of(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, template_kwargs: dict[str, Any] | None
    ) -> list[int]:
        template = self._tokenizer.chat_template
        if template is None:
            raise Refusal(f"messages: {self._name} has no chat template; /v1/completions takes a prompt")
        if tools is not None and "tools" not in str(template):
            raise Refusal(f"tools: the chat template of {self._name} takes none", param="tools")
        try:
            given = BaseHandler.get_processor_inputs_from_messages(messages, Modality.LLM)
            kwargs = self._template_kwargs | (template_kwargs or {})
            ids = self._processor.apply_chat_template(
                given, add_generation_prompt=True, tools=tools, return_dict=True, tokenize=True, **kwargs
            )["input_ids"]
        except (KeyError, TypeError, ValueError, jinja2.TemplateError) as error:
            message = f"messages: the chat template of {self._name} does not take them: {type(error).__name__}: {error}"
            raise Refusal(message, param="messages") from error
        return list(ids)

    def _parser_of(self, prompt: list[int], tools: list[dict[str, Any]] | None) -> Callable[[], Any]:
        template = get_response_template(self._processor, self._engine.model)
        if template is None:
            return _no_parser
        # Without the place where the reply begins the parser would take the whole prompt for a part of it.
        has_begin = load_response_template(template).start_anchor_re.search(self._tokenizer.decode(prompt)) is not None
        shown = prompt if has_begin else []
        return lambda: build_response_parser(self._processor, self._engine.model, shown, tools=tools)


def _check_parts(messages: list[dict[str, Any]]) -> None:
    """Raises Refusal where one is no text: transformers would pass over it."""
    for message in messages:
        content = message.get("content") or ""
        for part in content if isinstance(content, list) else ():
            if part["type"] not in ("text", "input_text", "output_text"):
                raise Refusal(f"input: expected parts that are text, got {part['type']}", param="input")


def _no_parser() -> None:
    return None
