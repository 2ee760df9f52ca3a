"""The recorded graphs are scheduled as they were. A change that is meant is recorded: ``replay.py --accept``."""

from __future__ import annotations

import pytest

from tests.schedule import replay
from tests.schedule.decoder_graph import decoder
from tests.schedule.replay import SCHEDULES
from torch_mpk import _C


@pytest.fixture(scope="module")
def graphs() -> dict[str, _C.TBGraph]:
    return replay.recorded_graphs()


def test_recorded_graphs_are_scheduled_as_they_were(graphs: dict[str, _C.TBGraph]) -> None:
    found = list(replay.differences(replay.read(SCHEDULES), replay.make_schedules(graphs), graphs))
    assert not found, "\n".join([*found, "If that is meant: python -m tests.schedule.replay --accept"])


def test_every_model_is_recorded(graphs: dict[str, _C.TBGraph]) -> None:
    zoo = pytest.importorskip("torch_mpk.testing.zoo")
    assert {name.partition(", launch")[0] for name in graphs} >= zoo.MODELS.keys()


def test_a_graph_survives_its_json(graphs: dict[str, _C.TBGraph]) -> None:
    graph = decoder(batch=2, computed_tables=True)
    assert replay.unpack_graph(replay.pack_graph(graph)).to_json() == graph.to_json()
    for recorded in graphs.values():
        assert replay.unpack_graph(replay.pack_graph(recorded)).to_json() == recorded.to_json()


def test_a_difference_is_shown_where_it_is() -> None:
    graph = decoder(layers=1)
    name = "decoder on cuda"
    polled, awaited = (
        {name: _C.make_schedule(graph, _C.Target("cuda", 90, 132, 232448, True, p)).to_json()} for p in (True, False)
    )
    [text] = replay.differences(awaited, polled, {"decoder": graph})
    lines = text.splitlines()
    assert {"-phase 1, which waits for [0]", "+phase 1, which waits for nothing"} <= set(lines)
    assert not any(line.startswith(("-", "+")) and "body" in line for line in lines)
    assert list(replay.differences(polled, polled, {"decoder": graph})) == []
    assert list(replay.differences(polled, {}, {})) == [f"{name}: only before"]
