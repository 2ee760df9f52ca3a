"""A reply's text, as its tokens come."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks


@dataclasses.dataclass
class TokenText:
    """A token of a reply, for clients that ask for log probabilities."""

    text: str
    logprob: float
    offset: int  # of its text in the reply's


@dataclasses.dataclass
class Piece:
    """What has come of a reply since the piece before."""

    parts: list[str | ReasoningText | ToolCall] = dataclasses.field(default_factory=list)
    tokens: list[TokenText] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None  # of the last one


class TextOfTokens:
    """Decodes a reply, ends it at stop strings, and has transformers' parser take out thoughts and calls of tools."""

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], ends: set[int], max_tokens: int, parser: Any | None
    ) -> None:
        self._tokenizer, self._stops, self._ends, self._max_tokens = tokenizer, stops, ends, max_tokens
        self._parser = parser
        self._skips_special = parser is None  # which a parser goes by
        self._stream = DecodeStream([], skip_special_tokens=self._skips_special)
        self._ids: list[int] = []
        self._text = ""  # of the tokens
        self._num_said = 0  # characters of it, which pieces have had
        self._has_tool_calls = False
        self.is_finished = False

    def add(self, ids: Sequence[int], logprobs: Sequence[float], is_last: bool) -> Piece:
        """Takes all tokens that there are by now."""
        piece = Piece()
        if not self._ids and self._parser is not None:
            self._take(piece, self._parser.initial_events)
        for number in range(len(self._ids), len(ids)):
            self._add_token(piece, ids[number], logprobs[number] if number < len(logprobs) else 0.0)
            piece.num_tokens += 1
            if (cut := self._first_stop()) is not None:
                self._say(piece, cut)
                piece.tokens = [token for token in piece.tokens if token.offset < cut]
                self._finish(piece, "stop")
                return piece
        if is_last:
            whole = self._tokenizer.decode(self._ids, skip_special_tokens=self._skips_special)
            if whole.startswith(self._text):
                self._text = whole  # also the bytes of a character that was not complete
            self._say(piece, len(self._text))
            has_end = bool(self._ids) and self._ids[-1] in self._ends
            self._finish(piece, "length" if len(self._ids) >= self._max_tokens and not has_end else "stop")
        else:
            self._say(piece, len(self._text) - self._num_held())
        return piece

    def _add_token(self, piece: Piece, token: int, logprob: float) -> None:
        offset = len(self._text)
        self._ids.append(token)
        self._text += self._stream.step(self._tokenizer._tokenizer, token) or ""
        if token not in self._ends:
            piece.tokens.append(TokenText(self._tokenizer.decode([token]), logprob, offset))

    def _first_stop(self) -> int | None:
        begin = self._num_said
        found = [at for stop in self._stops if (at := self._text.find(stop, begin)) >= 0]
        return min(found, default=None)

    def _num_held(self) -> int:
        """Characters at the end that may be a stop string's begin."""
        held = 0
        for stop in self._stops:
            for count in range(1, len(stop)):
                if self._text.endswith(stop[:count]):
                    held = max(held, count)
        return held

    def _say(self, piece: Piece, end: int) -> None:
        text = self._text[self._num_said : end]
        self._num_said = max(self._num_said, end)
        if self._parser is not None:
            self._take(piece, self._parser.feed(text) if text else [])
        elif text:
            piece.parts.append(text)

    def _take(self, piece: Piece, events: list[dict[str, Any]]) -> None:
        parts = response_events_to_chunks(events)
        self._has_tool_calls |= any(isinstance(part, ToolCall) for part in parts)
        piece.parts += parts

    def _finish(self, piece: Piece, reason: str) -> None:
        if self._parser is not None:
            try:
                _, events = self._parser.finalize()
            except (ValueError, RuntimeError):  # in the middle of a call that nobody can read
                events = []
            self._take(piece, events)
        self.is_finished = True
        piece.finish_reason = "tool_calls" if self._has_tool_calls else reason
