"""The reference VM: it computes what programs mean, and it notices what a schedule gets wrong."""

from __future__ import annotations

import pytest
import torch

import torch_mpk.tasks  # noqa: F401  (declares them)
from torch_mpk import _C
from torch_mpk.testing import reference_vm

NUM_POINTS = 6


def chain(num_nodes: int = 3) -> _C.TBGraph:
    """out = x + num_nodes, one addition per node, each through workspace of its own."""
    graph = _C.TBGraph()
    kinds = [("x", "input", 0), *((f"t{i}", "workspace", -1) for i in range(num_nodes - 1)), ("out", "output", 0)]
    for name, kind, index in kinds:
        graph.add_buffer(name, kind, index, 4 * NUM_POINTS)
    for i in range(num_nodes):
        program = _C.Program([NUM_POINTS])
        one = program.emit("const", "float32", imm=1.0)
        loaded = program.emit("load", "float32", operand=0, strides=[1])
        program.emit("store", "float32", [program.emit("add", "float32", [loaded, one])], operand=1, strides=[1])
        source, target = (_C.Tensor(b, "float32", [NUM_POINTS], [1]) for b in (i, i + 1))
        graph.add_node(
            "pointwise", [("in0", source, True, False), ("out0", target, False, True)], {}, program, f"add{i}"
        )
    return graph


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
def test_a_valid_schedule_gives_the_graphs_result_in_any_order(seed: int | None) -> None:
    schedule = _C.make_schedule(chain(), _C.Target("cpu", num_workers=2, fuse=False))
    x, out = torch.randn(NUM_POINTS), torch.full((NUM_POINTS,), torch.nan)
    reference_vm.run(schedule, [x], [out], seed=seed)
    assert torch.equal(out, x + 1 + 1 + 1)


class _Altered:
    """A schedule with some of its parts replaced."""

    def __init__(self, schedule: _C.Schedule, **parts: object) -> None:
        self._schedule = schedule
        self.__dict__.update(parts)

    def __getattr__(self, name: str) -> object:
        return getattr(self._schedule, name)


def test_a_missing_wait_shows_as_a_wrong_result() -> None:
    schedule = _C.make_schedule(chain(), _C.Target("cpu", num_workers=2, fuse=False))
    broken = _Altered(schedule, phases=[_Altered(phase, waits=[]) for phase in schedule.phases])
    x = torch.randn(NUM_POINTS)
    wrong = 0
    for seed in range(10):
        out = torch.full((NUM_POINTS,), torch.nan)
        reference_vm.run(broken, [x], [out], seed=seed)
        wrong += not torch.equal(out, x + 3)
    assert wrong


def test_reading_what_a_job_keeps_to_itself_is_an_error() -> None:
    graph = chain()
    schedule = _C.make_schedule(graph, _C.Target("cpu", num_workers=2, fuse=False))
    offsets = [-1 for _ in schedule.workspace_offsets]
    with pytest.raises(ValueError, match="outside the job"):
        reference_vm.run(_Altered(schedule, workspace_offsets=offsets), [torch.randn(6)], [torch.empty(6)])


def test_workspace_is_poisoned() -> None:
    graph = chain()
    out = torch.zeros(NUM_POINTS)
    machine = reference_vm.Machine(graph, reference_vm.Memory(graph, [torch.randn(NUM_POINTS)], [out]), [])
    machine.run(2)
    assert torch.isnan(out).all()


def test_an_access_outside_its_buffer_is_an_error() -> None:
    graph = chain(1)
    with pytest.raises(IndexError, match="reaches element 3 of 3"):
        reference_vm.run_graph(graph, [torch.randn(3)], [torch.empty(NUM_POINTS)])


