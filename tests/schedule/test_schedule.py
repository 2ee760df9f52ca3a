"""What the scheduler fuses, and that the validator accepts every schedule it makes."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codegen.chips import CHIPS
from tests.schedule.decoder_graph import Builder, decoder
from tests.schedule.prompt_graph import Prompt
from tests.schedule.taken_apart import Parts
from torch_mpk import _C
from torch_mpk.testing import reference_vm

CUDA = _C.Target("cuda", 90, 132, 232448, True)
CPU = _C.Target("cpu", 0, 2, 0, False)


def label(schedule: _C.Schedule, nodes: list[int]) -> list[str]:
    return [schedule.graph.nodes[n].label for n in nodes]


def test_a_layer_is_five_phases() -> None:
    schedule = _C.make_schedule(decoder(layers=3), CUDA)
    _C.validate(schedule)
    assert len(schedule.phases) == 5 * 3 + 1
    jobs = [phase.jobs[0] for phase in schedule.phases[:5]]
    parts = [[label(schedule, p) for p in (j.prologue, j.body, j.epilogue)] for j in jobs]
    at = "layers.0."
    assert parts[0] == [[at + "input_norm"], [at + "q", at + "k", at + "v"], []]
    assert parts[1] == [[at + "q_norm", at + "k_norm", at + "q_rope", at + "k_rope"], [at + "attention"], []]
    assert parts[2] == [[], [at + "o"], [at + "residual"]]
    assert parts[3] == [[at + "post_norm"], [at + "gate", at + "up"], [at + "act"]]
    assert parts[4] == [[], [at + "down"], [at + "output"]]
    assert [label(schedule, j.body) for j in schedule.phases[-1].jobs] == [["head"], ["counters"]]


def test_fused_intermediates_are_not_stored() -> None:
    schedule = _C.make_schedule(decoder(layers=1), CUDA)
    names = {schedule.graph.buffers[b].name for p in schedule.phases for j in p.jobs for b in j.unstored}
    at = "layers.0."
    stored = {at + n for n in ("q", "k", "v", "attended", "residual", "act", "output")}
    assert names == {b.name for b in schedule.graph.buffers if b.kind == "workspace"} - stored


@pytest.mark.parametrize("fuse", [True, False])
def test_phases_say_what_they_are_and_what_they_touch(fuse: bool) -> None:
    hidden, ffn, length, groups, head_dim = 64, 96, 40, 2, 16
    graph = decoder(hidden=hidden, ffn=ffn, length=length, groups=groups, head_dim=head_dim, layers=1)
    schedule = _C.make_schedule(graph, _C.Target("cuda", 90, 132, 232448, fuse))
    num_bytes = dict(zip(schedule.phase_names, schedule.phase_bytes, strict=True))
    # Two weights, x, and the results' product; with fusion x before its norm, and the norm's weight; else both results.
    elements = 2 * hidden * ffn + (2 * hidden + ffn if fuse else hidden + 2 * ffn)
    assert num_bytes["linear layers.0.gate, linear layers.0.up"] == 2 * elements
    caches = 2 * 2 * groups * length * head_dim
    attention = num_bytes["attention layers.0.attention"]
    assert caches < attention < 1.5 * caches, "a cache that is read and updated counts once"


def test_a_table_counts_with_the_rows_that_are_looked_up() -> None:
    b = Builder()
    table, row = b.buffer("input", "table", "float32", [1000, 8]), b.buffer("input", "row", "int64", [1])
    out = b.buffer("output", "out", "float32", [1, 8])
    program = _C.Program([1, 8])
    index = program.emit("load", "int64", operand=1, strides=[0, 0])
    place = program.emit("mul", "int64", [index, program.emit("const", "int64", imm=8)])
    value = program.emit("load", "float32", [place], operand=0, strides=[0, 1])
    program.emit("store", "float32", [value], operand=2, strides=[8, 1])
    operands = [("in0", table, True, False), ("in1", row, True, False), ("out0", out, False, True)]
    b.graph.add_node("pointwise", operands, {}, program, "lookup")
    schedule = _C.make_schedule(b.graph, _C.Target("cpu", fuse=False))
    assert (schedule.phase_names, schedule.phase_bytes) == (["pointwise lookup"], [8 * 4 + 8 + 8 * 4])


def test_without_fusion_every_node_is_a_job() -> None:
    schedule = _C.make_schedule(decoder(), CPU)
    _C.validate(schedule)
    jobs = [job for phase in schedule.phases for job in phase.jobs]
    assert sorted(n for j in jobs for n in j.body) == list(range(len(schedule.graph.nodes)))
    assert all(len(j.body) == 1 and not j.prologue and not j.epilogue and not j.unstored for j in jobs)


def test_a_norm_with_another_reader_is_stored() -> None:
    b = Builder()
    x = b.buffer("input", "x", "float32", [1, 8])
    normed = b.node(
        "rms_norm", [("x", x)], b.buffer("workspace", "n", "float32", [1, 8]), {"eps": 1e-6, "style": "llama"}
    )
    weight = b.buffer("input", "w", "float32", [8, 8])
    y = b.node("linear", [("x", normed), ("weight", weight)], b.buffer("workspace", "y", "float32", [1, 8]))
    b.pointwise("add", [normed, y], b.buffer("output", "z", "float32", [1, 8]))
    schedule = _C.make_schedule(b.graph, CUDA)
    _C.validate(schedule)
    assert [[j.body for j in p.jobs] for p in schedule.phases] == [[[0]], [[1]]]
    assert schedule.phases[1].jobs[0].epilogue == [2]


def test_a_norm_over_all_heads_is_not_staged_by_head() -> None:
    b = Builder()
    decoder(layers=0)
    x = b.buffer("input", "x", "float32", [1, 16])
    tables = [(name, b.buffer("input", name, "float32", [1, 8])) for name in ("cos", "sin")]
    norm = {"eps": 1e-6, "style": "llama"}
    normed = b.node("rms_norm", [("x", x)], b.buffer("workspace", "n", "float32", [1, 16]), norm)
    q = b.buffer("workspace", "q", "float32", [1, 2, 8])
    b.node("rope", [("x", b.view(normed, [1, 2, 8])), *tables], q)
    caches = [(name, b.buffer("input", name, "float32", [1, 2, 4, 8])) for name in ("k_cache", "v_cache")]
    attrs = {"scale": 1.0, "style": "sdpa"}
    b.node("attention", [("q", q), *caches], b.buffer("output", "y", "float32", [1, 2, 8]), attrs)
    schedule = _C.make_schedule(b.graph, CUDA)
    _C.validate(schedule)
    assert [[(j.prologue, j.body) for j in p.jobs] for p in schedule.phases] == [[([], [0])], [([1], [2])]]


def test_the_loader_waits_for_what_the_launch_computes() -> None:
    b = Builder()
    decoder(layers=0)
    x = b.buffer("input", "x", "float32", [1, 8])
    weight = b.pointwise(
        "neg", [b.buffer("input", "w", "float32", [8, 8])], b.buffer("workspace", "nw", "float32", [8, 8])
    )
    b.node("linear", [("x", x), ("weight", weight)], b.buffer("output", "y", "float32", [1, 8]))
    schedule = _C.make_schedule(b.graph, CUDA)
    _C.validate(schedule)
    assert schedule.phases[1].jobs[0].loader_waits == [0]


def test_an_update_in_place_is_not_fused_over_its_readers() -> None:
    b = Builder()
    decoder(layers=0)
    x = b.buffer("input", "x", "float32", [1, 8])
    weight = b.buffer("input", "w", "float32", [8, 8])
    y = b.node("linear", [("x", x), ("weight", weight)], b.buffer("workspace", "y", "float32", [1, 8]))
    b.pointwise("neg", [y], x)  # x.copy_(-y): every worker still reads x for the linear
    schedule = _C.make_schedule(b.graph, CUDA)
    _C.validate(schedule)
    assert len(schedule.phases) == 2


def test_polled_vectors_spare_all_waits_but_the_last() -> None:
    schedule = _C.make_schedule(decoder(layers=3), _C.Target("cuda", 90, 132, 232448, True, True))
    _C.validate(schedule)
    waiting = [p for p, phase in enumerate(schedule.phases) if phase.waits]
    assert waiting == [15]  # which advances counters
    polled = {schedule.graph.buffers[b].name.removeprefix("layers.0.") for b, t in enumerate(schedule.polled) if t}
    assert {"q", "k", "v", "residual", "act", "output", "attended"} <= polled


def renamed(graph: _C.TBGraph, tasks: dict[str, tuple[str, dict[str, str]]]) -> _C.TBGraph:
    """The graph with other names for tasks and their operands."""
    copy = _C.TBGraph()
    for buffer in graph.buffers:
        copy.add_buffer(buffer.name, buffer.kind, buffer.index, buffer.bytes)
    for node in graph.nodes:
        task, names = tasks.get(node.task, (node.task, {}))
        operands = [(names.get(o.name, o.name), o.tensor, o.is_read, o.is_write) for o in node.operands]
        copy.add_node(task, operands, node.attrs, node.program, node.label)
    return copy


@pytest.mark.parametrize("polled", [False, True])
def test_a_task_is_scheduled_by_its_traits_whatever_its_name(polled: bool) -> None:
    traits = {"loaded": ["matrix"], "staged": ["rows"], "whole": ["rows"], "takes_rows": ["rows"]}
    _C.register_task(
        "schedule_test_product",
        "stream",
        [
            ("rows", ["R", "K"], False, True, False),
            ("matrix", ["N", "K"], False, True, False),
            ("product", ["R", "N"], False, False, True),
        ],
        [],
        "",
        traits=traits,
        joined_by="rows",
        tiled_by="matrix",
        hands_over=True,
    )
    graph = decoder(batch=2, layers=2, computed_tables=True)
    names = {"x": "rows", "weight": "matrix", "y": "product"}
    other = renamed(graph, {"linear": ("schedule_test_product", names)})
    target = _C.Target("cuda", 90, 132, 232448, True, polled)
    _C.validate(_C.make_schedule(other, target))
    # Until tasks are asked themselves.
    expected, draft = (_C.draft_schedule(g, target, "choose_staging") for g in (graph, other))
    assert draft.replace("schedule_test_product", "linear") == expected


def test_a_stream_task_without_traits_is_a_job_of_its_own_that_waits() -> None:
    operands = [("x", ["R", "K"], False, True, False), ("y", ["R", "K"], False, False, True)]
    _C.register_task("schedule_test_copy", "stream", operands, [], "", traits={"loaded": ["x"]})
    b = Builder()
    x = b.buffer("input", "x", "bfloat16", [1, 64])
    normed = b.node(
        "rms_norm", [("x", x)], b.buffer("workspace", "n", "bfloat16", [1, 64]), {"eps": 1e-6, "style": "llama"}
    )
    copied = b.node("schedule_test_copy", [("x", normed)], b.buffer("workspace", "c", "bfloat16", [1, 64]))
    b.pointwise("add", [x, copied], b.buffer("output", "y", "bfloat16", [1, 64]))
    schedule = _C.make_schedule(b.graph, _C.Target("cuda", 90, 132, 232448, True, True))
    _C.validate(schedule)
    jobs = [job for phase in schedule.phases for job in phase.jobs]
    assert [(j.prologue, j.body, j.epilogue) for j in jobs] == [([], [0], []), ([], [1], []), ([], [2], [])]
    assert jobs[1].loader_waits == [0]
    assert not any(schedule.polled)


def test_json_describes_the_schedule() -> None:
    schedule = _C.make_schedule(decoder(layers=1), CUDA)
    parsed = json.loads(schedule.to_json())
    assert len(parsed["phases"]) == 6
    assert json.loads(schedule.graph.to_json())["nodes"][0]["task"] == "rms_norm"


@pytest.mark.parametrize("workers", [0, -1])
def test_a_target_has_workers(workers: int) -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        _C.make_schedule(decoder(layers=1), _C.Target("cuda", 90, workers, 232448, True))


def transposed(b: Builder, source: _C.Tensor, out: _C.Tensor, label: str = "") -> None:
    """out = -source.T, as far as memory goes."""
    rows, columns = source.shape
    program = _C.Program([columns, rows])
    value = program.emit("load", source.dtype, operand=0, strides=[1, columns])
    program.emit("store", out.dtype, [program.emit("neg", out.dtype, [value])], operand=1, strides=[rows, 1])
    operands = [("in0", source, True, False), ("out0", out, False, True)]
    b.graph.add_node("pointwise", operands, {}, program, label)


def shifted(b: Builder, source: _C.Tensor, target: _C.Tensor, label: str = "") -> None:
    """target[(r + 1) % R] = source[r]: stores at computed places."""
    rows, columns = source.shape
    program = _C.Program([rows, columns])
    value = program.emit("load", source.dtype, operand=0, strides=[columns, 1])
    row = program.emit(
        "add", "int64", [program.emit("index", "int64", operand=0), program.emit("const", "int64", imm=1)]
    )
    row = program.emit("remainder", "int64", [row, program.emit("const", "int64", imm=rows)])
    offset = program.emit("mul", "int64", [row, program.emit("const", "int64", imm=columns)])
    program.emit("store", target.dtype, [value, offset], operand=1, strides=[0, 1])
    operands = [("in0", source, True, False), ("out0", target, False, True)]
    b.graph.add_node("pointwise", operands, {}, program, label)


@st.composite
def random_graphs(draw: st.DrawFn) -> _C.TBGraph:
    """Linears, norms and pointwise nodes over a growing pool of values, some of them updated in place.

    With many rows warps multiply together, which decides what fuses.
    """
    b = Builder()
    decoder(layers=0)
    shape = [draw(st.sampled_from([1, 2, 66])), 8]
    pool = [b.buffer("input", f"x{i}", "float32", shape) for i in range(2)]
    for i in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["linear", "norm", "unary", "add", "transposed", "in_place", "shifted"]))
        source = draw(st.sampled_from(pool))
        if kind == "shifted":
            shifted(b, source, draw(st.sampled_from([t for t in pool[:2] if t is not source])))
            continue
        out = b.buffer(draw(st.sampled_from(["workspace", "workspace", "output"])), f"v{i}", "float32", shape)
        if kind == "linear":
            b.node("linear", [("x", source), ("weight", b.buffer("input", f"w{i}", "float32", [8, 8]))], out)
        elif kind == "norm":
            b.node("rms_norm", [("x", source)], out, {"eps": 1e-6, "style": "llama"})
        elif kind == "unary":
            b.pointwise("neg", [source], out)
        elif kind == "add":
            b.pointwise("add", [source, draw(st.sampled_from(pool))], out)
        elif kind == "transposed":
            transposed(b, source, out)
        else:
            b.pointwise("neg", [source], draw(st.sampled_from(pool[:2])))
            continue
        pool.append(out)
    return b.graph


@settings(max_examples=300, deadline=None, derandomize=True)
@given(random_graphs(), st.booleans(), st.booleans())
def test_every_schedule_is_sound(graph: _C.TBGraph, fuse: bool, polled: bool) -> None:
    schedule = _C.make_schedule(graph, _C.Target("cuda", 90, 132, 232448, fuse, polled))
    _C.validate(schedule)
    run = {n for p in schedule.phases for j in p.jobs for n in [*j.prologue, *j.body, *j.epilogue]}
    assert run == set(range(len(graph.nodes)))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from(sorted(CHIPS)),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 3, 5, 7, 8, 12, 16]),
    st.sampled_from([1, 3, 8, 9, 16, 33, 64, 65, 72, 128, 300]),
    st.fixed_dictionaries(
        {
            "head_dim": st.sampled_from([64, 80, 96, 128, 256]),
            "hidden": st.sampled_from([512, 1024, 2880, 4096]),
            "ffn": st.sampled_from([1024, 1536, 3072]),
            "length": st.sampled_from([256, 4096]),
        }
    ),
)
def test_decoders_of_any_size_are_sound(chip: int, groups: int, shared: int, batch: int, sizes: dict[str, int]) -> None:
    graph = decoder(layers=1, heads=groups * shared, groups=groups, batch=batch, vocab=1000, **sizes)
    _C.validate(_C.make_schedule(graph, CHIPS[chip].target()))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(random_graphs(), st.integers(0, 1000))
def test_every_schedule_computes_its_graph(graph: _C.TBGraph, seed: int) -> None:
    torch.manual_seed(seed)
    kinds = {kind: [b for b in graph.buffers if b.kind == kind] for kind in ("input", "output")}
    inputs = [torch.randn(b.bytes // 4) for b in kinds["input"]]
    made = []
    for run in (reference_vm.run_graph, _C.make_schedule(graph, _C.Target("cuda", 90, 132, 232448, True))):
        memory = [x.clone() for x in inputs], [torch.full((b.bytes // 4,), torch.nan) for b in kinds["output"]]
        if isinstance(run, _C.Schedule):
            reference_vm.run(run, *memory, seed=seed)
        else:
            run(graph, *memory)
        made.append([*memory[0], *memory[1]])
    assert all(torch.equal(got.nan_to_num(), want.nan_to_num()) for want, got in zip(*made, strict=True))


def test_keys_and_values_are_written_as_they_are_made() -> None:
    """By a row task's epilogue and by one of a linear, which shares its job with others of its input."""
    graph = Prompt(batch=1, tokens=70, heads=4, groups=2, size=40, length=100).graph()
    schedule = _C.make_schedule(graph, CUDA)
    _C.validate(schedule)
    jobs = [[(label(schedule, j.body), label(schedule, j.epilogue)) for j in p.jobs] for p in schedule.phases]
    assert jobs == [[(["q", "k", "v"], ["v.write"])], [(["q.rope"], []), (["k.rope"], ["k.write"])]]
    unstored = {graph.buffers[b].name for p in schedule.phases for j in p.jobs for b in j.unstored}
    assert unstored == {"q.norm", "k.norm", "k.rope", "v"}


