"""Two ranks on two GPUs, each a process: sums, models, and what becomes of a rank when the other is late or lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

import torch_mpk
from tests.ranks import sweep
from tests.ranks.team import run, start
from tests.ranks.test_models import LENGTH, NEW, PROMPT, save_quantised, sharded
from tests.ranks.test_processes import WATCHDOG, Layers, compiled, digest, inputs
from torch_mpk.errors import EngineError, MegakernelTimeout
from torch_mpk.testing.tiny import random_ids, tiny_model

RANKS = 2
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")]


class Step:
    """One compiled model of a rank, on its own GPU."""

    def __init__(self, rank: int) -> None:
        torch.cuda.set_device(rank)
        self.call = compiled(Layers(rank).cuda())
        self.inputs = [inputs(number).cuda() for number in range(5)]
        self.right = [each.clone() for each in self.outputs()]

    def outputs(self) -> list[torch.Tensor]:
        found = [self.call(each) for each in self.inputs]
        torch_mpk.synchronize()
        return [each.cpu() for each in found]

    def is_right(self) -> bool:
        return all(map(torch.equal, self.outputs(), self.right))

    def said(self, seconds: float = 0) -> str:
        """The error of a call that begins in so many seconds."""
        time.sleep(seconds)
        try:
            self.call(self.inputs[0])
            torch_mpk.synchronize()
        except MegakernelTimeout as error:
            return str(error)
        return ""


@torch.no_grad()
def apart(rank: int) -> dict[str, object]:
    step = Step(rank)
    wide = [Layers(each).double() for each in range(RANKS)]
    errors = []
    for number, got in enumerate(step.right):
        x = inputs(number).double()
        for parts in zip(*(layers.weights for layers in wide), strict=True):
            x = x + sum(torch.nn.functional.linear(x, part) for part in parts)
        errors.append((got.double() - x).abs().max().item())
    said = {"in time": step.said(2.0 * rank), "late": step.said(2.5 * WATCHDOG * rank)}
    return {"digest": digest(step.right), "error": max(errors), "said": said, "is_right": step.is_right()}


def test_launches_apart(tmp_path: Path) -> None:
    """Two seconds, and longer than the watchdog waits."""
    both = run(RANKS, apart, tmp_path)
    assert both[0]["digest"] == both[1]["digest"]
    assert all(each["error"] < 1e-5 and each["is_right"] and not each["said"]["in time"] for each in both)
    assert "rank 1" in both[0]["said"]["late"] and "rank 0" in both[1]["said"]["late"]


@torch.no_grad()
def left_out(rank: int) -> dict[str, object]:
    """Rank 1 raises where rank 0 launches. Then rank 0 is interrupted as it waits for rank 1."""
    step = Step(rank)
    said = {}
    try:
        if rank == 1:
            raise ValueError("of the user's")
        said["raised"] = step.said()
    except ValueError:
        said["raised"] = step.said(2.5 * WATCHDOG)
    is_right = step.is_right()
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 1)
    try:
        said["interrupted"] = step.said(2.5 * WATCHDOG * rank)
    except KeyboardInterrupt:
        said["next"] = step.said(2.5 * WATCHDOG)
    return {"said": said, "is_right": is_right and step.is_right()}


def test_a_rank_that_raises_or_is_interrupted(tmp_path: Path) -> None:
    both = run(RANKS, left_out, tmp_path)
    assert all(each["is_right"] for each in both)
    assert "rank 1" in both[0]["said"]["raised"] and "rank 0" in both[1]["said"]["raised"]
    assert "rank 1" in both[0]["said"]["next"] and "rank 0" in both[1]["said"]["interrupted"]


@torch.no_grad()
def replayed(rank: int) -> dict[str, object]:
    """Rank 0 replays its graph before rank 1 does, by more than the watchdog waits."""
    step = Step(rank)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step.call(step.inputs[0])
    for _ in range(3):
        graph.replay()
    torch_mpk.synchronize()
    same = torch.equal(output.cpu(), step.right[0])
    time.sleep(2.5 * WATCHDOG * rank)
    graph.replay()
    try:
        torch_mpk.synchronize()
        said = ""
    except MegakernelTimeout as error:
        said = str(error)
    return {"same": same, "said": said, "is_right": step.is_right()}


def test_a_graph_that_ranks_replay_apart(tmp_path: Path) -> None:
    both = run(RANKS, replayed, tmp_path)
    assert all(each["same"] and each["is_right"] for each in both)
    assert "rank 1" in both[0]["said"] and "rank 0" in both[1]["said"]


@torch.no_grad()
def until_killed(rank: int) -> list[str]:
    step = Step(rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [step.said(), step.said()]


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    team = start(RANKS, until_killed, tmp_path).wait(120)
    [said, killed] = team.results
    assert killed is None and said is not None, team.logs
    assert "rank 1" in said[0] and "rank 1" in said[1]


@torch.no_grad()
def models(rank: int, folder: str, prompts: list[list[int]]) -> dict[str, object]:
    """A prompt's logits of dense, expert and FP8 models, in one launch each, and the dense one's tokens behind
    ``prompts``; and why there is no continuous batching."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    from torch_mpk import continuous_batching

    torch.cuda.set_device(rank)
    FineGrainedFP8HfQuantizer.validate_environment = lambda *args, **kwargs: None  # no kernels from the hub
    ids = torch.tensor(PROMPT, device="cuda")
    found: dict[str, object] = {}
    for name in ("0", "fp8", "dense"):
        torch.compiler.reset()
        model = sharded(f"{folder}/{name}", dtype=torch.float32)
        step = torch.compile(model, backend="mpk", options={"fallback": "error", "while_building": "wait"})
        found[name] = step(input_ids=ids, use_cache=False).logits.float().tolist()
        torch_mpk.synchronize()
    tokens = torch_mpk.generate(
        model, torch.tensor(prompts, device="cuda"), NEW, options={"fallback": "error"}, eos_token_id=[]
    )
    batched = sharded(f"{folder}/dense", continuous_batching.ATTENTION, torch.float32)
    try:
        batched.generate_batch(PROMPT, continuous_batching_config=continuous_batching.config())
        refusal = ""
    except EngineError as error:
        refusal = str(error)
    return found | {"tokens": tokens.tolist(), "refusal": refusal}


def test_models_shared_out(tmp_path: Path) -> None:
    torch.manual_seed(3)
    sweep.save(["OLMoE"], tmp_path)
    want = {"fp8": torch.tensor(save_quantised(tmp_path / "fp8"))}
    dense = tiny_model("qwen3", dtype=torch.float32)
    dense.save_pretrained(tmp_path / "dense")
    with torch.no_grad():
        want["dense"] = dense(input_ids=torch.tensor(PROMPT)).logits
        experts = sweep.AutoModelForCausalLM.from_pretrained(tmp_path / "0", dtype=torch.float32)
        want["0"] = experts(input_ids=torch.tensor(PROMPT)).logits
        prompts = random_ids(2, LENGTH)
        greedy = dense.generate(prompts, max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    both = run(RANKS, models, tmp_path, str(tmp_path), prompts.tolist())
    assert both[0] == both[1], "ranks differ"
    for name, exact in want.items():
        error = (torch.tensor(both[0][name]) - exact).norm() / exact.norm()
        assert error < (1e-2 if name == "fp8" else 1e-4), name
    assert both[0]["tokens"] == greedy.tolist()
    assert "shared out to 2 ranks" in both[0]["refusal"]
