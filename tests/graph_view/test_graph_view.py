"""``python -m torch_mpk graph`` on what builds leave, and on what is no graph."""

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.decoder_graph import decoder
from torch_mpk import _C, PersistentKernel, graph_view
from torch_mpk.__main__ import main
from torch_mpk.errors import GraphFileError
from torch_mpk.graph_view.reader import GRAPH, SCHEDULE


def leave(folder: Path, graph: _C.TBGraph, target: _C.Target | None = None) -> Path:
    (folder / GRAPH).write_text(graph.to_json())
    schedule = _C.make_schedule(graph, target or _C.Target("cuda", 90, 132, 232448))
    (folder / SCHEDULE).write_text(schedule.to_json())
    return folder


@pytest.fixture
def folder(tmp_path):
    return leave(tmp_path, decoder(layers=1))


@pytest.mark.parametrize("target", [_C.Target("cpu", 0, 8, 0, False), _C.Target("cuda", 90, 132, 232448)])
def test_layers_are_found_by_their_names(target, tmp_path):
    """Elementwise ones have no node of their own: they are in one with what reads them, on CUDA in one job."""
    with PersistentKernel() as kernel:
        shapes = {"x": (2, 64), "gate": (96, 64), "up": (96, 64), "down": (64, 96), "out": (2, 64)}
        x, gate, up, down, out = (kernel.attach_input(torch.randn(shape), name) for name, shape in shapes.items())
        both = kernel.shuffle_tensors([gate, up], 0, 4)
        activated = kernel.silu_mul_layer(input=kernel.linear_layer(input=x, weight=both))
        doubled = kernel.elementwise_add_layer(activated, activated)
        kernel.linear_with_residual_layer(doubled, down, x, out)
        kernel.compile()
        file = graph_view.read(leave(tmp_path, kernel.schedule.graph, target))
    assert [node.label for node in file.nodes.values()] == [
        "linear.0",
        "linear.0",
        "linear.0, silu_mul.1, elementwise_add.2",  # the linear's two results are one tensor, in groups
        "linear_with_residual.out",
        "linear_with_residual.out",
    ]
    is_fused = target.device == "cuda"
    assert (file.phases_of(0) == file.phases_of(2)) == is_fused
    for layer in ("silu_mul", "elementwise_add"):
        head = f"2 pointwise linear.0, silu_mul.1, elementwise_add.2 (phase {0 if is_fused else 1})"
        assert graph_view.task(file, layer).startswith(head)


def test_summary(folder):
    expected = """\
: 20 nodes, 23 dependencies
  input: 20 buffers, 78.14 KiB
  output: 1 buffer, 200 B
  workspace: 18 buffers, 2.188 KiB
  target: cuda sm_90, 132 workers
  schedule: 6 phases, 7 jobs, 5 events waited for, workspace 141.2 KiB

task       nodes      bytes
linear         8  74.63 KiB
attention      1  10.39 KiB
rms_norm       5  1.562 KiB
pointwise      4  1.328 KiB
rope           2      512 B

largest nodes:
  18 linear head                  12.82 KiB
  12 linear layers.0.gate         12.31 KiB
  13 linear layers.0.up           12.31 KiB
  15 linear layers.0.down         12.31 KiB
  8 attention layers.0.attention  10.39 KiB"""
    assert graph_view.summary(graph_view.read(folder)).removeprefix(str(folder)) == expected


def test_a_task(folder):
    assert (
        graph_view.task(graph_view.read(folder / GRAPH), "layers.0.q_rope")
        == """\
6 rope layers.0.q_rope (phase 1), 320 B
  reads   x: bfloat16[1, 4, 16] strides [64, 16, 1] of workspace 'layers.0.q_norm'
  reads   cos: bfloat16[1, 16] strides [16, 1] of input 'cos'
  reads   sin: bfloat16[1, 16] strides [16, 1] of input 'sin'
  writes  y: bfloat16[1, 4, 16] strides [64, 16, 1] of workspace 'layers.0.q_rope'
  after  4 rms_norm layers.0.q_norm (read after write of 'layers.0.q_norm')
  before 8 attention layers.0.attention (read after write of 'layers.0.q_rope')"""
    )
    file = graph_view.read(folder)
    cut = r"\n  cut    \d+ tiles, static, tiles of \d+ rows of weights in entries of \d+ bytes, by linear\.vector \("
    assert re.search(cut, graph_view.task(file, "layers.0.down"))
    assert graph_view.task(file, "rope").count("\n\n") == 1  # two of them
    assert "store %" in graph_view.task(file, "10")  # a program is shown
    with pytest.raises(GraphFileError, match=r"no task or label is 'ropes': did you mean rope\?"):
        graph_view.task(file, "ropes")
    with pytest.raises(GraphFileError, match="tasks are attention, linear, pointwise"):
        graph_view.task(file, "zzzz")


