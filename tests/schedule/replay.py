"""Schedules recorded task graphs and shows what differs from the schedules recorded with them.

``python -m tests.schedule.replay`` compares what this checkout makes of the graphs with ``recorded/schedules.json.xz``.
``--record FILE`` writes what it makes, and ``--against FILE`` compares with such a file: with one of an earlier commit,
the two versions' schedules. ``--accept`` records the new schedules in place of the old ones. ``--graphs`` captures the
graphs anew, which takes minutes: every model of ``torch_mpk.testing.zoo`` in bfloat16, and decoders of real sizes.
"""

from __future__ import annotations

import argparse
import difflib
import json
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.schedule.decoder_graph import decoder
from torch_mpk import _C
from torch_mpk.planning.graph_json import pack_graph, unpack_graph

RECORDED = Path(__file__).parent / "recorded"
GRAPHS, SCHEDULES = RECORDED / "graphs.json.xz", RECORDED / "schedules.json.xz"
TARGETS = {
    "cuda": _C.Target("cuda", 90, 132, 232448, fuse=True, polled=True),
    "cpu": _C.Target("cpu", 0, 8, 0, fuse=False),
}
Schedules = dict[str, str]  # by graph and target: "Qwen3 on cuda"

_QWEN3_8B = {"hidden": 4096, "heads": 32, "groups": 8, "head_dim": 128, "ffn": 12288, "vocab": 151936, "length": 4096}
_QWEN3_06B = {"hidden": 1024, "heads": 16, "groups": 8, "head_dim": 128, "ffn": 3072, "vocab": 151936, "length": 1024}
_DECODERS: dict[str, dict[str, Any]] = {
    "decoder of 8B, 1 row": _QWEN3_8B,
    "decoder of 8B, 4 rows": _QWEN3_8B | {"batch": 4},
    "decoder of 0.6B, 1 row": _QWEN3_06B | {"computed_tables": True},
    "decoder of 0.6B, 16 rows": _QWEN3_06B | {"batch": 16},
    "decoder in float32": {"dtype": "float32", "batch": 3},
}


# ---- graphs ----


def write(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(lzma.compress(json.dumps(content, separators=(",", ":")).encode(), preset=9))


def read(path: Path) -> Any:
    return json.loads(lzma.decompress(path.read_bytes()))


def recorded_graphs() -> dict[str, _C.TBGraph]:
    return {name: unpack_graph(packed) for name, packed in read(GRAPHS).items()}


def capture_graphs() -> dict[str, _C.TBGraph]:
    """Of the models' launches, and of decoders of real sizes."""
    import torch

    from torch_mpk.capture.graph import capture
    from torch_mpk.lowering import lower
    from torch_mpk.partition.segments import partition
    from torch_mpk.patterns import apply
    from torch_mpk.testing.zoo import MODELS, see_graphs

    graphs = {name: decoder(**sizes) for name, sizes in _DECODERS.items()}
    for name, entry in MODELS.items():
        found: list[_C.TBGraph] = []

        def see(gm: torch.fx.GraphModule, inputs: list[Any], found: list[_C.TBGraph] = found) -> None:
            captured = capture(gm, inputs)
            with torch._guards.tracing(None):
                segments = partition(apply(captured.graph_module), min_segment_nodes=1).segments
            found += [lower(segment.gm).graph for segment in segments if segment.ours]

        see_graphs(entry, see, dtype=torch.bfloat16)
        print(f"{name}: {len(found)}", flush=True)
        graphs |= {name if i == 0 else f"{name}, launch {i + 1}": graph for i, graph in enumerate(found)}
    return graphs


# ---- schedules ----


def make_schedules(graphs: dict[str, _C.TBGraph]) -> Schedules:
    made = {}
    for name, graph in graphs.items():
        for device, target in TARGETS.items():
            schedule = _C.make_schedule(graph, target)
            _C.validate(schedule)
            made[f"{name} on {device}"] = schedule.to_json()
    return made


def describe(schedule: str, graph: _C.TBGraph) -> list[str]:
    """A schedule's JSON in lines: its phases and their jobs without what is empty, then the buffers that have a place
    in memory. What the JSON has besides comes first."""
    description, buffers = json.loads(schedule), [buffer.name for buffer in graph.buffers]
    offsets, polled = description.pop("workspace_offsets"), description.pop("polled")
    buffers += [f"added {number}" for number in range(len(offsets) - len(buffers))]  # by rewrites
    phases = description.pop("phases")
    lines = [f"{name}: {_text(value)}" for name, value in description.items()]
    for number, phase in enumerate(phases):
        lines.append(f"phase {number}, which waits for {phase['waits'] or 'nothing'}")
        for job in phase["jobs"]:
            job["unstored"] = [buffers[b] for b in job["unstored"]]
            tiles = f"{job.pop('tiles')} {job.pop('assignment')} tiles"
            lines.append(f"  {tiles}")
            lines += [f"    {part}: {_text(value)}" for part, value in job.items() if value]
    for kind, is_polled in (("workspace", False), ("polled", True)):
        lines.append(f"{kind}:")
        for buffer, offset, each in zip(buffers, offsets, polled, strict=True):
            if offset >= 0 and each == is_polled:
                lines.append(f"  {offset}: {buffer}")
    return lines


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def differences(before: Schedules, after: Schedules, *graphs: dict[str, _C.TBGraph]) -> Iterator[str]:
    """Unified diffs of the schedules that are not the same, and the names of those that only one side has. ``graphs``:
    those of both, or of each."""
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            yield f"{name}: only {'after' if name in after else 'before'}"
        elif before[name] != after[name]:
            model, schedules = name.rpartition(" on ")[0], (before[name], after[name])
            texts = [describe(schedules[i], graphs[min(i, len(graphs) - 1)][model]) for i in range(2)]
            diff = difflib.unified_diff(*texts, f"{name}, before", f"{name}, after", n=2, lineterm="")
            yield "\n".join(diff) or f"{name}: the same, written differently"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, default=SCHEDULES, help="recorded schedules, by default the checkout's")
    parser.add_argument("--record", type=Path, help="write the schedules made now to this file")
    parser.add_argument("--accept", action="store_true", help="record the schedules made now for CI")
    parser.add_argument("--graphs", action="store_true", help="capture the graphs anew")
    args = parser.parse_args()
    graphs_before = recorded_graphs()
    graphs = capture_graphs() if args.graphs else graphs_before
    made = make_schedules(graphs)
    found = list(differences(read(args.against), made, graphs_before, graphs)) if args.against.exists() else []
    for text in found:
        print(text)
    print(f"{len(found)} of {len(made)} schedules differ")
    for path in [args.record] * (args.record is not None) + [SCHEDULES] * args.accept:
        write(path, made)
    if args.graphs and args.accept:
        write(GRAPHS, {name: pack_graph(graph) for name, graph in graphs.items()})
    return bool(found) and not args.accept


if __name__ == "__main__":
    sys.exit(main())
