"""``python -m torch_mpk serve``: its options, what requests may say, and how replies become text."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.cli.serving.utils import ReasoningText, ToolCall

from torch_mpk.__main__ import main
from torch_mpk.serve.errors import Refusal
from torch_mpk.serve.fields import UNSUPPORTED, Chat, Completion, Response
from torch_mpk.serve.replies import Routes
from torch_mpk.serve.text import Piece, TextOfTokens

BYTES = Path(__file__).parents[2] / "examples" / "tiny-qwen3-bytes"


def test_options_are_those_of_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for option in ("model", "--cb-num-blocks", "--port", "--warmup / --no-warmup"):
        assert option in shown
    for fixed in ("--continuous-batching", "--attn-implementation", "--compile", "--non-blocking"):
        assert fixed not in shown


def test_a_model_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--device", "cpu"])
    assert stop.value.code == 2
    assert "Missing argument 'model'" in capsys.readouterr().err


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    with pytest.raises(SystemExit, match="uvicorn"):
        main(["serve", "a/model"])


MESSAGES = [{"role": "user", "content": "x"}]


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="WORLD_SIZE is 2: start it without torchrun"):
        main(["serve", "a/model"])


def test_what_is_not_supported_is_accepted_where_it_changes_nothing() -> None:
    for kind, needed in ((Chat, {"messages": MESSAGES}), (Completion, {"prompt": "x"}), (Response, {"input": "x"})):
        assert not set(kind.unsupported) & set(kind.model_fields)
        for name in kind.unsupported:
            for value in (None, *UNSUPPORTED[name].neutral):
                kind.of(needed | {name: value})
            with pytest.raises(Refusal, match=f"{name}: not supported") as refused:
                kind.of(needed | {name: "something"})
            assert (refused.value.status, refused.value.body["error"]["param"]) == (400, name)
    with pytest.raises(Refusal, match="n: "):
        Chat.of({"messages": MESSAGES, "n": True})
    with pytest.raises(Refusal, match="frequency_penalty"):
        Chat.of({"messages": MESSAGES, "frequency_penalty": False})


def read(text: TextOfTokens, ids: list[int], size: int = 1) -> tuple[list[Any], Piece]:
    """All parts, and the last piece, of tokens that come so many at a time."""
    parts: list[Any] = []
    piece = Piece()
    for end in [*range(size, len(ids), size), len(ids)]:
        piece = text.add(ids[:end], [0.0] * end, end == len(ids))
        parts += piece.parts
        if text.is_finished:
            break
    return parts, piece


@pytest.mark.parametrize("size", [1, 3, 100])
def test_text_comes_as_it_is_and_ends_at_a_stop_string(size: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BYTES)
    for written in ("naïve 日本 text", "cut \u00e9"):
        ids = tokenizer(written).input_ids
        parts, last = read(TextOfTokens(tokenizer, (), {0}, len(ids), None), ids, size)
        assert "".join(parts) == written
        assert last.finish_reason == "length"
    cut = tokenizer("half of \u65e5").input_ids[:-1]  # a character's first bytes
    parts, _ = read(TextOfTokens(tokenizer, (), {0}, 100, None), cut, size)
    assert "".join(parts) == tokenizer.decode(cut)
    ids = tokenizer("say ab and abc then").input_ids
    parts, last = read(TextOfTokens(tokenizer, ("abd", "abc"), {0}, 100, None), ids, size)
    assert "".join(parts) == "say ab and "
    assert last.finish_reason == "stop"
    parts, last = read(TextOfTokens(tokenizer, ("!",), {0}, 100, None), [*tokenizer("end").input_ids, 0], size)
    assert (parts[-1:] == ["d"] or parts == ["end"], last.finish_reason) == (True, "stop")


def parser_of(prompt: str) -> Any:
    """Of a reply to it, by a Qwen3, as the server makes one."""
    tokenizer = AutoTokenizer.from_pretrained(BYTES)
    engine: Any = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(model_type="qwen3")))
    routes = Routes(engine, "a model", tokenizer, {})
    return tokenizer, routes._parser_of(tokenizer(prompt).input_ids, None)()


@pytest.mark.parametrize("prompt", ["<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "hi\n"])
def test_thoughts_and_calls_are_taken_out_and_the_prompt_is_not_repeated(prompt: str) -> None:
    tokenizer, parser = parser_of(prompt)
    written = '<think>hm</think>yes<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    parts, last = read(TextOfTokens(tokenizer, (), set(), 1000, parser), tokenizer(written).input_ids)
    assert "".join(part for part in parts if isinstance(part, ReasoningText)) == "hm"
    assert "".join(part for part in parts if type(part) is str) == "yes"
    assert [part for part in parts if isinstance(part, ToolCall)] == [ToolCall("f", '{"a": 1}')]
    assert last.finish_reason == "tool_calls"
