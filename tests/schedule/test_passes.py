"""What each pass does to a draft, by itself: the draft behind the pass before it, and behind it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.codegen.programs_graph import long_reductions
from tests.schedule.decoder_graph import Builder, decoder
from tests.schedule.prompt_graph import QWEN3_06B, Prompt
from torch_mpk import _C

CUDA = _C.Target("cuda", 90, 132, 232448, fuse=True, polled=True)
UNFUSED = _C.Target("cuda", 90, 132, 232448, fuse=False)
AT = "layers.0."


class Draft:
    """A draft's JSON, with labels for nodes."""

    def __init__(self, graph: _C.TBGraph, last_pass: str, target: _C.Target = CUDA) -> None:
        content = json.loads(_C.draft_schedule(graph, target, last_pass))
        self.nodes = graph.nodes
        self.schedule, self.levels = content["schedule"], content["levels"]
        self.recomputed = [self.nodes[n].label.removeprefix(AT) for n in content["recomputed"]]
        self.jobs = [self.labels(job) for job in content["jobs"] if job["body"]]
        self.phases = [[self.labels(job) for job in phase["jobs"]] for phase in self.schedule["phases"]]

    @staticmethod
    def labels(job: dict) -> dict:
        parts = ("prologue", "body", "epilogue")
        return job | {part: [text.split(" ")[2].removeprefix(AT) for text in job[part]] for part in parts}


def before_and_after(graph: _C.TBGraph, name: str, target: _C.Target = CUDA) -> tuple[Draft, Draft]:
    names = _C.schedule_passes()
    return Draft(graph, names[names.index(name) - 1], target), Draft(graph, name, target)


def parts(jobs: list[dict], *names: str) -> list:
    return [job[names[0]] if len(names) == 1 else tuple(job[name] for name in names) for job in jobs]


def test_every_pass_is_a_file_with_a_test_of_its_own() -> None:
    names = _C.schedule_passes()
    files = (Path(__file__).parents[2] / "csrc" / "schedule" / "passes").glob("*.cpp")
    assert sorted(names) == sorted(file.stem for file in files)
    assert all(f"test_{name}" in globals() for name in names)


def test_an_unknown_pass_is_refused_with_a_list() -> None:
    with pytest.raises(ValueError, match=r"no pass 'fuse'; there are choose_warps, join_runs, "):
        _C.draft_schedule(decoder(layers=1), CUDA, "fuse")


def test_choose_warps() -> None:
    many_rows = decoder(layers=1, batch=65)
    before, after = (Draft(graph, "choose_warps").schedule["warps"] for graph in (decoder(layers=1), many_rows))
    assert "moves_registers" not in before
    assert after["moves_registers"] and after["consumers"] == 8 and after["hands_over_rows"]
    assert "input_norm" not in Draft(many_rows, "find_prologues").recomputed, "the loader reads x where it is"


def test_join_runs() -> None:
    """The core has no kernel of runs; tests/kernels loads one, and looks at what becomes of its nodes."""
    before, after = before_and_after(decoder(layers=1), "join_runs")
    assert before.jobs == after.jobs == []


def test_fuse_epilogues() -> None:
    draft = Draft(decoder(layers=1), "fuse_epilogues")
    fused = [(["o"], ["residual"]), (["gate", "up"], ["act"]), (["down"], ["output"])]
    assert parts(draft.jobs, "body", "epilogue") == fused


def test_group_nodes() -> None:
    before, after = before_and_after(decoder(layers=1), "group_nodes")
    assert parts(after.jobs, "body") == [*parts(before.jobs, "body"), ["q", "k", "v"], ["head"]]


def test_find_prologues() -> None:
    before, after = before_and_after(decoder(layers=1), "find_prologues")
    assert before.recomputed == []
    assert after.recomputed == ["input_norm", "q_norm", "k_norm", "q_rope", "k_rope", "post_norm", "norm"]


