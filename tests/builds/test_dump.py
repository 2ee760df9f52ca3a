"""TORCH_MPK_DUMP_ARCH: what a model would be on a device that is not there."""

import json
from pathlib import Path

import pytest
import torch

from torch_mpk import graph_view
from torch_mpk.config import env
from torch_mpk.errors import OptionError


def build(dtype: torch.dtype) -> None:
    model = torch.nn.Linear(8, 8, dtype=dtype)
    with torch.inference_mode():
        torch.compile(model, backend="mpk", options={"fallback": "error"})(torch.ones(1, 8, dtype=dtype))


def test_artefacts_of_a_device_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    monkeypatch.setenv("TORCH_MPK_DUMP_ARCH", "sm_90a")
    build(torch.bfloat16)
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "5.schedule.json").read_text())["target"]["device"] == "cpu"
    assert {path.name for path in (folder / "sm_90a").iterdir()} == {"4.graph.json", "5.schedule.json", "6.kernel.cu"}
    assert json.loads((folder / "sm_90a" / "5.schedule.json").read_text())["target"]["arch"] == 90
    assert "__global__" in (folder / "sm_90a" / "6.kernel.cu").read_text()
    assert "\nmodel: Linear\n" in (folder / "1.capture.txt").read_text()
    assert "of input 'weight'" in graph_view.task(graph_view.read(folder / "sm_90a"), "linear")


def test_what_such_a_device_does_not_take_is_written_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    monkeypatch.setenv("TORCH_MPK_DUMP_ARCH", "sm_80")
    build(torch.float64)
    (folder,) = tmp_path.iterdir()
    assert "float64" in (folder / "sm_80" / "unsupported.txt").read_text()


def test_an_architecture_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_MPK_DUMP_ARCH", "sm_90")
    with pytest.raises(OptionError, match="TORCH_MPK_DUMP_ARCH.*expected sm_80, sm_90a, .*got 'sm_90'"):
        _ = env.dump_arch
