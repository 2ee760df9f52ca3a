"""Timelines as ``torch_mpk.profile`` writes them, read and checked."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Track:
    """A thread of the file. Slices are (begin, end, name, args), times in nanoseconds. ``spans``: the same as viewers
    read them, in microseconds, which are floats."""

    process: str
    name: str
    slices: list[tuple[int, int, str, dict[str, Any]]] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)

    def of(self, *names: str) -> list[tuple[int, int, str, dict[str, Any]]]:
        return [each for each in self.slices if each[2] in names]


def read_tracks(path: Path) -> dict[str, Track]:
    """The tracks of a file of one process, by name, in their order. Fails where it is not what a viewer takes."""
    data = path.read_bytes()
    content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    events = content["traceEvents"]
    [process] = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    tracks = {e["tid"]: Track(process, e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    for event in events:
        if event["ph"] == "M":
            continue
        assert event["ph"] == "X" and event["pid"] == 1
        begin, duration = (round(1000 * event[key]) for key in ("ts", "dur"))
        assert begin >= 0 and duration >= 0
        track = tracks[event["tid"]]
        track.slices.append((begin, begin + duration + 1, event["name"], event.get("args", {})))
        track.spans.append((event["ts"], event["ts"] + event["dur"]))
    for track in tracks.values():
        check_nesting(track)
    return {track.name: track for track in tracks.values()}


def check_nesting(track: Track) -> None:
    """Slices come in order, and lie within each other or apart."""
    open_ends: list[float] = []
    last = 0.0
    for (begin, end), (*_, name, _) in zip(track.spans, track.slices, strict=True):
        assert begin >= last, f"{track.name}: {name} begins before the slice in front of it"
        last = begin
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], f"{track.name}: {name} ends behind the slice it began in"
        open_ends.append(end)