def test_the_part_of_each_operand_that_a_tile_has(tmp_path):
    with PersistentKernel() as kernel:
        x = kernel.attach_input(torch.ones(3, 8), "x")
        kernel.topk_layer(x, num=2)
        kernel.compile()
        text = graph_view.task(graph_view.read(leave(tmp_path, kernel.schedule.graph)), "topk")
    assert re.search(r"reads   x: float32\[3, 8\] .*, tile \[1, 8\]\n", text)
    assert re.search(r"writes  ids: int64\[3, 2\] .*, tile \[1, 2\]\n", text)
    assert "\n  cut    3 tiles, static" in text


def test_events(folder):
    file = graph_view.read(folder / SCHEDULE)
    assert (
        graph_view.event(file, 4)
        == """\
event 4: each of 132 workers signals it once, at the end of phase 4
  64 tiles, static: 15 linear layers.0.down, 16 pointwise layers.0.output
    by linear.vector (0.2 us; linear.direct 0.8 us)
  awaited by phase 5"""
    )
    assert graph_view.event(file, 5).endswith("awaited by nobody: it is the last")
    with pytest.raises(GraphFileError, match="no event 6: expected 0 to 5"):
        graph_view.event(file, 6)


def chain_bytes(file, path):
    return sum(node.bytes for node in path)


def test_the_critical_path_is_the_heaviest_chain(folder):
    file = graph_view.read(folder)
    path = file.critical_path()
    pairs = {(edge.source, edge.target) for edge in file.edges}
    assert all((a.id, b.id) in pairs for a, b in pairwise(path))
    after = {n: [e.target for e in file.edges if e.source == n] for n in file.nodes}

    def heaviest(node):  # by brute force
        return file.nodes[node].bytes + max(map(heaviest, after[node]), default=0)

    assert chain_bytes(file, path) == max(map(heaviest, file.nodes))
    assert graph_view.critical_path(file).startswith(f"critical path: {len(path)} of 20 nodes, ")


def test_each_file_alone(folder, tmp_path):
    (tmp_path / "alone").mkdir()
    only_graph = shutil.copy(folder / GRAPH, tmp_path / "alone" / "graph of mine.json")
    only_schedule = shutil.copy(folder / SCHEDULE, tmp_path / "alone" / "schedule of mine.json")
    graph, schedule = graph_view.read(only_graph), graph_view.read(only_schedule)
    assert not graph.phases
    with pytest.raises(GraphFileError, match="events are in a schedule"):
        graph_view.event(graph, 0)
    with pytest.raises(GraphFileError, match=r"dependencies are in 4.graph.json"):
        graph_view.critical_path(schedule)
    assert str(schedule.nodes[18]) == "18 linear head"
    for file in (graph, schedule):
        assert graph_view.summary(file)
        assert graph_view.to_dot(file)
        assert graph_view.to_html(file)


def test_dot(folder):
    dot = graph_view.to_dot(graph_view.read(folder))
    assert dot.count(" -> ") == len({(d.source, d.target) for d in decoder(layers=1).dependencies()})
    assert '0 [label="0 rms_norm\\nlayers.0.input_norm\\n[1, 64]"];' in dot
    assert dot.count("[style=dashed]") == 1  # the counter is advanced after attention has read it
    assert dot.count("subgraph cluster_") == 6


def test_svg_needs_graphviz(folder, monkeypatch):
    file = graph_view.read(folder)
    if shutil.which("dot"):
        assert "<svg" in graph_view.to_svg(file)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(GraphFileError, match="install graphviz, or use --html"):
        graph_view.to_svg(file)


def test_the_page_is_whole_and_safe(tmp_path):
    with PersistentKernel() as kernel:
        name = 'a</script><b>"\t\u00e9\\'
        x, y = kernel.attach_input(torch.randn(2, 2), "x"), kernel.attach_input(torch.zeros(2, 2), name)
        kernel.elementwise_add_layer(x, x, y)
        kernel.compile(tmp_path)
    page = graph_view.to_html(graph_view.read(tmp_path))
    assert page.count("</script>") == 1
    assert not re.search(r"""(src|href)=|url\((?!#)|@import|fetch\(|https?://(?!www\.w3\.org/2000/svg")""", page)
    [data] = re.findall(r"^const data = (.*);$", page, re.MULTILINE)
    data = json.loads(data)
    assert data["nodes"][0]["label"] == f"elementwise_add.{name}"
    assert [row["name"] for row in data["rows"]] == ["phase 0"]