def test_find_prologues_leaves_shared_memory_to_the_ring() -> None:
    staged = 64 * 2
    small = _C.Target("cuda", 90, 132, 2 * staged - 1, fuse=True)
    assert "input_norm" in Draft(decoder(layers=1), "find_prologues").recomputed
    assert "input_norm" not in Draft(decoder(layers=1), "find_prologues", small).recomputed


def test_split_norms() -> None:
    sizes = {"layers": 2, "batch": 64, "hidden": 1024, "ffn": 256}
    before, after = before_and_after(decoder(**sizes), "split_norms")
    made = {job["body"][0]: job["epilogue"] for job in after.jobs}
    assert made == {job["body"][0]: job["epilogue"] for job in before.jobs} | {
        "o": ["residual", "post_norm"],
        "down": ["output", "layers.1.input_norm"],
        "layers.1.o": ["layers.1.residual", "layers.1.post_norm"],
        "layers.1.down": ["layers.1.output", "norm"],
    }
    # The first one's rows are the call's. Fewer rows are normed by whoever stages them; float16 may not hold rows
    # without their factors; and factors are for sums of tensor cores.
    for others in ({"batch": 16}, {"dtype": "float16"}, {"dtype": "float32"}, {"hidden": 1056}):
        before, after = before_and_after(decoder(**sizes | others), "split_norms")
        assert before.jobs == after.jobs


def test_split_norms_leaves_rows_that_others_read_normed() -> None:
    b = Builder()
    shapes = {"x": [64, 1024], "w": [1024, 1024], "g": [1024]}
    x, w, g = (b.buffer("input", name, "bfloat16", shape) for name, shape in shapes.items())
    rows, normed = (b.buffer("workspace", name, "bfloat16", [64, 1024]) for name in ("rows", "normed"))
    y, z = (b.buffer("output", name, "bfloat16", [64, 1024]) for name in "yz")
    b.node("linear", [("x", x), ("weight", w)], rows, {}, "first")
    b.node("rms_norm", [("x", rows), ("weight", g)], normed, {"eps": 1e-6, "style": "llama"}, "norm")
    b.node("linear", [("x", normed), ("weight", w)], y, {}, "second")
    assert parts(Draft(b.graph, "split_norms").jobs, "body", "epilogue") == [(["first"], ["norm"]), (["second"], [])]
    b.pointwise("neg", [normed], z, "other")
    assert parts(Draft(b.graph, "split_norms").jobs, "body", "epilogue") == [
        (["norm"], ["other"]),
        (["first"], []),
        (["second"], []),
    ]


def test_few_results_of_rows_without_their_factors() -> None:
    """Another kernel would be cheaper for them, if it multiplied by factors."""
    schedule = _C.make_schedule(
        decoder(batch=12, hidden=5120, ffn=512, vocab=128, layers=1), _C.Target("cuda", 90, 132, 232448, polled=True)
    )
    _C.validate(schedule)
    *_, down, head = [job for phase in schedule.phases for job in phase.jobs if job.cut.kernel.startswith("linear")]
    assert down.cut.row_sums and head.cut.kernel == "linear.rows"


def test_make_single_jobs() -> None:
    before, after = before_and_after(decoder(layers=1), "make_single_jobs")
    assert parts(after.jobs, "body") == [*parts(before.jobs, "body"), ["attention"], ["counters"]]
    unfused = Draft(decoder(layers=1), "make_single_jobs", UNFUSED)
    assert parts(unfused.jobs, "body") == [[node.label.removeprefix(AT)] for node in unfused.nodes]


def test_attach_prologues() -> None:
    before, after = before_and_after(decoder(layers=1), "attach_prologues")
    assert not any(parts(before.jobs, "prologue"))
    expected = {"q": ["input_norm"], "gate": ["post_norm"], "head": ["norm"]}
    expected["attention"] = ["q_norm", "k_norm", "q_rope", "k_rope"]
    assert {job["body"][0]: job["prologue"] for job in after.jobs if job["prologue"]} == expected


