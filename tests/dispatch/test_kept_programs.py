"""Programs of the CPU that an earlier process has left: they are the same, and as careful."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.schedule.decoder_graph import decoder
from tests.schedule.replay import recorded_graphs
from torch_mpk import _C
from torch_mpk.builds import timing
from torch_mpk.dispatch import build_cache
from torch_mpk.jit import Cache
from torch_mpk.planning.graph_json import pack_graph, unpack_graph
from torch_mpk.testing.decode import prefill
from torch_mpk.testing.tiny import random_ids, tiny_model


@pytest.fixture(autouse=True)
def _keeps_all(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    monkeypatch.setattr(build_cache, "WORTH_SECONDS", 0)


def entries(root: Path) -> list[Any]:
    return list(Cache(root, 2**30, "builds").entries())


def decode_step(num_steps: int = 1) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Logits of steps and the stages of their build, in what is as good as another process."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = tiny_model(num_layers=2)
    cache, _ = prefill(model, random_ids(1, 29), 32)
    step = torch.compile(model, backend="mpk", options={"fallback": "error"})
    with torch.inference_mode():
        logits = [step(input_ids=random_ids(1, 1), past_key_values=cache).logits for _ in range(num_steps)]
    return logits, timing.recent[-1].stages


def test_another_process_runs_the_same_program(empty_cache: Path) -> None:
    first, stages = decode_step(2)
    assert {"capture", "patterns", "partition", "lowering", "schedule"} <= set(stages)
    assert len(entries(empty_cache)) == 1
    again, stages = decode_step(2)
    assert list(stages) == ["look-up", "compile", "load"]
    assert all(map(torch.equal, again, first))


def test_it_still_looks_at_positions() -> None:
    decode_step()
    with pytest.raises(Exception, match=r"the key/value cache is full: make the StaticCache longer"):
        decode_step(4)
    assert "lowering" not in timing.recent[-1].stages


def test_an_entry_that_is_damaged_is_made_again(empty_cache: Path) -> None:
    decode_step()
    (entry,) = entries(empty_cache)
    target = _C.Target("cpu", num_workers=2, fuse=False)
    kept = json.loads(entry.files["graph.json"])
    assert build_cache.get(entry.key, target) is not None
    kept["nodes"][0][0] = "no such task"
    with Cache(empty_cache, 2**30, "builds").workspace() as folder:
        for name, content in {**entry.files, "graph.json": json.dumps(kept).encode()}.items():
            (folder / name).write_bytes(content)
        Cache(empty_cache, 2**30, "builds").put("damaged", folder, {})
    assert build_cache.get("damaged", target) is None


def test_what_is_made_in_no_time_is_not_kept(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_cache, "WORTH_SECONDS", 1e6)
    decode_step()
    assert entries(empty_cache) == []


def test_a_schedule_that_its_graph_does_not_say_is_not_kept(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_cache, "unpack_graph", lambda packed: decoder(layers=1))
    decode_step()
    assert entries(empty_cache) == []


def test_graphs_come_back_from_json_as_they_were() -> None:
    for name, graph in recorded_graphs().items():
        packed = json.loads(json.dumps(pack_graph(graph)))
        assert unpack_graph(packed).to_json() == graph.to_json(), name
        assert pack_graph(unpack_graph(packed)) == pack_graph(graph), name


def test_numbers_come_back_as_they_were() -> None:
    numbers = {"float64": [float("nan"), float("-inf"), -0.0, 0.1, 5e-324], "int64": [2**62 + 1, -3], "bool": [True]}
    for dtype, values in numbers.items():
        for value in values:
            graph = _C.TBGraph()
            y = _C.Tensor(graph.add_buffer("y", "output", 0, 8), dtype, [], [])
            program = _C.Program([])
            program.emit("store", dtype, [program.emit("const", dtype, imm=value)], operand=0)
            graph.add_node("pointwise", [("out0", y, False, True)], {}, program)
            again = unpack_graph(json.loads(json.dumps(pack_graph(graph))))
            assert repr(again.nodes[0].program.instrs[0].imm) == repr(value)
