"""What a graph becomes before it is scheduled: FP8 linears of a prompt read an x that is quantised once."""

import pytest

from tests.schedule.decoder_graph import Builder
from torch_mpk import _C

ATTRS = {"block_rows": 128, "block_columns": 128, "x_columns": 128}


def schedule(rows: int, *, overwritten: bool = False, arch: int = 90) -> _C.Schedule:
    """Three linears of one x, which a pointwise node may overwrite in front of the last."""
    b = Builder()
    x = b.buffer("input", "x", "bfloat16", [rows, 256])
    for i in range(3):
        if overwritten and i == 2:
            b.pointwise("add", [x, x], x)
        weight = b.buffer("input", f"weight{i}", "float8_e4m3fn", [128, 256])
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


@pytest.mark.parametrize(("rows", "arch"), [(64, 90), (70, 100)])
def test_few_rows_and_other_chips_keep_the_graph(rows: int, arch: int) -> None:
    assert [node.task for node in schedule(rows, arch=arch).graph.nodes] == ["quantized_linear"] * 3
