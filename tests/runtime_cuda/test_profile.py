"""``torch_mpk.profile`` of kernels for a GPU: the fake driver's launches, run by the emulator."""

import ctypes
import functools
import gc
import importlib
import itertools
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_mpk
from tests.models.stepping import assert_close, compiled
from tests.runtime.traces import Track, read_tracks
from tests.runtime_cuda import simulated_gpu
from torch_mpk.builds.dump import Dump
from torch_mpk.config import Options
from torch_mpk.errors import ProfileError
from torch_mpk.plan import Plan
from torch_mpk.profile import record
from torch_mpk.runtime.segment import live_segments
from torch_mpk.runtime.timeline import FIELDS, Recording
from torch_mpk.testing.emulator import SMEM_BYTES, compile_kernels
from torch_mpk.testing.tiny import Decoding, random_ids, tiny_model

profiling = importlib.import_module("torch_mpk.profile")  # the package has the function by that name
NUM_WORKERS = 3
PROMPT_LENGTH = 5
LAUNCHES_KEPT = 8  # kLaunchesKept of abi/control.h
PREEMPTED_NS = 20_000_000  # between the two clocks that an emulated worker reads one after the other


@functools.cache
def library_of(source: str) -> ctypes.CDLL:
    return compile_kernels([source], 90, ["-O1"])


class EmulatedExecutable:
    """An executable on the fake driver, whose launches the emulator makes, with the parameters that the driver got."""

    def __init__(self, executable: Any, plan: Plan) -> None:
        self.executable, self.kernel = executable, plan.kernel
        self.library = library_of(plan.kernel.source)

    def call(self, *arguments: Any) -> None:
        self.executable.call(*arguments)
        self.library.emulate(
            0, bytes(simulated_gpu.driver.params), self.kernel.num_workers, self.kernel.num_threads, 0, 0
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executable, name)


@pytest.fixture
def emulated(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated.num_sms, simulated.smem_optin = NUM_WORKERS, SMEM_BYTES
    load = simulated_gpu.load

    def load_emulated(plan: Plan, device: torch.device, options: Options, dump: Dump) -> EmulatedExecutable:
        return EmulatedExecutable(load(plan, device, options, dump), plan)

    monkeypatch.setattr(simulated_gpu, "load", load_emulated)
    others = live_segments()  # that earlier tests have left
    monkeypatch.setattr(profiling, "live_segments", lambda: [each for each in live_segments() if each not in others])
    torch.compiler.reset()


class Steps:
    """Decode steps of a tiny model, compared with eager ones as they are made."""

    def __init__(self, **options: object) -> None:
        self.model = tiny_model()
        prompt = random_ids(1, PROMPT_LENGTH)
        self.ours, self.eager = Decoding(self.model, prompt), Decoding(self.model, prompt)
        self.step = compiled(self.model, **options)
        self.count = 0

    @torch.inference_mode()
    def __call__(self) -> None:
        token = random_ids(1, 1)
        assert_close(self.ours.step(self.step, token), self.eager.step(self.model, token))
        self.count += 1


def check_consumers(track: Track, launches: list[tuple], phase_names: list[str]) -> None:
    phases = [each for each in track.slices if each[3]]
    assert all(args["tasks"] == phase_names[args["phase"]] for *_, args in phases)
    for number, (first, last, *_) in enumerate(launches):
        mine = [args["phase"] for begin, end, _, args in phases if first <= begin and end <= last]
        assert mine == sorted({*mine}) and len(mine) >= len(phase_names) // 2, f"launch {number} of {track.name}"


@pytest.mark.slow
def test_a_timeline_shows_consumers_and_loaders(emulated: None, tmp_path: Path) -> None:
    step = Steps(profile=True)
    warmup, steps = LAUNCHES_KEPT + 1, LAUNCHES_KEPT + 2  # more than the device keeps
    profile = torch_mpk.profile(step, tmp_path / "trace.json.gz", steps=steps, warmup=warmup)
    assert step.count == warmup + steps
    [own] = profiling.live_segments()
    tracks = read_tracks(profile.path)
    workers = range(NUM_WORKERS)
    of_workers = [f"worker {w} {role}" for w in workers for role in ("consumers", "loader")]
    assert [*tracks] == [*of_workers, "launches"]
    launches = tracks["launches"].slices
    assert len(launches) == steps == profile.kernels[0].num_launches
    assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(launches)), "launches overlap"
    for worker in workers:
        check_consumers(tracks[f"worker {worker} consumers"], launches, own.plan.kernel.phase_names)
    assert any(tracks[f"worker {w} consumers"].of("stage") for w in workers)
    assert any(tracks[f"worker {w} consumers"].of("wait for events") for w in workers)
    assert any(tracks[f"worker {w} loader"].of("wait for consumers") for w in workers)


