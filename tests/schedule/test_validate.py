"""Break each property of a sound schedule: the validator must see it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.codegen.programs_graph import long_reductions
from tests.schedule.decoder_graph import Builder, decoder
from tests.schedule.prompt_graph import QWEN3_06B
from tests.schedule.taken_apart import Parts
from torch_mpk import _C


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


# ---- how jobs are cut


SIZES = {"hidden": 4096, "heads": 32, "groups": 8, "head_dim": 128, "ffn": 12288, "vocab": 65536}
CUT = [
    _C.make_schedule(decoder(layers=1, batch=batch, **SIZES), _C.Target("cuda", arch, 132, smem_bytes, True, True))
    for batch, arch, smem_bytes in ((1, 90, 232448), (4, 80, 166912), (4, 90, 232448), (64, 90, 232448))
]


# What is broken, of which part of a job, by which change, and what the validator says. The first job is broken whose
# field the change changes.
BROKEN_CUTS: dict[str, tuple[str, str, Callable, str]] = {
    "an entry larger than a slot": (
        "shape", "tile_rows", lambda n: 8 * n, r"linear \(node .*: an entry of \d+ bytes exceeds a slot of 8192",
    ),
    "a tile too few": ("cut", "num_tiles", lambda n: n - 1, r"\d+ tiles of \d rows do not cover its matrices, \d+ do"),
    "tiles of fewer rows": (
        "shape", "tile_rows", lambda n: max(n - 1, 1), r"\d+ tiles of 1 rows do not cover its matrices, \d+ do",
    ),
    "no rows in a tile": ("shape", "tile_rows", lambda n: 0, "a size of its tiles is not positive"),
    "nothing in flight": ("shape", "in_flight", lambda n: 0, "a size of its tiles is not positive"),
    "parts that nobody combines": (
        "shape", "parts", lambda n: n + 1 if n == 1 else n, "1 parts are combined, but a tile has 2",
    ),
    "parts that are not combined": (
        "shape", "parts", lambda n: 1, "2 parts are combined, but a tile has 1",
    ),
    "an entry with a part too many": (
        "shape", "chunk_parts", lambda n: n + 1, r"\d parts are combined, but a tile has \d, \d to an entry",
    ),
    "rows longer than the matrix has": (
        "shape", "row_bytes", lambda n: n + 16, "rows of 8208 bytes are not those of buffer 'layers.0.q.weight'",
    ),
    "a chunk that is no multiple of 16 bytes": (
        "shape", "chunk_bytes", lambda n: n - 8, "cannot be copied 16 bytes at a time",
    ),
    "a chunk longer than a row": (
        "shape", "chunk_bytes", lambda n: n + 16, "chunks of 8208 bytes of rows of 8192 cannot be copied",
    ),
    "runs that do not make a tile": ("shape", "run", lambda n: 7, r"runs of 7 do not make a tile of \d entries"),
    "a box of a row too few for the copy engine": (
        "shape", "tile_rows", lambda n: n - 1 if n == 8 else n, r"\(node .*: a box of 7 rows of 1024 bytes is none",
    ),
    "a box of columns that are no multiple of 64": (
        "shape", "chunk_bytes", lambda n: 1040 if n == 1024 else n, "a box of 8 rows of 1040 bytes is none",
    ),
    "workers that share tiles and have unequal parts of them": (
        "fields", "split", lambda n: 3 if n > 1 else n, "3 workers share tiles, but their parts are not equal",
    ),
    "sums of workers that share tiles, and more than have a place": (
        "scratch", "bytes", lambda n: n - 16, r"its workers leave \d+ bytes in the workspace, which has \d+ bytes for",
    ),
    "fields of another kernel": ("cut", "kernel", lambda _: "linear.tiles", "its tiles have no rows of x"),
    "a kernel of another task": ("cut", "kernel", lambda _: "reduce", "it has no kernel 'reduce'"),
    "a kernel that nobody has": ("cut", "kernel", lambda _: "linear.none", "it has no kernel 'linear.none'"),
    "boxes that more warps read than multiply": (
        "shape", "readers", lambda n: 8 if n == 4 else n, "8 of 11 consumers read an entry",
    ),
    "a ticket too few": (
        "tickets", "drawn", lambda n: n - 1 if n else n, r"\d+ tickets of \d+ are not those of \d+ tiles",
    ),
    "a ticket too many of each worker": (
        "tickets", "own", lambda n: n + 1 if n else n, r"\d+ tickets of \d+ are not those of \d+ tiles",
    ),
    "tickets of no tiles": ("tickets", "size", lambda n: 0, "its tiles are drawn, but there are no tickets"),
    "tickets that nobody draws": (
        "", "assignment", lambda _: "static", "tiles are dealt out beforehand, but there are tickets",
    ),
    "drawn without tickets": ("", "assignment", lambda _: "claimed", "its tiles are drawn, but there are no tickets"),
    "less staged than there is": (
        "cut", "staged_bytes", lambda n: n - 16 if n else n, r"it stages \d+ bytes in \d+",
    ),
    "a row task in front of what is not staged": (
        "cut", "input", lambda _: "in place", "it reads buffer 'layers.0.input_norm' where it is, but that is polled",
    ),
}  # fmt: skip


def break_first(parts: Parts, part: str, name: str, change: Callable) -> bool:
    for job in parts.jobs("body"):
        cut = job["cut"]
        fields = cut[part] if part in cut else cut if part == "cut" else job[part] if part else job
        if fields is not None and name in fields and change(fields[name]) != fields[name]:
            fields[name] = change(fields[name])
            return True
    return False


@pytest.mark.parametrize(("part", "name", "change", "message"), BROKEN_CUTS.values(), ids=BROKEN_CUTS)
def test_a_broken_cut_is_caught(part: str, name: str, change: Callable, message: str) -> None:
    for schedule in CUT:
        parts = Parts.of(schedule)
        _C.validate(parts.build())
        if break_first(parts, part, name, change):
            break
    with pytest.raises(RuntimeError, match="unsound schedule.*" + message):
        _C.validate(parts.build())


def test_sums_that_would_be_overwritten_are_caught() -> None:
    graph = decoder(layers=1, hidden=64, ffn=4096 * 64)  # down's rows are 64 slots long
    parts = Parts.of(_C.make_schedule(graph, _C.Target("cuda", 90, 132, 232448, True, False)))
    [job] = [job for job in parts.jobs("shape") if job["cut"]["shape"]["row_bytes"] == 4096 * 64 * 2]
    assert not job["cut"]["shape"]["shares_entries"]
    _C.validate(parts.build())
    job["cut"]["shape"]["shares_entries"] = True
    with pytest.raises(RuntimeError, match="the sums of a tile of 64 entries, in runs of 1, may be overwritten"):
        _C.validate(parts.build())


def test_shares_of_a_tile_that_are_not_whole_columns_of_products_are_caught() -> None:
    b = Builder()
    x, w = (b.buffer("input", name, "bfloat16", [rows, 3072]) for name, rows in (("x", 130), ("w", 64)))
    b.node("linear", [("x", x), ("weight", w)], b.buffer("output", "y", "bfloat16", [130, 64]))
    parts = Parts.of(_C.make_schedule(b.graph, _C.Target("cuda", 90, 24, 232448)))
    _C.validate(parts.build())
    [job] = parts.jobs("shape")
    job["cut"]["fields"]["split"] = 6
    with pytest.raises(RuntimeError, match="6 workers share tiles, but not the 32 rows of each, eight at a time"):
        _C.validate(parts.build())


BROKEN_CONVERSIONS: dict[str, tuple[str, str, int, str]] = {
    "rows of x that are no product's": ("shape", "x_rows", 24, "tiles of 24 rows of x are not what 2 warpgroups"),
    "half a block of columns": ("shape", "chunk_bytes", 16, "chunks of 16 bytes are not whole blocks of 64 columns"),
    "entries larger than slots": ("shape", "chunk_bytes", 256, "of 65536 bytes, with x, exceeds a slot of 49152"),
    "unequal parts": ("fields", "split", 3, "3 workers share tiles, but their parts or shares are not equal"),
    "no scratch": ("fields", "split", 1, "its workers leave 0 bytes in the workspace, which has"),
    "no room for strips": ("cut", "staged_bytes", 20479, "it keeps 20480 bytes in 20479"),
}


@pytest.mark.parametrize(("part", "name", "value", "message"), BROKEN_CONVERSIONS.values(), ids=BROKEN_CONVERSIONS)
def test_broken_tiles_of_quantised_weights_are_caught(part: str, name: str, value: int, message: str) -> None:
    b = Builder()
    x = b.buffer("input", "x", "bfloat16", [70, 4096])
    weight = b.buffer("input", "w", "int8", [256, 2048])
    scale, zero = (b.buffer("input", given, "bfloat16", [256, 32]) for given in ("scale", "zero"))
    operands = [("x", x), ("weight", weight), ("weight_scale", scale), ("zero", zero)]
    y = b.buffer("output", "y", "bfloat16", [70, 256])
    b.node("quantized_linear", operands, y, {"block_rows": 1, "block_columns": 128, "x_columns": 0, "scale_block": 0})
    parts = Parts.of(_C.make_schedule(b.graph, _C.Target("cuda", 90, 24, 232448)))
    _C.validate(parts.build())
    [job] = parts.jobs("shape")
    assert job["cut"]["kernel"] == "quantized_linear.tiles" and job["cut"]["fields"]["split"] > 1
    (job["cut"] if part == "cut" else job["cut"][part])[name] = value
    with pytest.raises(RuntimeError, match=message):
        _C.validate(parts.build())


def test_columns_of_rows_that_are_made_in_front_of_each_job_are_caught() -> None:
    parts = Parts.of(_C.make_schedule(decoder(batch=32, ffn=3072), _C.Target("cuda", 90, 132, 232448, True, True)))
    _C.validate(parts.build())
    for job in parts.jobs("shape"):
        if job["prologue"]:
            job["cut"]["input"] = "columns"
    with pytest.raises(RuntimeError, match="its workers stage columns of .*, but do not find them polled"):
        _C.validate(parts.build())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("stage_columns", 1024 + 64, "stages of 1088 columns of x are not what warpgroups multiply"),
        ("epilogue_tiles", 3, "the sums of 3 tiles at a time are not a box of each warpgroup"),
    ],
)
def test_what_warpgroups_cannot_do_is_caught(name: str, value: int, message: str) -> None:
    graph = decoder(batch=64, hidden=1024, heads=4, groups=2, head_dim=32, ffn=640, length=40)
    parts = Parts.of(_C.make_schedule(graph, _C.Target("cuda", 90, 2, 232448)))
    _C.validate(parts.build())
    fields = [job["cut"]["fields"] for job in parts.jobs("shape")]
    next(each for each in fields if each["epilogue_tiles"] < each["mainloop_tiles"])[name] = value
    with pytest.raises(RuntimeError, match=message):
        _C.validate(parts.build())


def test_two_streams_that_draw_from_one_counter_are_caught() -> None:
    b = Builder()
    for name, rows in (("a", 65536), ("b", 64)):
        x, y = b.buffer("input", f"{name}.x", "bfloat16", [1, 4096]), b.buffer("output", name, "bfloat16", [1, rows])
        b.node("linear", [("x", x), ("weight", b.buffer("input", f"{name}.w", "bfloat16", [rows, 4096]))], y)
    parts = Parts.of(_C.make_schedule(b.graph, _C.Target("cuda", 90, 132, 232448)))
    _C.validate(parts.build())
    [large, _] = parts.phases[0][0]
    large |= {"assignment": "claimed", "tickets": {"size": 1, "own": 0, "drawn": large["cut"]["num_tiles"]}}
    with pytest.raises(RuntimeError, match="phase 0 streams several jobs, so none of them can draw tiles"):
        _C.validate(parts.build())


# ---- warps and shared memory


BROKEN_WARPS = {
    "more warps than have the registers": (
        "consumers",
        12,
        "threads of 168 registers, but code needs 168, and 416 threads may have 128",
    ),
    "fewer registers than code needs": ("registers", 128, "threads of 128 registers, but code needs 168"),
    "more registers than there are": ("registers", 176, "384 threads may have 168"),
    "fewer warps than rows to stage": ("consumers", 3, "a split of 4 heads, a key and a value need a warp each"),
    "no consumers": ("consumers", 0, "0 consumers and 1 loaders, expected some and one"),
    "no loader": ("loaders", 0, "11 consumers and 0 loaders, expected some and one"),
    "a slot that is filled by nobody": ("full_arrivals", 32, "full after 32 arrivals, but loaders arrive 1 times"),
    "a slot that every consumer frees": ("empty_arrivals", 11, "empty after 11 arrivals, but 1 of 11 consumers"),
    "more slots than a word has bits": ("max_slots", 33, "a ring of 33 slots, expected 2 to 28"),
    "a ring of one slot": ("max_slots", 1, "a ring of 1 slots, expected 2 to 28"),
    "slots that are not aligned": ("slot_bytes", 8200, "slots of 8200 bytes, expected a multiple of 128 from 8192 on"),
    "slots that leave no room to stage": ("slot_bytes", 110592, "it stages .* bytes, but beside 2 slots of the ring"),
}


@pytest.mark.parametrize(("name", "value", "message"), BROKEN_WARPS.values(), ids=BROKEN_WARPS)
def test_a_broken_layout_of_warps_is_caught(name: str, value: int, message: str) -> None:
    parts = Parts.of(CUT[0])
    _C.validate(parts.build())
    parts.warps[name] = value
    with pytest.raises(RuntimeError, match="unsound schedule: .*" + message):
        _C.validate(parts.build())


def test_without_a_copy_engine_every_lane_arrives() -> None:
    parts = Parts.of(_C.make_schedule(decoder(layers=1), _C.Target("cuda", 80, 108, 166912)))
    _C.validate(parts.build())
    parts.warps["full_arrivals"] = 1
    with pytest.raises(RuntimeError, match="full after 1 arrivals, but loaders arrive 32 times"):
        _C.validate(parts.build())


def test_more_staged_than_leaves_a_ring_is_caught() -> None:
    parts = Parts.of(CUT[0])
    room = 232448 - 4096 - 4 * 1024 - 2 * 8192
    job = parts.jobs("shape")[0]
    job["cut"]["staged_bytes"] = room
    _C.validate(parts.build())
    job["cut"]["staged_bytes"] = room + 16
    with pytest.raises(RuntimeError, match=f"linear .*: it stages {room + 16} bytes, but .* room for {room}"):
        _C.validate(parts.build())


# ---- tiles of queries


AWAITED = _C.Target("cuda", 90, 132, 232448)


def prompt() -> _C.TBGraph:
    """Attention of 70 positions of two sequences, two heads to a group: 140 rows of each."""
    b = Builder()
    shapes = {"q": [2, 70, 4, 64], "k": [2, 2, 100, 64], "v": [2, 2, 100, 64]}
    operands = [(n, b.buffer("input", n, "bfloat16", shape)) for n, shape in shapes.items()]
    y = b.buffer("output", "y", "bfloat16", shapes["q"])
    b.node("prefill_attention", operands, y, {"scale": 0.125, "style": "sdpa"})
    return b.graph


def ragged() -> _C.TBGraph:
    """Attention of 70 tokens of up to three sequences, two heads to a group: 140 rows of each."""
    b = Builder()
    shapes = {"q": [70, 4, 64]} | {key: [70, 2, 64] for key in ("k_new", "v_new")}
    shapes |= {key: [100, 2, 64] for key in ("k_cache", "v_cache")}
    operands = [(n, b.buffer("input", n, "bfloat16", shape)) for n, shape in shapes.items()]
    operands += [("read_index", b.buffer("input", "read_index", "int64", [100]))]
    operands += [(n, b.buffer("input", n, "int32", [4])) for n in ("cu_seq_lens_q", "cu_seq_lens_k")]
    y = b.buffer("output", "y", "bfloat16", shapes["q"])
    rows = [(name, t, True, False) for name, t in operands]
    b.graph.add_node("varlen_attention", [*rows, ("y", y, False, True)], {"scale": 0.125, "window": 0}, None, "")
    return b.graph


BROKEN_RAGGED: dict[str, tuple[str, str, Callable, str]] = {
    "heads of fewer groups": ("fields", "heads", lambda n: 4, "10 tiles of 128 rows do not cover .* 6 do"),
    "rows that no worker takes": ("cut", "num_tiles", lambda n: n - 1, "9 tiles of 128 rows do not cover .* 10 do"),
    "no room for shared keys": ("cut", "staged_bytes", lambda n: n - 1, "its warps take 20480 bytes of 20479"),
    "entries larger than slots": ("fields", "positions", lambda n: 176, "of 50688 bytes does not fit a slot of 49152"),
}


@pytest.mark.parametrize(("part", "name", "change", "message"), BROKEN_RAGGED.values(), ids=BROKEN_RAGGED)
def test_broken_tiles_of_ragged_queries_are_caught(part: str, name: str, change: Callable, message: str) -> None:
    parts = Parts.of(_C.make_schedule(ragged(), AWAITED))
    _C.validate(parts.build())
    assert break_first(parts, part, name, change)
    with pytest.raises(RuntimeError, match="unsound schedule: varlen_attention.*" + message):
        _C.validate(parts.build())


BROKEN_QUERIES: dict[str, tuple[str, str, Callable, str]] = {
    "heads that do not make all": ("fields", "heads", lambda n: 3, "3 heads side by side do not make all"),
    "heads of fewer groups": ("fields", "heads", lambda n: 4, "8 tiles of 128 rows do not cover .* 6 do"),
    "rows for some warps": (
        "fields",
        "rows",
        lambda n: n - 16,
        "112 rows of queries are not 16 for each of some of 8",
    ),
    "half a step of positions": ("fields", "positions", lambda n: n - 8, "120 positions is no box that tensor cores"),
    "no positions": ("fields", "positions", lambda n: 0, "a tile of 0 positions"),
    "entries larger than slots": ("fields", "positions", lambda n: 208, "of 53248 bytes does not fit a slot of 49152"),
    "rows that no worker takes": ("cut", "num_tiles", lambda n: n - 1, "7 tiles of 128 rows do not cover .* 8 do"),
}


@pytest.mark.parametrize(("part", "name", "change", "message"), BROKEN_QUERIES.values(), ids=BROKEN_QUERIES)
def test_broken_tiles_of_queries_are_caught(part: str, name: str, change: Callable, message: str) -> None:
    parts = Parts.of(_C.make_schedule(prompt(), AWAITED))
    _C.validate(parts.build())
    assert break_first(parts, part, name, change)
    with pytest.raises(RuntimeError, match="unsound schedule: prefill_attention.*" + message):
        _C.validate(parts.build())


# ---- quantised weights

LINES = {"hidden": 4096, "heads": 32, "groups": 8, "head_dim": 128, "ffn": 4096, "batch": 4, "layers": 1}
BROKEN_LINES: dict[str, tuple[str, str, Callable, str]] = {
    "a part of a line": ("shape", "chunk_bytes", lambda n: n * 3 // 4, "192 bytes is none that the copy engine copies"),
    "more warps than boxes": ("fields", "lanes", lambda n: 9, "boxes are dealt out to warps that there are not"),
    "a pass of nothing": ("fields", "mainloop_tiles", lambda n: 0, "a pass has no tiles"),
    "no room for sums": ("cut", "staged_bytes", lambda n: n - 1, r"it keeps \d+ bytes in \d+"),
}


@pytest.mark.parametrize(("part", "name", "change", "message"), BROKEN_LINES.values(), ids=BROKEN_LINES)
def test_broken_lines_of_quantised_weights_are_caught(part: str, name: str, change: Callable, message: str) -> None:
    parts = Parts.of(_C.make_schedule(decoder(weights="int4", **LINES), AWAITED))
    _C.validate(parts.build())
    [shape, *_] = (job["cut"]["shape"] for job in parts.jobs("shape") if job["cut"]["kernel"].endswith("columns"))
    assert shape["tile_rows"] * shape["chunk_bytes"] == 8192, "boxes fill slots"
    assert break_first(parts, part, name, change)
    with pytest.raises(RuntimeError, match="unsound schedule: .*" + message):
        _C.validate(parts.build())


# ---- latents


def latents() -> _C.TBGraph:
    """Attention of three rows with the sizes of DeepSeek-V2-Lite."""
    b = Builder()
    shapes = {"q": [3, 16, 512], "q_rope": [3, 16, 64], "latent": [3, 1, 1000, 512], "rope": [3, 1, 1000, 64]}
    operands = [(n, b.buffer("input", n, "bfloat16", shape)) for n, shape in shapes.items()]
    b.node("latent_attention", operands, b.buffer("output", "y", "bfloat16", shapes["q"]), {"scale": 0.1})
    return b.graph


BROKEN_LATENTS: dict[str, tuple[str, str, Callable, str]] = {
    "one tile for all": ("fields", "stages", lambda n: 1, "1 tiles in shared memory are none that its loop takes"),
    "no room for tiles": ("cut", "staged_bytes", lambda n: n - 1, "its tiles take 100544 bytes of 100543"),
    "fewer than lengths may give": ("fields", "splits", lambda n: n - 3, "45 splits are not as many as lengths"),
    "none of a size": ("fields", "split_tiles", lambda n: 0, "a size of its splits is not positive"),
    "no room for results": ("scratch", "bytes", lambda n: n - 1, r"its workers leave \d+ bytes in the workspace"),
}


@pytest.mark.parametrize(("part", "name", "change", "message"), BROKEN_LATENTS.values(), ids=BROKEN_LATENTS)
def test_broken_splits_of_latents_are_caught(part: str, name: str, change: Callable, message: str) -> None:
    parts = Parts.of(_C.make_schedule(latents(), AWAITED))
    _C.validate(parts.build())
    assert break_first(parts, part, name, change)
    with pytest.raises(RuntimeError, match="unsound schedule: latent_attention.*" + message):
        _C.validate(parts.build())


# ---- splits, and what workers leave for each other


POLLED = _C.Target("cuda", 90, 132, 232448, polled=True)
LESS = r"its workers leave \d+ bytes in the workspace, which has \d+ bytes for them"
BROKEN_SPLITS: dict[str, tuple[_C.TBGraph, str, str, Callable, str]] = {
    "fewer than lengths may give": (
        decoder(layers=1), "fields", "splits", lambda n: n - 1, LESS,
    ),
    "none of a size": (decoder(layers=1), "fields", "heads", lambda n: 0, "a size of its splits is not positive"),
    "tiles of which a warp takes a part": (
        decoder(layers=1), "fields", "positions", lambda n: 24,
        "tiles of 24 positions are none that a warp takes from a slot",
    ),
    "tiles that no slot holds": (
        decoder(layers=1, head_dim=128), "fields", "positions", lambda n: 32,
        "tiles of 32 positions are none that a warp takes",
    ),
    "an odd place": (decoder(layers=1), "scratch", "offset", lambda n: n + 8, "not aligned to 16 bytes"),
    "outside the workspace": (decoder(layers=1), "scratch", "offset", lambda n: n + 256, "lie outside the workspace"),
    "before the workspace": (decoder(layers=1), "scratch", "offset", lambda n: -256, "lie outside the workspace"),
    "a row without a last part": (long_reductions(2, 100000), "scratch", "bytes", lambda n: n - 32, LESS),
    "rows in more parts": (long_reductions(2, 100000), "fields", "splits", lambda n: n + 1, LESS),
}  # fmt: skip


@pytest.mark.parametrize(("graph", "part", "name", "change", "message"), BROKEN_SPLITS.values(), ids=BROKEN_SPLITS)
def test_broken_splits_are_caught(graph: _C.TBGraph, part: str, name: str, change: Callable, message: str) -> None:
    parts = Parts.of(_C.make_schedule(graph, AWAITED))
    _C.validate(parts.build())
    assert break_first(parts, part, name, change)
    with pytest.raises(RuntimeError, match="unsound schedule.*" + message):
        _C.validate(parts.build())


@pytest.mark.parametrize(
    ("graph", "name", "value", "num_bytes", "message"),
    [
        (decoder(layers=1), "heads", 3, 132 * 3 * 544, "splits of 3 heads do not make 4"),
        (decoder(layers=1), "splits", 131, 131 * 2 * 544, "131 splits are fewer than lengths at run time may give"),
        (long_reductions(2, 100000), "splits", 67, 67 * 2 * 32, "134 parts of rows are more than 132 workers"),
    ],
)
def test_splits_that_do_not_make_the_whole_are_caught(
    graph: _C.TBGraph, name: str, value: int, num_bytes: int, message: str
) -> None:
    """With as many bytes in the workspace as they would leave."""
    parts = Parts.of(_C.make_schedule(graph, AWAITED))
    cut = next(job["cut"] for job in parts.jobs("scratch"))
    cut["fields"][name], cut["scratch"]["bytes"] = value, num_bytes
    parts.workspace_bytes += 1 << 20
    with pytest.raises(RuntimeError, match=message):
        _C.validate(parts.build())


def scratch_of(parts: Parts) -> list[dict]:
    return [job["cut"]["scratch"] for job in parts.jobs("scratch")]


def test_scratch_over_a_live_buffer_is_caught() -> None:
    schedule = _C.make_schedule(decoder(layers=1, batch=2), AWAITED)
    parts = Parts.of(schedule)
    scratch, names = scratch_of(parts)[0], [buffer.name for buffer in schedule.graph.buffers]
    parts.workspace_bytes += 1 << 20
    scratch["offset"] = parts.offsets[names.index("layers.0.q")]
    with pytest.raises(
        RuntimeError, match="what workers leave of attention .* and buffer 'layers.0.q' share workspace"
    ):
        _C.validate(parts.build())


def test_jobs_of_a_phase_do_not_share_scratch() -> None:
    parts = Parts.of(_C.make_schedule(long_reductions(2, 100000), AWAITED))
    first, second, *_ = scratch_of(parts)
    second["offset"] = first["offset"]
    message = "what workers leave of reduce .* and what workers leave of reduce .* share workspace"
    with pytest.raises(RuntimeError, match=message):
        _C.validate(parts.build())


def test_scratch_is_used_again_only_behind_an_event() -> None:
    parts = Parts.of(_C.make_schedule(decoder(layers=2), AWAITED))
    first, second = scratch_of(parts)
    assert first["offset"] == second["offset"]
    _C.validate(parts.build())
    parts = Parts.of(_C.make_schedule(decoder(layers=2), POLLED))
    first, second = scratch_of(parts)
    second["offset"] = first["offset"]
    with pytest.raises(RuntimeError, match="what workers leave of attention .* share workspace while both are needed"):
        _C.validate(parts.build())


# ---- norms that end jobs


def with_split_norms() -> Parts:
    schedule = _C.make_schedule(
        decoder(batch=64, hidden=1024, ffn=256, layers=2), _C.Target("cuda", 90, 132, 232448, polled=True)
    )
    _C.validate(schedule)
    return Parts.of(schedule)


def test_sums_of_rows_without_a_place_for_each_are_caught() -> None:
    parts = with_split_norms()
    parts.jobs("row_sums")[0]["cut"]["row_sums"]["count"] -= 1
    with pytest.raises(RuntimeError, match="workers leave 132 sums of a row, but 131 have a place"):
        _C.validate(parts.build())
    parts = with_split_norms()
    first, second, *_ = (job["cut"]["row_sums"] for job in parts.jobs("row_sums"))
    second["offset"] = first["offset"]
    with pytest.raises(RuntimeError, match="the sums of rows of .* and the sums of rows of .* share workspace"):
        _C.validate(parts.build())
    first["offset"] = parts.workspace_bytes
    with pytest.raises(RuntimeError, match="the sums of rows of .* lie outside the workspace"):
        _C.validate(parts.build())


def test_a_norm_that_its_job_does_not_end_with_is_caught() -> None:
    parts = with_split_norms()
    job = parts.jobs("row_sums")[0]
    job["cut"]["row_sums"] = None
    with pytest.raises(RuntimeError, match="rms_norm .* and pointwise .*: no write happens before the read"):
        _C.validate(parts.build())
    parts = with_split_norms()
    job = parts.jobs("row_sums")[0]
    job["epilogue"].reverse()
    with pytest.raises(RuntimeError, match="rms_norm .* stands in an epilogue, but is not the norm that"):
        _C.validate(parts.build())


def test_readers_that_take_rows_for_normed_are_caught() -> None:
    parts = with_split_norms()
    gate = next(job for job in parts.jobs("shape") if job["cut"]["shape"]["parts"] == 2)
    gate["cut"]["input"] = "whole"
    with pytest.raises(RuntimeError, match="is read by linear .*, which does not multiply its results by factors"):
        _C.validate(parts.build())
    parts = with_split_norms()
    norm = next(job["epilogue"][-1] for job in parts.jobs("row_sums"))
    graph = parts.schedule.graph
    made = next(o.tensor.buffer for o in graph.nodes[norm].operands if o.is_write)
    parts.polled[made] = True
    with pytest.raises(RuntimeError, match="rms_norm .* is polled before its rows' squares are added up"):
        _C.validate(parts.build())
    parts = with_split_norms()
    gate = next(job for job in parts.jobs("shape") if job["cut"]["shape"]["parts"] == 2)
    gate["cut"]["kernel"] = "linear.vector"
    with pytest.raises(RuntimeError, match="is read by linear .*, which does not multiply its results by factors"):
        _C.validate(parts.build())


# ---- row tasks that end jobs


def with_rows_behind() -> Parts:
    schedule = _C.make_schedule(QWEN3_06B.graph(), _C.Target("cuda", 90, 132, 232448, polled=True))
    _C.validate(schedule)
    return Parts.of(schedule)


def test_tiles_without_whole_rows_for_the_tasks_behind_are_caught() -> None:
    parts = with_rows_behind()
    [job] = parts.jobs("shape")
    job["cut"]["shape"]["tile_rows"], job["cut"]["num_tiles"] = 64, 2 * job["cut"]["num_tiles"]
    with pytest.raises(RuntimeError, match="its tiles of 64 rows, shared by 1, have no whole rows of 128"):
        _C.validate(parts.build())


def test_rows_that_are_stored_besides_are_caught() -> None:
    parts = with_rows_behind()
    [job] = parts.jobs("shape")
    graph = parts.schedule.graph
    q = next(i for i, b in enumerate(graph.buffers) if b.name == "q")
    job["unstored"].remove(q)
    parts.offsets[q] = parts.workspace_bytes
    parts.workspace_bytes += graph.buffers[q].bytes
    with pytest.raises(RuntimeError, match="buffer 'q' is needed besides the rows made of it"):
        _C.validate(parts.build())


def test_row_tasks_that_do_not_follow_each_other_are_caught() -> None:
    parts = with_rows_behind()
    [job] = parts.jobs("shape")
    job["epilogue"].reverse()
    with pytest.raises(RuntimeError, match="no write happens before the read"):
        _C.validate(parts.build())
    parts = with_rows_behind()
    [job] = parts.jobs("shape")
    labels = {n.label: n.id for n in parts.schedule.graph.nodes}
    job["epilogue"].remove(labels["q.norm"])
    job["prologue"].append(labels["q.norm"])
    with pytest.raises(RuntimeError, match="no write happens before the read"):
        _C.validate(parts.build())
    parts = with_rows_behind()
    [job] = parts.jobs("shape")
    job["body"].remove(job["body"][-1])
    job["epilogue"].insert(0, labels["v"])
    with pytest.raises(RuntimeError, match="stands in an epilogue, but is neither pointwise, nor a row task, nor"):
        _C.validate(parts.build())
