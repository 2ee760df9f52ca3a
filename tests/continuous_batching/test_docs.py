"""What docs/serving.md and the example show."""

import runpy

import pytest

from tests.test_docs import ROOT, run_examples


@pytest.mark.slow
def test_the_page_says_what_its_example_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run_examples("serving.md")


@pytest.mark.slow
def test_the_example_answers_every_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "serve.py"))
    example["main"]()
    printed = capsys.readouterr().out
    assert printed.count("48 tokens") == len(example["PROMPTS"])
    for prompt in example["PROMPTS"]:
        assert prompt in printed
