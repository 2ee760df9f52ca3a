"""Draft tokens for speculative decoding that cost nothing: what followed the last tokens when they were there before.

Source: A. Saxena, "Prompt Lookup Decoding", 2023. It pays for text that repeats its prompt: code,
summaries, answers from documents.
"""

from __future__ import annotations

from collections.abc import Iterable

_LONGEST = 3  # tokens that are looked up; then fewer


class PromptLookup:
    """The tokens of one sequence so far, and where each few of them were last followed by others."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # behind the last place of these tokens, the newest aside
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            for length in range(1, min(_LONGEST, len(self._tokens)) + 1):
                self._next[tuple(self._tokens[-length:])] = len(self._tokens)
            self._tokens.append(token)

    def draft(self, count: int) -> list[int]:
        """At most ``count`` tokens that may come next; none where the last token is new."""
        for length in range(min(_LONGEST, len(self._tokens)), 0, -1):
            place = self._next.get(tuple(self._tokens[-length:]))
            if place is not None:
                return self._tokens[place : place + count]
        return []