@pytest.mark.slow
def test_loaders_count_the_bytes_that_they_bring(emulated: None, tmp_path: Path) -> None:
    step = Steps(profile=True)
    profile = torch_mpk.profile(step, tmp_path / "trace.json", steps=2, warmup=1)
    tracks = read_tracks(profile.path)
    launches = tracks["launches"].slices
    [own] = profiling.live_segments()
    model = step.model
    layers = [
        [
            [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj],
            [layer.self_attn.o_proj],
            [layer.mlp.gate_proj, layer.mlp.up_proj],
            [layer.mlp.down_proj],
        ]
        for layer in model.model.layers
    ]
    weights = [sum(linear.weight.nbytes for linear in linears) for layer in layers for linears in layer]
    weights.append(model.lm_head.weight.nbytes)
    for number, (first, last, _, args) in enumerate(launches):
        loaded: dict[int, int] = {}
        for worker in range(NUM_WORKERS):
            for begin, _, _, load in tracks[f"worker {worker} loader"].slices:
                if load and first - 10**6 <= begin <= last:
                    loaded[load["phase"]] = loaded.get(load["phase"], 0) + load["bytes"]
        names = own.plan.kernel.phase_names
        assert [loaded[phase] for phase, name in enumerate(names) if name.startswith("linear")] == weights
        # Keys and values of the positions that there are with the step's own, not those of the whole cache.
        positions = PROMPT_LENGTH + 2 + number
        config = model.config
        of_position = 2 * config.num_key_value_heads * config.head_dim * 2
        attended = [loaded[phase] for phase, name in enumerate(names) if name.startswith("attention")]
        assert attended == [positions * of_position] * config.num_hidden_layers
        assert args["bytes"] >= sum(loaded.values())