def test_an_epilogue_that_writes_what_its_phase_reads_is_refused() -> None:
    """A linear whose input is what its results are written to, and rows that are written over themselves."""
    for task in ("linear", "rms_norm"):
        b = Builder()
        x = b.buffer("input", "x", "bfloat16", [66, 64])
        y = b.buffer("workspace", "y", "bfloat16", [66, 64])
        if task == "linear":
            b.node("linear", [("x", x), ("weight", b.buffer("input", "w", "bfloat16", [64, 64]))], y)
        else:
            b.node("rms_norm", [("x", x)], y, {"eps": 1e-6, "style": "llama"})
            weight = b.buffer("input", "w", "bfloat16", [64, 64])
            b.node("linear", [("x", y), ("weight", weight)], b.buffer("output", "z", "bfloat16", [66, 64]))
        shifted(b, y, x, "write")
        write = len(b.graph.nodes) - 1
        schedule = _C.make_schedule(b.graph, CUDA)
        _C.validate(schedule)
        assert not any(j.epilogue for p in schedule.phases for j in p.jobs)
        parts = Parts.of(schedule)
        for job in parts.jobs("body"):
            if job["body"] == [write]:
                job["body"].clear()
        parts.phases = [([j for j in jobs if j["body"]], waits) for jobs, waits in parts.phases]
        parts.phases = [(jobs, waits) for jobs, waits in parts.phases if jobs]
        next(j for j in parts.jobs("body") if j["body"] == [0])["epilogue"].append(write)
        with pytest.raises(RuntimeError, match="pointwise .node .*, write. .*may overtake the earlier access"):
            _C.validate(parts.build())


