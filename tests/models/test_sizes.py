"""Prompts, batches and caches that grow and shrink from call to call: a build for each size, none of them in parts."""

import warnings

import pytest
import torch
from transformers import CompileConfig

import torch_mpk
from tests.thinned import thinned
from torch_mpk.backend import pipeline
from torch_mpk.errors import MpkWarning
from torch_mpk.testing.tiny import Decoding, random_ids, tiny_model

STRICT = {"fallback": "error"}
# Sequences, tokens of each, and the cache's length.
CALLS = [
    (1, 4, 32),
    (1, 20, 64),
    (1, 9, 32),
    (2, 4, 32),
    (3, 20, 48),
    (2, 9, 32),
]
SIZES = {(batch, length) for batch, _, length in CALLS}


@pytest.fixture
def builds(monkeypatch, tmp_path):
    """Every build of a graph, each of which has to be one launch; a warning is an error. No earlier trace serves."""
    torch.compiler.reset()
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(tmp_path))
    made, build = [], pipeline.build

    def recorded(captured, *args):
        compiled = build(captured, *args)
        assert len(compiled.partitioned.segments) == 1
        made.append(captured)
        return compiled

    monkeypatch.setattr(pipeline, "build", recorded)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MpkWarning)
        yield made


def model_of(**config):
    return tiny_model(dtype=torch.float32, num_layers=1, **config)


@pytest.mark.parametrize("mask", thinned(["none", "4d"], 0))
def test_a_compiled_step(mask, builds):
    model = model_of()
    step = torch.compile(model, backend="mpk")
    for batch, prompt, length in CALLS:
        ids = random_ids(batch, prompt)
        ours, eager = (Decoding(model, ids, mask=mask, max_cache_len=length) for _ in range(2))
        with torch.inference_mode():
            for _ in range(2):
                token = random_ids(batch, 1)
                torch.testing.assert_close(ours.step(step, token), eager.step(model, token), rtol=1e-4, atol=1e-4)
        for actual, expected in zip(ours.state(), eager.state(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert len(builds) == len(SIZES)


def test_the_length_of_a_mask_is_no_size(builds):
    """The first call's length is none yet to Dynamo: one build more."""
    model = model_of()
    step = torch.compile(model, backend="mpk")
    for batch, prompt, length in CALLS[:3]:
        ids = random_ids(batch, prompt)
        ours, eager = (Decoding(model, ids, mask="2d", max_cache_len=length) for _ in range(2))
        with torch.inference_mode():
            for _ in range(3):
                token = random_ids(batch, 1)
                torch.testing.assert_close(ours.step(step, token), eager.step(model, token), rtol=1e-4, atol=1e-4)
    assert len(builds) == len({(batch, length) for batch, _, length in CALLS[:3]}) + 1


@pytest.mark.slow
def test_more_sizes_than_dynamo_compiles(builds):
    model = model_of()
    step = torch.compile(model, backend="mpk", options=STRICT)
    sizes = [(batch, length) for length in (32, 40, 56, 64) for batch in (1, 2, 3)]
    assert len(sizes) > torch._dynamo.config.recompile_limit
    for batch, length in sizes * 2:
        decoding = Decoding(model, random_ids(batch, 4), max_cache_len=length)
        with torch.inference_mode():
            decoding.step(step, random_ids(batch, 1))
    assert len(builds) == len(sizes)


def test_hugging_faces_generate(builds):
    model = model_of()
    config = CompileConfig(backend="mpk", mode=None, fullgraph=False)
    config._compile_all_devices = True
    for batch, prompt, length in CALLS[:4]:
        settings = {"max_new_tokens": length - prompt, "do_sample": False, "pad_token_id": 0}
        ids = random_ids(batch, prompt)
        settings["attention_mask"] = torch.ones_like(ids)  # else what looks like padding is masked
        actual = model.generate(ids, cache_implementation="static", compile_config=config, **settings)
        assert torch.equal(actual, model.generate(ids, **settings))
    assert len(builds) <= len(SIZES)  # its cache never shrinks


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 16])
def test_our_generate(chunk, builds):
    model = model_of()
    for batch, prompt, length in CALLS:
        ids = random_ids(batch, prompt)
        arguments = {"max_cache_len": length, "prefill_chunk_size": chunk, "options": STRICT}
        actual = torch_mpk.generate(model, ids, 5, **arguments)
        settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        expected = model.generate(ids, max_new_tokens=5, **settings)
        assert torch.equal(actual, expected)
    assert len(builds) == (1 if chunk is None else 2) * len(SIZES)  # the chunk is one, too