def test_end_with_rows() -> None:
    before, after = before_and_after(QWEN3_06B.graph(), "end_with_rows")
    assert parts(before.jobs, "body") == [["k.rope"], ["q", "k", "v"], ["q.rope"]]
    assert parts(after.jobs, "body") == [["q", "k", "v"]]
    assert sorted(after.jobs[0]["epilogue"]) == sorted(["q.norm", "q.rope", "k.norm", "k.rope", "k.write", "v.write"])
    assert after.recomputed == []
    # Of 128 tokens workers share tiles, of which each finishes less than a head; those that have one take longer.
    # And some heads no tile has whole.
    for change in ({"tokens": 128}, {"size": 80}, {"size": 256}, {"size": 4}):
        before, after = before_and_after(replace(QWEN3_06B, **change).graph(), "end_with_rows")
        assert before.jobs == after.jobs


def test_end_with_rows_leaves_rows_that_others_read() -> None:
    """Of what lies between the products and the last rows nothing is stored."""
    for between in ("q", "q.norm"):
        graph = QWEN3_06B.graph()
        b = Builder(graph, num_outputs=1)
        made = next(o.tensor for n in graph.nodes for o in n.operands if o.is_write and n.label == between)
        b.pointwise("neg", [made], b.buffer("output", "other", "bfloat16", made.shape), "other")
        after = Draft(graph, "end_with_rows")
        assert {job["body"][0] for job in after.jobs} >= {"q", "q.rope"}
        assert "k.rope" in after.jobs[0]["epilogue"]


def test_end_with_rows_shares_out_wide_heads_evenly() -> None:
    """A tile of Qwen3-8B has two heads."""
    graph = Prompt(batch=1, tokens=512, heads=32, groups=8, size=128, length=2560, hidden=4096).graph()
    [[job]] = Draft(graph, "choose_kernels").phases
    assert (job["shape"]["tile_rows"], job["fields"]["split"]) == (256, 1)


def test_end_with_tiles() -> None:
    """A norm ends with tiles of its rows, also where another node reads them; a pointwise node does not."""
    b = Builder()
    x, y, z = (b.buffer(kind, kind, "bfloat16", [9, 512]) for kind in ("input", "workspace", "output"))
    b.node("rms_norm", [("x", x)], y, {"eps": 1e-6, "style": "llama"}, "norm")
    b.pointwise("neg", [y], z, "neg")
    for made, label in ((y, "tiles"), (z, "others")):
        results = [
            b.buffer("output", label + d, d, shape)
            for d, shape in (("float8_e4m3fn", [9, 4, 128]), ("float32", [9, 4]))
        ]
        operands = [(name, t, False, True) for name, t in zip(("numbers", "scales"), results)]
        b.graph.add_node("quantise_rows", [("x", b.view(made, [9, 4, 128]), True, False), *operands], {}, None, label)
    before, after = before_and_after(b.graph, "end_with_tiles")
    assert parts(before.jobs, "body", "epilogue") == [(["norm"], ["neg"]), (["tiles"], []), (["others"], [])]
    assert parts(after.jobs, "body", "epilogue") == [(["norm"], ["neg", "tiles"]), (["others"], [])]


def test_assign_levels() -> None:
    before, after = before_and_after(decoder(layers=1), "assign_levels")
    assert before.levels == []
    order = {job["body"][0]: level for job, level in zip(after.jobs, after.levels, strict=True)}
    assert order == {"q": 0, "attention": 1, "o": 2, "gate": 3, "down": 4, "head": 5, "counters": 5}


def test_build_phases() -> None:
    before, after = before_and_after(decoder(layers=1), "build_phases")
    assert before.phases == []
    assert [parts(jobs, "body") for jobs in after.phases[-2:]] == [[["down"]], [["head"], ["counters"]]]
    assert [phase["waits"] for phase in after.schedule["phases"]] == [[], [0], [1], [2], [3], [4]]


