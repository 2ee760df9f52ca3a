"""What ``python -m torch_mpk graph`` prints."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

from torch_mpk import registry
from torch_mpk.errors import GraphFileError, UnknownTaskError
from torch_mpk.graph_view.reader import GraphFile, Node, Operand

_NUM_LARGEST = 5


def summary(file: GraphFile) -> str:
    return "\n".join(_summary(file))


def _summary(file: GraphFile) -> Iterator[str]:
    yield f"{file.path}: {count(file.nodes, 'node')}, {count(file.edges, 'dependency')}"
    for kind in ("input", "output", "workspace"):
        buffers = [buffer for buffer in file.buffers if buffer.kind == kind]
        if buffers:
            yield f"  {kind}: {count(buffers, 'buffer')}, {size(sum(buffer.bytes for buffer in buffers))}"
    if file.target is not None:
        jobs = [job for phase in file.phases for job in phase.jobs]
        events = sorted({event for phase in file.phases for event in phase.waits})
        yield f"  target: {describe(file.target)}"
        yield (
            f"  schedule: {count(file.phases, 'phase')}, {count(jobs, 'job')}, {count(events, 'event')} waited for, "
            f"workspace {size(file.workspace_bytes)}"
        )
    rows = [("task", "nodes", "bytes")]
    names = sorted({node.task for node in file.nodes.values()})
    groups = {name: [node for node in file.nodes.values() if node.task == name] for name in names}
    for name, nodes in sorted(groups.items(), key=lambda item: -sum(node.bytes for node in item[1])):
        rows.append((name, str(len(nodes)), size(sum(node.bytes for node in nodes))))
    yield from ("", *_table(rows))
    largest = sorted(file.nodes.values(), key=lambda node: -node.bytes)[:_NUM_LARGEST]
    if largest and largest[0].bytes:
        yield from ("", "largest nodes:", *_table([(f"  {node}", size(node.bytes)) for node in largest]))


def task(file: GraphFile, name: str) -> str:
    """Every node whose number or task is ``name``, or whose label contains it.

    Raises:
        GraphFileError: there is none.
    """
    nodes = list(file.nodes.values())
    found = [node for node in nodes if name in (node.task, str(node.id))]
    found = found or [node for node in nodes if name and name in node.label]
    if not found:
        names = sorted({node.task for node in nodes} | {node.label for node in nodes if node.label})
        close = difflib.get_close_matches(name, names, n=3)
        known = f"did you mean {' or '.join(close)}?" if close else f"tasks are {_known(nodes)}"
        raise GraphFileError(path=file.path, what=f"no task or label is {name!r}: {known}")
    return "\n\n".join("\n".join(_describe(file, node)) for node in found)


def _known(nodes: Iterable[Node]) -> str:
    return ", ".join(sorted({node.task for node in nodes})) or "none"


def _describe(file: GraphFile, node: Node) -> Iterator[str]:
    phases = ", ".join(map(str, file.phases_of(node.id)))
    yield f"{node}{f' (phase {phases})' if phases else ''}{f', {size(node.bytes)}' if node.bytes else ''}"
    for operand in node.operands:
        buffer = file.buffers[operand.buffer]
        access = "updates" if operand.is_read and operand.is_write else "writes" if operand.is_write else "reads"
        strides = f" strides {list(operand.strides)}"
        yield f"  {access:7} {operand}{strides} of {buffer.kind} {buffer.name!r}{_tile(node, operand)}"
    for name, value in node.attrs.items():
        yield f"  {name} = {value!r}"
    for phase in file.phases:
        for job in phase.jobs:
            if node.id in job.body:
                tiles = f"{count(range(job.tiles), 'tile')}, {job.assignment}"
                yield f"  cut    {', '.join(filter(None, [tiles, job.stream, job.kernel and f'by {job.kernel}']))}"
    for title, pairs in (
        ("after", [(edge.source, edge) for edge in file.edges if edge.target == node.id]),
        ("before", [(edge.target, edge) for edge in file.edges if edge.source == node.id]),
    ):
        for other, edge in pairs:
            yield f"  {title:7}{file.nodes[other]} ({edge.hazard} of {file.buffers[edge.buffer].name!r})"
    if node.program:
        yield from (f"  {line}" for line in node.program.rstrip().splitlines())


def _tile(node: Node, operand: Operand) -> str:
    """What a tile has of an operand, by the task's declaration: the part of each dimension along which the task is cut,
    and all of the others."""
    try:
        task = registry.get(node.task)
    except UnknownTaskError:  # of another process, or a program's
        return ""
    spec = next((each for each in (*task.inputs, *task.outputs) if each.name == operand.name), None)
    if spec is None or task.role not in ("tile", "row"):
        return ""
    cut = task.tile if task.role == "tile" else {"...": 1, task.inputs[0].dims[0]: 1}
    named = [dim for dim in spec.dims if dim != "..."]
    leading = len(operand.shape) - len(named)
    sizes = [1] * leading + [min(cut.get(dim, size), size) for dim, size in zip(named, operand.shape[leading:])]
    return "" if sizes == [*operand.shape] else f", tile {sizes}"


def event(file: GraphFile, number: int) -> str:
    """Who signals event ``number``, which ends the phase of that number, and who waits for it.

    Raises:
        GraphFileError: there is no such phase, or no schedule.
    """
    if not file.phases:
        raise GraphFileError(path=file.path, what="events are in a schedule, and there is none beside this graph")
    if not 0 <= number < len(file.phases):
        what = f"no event {number}: expected 0 to {len(file.phases) - 1}, one for each phase"
        raise GraphFileError(path=file.path, what=what)
    assert file.target is not None
    lines = [f"event {number}: each of {file.target['workers']} workers signals it once, at the end of phase {number}"]
    for job in file.phases[number].jobs:
        names = ", ".join(str(file.nodes[node]) for node in job.nodes)
        lines.append(f"  {count(range(job.tiles), 'tile')}, {job.assignment}: {names}")
        if job.kernel:
            lines.append(f"    by {job.kernel}")
    waiting = [f"phase {i}" for i, phase in enumerate(file.phases) if number in phase.waits]
    loading = [i for i, phase in enumerate(file.phases) if any(number in job.loader_waits for job in phase.jobs)]
    waiting += [f"the loader in phase {i}" for i in loading]
    last = "nobody: it is the last" if number == len(file.phases) - 1 else "nobody: what follows polls its results"
    return "\n".join([*lines, f"  awaited by {', '.join(waiting) or last}"])


def critical_path(file: GraphFile) -> str:
    """The chain of dependent nodes that moves the most bytes.

    Raises:
        GraphFileError: the file has no dependencies, as a schedule alone.
    """
    if not any(node.operands for node in file.nodes.values()):
        raise GraphFileError(path=file.path, what="dependencies are in 4.graph.json, which is not beside this schedule")
    path = file.critical_path()
    total, of = sum(node.bytes for node in path), sum(node.bytes for node in file.nodes.values())
    head = f"critical path: {len(path)} of {count(file.nodes, 'node')}, {size(total)} of {size(of)}"
    return "\n".join([head, *_table([(f"  {node}", size(node.bytes)) for node in path])])


def describe(target: dict[str, Any]) -> str:
    arch = f" sm_{target['arch']}" if target["arch"] else ""
    return f"{target['device']}{arch}, {target['workers']} workers"


def size(num_bytes: int) -> str:
    """Bytes with a unit."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"


def count(items: Sized, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{len(items)} {noun if len(items) == 1 else plural}"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for first, *rest in rows:
        yield "  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:]))])
