"""What a request may say, and how: a model of its body for each route. Everything else is refused with a reason."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from torch_mpk.serve.errors import Refusal, of_validation

MAX_CHOICES = 64
MAX_STOPS = 16
MIN_TEMPERATURE = 0.01  # scores divided by less may be beyond float32

# Of what may be of several types, where pydantic says what the first of them would be.
EXPECTED = {
    "prompt": "a text, a list of token ids, or a list of either, none of them empty",
    "stop": f"a text or up to {MAX_STOPS} of them, none empty",
    "input": "a text, or a list of messages, calls and results, not empty",
    "content": "a text, or a list of parts such as {'type': 'text', 'text': '...'}",
}

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1)]
TokenIds = Annotated[list[int], Field(min_length=1)]


class Unsupported(NamedTuple):
    """A field of OpenAI's, or of other servers', that is accepted where it changes nothing."""

    neutral: tuple[Any, ...]  # values, beside null
    reason: str


_NO_PENALTIES = "the engine does not look at earlier tokens to change scores"
_NO_TOOL_FORM = "replies are not bound to a form: say what you want in the messages"
_TEXT_ONLY = "replies are text"
_NOTHING_KEPT = "nothing is kept of a request"
_TEMPLATE = "what a template takes goes into chat_template_kwargs"

UNSUPPORTED: dict[str, Unsupported] = {
    "frequency_penalty": Unsupported((0,), _NO_PENALTIES),
    "presence_penalty": Unsupported((0,), _NO_PENALTIES),
    "repetition_penalty": Unsupported((1,), _NO_PENALTIES),
    "logit_bias": Unsupported(({},), "the engine adds nothing to scores"),
    "top_logprobs": Unsupported((0,), "the engine keeps the log probability of the chosen token only"),
    "response_format": Unsupported(({"type": "text"},), _NO_TOOL_FORM),
    "parallel_tool_calls": Unsupported((True,), _NO_TOOL_FORM),
    "functions": Unsupported(([],), "tools takes their place"),
    "function_call": Unsupported(("none",), "tools takes its place"),
    "modalities": Unsupported((["text"],), _TEXT_ONLY),
    "audio": Unsupported((), _TEXT_ONLY),
    "prediction": Unsupported((), "the engine makes a token a step"),
    "web_search_options": Unsupported((), "the server reaches nothing else"),
    "reasoning_effort": Unsupported((), _TEMPLATE),
    "verbosity": Unsupported((), _TEMPLATE),
    "store": Unsupported((False,), _NOTHING_KEPT),
    "service_tier": Unsupported(("auto", "default"), "there is one"),
    "best_of": Unsupported((1,), "all of a request's choices are answered: n says how many"),
    "echo": Unsupported((False,), "replies do not repeat the prompt"),
    "suffix": Unsupported(("",), "the model goes on behind the prompt"),
    "generation_config": Unsupported((), "the fields of the request say the same"),
    "background": Unsupported((False,), _NOTHING_KEPT),
    "conversation": Unsupported((), _NOTHING_KEPT),
    "previous_response_id": Unsupported((), _NOTHING_KEPT),
    "prompt": Unsupported((), "the server has no templates of prompts"),
    "include": Unsupported(([],), "the reply is all that there is"),
    "text": Unsupported(({"format": {"type": "text"}},), _NO_TOOL_FORM),
    "max_tool_calls": Unsupported((), "the server calls no tools"),
    "reasoning": Unsupported((), _TEMPLATE),
    "truncation": Unsupported(("disabled",), "prompts are not cut"),
}
OF_COMPLETIONS = {"best_of", "echo", "suffix"}
OF_RESPONSES = {
    *("background", "conversation", "previous_response_id", "prompt", "include", "text"),
    *("max_tool_calls", "reasoning", "truncation"),
}
LENGTH = "tokens of the reply; prompt and reply must fit into the cache and the model's positions"


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


def _field(description: str, **limits: Any) -> Any:
    """``description``: what docs/serving.md says of it."""
    return Field(None, description=description, **limits)


class Sampling(BaseModel):
    """Fields of every route. None is the model's own, of its generation_config.json, or what changes nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    unsupported: ClassVar[tuple[str, ...]]  # fields of the route

    model: str | None = _field("the served model's name, as `/v1/models` has it, or nothing")
    temperature: float | None = _field(
        f"0, which is greedy, or {MIN_TEMPERATURE} to 2; by default the model's own", ge=0, le=2
    )
    top_p: float | None = _field("above 0, to 1", gt=0, le=1)
    top_k: int | None = _field("tokens to choose from; 0 and -1 are all", ge=-1)
    min_p: float | None = _field("0 to 1, of the likeliest token's probability", ge=0, le=1)
    seed: int | None = _field(
        "draws the same tokens again, whatever else the server does, as far as rounding lets it", ge=-(2**63), lt=2**63
    )
    stop: Text | Texts | None = _field(f"a text or up to {MAX_STOPS}; the reply ends in front of the first that comes")
    stream: bool | None = _field("sends the reply in pieces, as server-sent events")
    user: str | None = _field("a label, without effect")
    metadata: dict[str, Any] | None = _field("labels, without effect")

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: str | list[str] | None) -> str | list[str] | None:
        if isinstance(value, list) and len(value) > MAX_STOPS:
            raise ValueError(f"expected {EXPECTED['stop']}")
        return value

    @classmethod
    def of(cls, body: Any) -> Any:
        """The request that a JSON body is. Raises Refusal where it is none that the server answers."""
        if not isinstance(body, dict):
            raise Refusal(f"the body: expected a JSON object, got {type(body).__name__}")
        kept = {name: value for name, value in body.items() if not cls._is_dropped(name, value)}
        try:
            return cls.model_validate(kept)
        except ValidationError as error:
            raise of_validation(error, body, EXPECTED) from None

    @classmethod
    def _is_dropped(cls, name: str, value: Any) -> bool:
        """Whether the field changes nothing; a Refusal where it would, and the server does not know how."""
        if name in cls.model_fields:
            return False
        if name not in cls.unsupported:
            raise Refusal(f"{name}: no field of this route; it takes {', '.join(cls.model_fields)}", param=name)
        neutral, reason = UNSUPPORTED[name]
        if value is None or any(type(value) in _kinds(one) and value == one for one in neutral):
            return True
        allowed = f" but as {' or '.join(map(repr, neutral))}" if neutral else ""
        raise Refusal(f"{name}: not supported{allowed}: {reason}", param=name, code="unsupported_parameter")

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < MIN_TEMPERATURE:
            raise ValueError(f"expected 0, which is greedy, or {MIN_TEMPERATURE} to 2")
        return value

    def stops(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def most_tokens(self) -> tuple[str, int | None]:
        """The field that says how many tokens a reply may have, and how many."""
        raise NotImplementedError


class Choices(Sampling):
    """Fields of chats and completions, whose replies may be several."""

    max_tokens: int | None = _field(LENGTH, ge=1)
    n: int | None = _field(
        f"replies to each prompt, 1 to {MAX_CHOICES}; each is a request to the engine", ge=1, le=MAX_CHOICES
    )
    stream_options: StreamOptions | None = _field('`{"include_usage": true}`: the last piece counts tokens')

    def most_tokens(self) -> tuple[str, int | None]:
        return "max_tokens", self.max_tokens

    def has_logprobs(self) -> bool:
        raise NotImplementedError

    def has_usage_in_stream(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def _kinds(value: Any) -> tuple[type, ...]:
    """1 is 1.0, and not True."""
    return (int, float) if type(value) is int else (type(value),)


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """Of a chat. What else a message has goes to the model's chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.role == "user" and not self.text():
            raise ValueError("content of a user's message is empty")
        return self

    def text(self) -> str:
        parts = self.content or ""
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class Chat(Choices):
    """``POST /v1/chat/completions``."""

    unsupported = tuple(name for name in UNSUPPORTED if name not in OF_COMPLETIONS | OF_RESPONSES)

    messages: list[Message] = Field(
        min_length=1, description="of system, developer, user, assistant and tool, with text; a user's is not empty"
    )
    max_completion_tokens: int | None = _field("as `max_tokens`, in front of which it goes", ge=1)
    logprobs: bool | None = _field(
        "the log probability of each token, [of what it was drawn from](#how-a-request-draws)"
    )
    tools: list[dict[str, Any]] | None = _field("where the chat template takes them")
    tool_choice: Literal["auto", "none"] | None = _field('`"auto"` or `"none"`')
    chat_template_kwargs: dict[str, Any] | None = _field("arguments of the chat template, such as `enable_thinking`")

    def has_logprobs(self) -> bool:
        return bool(self.logprobs)

    def most_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().most_tokens()

    def offered_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools or None


class Completion(Choices):
    """``POST /v1/completions``."""

    unsupported = tuple(name for name in UNSUPPORTED if name not in OF_RESPONSES)

    prompt: Text | TokenIds | Texts | Annotated[list[TokenIds], Field(min_length=1)] = Field(
        description="a text or token ids, or a list of either"
    )
    logprobs: int | None = _field(
        "0: as a chat's `logprobs`; a larger number asks for other tokens, too, and is refused", ge=0, le=0
    )

    def has_logprobs(self) -> bool:
        return self.logprobs is not None

    def prompts(self) -> list[str | list[int]]:
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given


class Response(Sampling):
    """``POST /v1/responses``."""

    unsupported = tuple(name for name in UNSUPPORTED if name not in OF_COMPLETIONS)

    input: Text | Annotated[list[dict[str, Any]], Field(min_length=1)] = Field(
        description="a text, or a list of messages, calls of tools and their results, as earlier replies have them"
    )
    instructions: str | None = _field("a system's message in front")
    max_output_tokens: int | None = _field(LENGTH, ge=1)
    tools: list[dict[str, Any]] | None = _field("where the chat template takes them")
    tool_choice: Literal["auto", "none"] | None = _field('`"auto"` or `"none"`')
    chat_template_kwargs: dict[str, Any] | None = _field("arguments of the chat template, such as `enable_thinking`")

    def most_tokens(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_output_tokens

    def offered_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools or None


def table() -> str:
    """What docs/serving.md says of fields, in Markdown."""
    lines = ["| field | of | meaning |", "|---|---|---|"]
    described: dict[tuple[str, str], list[str]] = {}
    for route, kind in (("chat", Chat), ("completions", Completion), ("responses", Response)):
        for name, field in kind.model_fields.items():
            described.setdefault((name, str(field.description)), []).append(route)
    for (name, description), routes in described.items():
        lines.append(f"| `{name}` | {'all' if len(routes) == 3 else ', '.join(routes)} | {description} |")
    lines += ["", "| refused | but as | because |", "|---|---|---|"]
    for name, (neutral, reason) in UNSUPPORTED.items():
        allowed = ", ".join(f"`{json.dumps(value)}`" for value in neutral)
        lines.append(f"| `{name}` | {allowed} | {reason} |")
    return "\n".join(lines)