def test_count_tiles() -> None:
    graph = decoder(layers=1, batch=2, hidden=1024, vocab=32768)
    after = Draft(graph, "count_tiles")
    counted = {job["body"][0]: job["tiles"] for jobs in after.phases for job in jobs}
    assert counted["q"] == (4 + 2 + 2) * 16
    assert counted["attention"] == 2  # rows of its result
    assert counted["head"] == 32768
    assert counted["counters"] == 1


def test_find_unstored() -> None:
    graph = decoder(layers=1)
    before, after = before_and_after(graph, "find_unstored")
    assert not any(job["unstored"] for jobs in before.phases for job in jobs)
    unstored = {b for jobs in after.phases for job in jobs for b in job["unstored"]}
    assert {graph.buffers[b].name.removeprefix(AT) for b in unstored} == {*after.recomputed, "o", "gate", "up", "down"}


def test_find_loader_waits() -> None:
    b = Builder()
    weight = b.buffer("input", "w", "float32", [8, 8])
    made = b.pointwise("neg", [weight], b.buffer("workspace", "nw", "float32", [8, 8]), "made")
    x = b.buffer("input", "x", "float32", [1, 8])
    y = b.node("linear", [("x", x), ("weight", weight)], b.buffer("workspace", "y", "float32", [1, 8]), {}, "given")
    z = b.buffer("output", "z", "float32", [1, 8])
    b.node("linear", [("x", y), ("weight", made)], z, {}, "computed")
    before, after = before_and_after(b.graph, "find_loader_waits")
    assert not any(job["loader_waits"] for jobs in before.phases for job in jobs)
    waits = {job["body"][0]: job["loader_waits"] for jobs in after.phases for job in jobs}
    assert waits == {"made": [], "given": [], "computed": [0]}


def test_choose_handover() -> None:
    graph = decoder(layers=1)
    before, after = before_and_after(graph, "choose_handover")
    assert not any(before.schedule["polled"])
    polled = {b.name.removeprefix(AT) for b, t in zip(graph.buffers, after.schedule["polled"], strict=True) if t}
    assert {"q", "k", "v", "attended", "residual", "act", "output"} <= polled
    assert "logits" not in polled
    waits = [[phase["waits"] for phase in draft.schedule["phases"]] for draft in (before, after)]
    assert waits == [[[], [0], [1], [2], [3], [4]], [[], [], [], [], [], [4]]]


@pytest.mark.parametrize(
    ("batch", "ffn", "is_polled", "split"),
    [(16, 3072, True, 1), (16, 4096, False, 4), (32, 3072, True, 4), (32, 4096, False, 4)],
)
def test_choose_handover_by_what_each_worker_polls(batch: int, ffn: int, is_polled: bool, split: int) -> None:
    """Of 32 rows workers share tiles, and so the columns of x; their part is as long as all of 16 rows."""
    graph = decoder(layers=1, batch=batch, ffn=ffn, hidden=1024)
    after = Draft(graph, "choose_handover").schedule
    assert [t for b, t in zip(graph.buffers, after["polled"], strict=True) if b.name == AT + "act"] == [is_polled]
    assert by_label(Draft(graph, "choose_kernels"), "fields")["down"]["split"] == split


def test_place_workspace() -> None:
    graph = decoder(layers=3)
    polled, awaited = (Draft(graph, "place_workspace", t) for t in (CUDA, _C.Target("cuda", 90, 132, 232448)))
    stored = [b for b, offset in enumerate(awaited.schedule["workspace_offsets"]) if offset >= 0]
    places = [awaited.schedule["workspace_offsets"][b] for b in stored]
    assert len(set(places)) < len(places)  # of what is over, the bytes are used again
    assert awaited.schedule["workspace_bytes"] < sum(graph.buffers[b].bytes for b in stored)
    places = [p for p, t in zip(polled.schedule["workspace_offsets"], polled.schedule["polled"], strict=True) if t]
    places = [p for p in places if p >= 0]
    assert len(set(places)) == len(places) == polled.schedule["polled_bytes"] // 256  # but not of what is polled


