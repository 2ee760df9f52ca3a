"""The examples run, as a user runs them."""

import copy
import functools
import itertools
import random
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_generate_streams_and_agrees_with_eager() -> None:
    command = [sys.executable, "examples/generate.py", "--max-new-tokens", "24", "--prompt", "import os\n"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("import os\n")
    assert re.search(r"^mpk +[\d.]+ +[\d.]+ +(1|-)$", result.stdout, re.MULTILINE), result.stdout
    assert "tokens agree: " in result.stdout
    assert "compiling" in result.stderr


def test_speeds_are_medians_of_runs_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "generate.py"))
    now, order = 0.0, []

    def run(name: str, seconds: float, stream) -> None:
        nonlocal now
        order.append(name)
        for i in range(8):
            is_late = i == 6 or len(order) == 1  # a token of each run, and all of one
            now += 100 * seconds if is_late else seconds
            stream.record(torch.tensor(i))

    monkeypatch.setattr(example["time"], "perf_counter", lambda: now)
    runs = [functools.partial(run, "eager", 0.5), functools.partial(run, "ours", 0.25)]
    assert example["in_turns"](runs, 5, example["ByteText"]()) == [500, 250]
    assert order == ["eager", "ours"] * 5


def test_the_tiny_models_tokens_are_bytes() -> None:
    made = runpy.run_path(str(ROOT / "examples" / "train_tiny.py"))["byte_tokenizer"]()
    shipped = AutoTokenizer.from_pretrained(ROOT / "examples" / "tiny-qwen3-bytes")
    assert shipped.get_vocab() == made.get_vocab()
    assert shipped.chat_template == made.chat_template
    points = (random.choice((random.randrange(1, 128), random.randrange(160, 0xD800))) for _ in range(400))
    text = "".join(map(chr, points))
    assert shipped(text).input_ids == list(text.encode())
    assert shipped.decode(list(text.encode())) == text
    assert shipped("a\0").input_ids == [ord("a"), shipped.eos_token_id] == [ord("a"), 0]
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    asked = shipped.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert asked == "one\ntwo\n"


@pytest.mark.slow
def test_training_lowers_the_loss() -> None:
    example = runpy.run_path(str(ROOT / "examples" / "train_tiny.py"))
    text = example["as_tokens"](b"def f(x):\n    return x + 1\n" * 400, torch.device("cpu"))
    config = copy.deepcopy(example["CONFIG"])
    config.num_hidden_layers = 1
    model = Qwen3ForCausalLM(config)
    before = example["perplexity"](model, text, num_crops=2)
    seconds = (
        itertools.count().__next__
    )  # every look at the clock finds a second gone: 30 steps, however long they take
    assert example["train"](model, text, minutes=0.5, batch=1, peak_lr=1e-2, clock=seconds) > 20
    assert example["perplexity"](model, text, num_crops=2) < 0.5 * before