def test_inputs_and_the_model_have_their_names_from_the_capture(folder):
    """Which lies beside the graph, or above it where the graph is a part's or another device's."""
    sources = "cos: input torch.bfloat16[1, 16] strides [16, 1] cpu L['fn']._modules['rotary']._buffers['cos']\n"
    (folder / "1.capture.txt").write_text(f"{sources}model: Tiny\n\nsin: not one L['fn'].sin\n")
    inner = folder / "segment_0" / "sm_90a"
    inner.mkdir(parents=True)
    for name in (GRAPH, SCHEDULE):
        shutil.copy(folder / name, inner / name)
    for place in (folder, inner):
        text = graph_view.task(graph_view.read(place), "layers.0.q_rope")
        assert "of input 'rotary.cos'" in text and "of input 'sin'" in text
        assert f'"title": "Tiny of {place}"' in graph_view.to_html(graph_view.read(place))


def test_the_command(folder, capsys):
    main(["graph", str(folder)])
    assert capsys.readouterr().out.startswith(f"{folder}: 20 nodes")
    main(["graph", str(folder), "--task", "head", "--event", "0", "--critical-path", "--html", str(folder / "p.html")])
    out = capsys.readouterr().out
    assert all(word in out for word in ("18 linear head", "event 0:", "critical path:"))
    assert (folder / "p.html").read_text().startswith("<!doctype html>")
    main(["graph", str(folder), "--dot"])
    assert capsys.readouterr().out.startswith("digraph")


def test_the_command_shows_what_is_asked_for_alone(folder, capsys, tmp_path):
    main(["graph", str(folder), "--event", "0"])
    assert capsys.readouterr().out == graph_view.event(graph_view.read(folder), 0) + "\n"
    main(["graph", str(folder), "--html", str(tmp_path / "page.html")])
    assert capsys.readouterr().out == ""
    for bad in (tmp_path, tmp_path / "none" / "page.html"):
        with pytest.raises(SystemExit, match="^ArgumentError: --html: expected a file in a folder .*, got "):
            main(["graph", str(folder), "--html", str(bad)])
    with pytest.raises(SystemExit, match="^GraphFileError: .* no task or label is ''"):
        main(["graph", str(folder), "--task", ""])


def test_the_command_says_what_is_wrong_without_a_traceback(tmp_path):
    with pytest.raises(SystemExit, match=f"^GraphFileError: {tmp_path}/nothing.json: there is no such file$"):
        main(["graph", str(tmp_path / "nothing.json")])


def test_folders(tmp_path):
    with pytest.raises(GraphFileError, match="expected 4.graph.json or 5.schedule.json in it, found neither"):
        graph_view.read(tmp_path)
    for i in range(2):
        (tmp_path / f"segment_{i}").mkdir()
        leave(tmp_path / f"segment_{i}", decoder(layers=1))
    with pytest.raises(GraphFileError, match="found it in .*segment_0, .*segment_1: name one of them"):
        graph_view.read(tmp_path)


JSON = st.recursive(
    st.none() | st.integers(-2, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["nodes", "phases", "jobs"]), inner),
)


@pytest.mark.parametrize("name", [GRAPH, SCHEDULE])
@settings(max_examples=30)
@given(data=st.data())
def test_damaged_files_are_refused_or_shown(tmp_path_factory, name, data):
    folder = leave(tmp_path_factory.mktemp("damaged"), decoder(layers=1))
    content = json.loads((folder / name).read_text())
    at = content
    while isinstance(at, (dict, list)) and at:
        key = data.draw(st.sampled_from(sorted(at)) if isinstance(at, dict) else st.integers(0, len(at) - 1))
        if not isinstance(at[key], (dict, list)) or not at[key] or data.draw(st.booleans()):
            at[key] = data.draw(JSON)
            break
        at = at[key]
    (folder / name).write_text(json.dumps(content))
    try:
        file = graph_view.read(folder)
    except GraphFileError:
        return
    for show in (graph_view.summary, graph_view.critical_path, graph_view.to_dot, graph_view.to_html):
        assert show(file)