def test_an_epilogue_that_reads_elements_twice_or_not_in_their_order_is_caught() -> None:
    for strides, num_phases in (([8, 1], 1), ([1, 66], 1), ([2, 1], 2), ([0, 1], 2)):
        b = Builder()
        x, weight = b.buffer("input", "x", "bfloat16", [66, 64]), b.buffer("input", "w", "bfloat16", [8, 64])
        y = b.node("linear", [("x", x), ("weight", weight)], b.buffer("workspace", "y", "bfloat16", [66, 8]))
        program = _C.Program([66, 8])
        value = program.emit("load", "bfloat16", operand=0, strides=strides)
        program.emit("store", "bfloat16", [value], operand=1, strides=[8, 1])
        z = b.buffer("output", "z", "bfloat16", [66, 8])
        b.graph.add_node("pointwise", [("in0", y, True, False), ("out0", z, False, True)], {}, program, "read")
        schedule = _C.make_schedule(b.graph, CUDA)
        _C.validate(schedule)
        assert len(schedule.phases) == num_phases
        if num_phases == 1:
            continue
        parts = Parts.of(schedule)
        parts.jobs("body")[0]["epilogue"] = [1]
        parts.phases = parts.phases[:1]
        with pytest.raises(RuntimeError, match="read. and linear .*, on buffer .y.: no write happens before"):
            _C.validate(parts.build())


@pytest.mark.parametrize(
    ("rows", "columns", "most"), [(16384, 64, 6), (65536, 128, 3), (4096, 1024, 1.1), (151936, 4096, 1.1)]
)
def test_a_linear_of_one_row_costs_about_what_its_bytes_take(rows: int, columns: int, most: float) -> None:
    """What a warp takes for a tile passes while others' tiles come; where tiles are rows of 128 bytes it is more."""
    b = Builder()
    weight = b.buffer("input", "weight", "bfloat16", [rows, columns])
    b.node("linear", [("x", b.buffer("input", "x", "bfloat16", [1, columns])), ("weight", weight)],
           b.buffer("output", "y", "bfloat16", [1, rows]))  # fmt: skip
    [[job]] = [phase.jobs for phase in _C.make_schedule(b.graph, CUDA).phases]
    assert job.cut.kernel == "linear.vector"
    bytes_ns = 2 * rows * columns / (132 * 35)
    assert bytes_ns / 1.01 <= job.cut.cost_ns <= most * bytes_ns