def test_scalars_predicates_and_offsets() -> None:
    """out[i] = x[i + s] where i + s < 6, else -1; only even i are stored."""
    graph = _C.TBGraph()
    for name, kind in (("x", "input"), ("out", "output")):
        graph.add_buffer(name, kind, 0, 8 * NUM_POINTS)
    p = _C.Program([NUM_POINTS])
    i, s, two, six = (
        p.emit("index", "int64", operand=0),
        p.emit("size", "int64", operand=0),
        p.emit("const", "int64", imm=2),
        p.emit("const", "int64", imm=6),
    )
    inside = p.emit("lt", "bool", [p.emit("add", "int64", [i, s]), six])
    loaded = p.emit("load", "float64", [s, inside], operand=0, strides=[1])
    value = p.emit("where", "float64", [inside, loaded, p.emit("const", "float64", imm=-1.0)])
    is_even = p.emit("eq", "bool", [p.emit("remainder", "int64", [i, two]), p.emit("const", "int64", imm=0)])
    p.emit("store", "float64", [value, p.emit("const", "int64", imm=0), is_even], operand=1, strides=[1])
    tensors = [_C.Tensor(b, "float64", [NUM_POINTS], [1]) for b in (0, 1)]
    graph.add_node("pointwise", [("in0", tensors[0], True, False), ("out0", tensors[1], False, True)], {}, p, "")
    x, out = torch.arange(6.0, dtype=torch.float64), torch.full((6,), 9.0, dtype=torch.float64)
    reference_vm.run_graph(graph, [x], [out], [3])
    assert out.tolist() == [3, 9, 5, 9, -1, 9]


@pytest.mark.parametrize("op", ["sum", "mean", "amax", "amin", "prod", "argmax", "argmin", "any", "all"])
def test_reductions_accumulate_in_fp32_and_round_once(op: str) -> None:
    dtype = {"argmax": torch.int64, "argmin": torch.int64, "any": torch.bool, "all": torch.bool}.get(op, torch.bfloat16)
    graph = _C.TBGraph()
    graph.add_buffer("x", "input", 0, 2 * 4 * 300)
    graph.add_buffer("out", "output", 0, 4 * dtype.itemsize)
    p = _C.Program([4, 300])
    value = p.emit("load", "bfloat16", operand=0, strides=[300, 1])
    if dtype == torch.bool:
        p.emit("cast", "bool", [value])
    source = _C.Tensor(0, "bfloat16", [4, 300], [300, 1])
    target = _C.Tensor(1, str(dtype).removeprefix("torch."), [4], [1])
    graph.add_node("reduce", [("in0", source, True, False), ("out0", target, False, True)], {"op": op}, p, "")
    x = torch.randn(4, 300).bfloat16()
    out = torch.zeros(4, dtype=dtype)
    reference_vm.run_graph(graph, [x], [out])
    wide = x.bool() if dtype == torch.bool else x.float()
    assert torch.equal(out, getattr(torch, op)(wide, dim=-1).to(dtype))


def test_every_operation_of_programs_is_known() -> None:
    structural = {"const", "index", "size", "load", "store", "cast", "where", "bit_cast"}
    assert set(reference_vm._OPS) == set(_C.op_names()) - structural


def test_tasks_run_their_references_on_strided_views() -> None:
    graph = _C.TBGraph()
    for name, kind, index, num in (("x", "input", 0, 40), ("w", "input", 1, 24), ("y", "output", 0, 12)):
        graph.add_buffer(name, kind, index, 4 * num)
    x = _C.Tensor(0, "float32", [4, 8], [10, 1], 2)
    w, y = _C.Tensor(1, "float32", [3, 8], [8, 1]), _C.Tensor(2, "float32", [4, 3], [3, 1])
    graph.add_node("linear", [("x", x, True, False), ("weight", w, True, False), ("y", y, False, True)], {}, None, "")
    a, weight, out = torch.randn(4, 10), torch.randn(3, 8), torch.full((4, 3), torch.nan)
    reference_vm.run_graph(graph, [a, weight], [out])
    torch.testing.assert_close(out, a[:, 2:] @ weight.t())