def by_label(draft: Draft, name: str) -> dict:
    return {job["body"][0]: job[name] for jobs in draft.phases for job in jobs}


def test_lay_out_warps() -> None:
    before, after = before_and_after(decoder(layers=1), "lay_out_warps")
    assert before.schedule["warps"]["threads"] == 0
    expected = {"consumers": 11, "loaders": 1, "threads": 384, "registers": 168, "max_slots": 28, "slot_bytes": 8192}
    assert after.schedule["warps"] == expected | {"full_arrivals": 1, "empty_arrivals": 1}
    # Rows of 10 KiB leave three eighths of two slots of 8 KiB empty, and nothing of one of their own length.
    assert Draft(decoder(layers=1, hidden=5120, ffn=5120), "lay_out_warps").schedule["warps"]["slot_bytes"] == 10240
    assert Draft(decoder(layers=1), "lay_out_warps", _C.Target("cpu", fuse=False)).schedule["warps"]["threads"] == 0


def test_choose_staging() -> None:
    graph = decoder(layers=1, batch=8, ffn=8192)
    before, after = before_and_after(graph, "choose_staging")
    assert set(by_label(before, "input").values()) == {None}
    staged = {"q": True, "attention": False, "o": True, "gate": True, "down": False, "head": True, "counters": False}
    assert by_label(after, "input") == {
        name: "whole" if staged[name] else None for name in staged
    }  # of down's input, 128 KiB, the ring would have to make room


def test_choose_kernels() -> None:
    graph = decoder(layers=1, hidden=4096, ffn=12288)
    before, after = before_and_after(graph, "choose_kernels")
    assert not any(by_label(before, "shape").values())
    shapes, tiles = by_label(after, "shape"), by_label(after, "tiles")
    assert shapes["attention"] is None and tiles["q"] == 128
    gate = {"tile_rows": 1, "parts": 2, "chunk_parts": 1, "row_bytes": 8192, "chunk_bytes": 8192, "entries": 2}
    assert shapes["gate"] == gate | {"run": 1, "in_flight": 9, "shares_entries": True}
    assert tiles["gate"] == 12288  # gate's row and up's
    down = shapes["down"]  # rows of 24 KiB
    assert (down["tile_rows"], down["chunk_bytes"], down["entries"], tiles["down"]) == (1, 8192, 3, 4096)
    assert by_label(after, "staged_bytes")["down"] == 24576


def test_choose_kernels_leaves_weights_that_cannot_be_copied() -> None:
    after = Draft(decoder(layers=1, hidden=60, heads=4, head_dim=15), "choose_kernels")  # rows of 120 bytes
    assert by_label(after, "shape")["o"] is None
    assert by_label(after, "kernel")["o"] == "linear.direct"
    assert by_label(after, "input")["o"] == "whole" and by_label(after, "tiles")["o"] == 60


def test_deal_tiles() -> None:
    graph = decoder(layers=1, hidden=4096, vocab=32768)
    before, after = before_and_after(graph, "deal_tiles")
    assert set(by_label(before, "assignment").values()) == {"static"}
    drawn = {label for label, assignment in by_label(after, "assignment").items() if assignment == "claimed"}
    assert drawn == {"head"}  # 256 MiB, more than 40 slots of 8 KiB for each of 132 workers
    tickets, tiles = by_label(after, "tickets"), by_label(after, "tiles")
    assert tickets["o"] is None
    count = tickets["head"]["own"] * 132 + tickets["head"]["drawn"]
    assert (count - 1) * tickets["head"]["size"] < tiles["head"] <= count * tickets["head"]["size"]


def test_deal_tiles_shares_out_two_streams_of_a_phase_beforehand() -> None:
    b = Builder()
    for name in ("a", "b"):
        x = b.buffer("input", f"{name}.x", "bfloat16", [1, 4096])
        weight = b.buffer("input", f"{name}.w", "bfloat16", [32768, 4096])
        y = b.buffer("output", f"{name}.y", "bfloat16", [1, 32768])
        b.node("linear", [("x", x), ("weight", weight)], y, {}, name)
    assert by_label(Draft(b.graph, "deal_tiles"), "assignment") == {"a": "static", "b": "static"}


