"""Reads 4.graph.json and 5.schedule.json, both where there are both."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torch_mpk.capture.provenance import plain_path
from torch_mpk.errors import GraphFileError

CAPTURE, GRAPH, SCHEDULE = "1.capture.txt", "4.graph.json", "5.schedule.json"


@dataclass(frozen=True)
class Buffer:
    name: str
    kind: str  # "input", "output" or "workspace"
    bytes: int


@dataclass(frozen=True)
class Operand:
    name: str
    buffer: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_read: bool
    is_write: bool

    @property
    def bytes(self) -> int:
        return getattr(torch, self.dtype).itemsize * torch.Size(self.shape).numel()

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Node:
    id: int
    task: str
    label: str = ""
    operands: tuple[Operand, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)
    program: str | None = None

    @property
    def bytes(self) -> int:
        """Of what it reads and writes; a gather counts all that it may read."""
        return sum(operand.bytes * (operand.is_read + operand.is_write) for operand in self.operands)

    def __str__(self) -> str:
        return f"{self.id} {self.task}{f' {self.label}' if self.label else ''}"


@dataclass(frozen=True)
class Edge:
    source: int
    target: int
    buffer: int
    hazard: str


@dataclass(frozen=True)
class Job:
    prologue: tuple[int, ...]
    body: tuple[int, ...]
    epilogue: tuple[int, ...]
    tiles: int
    assignment: str
    loader_waits: tuple[int, ...]
    kernel: str = ""  # with what it and the next best are expected to take; empty on the CPU
    stream: str = ""  # how its matrices come through the ring, if they do

    @property
    def nodes(self) -> tuple[int, ...]:
        return self.prologue + self.body + self.epilogue


@dataclass(frozen=True)
class Phase:
    waits: tuple[int, ...]
    jobs: tuple[Job, ...]


@dataclass
class GraphFile:
    """A task graph, its schedule, or both. What a file does not have is empty, and ``target`` None."""

    path: Path
    model: str = ""  # its class, where the capture is beside it
    nodes: dict[int, Node] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    target: dict[str, Any] | None = None
    workspace_bytes: int = 0

    def phases_of(self, node: int) -> list[int]:
        """The phases that run a node; several where it is recomputed."""
        return [i for i, phase in enumerate(self.phases) if any(node in job.nodes for job in phase.jobs)]

    def critical_path(self) -> list[Node]:
        """The chain of dependent nodes that moves the most bytes: what no number of workers makes shorter."""
        total: dict[int, int] = {}
        before: dict[int, int] = {}
        incoming: dict[int, list[int]] = {}
        for edge in self.edges:
            incoming.setdefault(edge.target, []).append(edge.source)
        for node in sorted(self.nodes):  # program order: an edge's source comes first
            sources = incoming.get(node, [])
            best = max(sources, key=total.__getitem__, default=None)
            total[node] = self.nodes[node].bytes + (total[best] if best is not None else 0)
            if best is not None:
                before[node] = best
        path = [max(total, key=total.__getitem__)] if total else []
        while path and path[-1] in before:
            path.append(before[path[-1]])
        return [self.nodes[node] for node in reversed(path)]


def read(path: Path) -> GraphFile:
    """The graph and schedule at ``path``: one of the two files, which brings the other with it, or their folder.

    Raises:
        GraphFileError: there is no such file, or it is something else.
    """
    paths = [path / GRAPH, path / SCHEDULE] if path.is_dir() else [path]
    if path.name in (GRAPH, SCHEDULE):
        paths = [path.with_name(GRAPH), path.with_name(SCHEDULE)]
    found = [p for p in paths if p.is_file()]
    if not found:
        segments = [str(p.parent) for p in sorted(path.rglob(GRAPH))] if path.is_dir() else []
        raise GraphFileError(path=path, what=_absent(path, segments))
    file = GraphFile(path)
    for p in found:
        try:
            content = json.loads(p.read_text())
            if "nodes" in content:
                _read_graph(file, content)
            elif "phases" in content:
                _read_schedule(file, content)
            else:
                raise ValueError("neither nodes nor phases are in it")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            what = f"not a task graph or schedule of torch_mpk ({type(error).__name__}: {error})"
            raise GraphFileError(path=p, what=what) from error
    _read_capture(file, found[0].parent)
    return file


def _read_capture(file: GraphFile, folder: Path) -> None:
    """Inputs by their names in the model, and its class, from what the first stage has left; of a segment, or for
    another device, in a folder above."""
    capture = next((p for p in (each / CAPTURE for each in (folder, *folder.parents[:2])) if p.is_file()), None)
    if capture is None:
        return
    lines = capture.read_text(errors="replace").partition("\n\n")[0].splitlines()
    sources = dict(re.findall(r"^(\w+): .* (L\[.*)$", "\n".join(lines), re.MULTILINE))
    file.model = next((line.removeprefix("model: ") for line in lines if line.startswith("model: ")), "")
    file.buffers = [
        dataclasses.replace(buffer, name=plain_path(sources[buffer.name])) if buffer.name in sources else buffer
        for buffer in file.buffers
    ]


def _absent(path: Path, segments: Sequence[str]) -> str:
    if segments:
        return f"expected {GRAPH} in it, found it in {', '.join(segments)}: name one of them"
    return f"expected {GRAPH} or {SCHEDULE} in it, found neither" if path.is_dir() else "there is no such file"


def _read_graph(file: GraphFile, content: dict[str, Any]) -> None:
    file.buffers = [Buffer(str(b["name"]), str(b["kind"]), int(b["bytes"])) for b in content["buffers"]]
    for n in content["nodes"]:
        operands = tuple(_operand(o) for o in n["operands"])
        program = None if n.get("program") is None else str(n["program"])
        number = int(n["id"])
        file.nodes[number] = Node(number, str(n["task"]), str(n["label"]), operands, dict(n["attrs"]), program)
    for d in content["dependencies"]:
        file.edges.append(Edge(int(d["from"]), int(d["to"]), int(d["buffer"]), str(d["hazard"])))
    if not all(edge.source < edge.target and {edge.source, edge.target} <= file.nodes.keys() for edge in file.edges):
        raise ValueError("a dependency is not between two nodes in program order")
    used = [operand.buffer for node in file.nodes.values() for operand in node.operands]
    if not all(0 <= buffer < len(file.buffers) for buffer in [*used, *(edge.buffer for edge in file.edges)]):
        raise ValueError("a buffer is used that is not listed")


def _operand(o: dict[str, Any]) -> Operand:
    t = o["tensor"]
    shape, strides = _ints(t["shape"]), _ints(t["strides"])
    access = bool(o["read"]), bool(o["write"])
    operand = Operand(str(o["name"]), int(t["buffer"]), str(t["dtype"]), shape, strides, *access)
    _ = operand.bytes  # raises where the dtype is none
    return operand


def _kernel(job: dict[str, Any]) -> str:
    """The kernel of a job, as ``linear.vector (1.49 us; linear.direct 5.97 us)``."""
    if not job.get("kernel"):
        return ""
    others = [other for other in job.get("others", ()) if "cost_ns" in other]
    costs = [f"{job['cost_ns'] / 1e3:.3g} us"] + [f"{o['kernel']} {o['cost_ns'] / 1e3:.3g} us" for o in others[:1]]
    return f"{job['kernel']} ({'; '.join(costs)})"


def _stream(job: dict[str, Any]) -> str:
    """What a tile has of the job's matrices, as ``tiles of 3 rows of weights in entries of 384 bytes``."""
    shape = job.get("shape")
    if not shape:
        return ""
    both = f" and {shape['x_rows']} of x" if shape.get("x_rows") else ""
    entry = (int(shape["chunk_parts"]) * int(shape["tile_rows"]) + int(shape.get("x_rows", 0))) * int(
        shape["chunk_bytes"]
    )
    return f"tiles of {shape['tile_rows']} rows of weights{both} in entries of {entry} bytes"


def _ints(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _read_schedule(file: GraphFile, content: dict[str, Any]) -> None:
    target = content["target"]
    file.target = {name: kind(target[name]) for name, kind in (("device", str), ("arch", int), ("workers", int))}
    file.workspace_bytes = int(content["workspace_bytes"]) + 2 * int(content["polled_bytes"])

    def ids(names: Sequence[str]) -> tuple[int, ...]:
        """Nodes are written as "3 linear layers.0.q_proj"."""
        found = []
        for name in names:
            number, task, *label = name.split(" ", 2)
            file.nodes.setdefault(int(number), Node(int(number), task, " ".join(label)))
            found.append(int(number))
        return tuple(found)

    for p in content["phases"]:
        jobs = [
            Job(
                ids(j["prologue"]),
                ids(j["body"]),
                ids(j["epilogue"]),
                int(j["tiles"]),
                str(j["assignment"]),
                _ints(j["loader_waits"]),
                _kernel(j),
                _stream(j),
            )
            for j in p["jobs"]
        ]
        file.phases.append(Phase(_ints(p["waits"]), tuple(jobs)))
