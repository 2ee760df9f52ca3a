"""Rewrites of a graph before it is scheduled: FP8 linears of several rows read an x that is quantised once, and a norm
may be made twice."""

import pytest

from tests.schedule.decoder_graph import Builder, decoder
from torch_mpk import _C

ATTRS = {"block_rows": 128, "block_columns": 128, "x_columns": 128}


def schedule(
    rows: int,
    *,
    overwritten: bool = False,
    arch: int = 90,
    storage: str = "float8_e4m3fn",
    of_scalar: bool = False,
) -> _C.Schedule:
    """Three linears of one x, which a pointwise node may overwrite in front of the last, of weights in ``storage``.

    ``of_scalar``: a node without dimensions is in front.
    """
    b = Builder()
    if of_scalar:
        program = _C.Program([])
        program.emit("store", "float32", [program.emit("load", "float32", operand=0)], operand=1)
        scalar, copy = (b.buffer(kind, f"scalar.{kind}", "float32", []) for kind in ("input", "output"))
        b.graph.add_node("pointwise", [("x", scalar, True, False), ("y", copy, False, True)], {}, program)
    x = b.buffer("input", "x", "bfloat16", [rows, 256])
    for i in range(3):
        if overwritten and i == 2:
            b.pointwise("add", [x, x], x)
        weight = b.buffer("input", f"weight{i}", storage if i == 2 else "float8_e4m3fn", [128, 256])
        scale = b.buffer("input", f"scale{i}", "float32", [1, 2])
        y = b.buffer("output", f"y{i}", "bfloat16", [rows, 128])
        b.node("quantized_linear", [("x", x), ("weight", weight), ("weight_scale", scale)], y, ATTRS, f"y{i}")
    made = _C.make_schedule(b.graph, _C.Target("cuda", arch, 132, 232448))
    _C.validate(made)
    return made


@pytest.mark.parametrize(("overwritten", "times"), [(False, 1), (True, 2)])
def test_x_is_quantised_once_until_it_is_written(overwritten: bool, times: int) -> None:
    tasks = [node.task for node in schedule(70, overwritten=overwritten).graph.nodes]
    assert tasks.count("quantise_rows") == times
    assert tasks.count("e4m3_linear") == 3


def test_an_x_may_have_no_rows() -> None:
    tasks = [node.task for node in schedule(70, of_scalar=True).graph.nodes]
    assert tasks == ["pointwise", "quantise_rows", *["e4m3_linear"] * 3]


@pytest.mark.parametrize("rows", [4, 64])
def test_the_quicker_launch_is_taken(rows: int) -> None:
    """Few rows are quantised by every worker sooner than phases of their own take."""
    tasks = {node.task for node in schedule(rows).graph.nodes}
    assert tasks == ({"quantized_linear"} if rows == 4 else {"quantise_rows", "e4m3_linear"})


def test_a_chip_without_products_of_warpgroups_keeps_the_graph() -> None:
    tasks = [node.task for node in schedule(70, arch=100).graph.nodes]
    assert tasks == ["quantized_linear"] * 3


def test_weights_that_are_converted_in_registers_stand_beside() -> None:
    """Up to 64 rows need no launch whose warps all multiply together."""
    tasks = [node.task for node in schedule(64, storage="int8").graph.nodes]
    assert tasks == ["quantise_rows", "e4m3_linear", "e4m3_linear", "quantized_linear"]


def test_one_rewrite_is_taken_where_another_does_not_pay() -> None:
    """Weights of 4 bits are worth an x in their order. Matrices of the others are not worth their bytes."""
    b = Builder()
    x = b.buffer("input", "x", "bfloat16", [32, 4096])
    for name, of_byte, columns in (("four", 2, 128), ("eight", 1, 4096)):
        weight = b.buffer("input", f"{name}.weight", "int8", [24576, 4096 // of_byte])
        scale = b.buffer("input", f"{name}.scale", "bfloat16", [24576, 4096 // columns])
        y = b.buffer("output", f"{name}.y", "bfloat16", [32, 24576])
        attrs = {"block_rows": 1, "block_columns": columns, "x_columns": 0}
        b.node("quantized_linear", [("x", x), ("weight", weight), ("weight_scale", scale)], y, attrs, name)
    made = _C.make_schedule(b.graph, _C.Target("cuda", 90, 132, 232448))
    _C.validate(made)
    assert [node.task for node in made.graph.nodes] == ["order_columns", "ordered_linear", "quantized_linear"]


def test_matrices_of_prompts_take_turns_at_few_places() -> None:
    """Made after those that they overwrite have been read, not all at the launch's start."""
    sizes = {"hidden": 384, "heads": 6, "groups": 2, "head_dim": 64, "ffn": 384, "layers": 3}
    made = _C.make_schedule(decoder(batch=70, weights="int4", **sizes), _C.Target("cuda", 90, 132, 232448))
    _C.validate(made)
    tasks = [node.task for node in made.graph.nodes]
    assert (tasks.count("dequantise"), tasks.count("linear"), tasks.count("quantized_linear")) == (21, 22, 0)
    assert len([b for b in made.graph.buffers if b.name.startswith("matrix.")]) == 4  # q, k and v; o
    first = [made.graph.nodes[job.body[0]].task for job in made.phases[0].jobs]
    assert first.count("dequantise") == 4


def test_only_weights_that_warpgroups_do_not_convert_become_matrices() -> None:
    """Down's rows are no multiple of 128 bytes, unlike those of the other six of a layer."""
    sizes = {"hidden": 256, "heads": 4, "groups": 2, "head_dim": 64, "ffn": 384, "layers": 2}
    made = _C.make_schedule(decoder(batch=70, weights="int4", **sizes), _C.Target("cuda", 90, 132, 232448))
    _C.validate(made)
    kernels = [job.cut.kernel for phase in made.phases for job in phase.jobs for _ in job.body]
    assert (kernels.count("dequantise"), kernels.count("quantized_linear.tiles")) == (2, 12)


@pytest.mark.parametrize(("rows", "times"), [(1, 2), (8, 2), (9, 1)])
def test_a_norm_of_few_rows_is_made_for_a_router_and_for_experts(rows: int, times: int) -> None:
    """The router's linear has the norm in front of it, and so begins together with the norm that experts wait for."""
    b = Builder()
    x = b.buffer("input", "x", "bfloat16", [rows, 256])
    normed = b.node(
        "rms_norm", [("x", x)], b.buffer("workspace", "n", "bfloat16", [rows, 256]), {"eps": 1e-6, "style": "llama"}
    )
    weight = b.buffer("input", "router", "bfloat16", [64, 256])
    b.node("linear", [("x", normed), ("weight", weight)], b.buffer("output", "scores", "bfloat16", [rows, 64]))
    b.pointwise("add", [normed, normed], b.buffer("output", "z", "bfloat16", [rows, 256]))
    made = _C.make_schedule(b.graph, _C.Target("cuda", 90, 132, 232448, polled=True))
    _C.validate(made)
    assert [node.task for node in made.graph.nodes].count("rms_norm") == times
    jobs = [{job.cut.kernel: len(job.prologue) for job in phase.jobs} for phase in made.phases]
    if times == 2:
        assert jobs == [{"row": 0, "linear.vector" if rows == 1 else "linear.rows": 1}]
