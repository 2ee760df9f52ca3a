"""``torch_mpk.profile`` on the CPU's runtime."""

import gc
import gzip
import importlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import torch_mpk
from tests.models.stepping import assert_close, compiled
from tests.runtime.traces import read_tracks
from tests.thinned import thinned
from torch_mpk.__main__ import main
from torch_mpk.errors import ArgumentError, ProfileError
from torch_mpk.runtime.segment import live_segments
from torch_mpk.testing.tiny import Decoding, random_ids, tiny_model

NUM_THREADS = 2


profiling = importlib.import_module("torch_mpk.profile")  # the package has the function by that name


@pytest.fixture(autouse=True)
def _no_other_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier tests have left, as in the frames of one that failed, is not there for these."""
    torch.compiler.reset()
    gc.collect()
    others = live_segments()
    monkeypatch.setattr(profiling, "live_segments", lambda: [each for each in live_segments() if each not in others])


class Steps:
    """Decode steps of a tiny model, compared with eager ones as they are made."""

    def __init__(self, **options: object) -> None:
        self.model = tiny_model(num_layers=1)
        prompt = random_ids(1, 5)
        self.ours, self.eager = Decoding(self.model, prompt), Decoding(self.model, prompt)
        self.step = compiled(self.model, num_threads=NUM_THREADS, **options)
        self.count = 0

    @torch.inference_mode()
    def __call__(self) -> None:
        token = random_ids(1, 1)
        assert_close(self.ours.step(self.step, token), self.eager.step(self.model, token))
        self.count += 1


@pytest.mark.parametrize("name", thinned(["trace.json", "trace.json.gz"], 0))
def test_a_timeline_has_every_phase_of_every_launch_in_order(tmp_path: Path, name: str) -> None:
    step = Steps()
    profile = torch_mpk.profile(step, tmp_path / name, steps=4, warmup=2)
    assert step.count == 6
    assert profile.path == tmp_path / name and [*tmp_path.iterdir()] == [tmp_path / name]
    [segment] = profiling.live_segments()
    schedule = segment.plan.schedule
    tracks = read_tracks(profile.path)
    assert [*tracks] == [*(f"worker {w}" for w in range(NUM_THREADS)), "launches"]
    launches = tracks["launches"].slices
    assert [name for _, _, name, _ in launches] == [f"launch {i}" for i in range(4)]
    assert all(args["bytes"] == sum(schedule.phase_bytes) for *_, args in launches)
    for worker in range(NUM_THREADS):
        phases = [each for each in tracks[f"worker {worker}"].slices if each[3]]
        for begin, end, _, args in phases:
            assert args["tasks"] == schedule.phase_names[args["phase"]]
            assert args["bytes"] == schedule.phase_bytes[args["phase"]]
            assert any(first <= begin and end <= last for first, last, *_ in launches)
        numbers = [args["phase"] for *_, args in phases]
        if worker == 0:  # it has a part in all of them
            assert numbers == 4 * [*range(len(schedule.phases))]
    assert any(tracks[f"worker {w}"].of("wait for events") for w in range(NUM_THREADS))
    content = (gzip.open if name.endswith(".gz") else open)(tmp_path / name).read()
    events = [event for event in json.loads(content)["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in events} >= {"launch", "work", "wait"}
    for event in events:
        assert event["name"].startswith("wait") == (event["cat"] == "wait") == (event.get("cname") == "grey")


@pytest.mark.slow
def test_totals_add_up_to_the_launch(tmp_path: Path) -> None:
    step = Steps()
    [kernel] = torch_mpk.profile(step, tmp_path / "trace.json", steps=5).kernels
    [segment] = profiling.live_segments()
    schedule = segment.plan.schedule
    assert kernel.num_launches == 5
    assert sum(task.num_phases for task in kernel.tasks) == len(schedule.phases)
    assert kernel.num_bytes == sum(schedule.phase_bytes)
    by_name = {task.tasks: task for task in kernel.tasks}
    layers = step.model.model.layers
    down = by_name["linear down_proj"]
    config = step.model.config
    assert down.num_phases == len(layers)
    activations = config.intermediate_size + config.hidden_size
    assert down.num_bytes == len(layers) * 2 * (layers[0].mlp.down_proj.weight.numel() + activations)
    embedding = kernel.tasks[0]
    assert embedding.num_bytes < step.model.model.embed_tokens.weight.nbytes, "of the table one row is read"
    assert 0 < max(task.us for task in kernel.tasks) <= sum(task.us for task in kernel.tasks)
    text = str(kernel)
    assert max(map(len, text.splitlines())) <= max(100, shutil.get_terminal_size().columns)
    assert "linear down_proj" in text and "of the memory's speed" in text and "5 launches" in text


def test_experts_count_with_the_pairs_that_chose_them(tmp_path: Path) -> None:
    rows, choices, experts, n, k = 5, 2, 8, 24, 16
    x, weight = torch.randn(rows, choices, k), torch.randn(experts, n, k)
    given = [torch.randint(experts, (rows, choices)) for _ in range(4)]
    step = torch.compile(torch.ops.mpk.expert_linear, backend="mpk", options={"num_threads": NUM_THREADS})
    calls = iter(given)
    profile = torch_mpk.profile(lambda: step(x, next(calls), weight), tmp_path / "trace.json", steps=3, warmup=1)
    slices = read_tracks(profile.path)["experts"].slices
    numbers = []
    for ids, (*_, name, args) in zip(given[1:], slices, strict=True):
        counts = {str(i): count for i, count in enumerate(ids.flatten().bincount().tolist()) if count}
        assert args["pairs of experts"] == counts
        assert name == f"expert_linear: {len(counts)} of {experts} experts"
        assert args["bytes"] == ids.nbytes + x.nbytes + 4 * rows * choices * n + len(counts) * weight[0].nbytes
        numbers.append(len(counts))
    [task] = profile.kernels[0].tasks
    assert task.experts == pytest.approx(sum(numbers) / 3)
    assert f"of a phase of expert_linear: {task.experts:.1f} experts chosen" in str(profile)


@pytest.mark.slow
def test_nothing_is_recorded_afterwards(tmp_path: Path) -> None:
    step = Steps()
    torch_mpk.profile(step, tmp_path / "trace.json", steps=2)
    step()
    [segment] = profiling.live_segments()
    assert segment.executable.stop_recording() == []


@pytest.mark.slow
def test_several_segments_are_several_processes(tmp_path: Path) -> None:
    first, second = Steps(), Steps(fuse=False)
    profile = torch_mpk.profile(lambda: (first(), second()), tmp_path / "trace.json", steps=2)
    assert [kernel.num_launches for kernel in profile.kernels] == [2, 2]


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"steps": True}, {"warmup": 0}, {"warmup": 1.5}])
def test_counts_are_checked_before_anything_runs(tmp_path: Path, arguments: dict[str, object]) -> None:
    [(name, _)] = arguments.items()
    with pytest.raises(ArgumentError, match=f"{name}: expected an int > 0"):
        torch_mpk.profile(lambda: pytest.fail("it ran"), tmp_path / "trace.json", **arguments)


@pytest.mark.parametrize("path", ["missing/trace.json", "."])
def test_a_path_that_cannot_be_written_is_found_before_anything_runs(tmp_path: Path, path: str) -> None:
    with pytest.raises(ArgumentError, match="path: expected a file in a folder that can be written to"):
        torch_mpk.profile(lambda: pytest.fail("it ran"), tmp_path / path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_found_before_anything_runs(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ArgumentError, match="Permission denied"):
        torch_mpk.profile(lambda: pytest.fail("it ran"), tmp_path / "trace.json")


def test_a_step_without_megakernels_is_an_error_and_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("an earlier one")
    step = Steps()
    step()
    with pytest.raises(ProfileError, match=r"launched no megakernel.*torch_mpk\.explain"):
        torch_mpk.profile(lambda: torch.ones(2) + 1, path)
    with pytest.raises(ZeroDivisionError):
        torch_mpk.profile(lambda: 1 / 0, path)
    assert path.read_text() == "an earlier one" and [*tmp_path.iterdir()] == [path]


def test_an_error_in_a_recorded_step_ends_the_recording(tmp_path: Path) -> None:
    step = Steps()

    def fails_at_the_fifth() -> None:
        step()
        if step.count == 5:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        torch_mpk.profile(fails_at_the_fifth, tmp_path / "trace.json", steps=3, warmup=3)
    step()
    [segment] = profiling.live_segments()
    assert segment.executable.stop_recording() == [] and not any(tmp_path.iterdir())


def test_the_command_profiles_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model(num_layers=1).config.save_pretrained(tmp_path)
    out = tmp_path / "trace.json.gz"
    sizes = ["--position", "5", "--length", "16", "--dtype", "float32", "--device", "cpu", "--steps", "2"]
    main(["profile", str(tmp_path), "--out", str(out), *sizes])
    assert "2 launches" in capsys.readouterr().out
    assert len(read_tracks(out)["launches"].slices) == 2
    with pytest.raises(
        SystemExit, match=r"--length: expected at least 17, for --position 12 and the steps after it, got 16"
    ):
        main(["profile", str(tmp_path), *sizes, "--position", "12"])
