"""Break each property of a sound schedule: the validator must see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from decoder_graph import decoder
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torch_mpk import _C


@dataclass
class Parts:
    """A schedule taken apart, to be changed and put together again."""

    schedule: _C.Schedule
    phases: list[tuple[list[dict], list[int]]]
    offsets: list[int]
    workspace_bytes: int
    polled_bytes: int
    polled: list[bool]

    @classmethod
    def of(cls, s: _C.Schedule) -> Parts:
        fields = ("prologue", "body", "epilogue", "loader_waits", "unstored")
        phases = [([{f: list(getattr(j, f)) for f in fields} for j in p.jobs], list(p.waits)) for p in s.phases]
        return cls(s, phases, list(s.workspace_offsets), s.workspace_bytes, s.polled_bytes, list(s.polled))

    def build(self) -> _C.Schedule:
        phases = [_C.Phase([_C.Job(**job) for job in jobs], waits) for jobs, waits in self.phases]
        s = self.schedule
        sizes = self.workspace_bytes, self.polled_bytes
        return _C.Schedule(s.graph, s.target, phases, self.offsets, *sizes, self.polled)

    def jobs(self, part: str) -> list[dict]:
        return [job for jobs, _ in self.phases for job in jobs if job[part]]

    def phases_with(self, condition: Callable[[int], bool]) -> list[int]:
        return [p for p in range(len(self.phases)) if condition(p)]


def pick(draw: st.DrawFn, items: list):
    return draw(st.sampled_from(items))


def drop_node(parts: Parts, draw: st.DrawFn) -> None:
    body = pick(draw, parts.jobs("body"))["body"]
    body.remove(pick(draw, body))


def run_twice(parts: Parts, draw: st.DrawFn) -> None:
    node = pick(draw, pick(draw, parts.jobs("body"))["body"])
    pick(draw, parts.phases)[0].append({**parts.phases[0][0][0], "prologue": [], "epilogue": [], "body": [node]})


def drop_wait(parts: Parts, draw: st.DrawFn) -> None:
    waiting = [waits for _, waits in parts.phases if waits]
    pick(draw, waiting).clear()


def wait_forward(parts: Parts, draw: st.DrawFn) -> None:
    p = pick(draw, list(range(len(parts.phases))))
    parts.phases[p][1].append(pick(draw, list(range(p, len(parts.phases) + 2))))


def swap_phases(parts: Parts, draw: st.DrawFn) -> None:
    p = pick(draw, list(range(len(parts.phases) - 1)))
    (a, wait_a), (b, wait_b) = parts.phases[p], parts.phases[p + 1]
    parts.phases[p], parts.phases[p + 1] = (b, wait_a), (a, wait_b)


def merge_phases(parts: Parts, draw: st.DrawFn) -> None:
    p = pick(draw, list(range(len(parts.phases) - 1)))
    parts.phases[p][0].extend(parts.phases[p + 1][0])
    parts.phases[p + 1] = ([], parts.phases[p + 1][1])


def unstore_what_others_read(parts: Parts, draw: st.DrawFn) -> None:
    edges = {d.source: d.buffer for d in parts.schedule.graph.dependencies() if d.hazard == "RAW"}
    jobs = [(j, n) for j in parts.jobs("body") for n in [*j["body"], *j["epilogue"]] if n in edges]
    outside = [(j, edges[n]) for j, n in jobs if edges[n] not in j["unstored"]]
    job, buffer = pick(draw, outside)
    job["unstored"].append(buffer)


def drop_prologue(parts: Parts, draw: st.DrawFn) -> None:
    prologue = pick(draw, parts.jobs("prologue"))["prologue"]
    prologue.remove(pick(draw, prologue))


def body_in_epilogue(parts: Parts, draw: st.DrawFn) -> None:
    job = pick(draw, [j for j in parts.jobs("body") if len(j["body"]) > 1])
    job["epilogue"].insert(0, job["body"].pop())


def epilogue_before_body(parts: Parts, draw: st.DrawFn) -> None:
    job = pick(draw, parts.jobs("epilogue"))
    job["prologue"].append(job["epilogue"].pop())


def overlap_workspace(parts: Parts, draw: st.DrawFn) -> None:
    s = parts.schedule
    live = {}
    for p, (jobs, _) in enumerate(parts.phases):
        for job in jobs:
            for n in [*job["prologue"], *job["body"], *job["epilogue"]]:
                for o in s.graph.nodes[n].operands:
                    if parts.offsets[o.tensor.buffer] >= 0 and o.tensor.buffer not in job["unstored"]:
                        live.setdefault(o.tensor.buffer, set()).add(p)
    spans = {b: range(min(ps), max(ps) + 1) for b, ps in live.items()}
    polled = parts.polled
    pairs = [(a, b) for a in spans for b in spans if a < b and polled[a] == polled[b]]
    a, b = pick(draw, [(a, b) for a, b in pairs if polled[a] or set(spans[a]) & set(spans[b])])
    parts.offsets[a] = parts.offsets[b]


def outside_workspace(parts: Parts, draw: st.DrawFn) -> None:
    b = pick(draw, [b for b, o in enumerate(parts.offsets) if o >= 0])
    parts.offsets[b] = pick(draw, [-256, parts.polled_bytes if parts.polled[b] else parts.workspace_bytes])


def await_what_is_polled(parts: Parts, draw: st.DrawFn) -> None:
    nodes = parts.schedule.graph.nodes
    polled = {
        o.tensor.buffer
        for jobs, waits in parts.phases
        for job in jobs
        for n in [*job["prologue"], *job["body"]]
        for o in nodes[n].operands
        if o.is_read and not waits and parts.polled[o.tensor.buffer] and parts.offsets[o.tensor.buffer] >= 0
    }
    assume(polled)
    parts.polled[pick(draw, sorted(polled))] = False


def poll_what_shares_workspace(parts: Parts, draw: st.DrawFn) -> None:
    spans = [(o, o + b.bytes, i) for i, (o, b) in enumerate(zip(parts.offsets, parts.schedule.graph.buffers)) if o >= 0]
    sharing = [(i, k) for b, e, i in spans for c, f, k in spans if i < k and b < f and c < e and not parts.polled[i]]
    assume(sharing)
    for buffer in pick(draw, sharing):
        parts.polled[buffer] = True


def shrink_workspace(parts: Parts, draw: st.DrawFn) -> None:
    size = pick(draw, [name for name in ("workspace_bytes", "polled_bytes") if getattr(parts, name) > 0])
    setattr(parts, size, getattr(parts, size) - draw(st.integers(256, getattr(parts, size))))


def unknown_node(parts: Parts, draw: st.DrawFn) -> None:
    count = len(parts.schedule.graph.nodes)
    pick(draw, parts.jobs("body"))["body"].append(pick(draw, [-1, count, count + 7]))


def job_without_body(parts: Parts, draw: st.DrawFn) -> None:
    pick(draw, pick(draw, parts.phases)[0])["body"].clear()


def delay_phase(parts: Parts, draw: st.DrawFn) -> None:
    parts.phases.append(parts.phases.pop(pick(draw, range(len(parts.phases) - 1))))


MUTATIONS = [
    await_what_is_polled, poll_what_shares_workspace, shrink_workspace, unknown_node, job_without_body, delay_phase,
    drop_node, run_twice, drop_wait, wait_forward, swap_phases, merge_phases, unstore_what_others_read, drop_prologue,
    body_in_epilogue, epilogue_before_body, overlap_workspace, outside_workspace,
]  # fmt: skip

SCHEDULES = [
    _C.make_schedule(decoder(layers=layers, batch=batch), _C.Target("cuda", 90, 132, 232448, True, polled))
    for polled, sizes in ((False, [(1, 1), (2, 3), (4, 1), (3, 8)]), (True, [(3, 1), (2, 2)]))
    for layers, batch in sizes
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_broken_schedule_is_caught(mutate, data) -> None:
    parts = Parts.of(data.draw(st.sampled_from(SCHEDULES)))
    _C.validate(parts.build())
    mutate(parts, data.draw)
    with pytest.raises(RuntimeError, match="unsound schedule"):
        _C.validate(parts.build())


def test_a_loader_that_does_not_wait_is_caught() -> None:
    graph = decoder(layers=1)
    program = _C.Program([1])
    limit = next(b for b, buffer in enumerate(graph.buffers) if buffer.name == "limit")
    value = program.emit("load", "int64", operand=0, strides=[1])
    program.emit("store", "int64", [value], operand=0, strides=[1])
    rewritten = _C.TBGraph()  # the same graph, but its first node rewrites `limit`
    for b in graph.buffers:
        rewritten.add_buffer(b.name, b.kind, b.index, b.bytes)
    rewritten.add_node("pointwise", [("in0", _C.Tensor(limit, "int64", [1], [1]), True, True)], {}, program, "limit")
    for n in graph.nodes:
        operands = [(o.name, o.tensor, o.is_read, o.is_write) for o in n.operands]
        rewritten.add_node(n.task, operands, n.attrs, n.program, n.label)
    parts = Parts.of(_C.make_schedule(rewritten, _C.Target("cuda", 90, 132, 232448, True)))
    _C.validate(parts.build())
    for job in parts.jobs("loader_waits"):
        job["loader_waits"].clear()
    with pytest.raises(RuntimeError, match="the loader of attention .* may read buffer 'limit'"):
        _C.validate(parts.build())