@pytest.mark.slow
def test_experts_count_with_the_pairs_that_chose_them(emulated: None, tmp_path: Path) -> None:
    """By kernels whose warps read weights in place."""
    rows, choices, experts, sizes = 3, 2, 40, [(64, 72), (72, 40)]
    weights = [torch.randn(experts, n, k).bfloat16() / 8 for k, n in sizes]
    weights[1] = weights[1].to(torch.float8_e4m3fn)
    scale = torch.rand(experts, 1, 1)

    def products(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        y = torch.ops.mpk.expert_linear(x, first, weights[0])
        return torch.ops.mpk.quantized_expert_linear(y, second, weights[1], scale, block_rows=128, block_columns=128)

    x = torch.randn(rows, choices, sizes[0][0]).bfloat16()
    given = [[torch.randint(experts, (rows, choices)) for _ in sizes] for _ in range(3)]
    step, calls = torch.compile(products, backend="mpk", options={"profile": True}), iter(given)
    profile = torch_mpk.profile(lambda: step(x, *next(calls)), tmp_path / "trace.json", steps=2, warmup=1)
    [own] = profiling.live_segments()
    names = [job.cut.kernel for phase in own.plan.schedule.phases for job in phase.jobs]
    assert names == ["expert_linear.rows", "quantized_expert_linear.direct"]
    slices = read_tracks(profile.path)["experts"].slices
    for number, (ids, (*_, args)) in enumerate(zip(itertools.chain(*given[1:]), slices, strict=True)):
        counts = {str(i): count for i, count in enumerate(ids.flatten().bincount().tolist()) if count}
        assert args["pairs of experts"] == counts
        operands = ids.nbytes + 2 * rows * choices * sum(sizes[number % 2])
        of_expert = weights[number % 2][0].nbytes + number % 2 * scale[0].nbytes
        assert args["bytes"] == operands + len(counts) * of_expert


def check_order(recording: Recording, names: tuple[str, ...]) -> None:
    """Each time is at or after those in front of it, in its phase and in the phases before."""
    times = torch.stack([recording.field(name) for name in names], -1).flatten(2)  # [launch, worker, all in a row]
    noted = torch.where(times == 0, 0, times).cummax(-1).values
    assert (noted[..., 1:] >= noted[..., :-1]).all() and torch.equal(torch.where(times == 0, noted, times), noted)


@pytest.mark.slow
def test_clocks_of_multiprocessors_are_put_on_one_axis(emulated: None) -> None:
    """The emulator's are half a second apart, and run at two cycles a nanosecond."""
    step = Steps(profile=True)
    step()
    began = time.monotonic_ns()  # the clock that is the emulator's shared one
    [recording] = record(lambda: [step() for _ in range(2)])
    took = time.monotonic_ns() - began
    check_order(recording, FIELDS[:5])
    check_order(recording, FIELDS[5:-1])
    assert (recording.field("computed") > 0).all() and (recording.field("loaded") > 0).all()
    assert (recording.begins >= began).all() and (recording.ends <= began + took).all()
    [own] = profiling.live_segments()
    ready, computed = recording.field("ready"), recording.field("computed")
    waits = [(phase, before) for phase, p in enumerate(own.plan.schedule.phases) for before in p.waits]
    assert waits
    for phase, before in waits:
        done = computed[:, :, before].amax(1)
        assert (ready[:, :, phase].amin(1) >= done - PREEMPTED_NS).all(), f"{phase} was ready before {before} was done"


# A worker's stamps in order, in cycles since its begin, of which a nanosecond has 3; the clock wraps in the launch.
# None: nothing to stage, or to wait for. The loader began before the consumers did.
LONG = 3 * 10**9
CONSUMER = [[3, 6, 9, 12, 30], [33, 36, 39, None, LONG], [LONG + 3, 2 * LONG, 2 * LONG + 3, None, 3 * LONG]]
LOADER = [[-6, 3, None, None, 9], [9, 12, 15, LONG, LONG + 3], [LONG + 3, 2 * LONG, None, None, 2 * LONG + 9]]
BEGIN_NS = 10**9


@pytest.mark.parametrize("ranks", [1, 3])
def test_cycles_of_a_clock_that_wraps(fake: Any, make_executable: Any, ranks: int) -> None:
    workers, begins = 4, [2**32 - 100, 7, 2**31, 123456789]
    waits = torch.arange(workers * 3 * ranks).view(workers, 3, ranks) * 30 if ranks > 1 else torch.zeros(workers, 3, 0)
    size = 512 + LAUNCHES_KEPT * (656 + 4 * waits.numel())
    executable = make_executable(stamps_offset=512, control_bytes=size, ranks=ranks)
    if ranks > 1:
        executable.join(1, [1 << 32, 2 << 32, 3 << 32])
    executable.start_recording()
    executable.run([4096, 8200], [12288], [0], 64)

    def word(begin: int, cycles: int | None) -> int:
        return 0 if cycles is None else (begin + cycles) % 2**32

    end = 4 * LONG
    block = b"".join(
        struct.pack("<2Q4I", BEGIN_NS, BEGIN_NS + end // 3, begin, word(begin, end), 1, 0) for begin in begins
    )
    block += b"".join(struct.pack("<5I", *(word(begin, c) for c in row)) for begin in begins for row in CONSUMER)
    block += b"".join(struct.pack("<6I", *(word(begin, c) for c in row), 77) for begin in begins for row in LOADER)
    control, behind = executable.control_address(64), 512 + LAUNCHES_KEPT * 656
    ctypes.memmove(control + 512, block, len(block))
    ctypes.memmove(control + behind, waits.int().numpy().tobytes(), 4 * waits.numel())
    [launch] = executable.stop_recording()
    recording = Recording.read("test", simulated_gpu.DEVICE, ["a", "b", "c"], [0, 0, 0], [launch], ranks)
    assert recording.times.shape == (1, workers, 3, len(FIELDS))
    assert torch.equal(recording.waited[0], (waits // 3).long())
    for worker in range(workers):
        for phase, (consumer, loader) in enumerate(zip(CONSUMER, LOADER)):
            wanted = [0 if c is None else BEGIN_NS + c // 3 for c in [*consumer, *loader]]
            got = recording.times[0, worker, phase]
            assert [int(t) for t in got[:-1]] == wanted
            assert got[-1] == 77


def test_launches_that_are_given_up_or_made_by_graphs_are_not_recorded(fake: Any, make_executable: Any) -> None:
    executable = make_executable(stamps_offset=512, control_bytes=512 + LAUNCHES_KEPT * 656)
    executable.start_recording()
    executable.run([4096, 8200], [12288], [0], 64)  # its stamps never come
    fake.capturing_stream, fake.capture_id = 128, 5
    executable.run([4096, 8200], [12288], [0], 128)
    fake.capturing_stream = 0
    assert executable.stop_recording() == []


def test_a_kernel_that_is_not_profiled_records_nothing(make_executable: Any) -> None:
    executable = make_executable()
    assert not executable.is_profiled
    with pytest.raises(ValueError, match="mpk_kernel was not built with options"):
        executable.start_recording()


@pytest.mark.slow
def test_a_build_of_an_earlier_process_is_as_good(emulated: None, tmp_path: Path) -> None:
    profiles = []
    for _ in range(2):
        torch.compiler.reset()
        gc.collect()
        profiles.append(torch_mpk.profile(Steps(profile=True), tmp_path / "trace.json", steps=1, warmup=1))
    [own] = profiling.live_segments()
    assert own.plan.schedule is None, "it was built again"
    first, second = ([(t.tasks, t.num_phases, t.num_bytes) for t in p.kernels[0].tasks] for p in profiles)
    assert first == second


@pytest.mark.slow
def test_kernels_that_were_not_built_for_it_are_an_error(emulated: None, tmp_path: Path) -> None:
    step = Steps()
    with pytest.raises(ProfileError, match=r"built to run, not to be recorded.*options=\{'profile': True\}"):
        torch_mpk.profile(step, tmp_path / "trace.json")
    assert not any(tmp_path.glob("trace*"))
