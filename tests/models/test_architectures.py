"""Every model of docs/models.md runs through the backend as it does in eager, in as many launches as that page says."""

import re
from pathlib import Path

import pytest
import torch

from tests.thinned import thinned
from torch_mpk.testing.tiny import random_ids
from torch_mpk.testing.zoo import MODELS, PROMPT_LENGTH, Decoder, DecodeSteps

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
LAUNCHES = {
    name: int(launches) for name, launches in re.findall(r"^\| ([^|]+?) \| [^|]* \| (\d+) \|", PAGE, flags=re.MULTILINE)
}


def launches_of(folder: Path) -> int:
    """The segments of ours in the graphs built so far."""
    return sum(path.read_text().count(" (ours)\n") for path in folder.glob("*/3.segments.txt"))


def attention_tasks_of(folder: Path) -> int:
    """Counts attention of one position a row, over keys and values or over latents."""
    names = "tasks_attention_attention(", "tasks_latent_attention_latent_attention("
    return sum(path.read_text().count(name) for path in folder.glob("*/2.tasks.txt") for name in names)


def test_the_page_lists_every_model():
    assert list(LAUNCHES) == list(MODELS)


def test_dense_models_are_one_launch():
    for name, model in MODELS.items():
        assert model.is_dense == (LAUNCHES[name] == 1), name


DECODERS = [name for name, model in MODELS.items() if isinstance(model, Decoder)]
ALSO_ALONE = ["Qwen2", "Qwen3-MoE", "Gemma 3", "OLMo 2", "GPT-NeoX", "DeepSeek-V2", "gpt-oss"]  # unlike each other


CASES = [(name, 1) for name in ALSO_ALONE] + [(name, 3) for name in DECODERS]


@pytest.mark.parametrize(("name", "batch"), thinned(CASES, ALSO_ALONE.index("Qwen2")))
def test_decode_equals_eager(device, name, batch, tmp_path, monkeypatch):
    """A window that slides is filled and left behind, under a mask that grows."""
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    model = MODELS[name].make().to(device)
    step = torch.compile(model, backend="mpk", options={"min_segment_nodes": 1})
    prompt = random_ids(batch, PROMPT_LENGTH, device)
    slides = MODELS[name].slides
    ours, eager = (DecodeSteps(model, prompt, mask_grows=slides) for _ in range(2))
    with torch.inference_mode():
        for i in range(6 if slides else 3):
            token = random_ids(batch, 1, device)
            assert_close(ours.step(step, token), eager.step(model, token))
            if i == 0 and device.type == "cpu":
                assert launches_of(tmp_path) == LAUNCHES[name]
                attending = [each for each in ours.cache.layers if getattr(each, "keys", None) is not None]
                assert attention_tasks_of(tmp_path) == len(attending), "sums, which larger models are too large for"
    for actual, expected in zip(ours.state(), eager.state(), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("name", thinned([name for name, model in MODELS.items() if not isinstance(model, Decoder)], 0))
def test_a_module_equals_eager(device, name, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    model = MODELS[name].make().to(device)
    step = torch.compile(model, backend="mpk", options={"min_segment_nodes": 1})
    with torch.inference_mode():
        for batch in (1, 3):
            inputs = [tensor.to(device) for tensor in MODELS[name].inputs(batch)]
            buffers = [buffer.clone() for buffer in model.buffers()]
            expected = model(*inputs)
            after = [buffer.clone() for buffer in model.buffers()]
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
            assert_close(step(*inputs), expected)
            for buffer, wanted in zip(model.buffers(), after, strict=True):
                assert_close(buffer, wanted)
            if batch == 1:
                assert launches_of(tmp_path) == LAUNCHES[name]


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