def test_choose_kernels_leaves_what_cannot_leave_a_ring() -> None:
    small = _C.Target("cuda", 90, 132, 40000, polled=True)
    assert by_label(Draft(decoder(layers=1), "choose_kernels", small), "kernel")["attention"] is None
    schedule = _C.make_schedule(decoder(layers=1), small)
    _C.validate(schedule)
    with pytest.raises(Exception, match="attention .*no way to cut it fits shared memory beside the ring"):
        _C.generate_cuda(schedule)


def test_choose_kernels_splits_keys_and_rows() -> None:
    alone = Draft(decoder(layers=1, heads=16), "choose_kernels")  # two key heads, eight heads for each
    expected = {"heads": 8, "few_heads": 2, "positions": 16, "split_tiles": 0, "few_splits": 1, "splits": 132}
    expected |= {"result_bytes": 8 * 64 + 32, "overlaps": 0}
    assert by_label(alone, "fields")["attention"] == expected
    assert by_label(alone, "scratch")["attention"] == {"bytes": 132 * 8 * (8 * 64 + 32), "offset": -1}
    two = Draft(decoder(layers=1, batch=2, heads=16, length=100), "choose_kernels")
    assert by_label(two, "fields")["attention"] == expected | {"splits": 4, "split_tiles": 8, "few_splits": 33}
    more = Draft(decoder(layers=1, batch=67, heads=4), "choose_kernels")  # groups of two key heads each
    assert by_label(more, "fields")["attention"] == expected | {
        "splits": 134,
        "heads": 2,
        "split_tiles": 20,  # and a row has no more
        "overlaps": 1,
        "positions": 32,  # what fits an entry of the ring
    }
    reductions = json.loads(_C.draft_schedule(long_reductions(2, 100000), CUDA, "choose_kernels"))["schedule"]
    jobs = [job for phase in reductions["phases"] for job in phase["jobs"]]
    assert {job["fields"]["splits"] for job in jobs} == {48}  # of 2,048 elements and more
    assert {job["scratch"]["bytes"] for job in jobs} == {2 * 48 * 32}
    short = json.loads(_C.draft_schedule(long_reductions(2, 4000), CUDA, "choose_kernels"))["schedule"]
    assert not any(job["scratch"] for phase in short["phases"] for job in phase["jobs"])


def test_choose_kernels_into_tiles_of_queries() -> None:
    def cut(size: int, positions: int = 100, arch: int = 90) -> dict:
        b = Builder()
        shapes = {"q": [1, positions, 6, size], "k": [1, 2, 300, size], "v": [1, 2, 300, size]}
        operands = [(name, b.buffer("input", name, "bfloat16", shape)) for name, shape in shapes.items()]
        y = b.buffer("output", "y", "bfloat16", shapes["q"])
        b.node("prefill_attention", operands, y, {"scale": 0.1, "style": "sdpa"}, "attention")
        [[job]] = Draft(b.graph, "choose_kernels", _C.Target("cuda", arch, 132, 232448)).phases
        return job

    # Of two groups 300 rows each, or more; keys and values of a tile are 32 KiB.
    assert (cut(64)["fields"], cut(64)["tiles"]) == ({"heads": 3, "rows": 128, "positions": 128}, 2 * 3)
    assert (cut(128)["fields"], cut(128)["tiles"]) == ({"heads": 3, "rows": 64, "positions": 64}, 2 * 5)
    assert [cut(128, n)["fields"]["rows"] for n in (64, 65, 192, 193, 704, 705, 1408, 1409)] == [
        *(128, 64),  # one tile of keys, or two
        *(64, 32),  # three, or four
        *(32, 64),  # 132 tiles of queries, as many as workers, or 134
        *(64, 128),
    ]
    assert cut(80)["fields"]["heads"] == 3
    assert cut(84)["kernel"] is None and cut(64, arch=80)["kernel"] is None


