"""``python -m torch_mpk serve``."""

import pytest
from transformers.cli import transformers as cli

from torch_mpk.__main__ import main
from torch_mpk.continuous_batching import ATTENTION


def test_it_is_transformers_serve_with_our_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(cli, "app", calls.append)
    main(["serve", "--device", "cpu", "a/model", "--port", "8001", "--help"])
    ours = ["serve", "--continuous-batching", "--attn-implementation", ATTENTION]
    assert calls == [[*ours, "--device", "cpu", "a/model", "--port", "8001", "--help"]]


def test_options_are_those_of_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--help"])
    assert stop.value.code == 0
    assert "--cb-num-blocks" in capsys.readouterr().out
