"""Decode steps of Hugging Face models under ``torch.compile(backend="mpk")``, against eager PyTorch."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.models.stepping import assert_close, compiled, run_both
from tests.thinned import thinned
from torch_mpk.errors import IndexRangeError
from torch_mpk.testing.tiny import Decoding, random_ids, tiny_model

VARIANTS = [
    # arch, attention, dtype, batch, mask, tied head; chosen so that every pair of values meets
    ("qwen3", "sdpa", torch.bfloat16, 1, "none", False),
    ("qwen3", "sdpa", torch.float32, 3, "2d", True),
    ("qwen3", "eager", torch.bfloat16, 3, "4d", True),
    ("qwen3", "eager", torch.float32, 1, "2d", False),
    ("llama", "sdpa", torch.bfloat16, 3, "2d", False),
    ("llama", "sdpa", torch.float32, 1, "4d", True),
    ("llama", "eager", torch.bfloat16, 1, "2d", True),
    ("llama", "eager", torch.float32, 3, "none", False),
]


@pytest.mark.parametrize(("arch", "attention", "dtype", "batch", "mask", "tied"), thinned(VARIANTS, 0, 7))
def test_decode_equals_eager(device, arch, attention, dtype, batch, mask, tied):
    model = tiny_model(arch, attention=attention, dtype=dtype, device=device, tie_word_embeddings=tied)
    run_both(model, compiled(model), batch=batch, mask=mask)


def masks_users_make(dtype, length, written, device):
    """Masks for a batch of two and four heads: the first row attends to nothing, the second to what was written."""

    def added(dead, live=0.0):
        mask = torch.full((2, 1, 1, length), dead, dtype=dtype, device=device)
        mask[1, ..., :written] = live
        return mask

    yield added(-torch.inf)
    yield added(torch.finfo(dtype).min)
    yield added(-1.5, live=0.5)  # only a bias
    with_nan = added(-torch.inf, live=0.5)
    with_nan[1, ..., length - 1] = torch.nan
    yield with_nan
    yield added(-torch.inf) == 0
    yield added(-torch.inf).float()
    yield torch.cat([added(-torch.inf), added(0.0), added(-torch.inf).roll(1, 0), added(-torch.inf, 0.5)], dim=1)


@pytest.mark.parametrize("attention", thinned(["sdpa", "eager"]))
def test_masks_users_make(device, attention):
    model = tiny_model(attention=attention, device=device, num_layers=1)
    step, prompt, token = compiled(model), random_ids(2, 5, device), random_ids(2, 1, device)
    num_with_nan = 0
    for mask in masks_users_make(model.dtype, 32, 6, device):
        ours, eager = Decoding(model, prompt), Decoding(model, prompt)
        with torch.inference_mode():
            try:
                with sdpa_kernel(SDPBackend.MATH):  # PyTorch's other kernels differ where nothing is attended to
                    expected = eager.step(model, token, attention_mask=mask)
            except RuntimeError as error:  # sdpa refuses a mask of another dtype
                with pytest.raises(type(error)):
                    ours.step(step, token, attention_mask=mask)
                continue
            actual = ours.step(step, token, attention_mask=mask)
        num_with_nan += int(expected.isnan().any())
        assert torch.equal(actual.isnan(), expected.isnan())
        assert_close(actual.nan_to_num(), expected.nan_to_num())
        for left, right in zip(ours.state(), eager.state(), strict=True):
            assert_close(left, right)
    assert num_with_nan == (4 if attention == "eager" else 1)


def test_a_growing_mask_makes_at_most_two_builds(device, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    model = tiny_model(device=device, num_layers=1)
    step = compiled(model)
    prompt = random_ids(2, 4, device)
    ours, eager = (Decoding(model, prompt, mask="2d", max_cache_len=110) for _ in range(2))
    with torch.inference_mode():
        for _ in range(100):
            token = random_ids(2, 1, device)
            assert_close(ours.step(step, token), eager.step(model, token))
    assert len(list(tmp_path.iterdir())) <= 2


def test_a_new_cache_needs_no_build(device, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    model = tiny_model(device=device, num_layers=1)
    step = compiled(model)
    for _ in range(3):
        run_both(model, step)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_an_equal_graph_shares_the_build(device, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    first, second = (tiny_model(device=device, num_layers=1) for _ in range(2))

    def step_of_first(**kwargs):
        return first(**kwargs)

    def step_of_second(**kwargs):
        return second(**kwargs)

    steps = compiled(step_of_first), compiled(step_of_second)  # Dynamo compiles both
    for model, step in ((first, steps[0]), (second, steps[1]), (first, steps[0])):
        run_both(model, step, num_steps=2)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_several_batch_sizes_and_cache_lengths(device, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    model = tiny_model(device=device, num_layers=1)
    step = compiled(model)
    for batch, prompt_length in ((1, 3), (4, 5), (2, 7), (4, 5)):
        run_both(model, step, batch=batch, prompt_length=prompt_length, num_steps=2)
    assert len(list(tmp_path.iterdir())) <= 4, "a batch size was built again"
    prompt = random_ids(1, 3, device)
    for length in (16, 24):
        ours, eager = (Decoding(model, prompt, max_cache_len=length) for _ in range(2))
        with torch.inference_mode():
            token = random_ids(1, 1, device)
            assert_close(ours.step(step, token), eager.step(model, token))


def _in_place(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.9)


def _data(model):
    for weight in model.parameters():
        weight.data = weight.data.flip(0).clone()


def _load(model):
    model.load_state_dict({name: weight * 0.8 for name, weight in model.state_dict().items()})


def _assign(model):
    model.load_state_dict({name: weight * 0.8 for name, weight in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", thinned([_in_place, _data, _load, _assign], 0, 3))
def test_changed_weights_are_seen(device, change):
    model = tiny_model(device=device, num_layers=1)
    step = compiled(model)
    run_both(model, step, num_steps=1)
    change(model)
    run_both(model, step, num_steps=2)


@pytest.mark.slow
def test_models_run_at_once_in_threads(device):
    """Three threads, each on a stream of its own; two of them share a model."""
    first, second = (tiny_model(arch, device=device, num_layers=1) for arch in ("qwen3", "llama"))
    jobs = []
    for model, step in ((first, step_of_first := compiled(first)), (second, compiled(second)), (first, step_of_first)):
        run_both(model, step, num_steps=1)  # builds
        prompt, tokens = random_ids(1, 5, device), random_ids(16, 1, device).split(1)
        ours, eager = Decoding(model, prompt), Decoding(model, prompt)
        with torch.inference_mode():
            jobs.append((step, ours, tokens, [eager.step(model, token) for token in tokens]))
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = threading.Barrier(len(jobs))

    def decode(job):
        step, ours, tokens, _ = job
        stream = torch.cuda.Stream() if device.type == "cuda" else None
        start.wait(60)
        with torch.inference_mode(), torch.cuda.stream(stream):
            results = [ours.step(step, token) for token in tokens]
        if stream is not None:
            stream.synchronize()
        return results

    with ThreadPoolExecutor(len(jobs)) as pool:
        for results, (*_, expected) in zip(pool.map(decode, jobs), jobs, strict=True):
            for actual, wanted in zip(results, expected, strict=True):
                assert_close(actual, wanted)


def test_no_grad_works_and_bumps_versions(device):
    model = tiny_model(device=device, num_layers=1)
    step = compiled(model)
    prompt, token = random_ids(1, 5, device), random_ids(1, 1, device)
    with torch.no_grad():
        ours, eager = Decoding(model, prompt), Decoding(model, prompt)
        versions = [tensor._version for tensor in ours.state()]
        assert_close(ours.step(step, token), eager.step(model, token))
    assert all(tensor._version > version for tensor, version in zip(ours.state(), versions, strict=True))


def test_a_cache_made_in_inference_mode_is_refused_outside_as_in_eager(device):
    model = tiny_model(device=device, num_layers=1)
    prompt, token = random_ids(1, 5, device), random_ids(1, 1, device)
    ours, eager = Decoding(model, prompt), Decoding(model, prompt)
    for decoding, run in ((ours, compiled(model)), (eager, model)):
        with torch.no_grad(), pytest.raises(RuntimeError, match="inference tensor"):
            decoding.step(run, token)
    assert all(map(torch.equal, ours.state(), eager.state()))


def test_a_full_cache_is_not_written_beyond(device):
    model = tiny_model(device=device, num_layers=1)
    step = compiled(model)
    prompt = torch.ones(1, 6, dtype=torch.int64, device=device)
    ours, eager = (Decoding(model, prompt, max_cache_len=8) for _ in range(2))
    with torch.inference_mode():
        for _ in range(2):
            token = random_ids(1, 1, device)
            assert_close(ours.step(step, token), eager.step(model, token))
        before = [tensor.clone() for tensor in ours.state()]
        if device.type == "cpu":  # on CUDA the host does not know the position: its row is left out
            with pytest.raises(
                IndexRangeError, match=r"layers\.0\.self_attn: the key/value cache is full.*max_cache_len.*got 8"
            ):
                ours.step(step, token)
            assert all(map(torch.equal, ours.state(), before))
        else:
            ours.step(step, token)
            for state, old in zip(ours.state(), before, strict=True):
                assert state.dim() == 0 or torch.equal(state, old)
        assert_close(*(Decoding(model, prompt).step(run, token) for run in (step, model)))


@pytest.mark.parametrize("token", thinned([96, -1, 2**40], 0))
def test_a_token_outside_the_vocabulary_is_an_error(token):
    model = tiny_model(num_layers=1)
    step = compiled(model)
    decoding = Decoding(model, random_ids(2, 5))
    with torch.inference_mode():
        decoding.step(step, random_ids(2, 1))
        before = [tensor.clone() for tensor in decoding.state()]
        apart = torch.tensor([[1, 2], [token, 2]])[:, :1]
        for tokens in (apart.contiguous(), apart):
            torch.compiler.reset()  # else the second stride becomes a symbol, which is not checked
            with pytest.raises(IndexError):
                decoding.step(model, tokens)
            with pytest.raises(IndexRangeError, match=rf"expected token ids from 0 to 95, got {token}"):
                decoding.step(step, tokens)
    assert all(map(torch.equal, decoding.state(), before))


@pytest.mark.slow
def test_other_dtypes_and_shapes_fail_or_work_as_in_eager(device):
    model = tiny_model(device=device, num_layers=1)
    step = torch.compile(model, backend="mpk")  # not strict: Dynamo may compile in parts what has raised once
    run_both(model, step, num_steps=1)
    decoding = Decoding(model, random_ids(2, 5, device))
    with torch.inference_mode():
        for wrong in (random_ids(2, 1, device).float(), random_ids(3, 1, device)):
            for run in (model, step):
                with pytest.raises((RuntimeError, IndexError, ValueError)):
                    run(input_ids=wrong, past_key_values=decoding.cache)
    run_both(model, step, num_steps=1)