def test_choose_kernels_of_ragged_sequences() -> None:
    b = Builder()
    shapes = {"q": [300, 6, 128]} | {key: [300, 2, 128] for key in ("k_new", "v_new")}
    shapes |= {key: [500, 2, 128] for key in ("k_cache", "v_cache")}
    rows = [(name, b.buffer("input", name, "bfloat16", shape), True, False) for name, shape in shapes.items()]
    numbers = {"read_index": ("int64", [800]), "cu_seq_lens_q": ("int32", [9]), "cu_seq_lens_k": ("int32", [9])}
    rows += [(name, b.buffer("input", name, *of), True, False) for name, of in numbers.items()]
    y = b.buffer("output", "y", "bfloat16", shapes["q"])
    b.graph.add_node("varlen_attention", [*rows, ("y", y, False, True)], {"scale": 0.1, "window": 0}, None, "attention")
    [[job]] = Draft(b.graph, "choose_kernels", _C.Target("cuda", 90, 132, 232448)).phases
    # Of each of two groups 900 rows: seven tiles that are full, and one that is not at each of nine ends.
    assert (job["fields"], job["tiles"]) == ({"heads": 3, "rows": 128, "positions": 64}, 2 * (7 + 9))


@pytest.mark.parametrize(
    ("batch", "splits"), [(8, (1, 1, 1, 1)), (16, (1, 1, 1, 2)), (32, (2, 4, 1, 4)), (64, (2, 2, 1, 4))]
)
def test_choose_kernels_lets_workers_share_tiles_where_x_is_most_of_what_they_read(batch: int, splits: tuple) -> None:
    after = Draft(
        decoder(layers=1, hidden=4096, heads=32, groups=8, head_dim=128, ffn=12288, batch=batch), "choose_kernels"
    )
    fields = by_label(after, "fields")
    assert tuple(fields[name]["split"] for name in ("q", "o", "gate", "down")) == splits
    assert (by_label(after, "scratch")["down"] is not None) == (splits[-1] > 1)


def test_choose_kernels_takes_high_boxes_of_many_rows() -> None:
    """Of 128,256 rows boxes of 8 are shared out the most evenly, but are eight times as many chunks as ones of 64."""
    after = Draft(decoder(layers=1, hidden=2048, vocab=128256, batch=64), "choose_kernels")
    shape, fields = by_label(after, "shape")["head"], by_label(after, "fields")["head"]
    assert (shape["tile_rows"], fields["mainloop_tiles"]) == (32, 4)


def test_place_scratch_keeps_sums_of_rows_until_they_are_read() -> None:
    after = Draft(decoder(layers=2, batch=64, hidden=1024, ffn=256), "place_scratch")
    sums = [job["row_sums"] for jobs in after.phases for job in jobs if job.get("row_sums")]
    assert [each["count"] for each in sums] == [132] * 4
    post_norm, next_input_norm, next_post_norm, last = (each["offset"] for each in sums)
    assert post_norm != next_input_norm, "gate reads the ones while down makes the others"
    assert (next_post_norm, last) == (post_norm, next_input_norm)


def test_place_scratch() -> None:
    before, after = before_and_after(decoder(layers=2), "place_scratch", _C.Target("cuda", 90, 132, 232448))
    scratch = [job["scratch"] for jobs in after.phases for job in jobs if job["scratch"]]
    begin = before.schedule["workspace_bytes"]
    assert [each["offset"] for each in scratch] == [begin, begin]  # behind an event nobody polls the first any more
    assert after.schedule["workspace_bytes"] == begin + 132 * 2 * (8 * 64 + 32)
    polled = Draft(decoder(layers=2), "place_scratch")  # without events in between each has its own
    scratch = [job["scratch"] for jobs in polled.phases for job in jobs if job["scratch"]]
    assert scratch[0]["offset"] != scratch[1]["offset"]
