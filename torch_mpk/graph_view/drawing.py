"""Task graphs as Graphviz sources, SVG, and as a page to look around in."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from typing import Any

from torch_mpk.errors import GraphFileError
from torch_mpk.graph_view.reader import GraphFile, Node
from torch_mpk.graph_view.text import count, describe, size

_FLOW = "read after write"  # the hazard that hands values over; the others only order


def to_dot(file: GraphFile) -> str:
    """Nodes in a box for each phase, solid edges where values go, dashed ones for order alone."""
    lines = ["digraph tasks {", "  node [shape=box, style=filled, fillcolor=white, fontname=Helvetica, fontsize=10];"]
    first = {node: phases[0] for node in file.nodes if (phases := file.phases_of(node))}
    for i in range(len(file.phases)):
        lines += [f"  subgraph cluster_{i} {{", f'    label="phase {i}"; style=filled; color=gray93;']
        lines += [f"    {node};" for node, phase in first.items() if phase == i]
        lines += ["  }"]
    for node in file.nodes.values():
        lines.append(f"  {node.id} [label={_quote(_caption(node))}];")
    kinds: dict[tuple[int, int], bool] = {}
    for edge in file.edges:
        pair = (edge.source, edge.target)
        kinds[pair] = kinds.get(pair, False) or edge.hazard == _FLOW
    lines += [
        f"  {source} -> {target}{'' if flows else ' [style=dashed]'};" for (source, target), flows in kinds.items()
    ]
    return "\n".join([*lines, "}"]) + "\n"


def _caption(node: Node) -> str:
    results = [f"[{', '.join(map(str, operand.shape))}]" for operand in node.operands if operand.is_write]
    return "\n".join(filter(None, (f"{node.id} {node.task}", node.label, " ".join(results))))


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def to_svg(file: GraphFile) -> str:
    """``to_dot`` drawn by Graphviz.

    Raises:
        GraphFileError: Graphviz is not installed, or fails.
    """
    program = shutil.which("dot")
    if program is None:
        what = "an SVG needs Graphviz, whose 'dot' is not in PATH: install graphviz, or use --html, which needs nothing"
        raise GraphFileError(path=file.path, what=what)
    done = subprocess.run([program, "-Tsvg"], input=to_dot(file), capture_output=True, text=True)
    if done.returncode != 0:
        raise GraphFileError(path=file.path, what=f"dot failed: {done.stderr.strip()}")
    return done.stdout


def to_html(file: GraphFile) -> str:
    """One page with everything in it: phases from top to bottom, to pan, zoom, search and click in."""
    data = json.dumps(_page_data(file)).replace("<", "\\u003c")  # so that no text ends the script element
    return files(__package__).joinpath("page.html").read_text().replace("/*DATA*/null", data)


def _page_data(file: GraphFile) -> dict[str, Any]:
    def node(n: Node) -> dict[str, Any]:
        operands = [
            {
                "name": o.name,
                "type": f"{o.dtype}[{', '.join(map(str, o.shape))}]",
                "access": ("read" if o.is_read else "") + ("write" if o.is_write else ""),
                "buffer": f"{file.buffers[o.buffer].kind} {file.buffers[o.buffer].name}",
            }
            for o in n.operands
        ]
        return {
            "id": n.id, "task": n.task, "label": n.label, "operands": operands, "attrs": n.attrs, "program": n.program,
            "size": size(n.bytes), "bytes": n.bytes,
        }  # fmt: skip

    return {
        "title": " of ".join(filter(None, [file.model, str(file.path)])),
        "target": describe(file.target) if file.target else "no schedule",
        "nodes": [node(n) for n in file.nodes.values()],
        "edges": [
            {
                "source": e.source,
                "target": e.target,
                "flows": e.hazard == _FLOW,
                "bytes": file.buffers[e.buffer].bytes,
                "why": f"{e.hazard}: {file.buffers[e.buffer].name}",
            }
            for e in file.edges
        ],
        "critical": [n.id for n in file.critical_path()] if file.edges else [],
        "scheduled": bool(file.phases),
        "rows": _rows(file),
    }


def _rows(file: GraphFile) -> list[dict[str, Any]]:
    """What stands beside each other: a phase's jobs, or without a schedule the nodes that are equally deep."""
    if file.phases:
        return [
            {
                "name": f"phase {i}",
                "note": f"after {', '.join(map(str, phase.waits))}" if phase.waits else "",
                "jobs": [
                    {
                        "nodes": job.nodes,
                        "body": job.body,
                        "note": ", ".join(filter(None, (count(range(job.tiles), "tile"), job.assignment, job.kernel))),
                    }
                    for job in phase.jobs
                ],
            }
            for i, phase in enumerate(file.phases)
        ]
    depth = dict.fromkeys(file.nodes, 0)
    for edge in sorted(file.edges, key=lambda edge: edge.source):
        depth[edge.target] = max(depth[edge.target], depth[edge.source] + 1)
    levels = [[node for node in file.nodes if depth[node] == i] for i in range(max(depth.values(), default=-1) + 1)]
    return [
        {"name": f"depth {i}", "note": "", "jobs": [{"nodes": [n], "body": [n], "note": ""} for n in level]}
        for i, level in enumerate(levels)
    ]
