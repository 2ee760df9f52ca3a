"""``torch_mpk.generate``, and Hugging Face's ``generate`` through the backend, against Hugging Face's own."""

import io
import sys
import threading

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    CompileConfig,
    GenerationConfig,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation import BaseStreamer

import torch_mpk
from tests.models.letters import letters
from tests.thinned import thinned
from torch_mpk.builds import timing
from torch_mpk.errors import ArgumentError, AutocastError, MpkWarning
from torch_mpk.generation.prompt_lookup import PromptLookup
from torch_mpk.testing.tiny import VOCAB_SIZE, random_ids, tiny_model
from torch_mpk.testing.zoo import MODELS

STRICT = {"fallback": "error"}


def left_padded(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, :2] = 0
    return random_ids(batch, length), mask


class Recorder(BaseStreamer):
    def __init__(self):
        self.given, self.num_ends = [], 0

    def put(self, value):
        assert value.device.type == "cpu"
        self.given.append(value.tolist())

    def end(self):
        self.num_ends += 1

    def new_tokens(self) -> torch.Tensor:
        return torch.tensor(self.given[1:]).t()


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def model(device):
    # Float32 and distinct logits: greedy choices must not hang on the order of a sum.
    return tiny_model("qwen3", dtype=torch.float32, device=device, num_layers=1)


def test_greedy_tokens_are_eagers(model):
    ids, mask = (tensor.to(model.device) for tensor in left_padded(3, 5))
    for kwargs in ({}, {"attention_mask": mask}):
        expected = model.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=0, **kwargs)
        for _ in range(2):
            assert torch.equal(torch_mpk.generate(model, ids, 10, options=STRICT, **kwargs), expected)
    drawn = torch_mpk.generate(model, ids, 10, do_sample=True, top_k=1, options=STRICT, **kwargs)
    assert torch.equal(drawn, expected)


def test_one_build_serves_every_call(model, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    for length, count in ((5, 10), (9, 4), (2, 20)):
        ids = random_ids(2, length, model.device)
        expected = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
        assert torch.equal(torch_mpk.generate(model, ids, count, options=STRICT), expected)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_rows_stop_behind_their_end_of_sequence(model):
    ids = random_ids(2, 5, model.device)
    free = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    eos = int(free[0, 8])
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=eos, eos_token_id=eos)
    ours, theirs = Recorder(), Recorder()
    model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=eos, streamer=theirs)
    actual = torch_mpk.generate(model, ids, 12, eos_token_id=eos, streamer=ours, options=STRICT)
    assert torch.equal(actual, expected)
    assert torch.equal(ours.new_tokens(), expected[:, 5:].cpu())
    assert (ours.given, ours.num_ends) == (theirs.given, theirs.num_ends)
    stopped = torch_mpk.generate(model, ids[:1], 12, eos_token_id=[eos], options=STRICT)
    assert stopped[0].tolist() == free[0, : free[0, 5:].tolist().index(eos) + 6].tolist()


@pytest.mark.usefixtures("empty_cache")  # with a trace that an earlier process has left there would be no call
def test_all_but_two_steps_of_a_call_go_around_dynamo(model, monkeypatch):
    ids, stats = random_ids(2, 5, model.device), {}
    expected = torch_mpk.generate(model, ids, 10, options=STRICT, stats=stats)
    assert stats["seconds"] > 0
    assert stats["tokens_per_second"] == pytest.approx(18 / stats["seconds"])
    (step,) = sys.modules["torch_mpk.generate"]._steps[model].values()
    calls = []
    compiled = step._compiled
    monkeypatch.setattr(step, "_compiled", lambda *args: (calls.append(args), compiled(*args))[1])
    assert torch.equal(torch_mpk.generate(model, ids, 10, options=STRICT), expected)
    assert len(calls) == 2


def test_changed_weights_and_settings_are_seen_by_the_next_call(model):
    ids = random_ids(1, 5, model.device)
    torch_mpk.generate(model, ids, 6, options=STRICT)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(-1.3)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(torch_mpk.generate(model, ids, 6, options=STRICT), expected)
    model.config.rms_norm_eps = 10.0
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 10.0
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(torch_mpk.generate(model, ids, 6, options=STRICT), expected)


def test_prompts_of_different_lengths_come_as_a_tokenizer_gives_them(model):
    texts = ["'()*+,-", "ABC", "k"]
    inputs = letters(padding_side="left")(texts, return_tensors="pt", padding=True).to(model.device)
    actual = torch_mpk.generate(model, **inputs, max_new_tokens=8, options=STRICT)
    assert torch.equal(actual, model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0))
    for text, row in zip(texts, actual, strict=True):
        alone = letters()(text, return_tensors="pt").to(model.device)
        assert torch.equal(torch_mpk.generate(model, **alone, max_new_tokens=8)[0, -8:], row[-8:])
    inputs = letters(padding_side="right")(texts, return_tensors="pt", padding=True).to(model.device)
    with pytest.raises(ArgumentError, match="attention_mask: expected padding on the left"):
        torch_mpk.generate(model, **inputs, max_new_tokens=8)


def test_text_comes_through_hugging_faces_streamers(model, capsys):
    tokenizer = letters()
    inputs = tokenizer("'()*+", return_tensors="pt").to(model.device)
    model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0, streamer=TextStreamer(tokenizer))
    expected = capsys.readouterr().out
    torch_mpk.generate(model, **inputs, max_new_tokens=8, options=STRICT, streamer=TextStreamer(tokenizer))
    assert capsys.readouterr().out == expected
    assert len(expected) == 14

    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    settings = {"max_new_tokens": 8, "options": STRICT, "streamer": streamer}
    thread = threading.Thread(target=torch_mpk.generate, args=(model,), kwargs=inputs | settings)
    thread.start()
    assert "".join(streamer) == expected[5:].rstrip("\n")
    thread.join()


def test_a_terminal_shows_progress_unless_text_comes(model, monkeypatch):
    ids = random_ids(2, 5, model.device)
    expected = torch_mpk.generate(model, ids, 6, options=STRICT)

    def shown(stderr, **kwargs) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stderr)
            assert torch.equal(torch_mpk.generate(model, ids, 6, options=STRICT, **kwargs), expected)
        return stderr.getvalue()

    assert "0/6" in shown(Terminal())
    assert shown(io.StringIO()) == ""
    assert shown(Terminal(), streamer=Recorder()) == ""
    assert shown(Terminal(), progress_bar=False) == ""
    assert "0/6" in shown(io.StringIO(), streamer=Recorder(), progress_bar=True)


@pytest.mark.slow
def test_settings_come_from_configurations_too(model):
    ids = random_ids(1, 5, model.device)
    free = torch_mpk.generate(model, ids, 12, options=STRICT)
    eos = int(free[0, 9])
    config = GenerationConfig(max_new_tokens=12, eos_token_id=eos, repetition_penalty=1.2, pad_token_id=0)
    expected = model.generate(ids, generation_config=config)
    assert torch.equal(torch_mpk.generate(model, ids, generation_config=config, options=STRICT), expected)
    neutral = {"repetition_penalty": 1.0, "eos_token_id": [], "max_new_tokens": 10}
    actual = torch_mpk.generate(model, ids, generation_config=config, options=STRICT, **neutral)
    assert torch.equal(actual, free[:, :15])

    model.generation_config = config
    assert torch.equal(torch_mpk.generate(model, ids, options=STRICT), expected)
    short = GenerationConfig(max_length=8, repetition_penalty=1.0, eos_token_id=[])
    model.generation_config.max_new_tokens = None
    assert torch.equal(torch_mpk.generate(model, ids, generation_config=short, options=STRICT), free[:, :8])
    with pytest.raises(ArgumentError, match="max_length: expected an int above the prompt's 5 tokens, got 5"):
        torch_mpk.generate(model, ids, generation_config=GenerationConfig(max_length=5))


@pytest.mark.slow
def test_a_configured_sample_is_drawn_as_by_keywords(model):
    ids = random_ids(3, 5, model.device)
    settings = {"do_sample": True, "temperature": 0.8, "top_k": 7, "top_p": 0.9, "min_p": 0.01}

    def draw(**kwargs):
        torch.manual_seed(3)
        return torch_mpk.generate(model, ids, 8, options=STRICT, **kwargs)

    expected = draw(**settings)
    assert torch.equal(draw(generation_config=GenerationConfig(**settings)), expected)
    assert not torch.equal(draw(**settings | {"top_k": 1}), expected)
    assert torch.equal(draw(do_sample=True), draw(do_sample=True, top_k=50))  # as Hugging Face's
    assert not torch.equal(draw(do_sample=True, top_k=0), draw(do_sample=True))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("num_beams", 2, "1, since"),
        ("num_return_sequences", 2, "1, since"),
        ("return_dict_in_generate", True, "None, since"),
        ("penalty_alpha", 0.5, "None, since"),
        ("dola_layers", "high", "None, since"),
        ("cache_implementation", "quantized", "a cache of the model's dtype on its device"),
    ],
)
def test_what_a_configuration_asks_for_and_there_is_not_is_an_error(model, field, value, expected):
    config = GenerationConfig(max_new_tokens=4)
    setattr(config, field, value)
    with pytest.raises(ArgumentError, match=rf"generation_config\.{field}: expected {expected}.* got "):
        torch_mpk.generate(model, random_ids(1, 3, model.device), generation_config=config)
    setattr(model.generation_config, field, value)
    with pytest.raises(ArgumentError, match=rf"generation_config\.{field}"):
        torch_mpk.generate(model, random_ids(1, 3, model.device), 4)


IGNORED = {
    "temperature": 0.0,
    "top_p": 0.0,
    "top_k": -1,
    "min_p": 7.0,
    "typical_p": 0.3,
    "epsilon_cutoff": 0.1,
    "num_assistant_tokens": 3,
    "disable_compile": True,
    "renormalize_logits": True,
    "use_cache": False,
    "cache_implementation": "dynamic",
    "a_field_of_later_versions": 1,
    "output_logits": True,
    "max_time": 1e4,
    "suppress_tokens": [],
    "max_cache_len": 2,
    "prefill_chunk_size": 3,
    "length_penalty": 2.0,
    "guidance_scale": 1,
}


def test_greedy_search_takes_every_configuration_that_asks_for_no_other(model):
    ids = random_ids(2, 5, model.device)
    free = torch_mpk.generate(model, ids, 6, options=STRICT)
    config = GenerationConfig(max_new_tokens=6, eos_token_id=[], do_sample=False)
    vars(config).update(IGNORED)
    assert torch.equal(torch_mpk.generate(model, ids, generation_config=config, options=STRICT), free)
    model.generation_config = config  # as a checkpoint's file has it
    assert torch.equal(torch_mpk.generate(model, ids, options=STRICT), free)
    late = GenerationConfig(max_new_tokens=6, max_time=0.0)
    assert torch_mpk.generate(model, ids, generation_config=late, options=STRICT).shape == (2, 6)
    eos = free[:1, 8].clone()
    expected = model.generate(ids, eos_token_id=eos, pad_token_id=0, max_new_tokens=6, do_sample=False, use_cache=True)
    actual = torch_mpk.generate(model, ids, eos_token_id=eos, pad_token_id=torch.tensor(0), options=STRICT)
    assert torch.equal(actual, expected)


def test_logits_are_processed_as_hugging_faces_are(model):
    """A penalty passes over padding."""
    ids, mask = (tensor.to(model.device) for tensor in left_padded(3, 5))
    free = torch_mpk.generate(model, ids, 10, attention_mask=mask, options=STRICT)
    never, eos = free[0, 6:8].tolist(), int(free[0, 6])
    settings = {
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[never[0]], never],
        "suppress_tokens": [int(free[1, 7])],
        "sequence_bias": [[[int(free[2, 8])], -5.0]],
        "min_new_tokens": 3,
        "eos_token_id": eos,
        "pad_token_id": 0,
        "forced_eos_token_id": 7,
    }
    config = GenerationConfig(max_new_tokens=10, **settings)
    expected = model.generate(ids, attention_mask=mask, generation_config=config, do_sample=False)
    actual = torch_mpk.generate(model, ids, attention_mask=mask, generation_config=config, options=STRICT)
    assert torch.equal(actual, expected)
    with pytest.raises(ArgumentError, match="generation_config: expected what Hugging Face takes, got .*bad_words_ids"):
        torch_mpk.generate(model, ids, generation_config=GenerationConfig(max_new_tokens=2, bad_words_ids=[["a"]]))


@pytest.mark.slow
def test_the_coldest_samples_are_greedy(model):
    ids = random_ids(2, 5, model.device)
    greedy = torch_mpk.generate(model, ids, 6, options=STRICT)
    for settings in ({"temperature": 1e-40}, {"temperature": 1e-40, "top_k": 0}, {"top_p": 0.0}):
        assert torch.equal(torch_mpk.generate(model, ids, 6, do_sample=True, options=STRICT, **settings), greedy)


def test_a_pad_token_in_a_prompt_is_padding_as_for_hugging_face(model):
    ids = random_ids(2, 5, model.device).clamp(min=1)
    ids[0, :2] = 0
    expected = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(torch_mpk.generate(model, ids, 5, pad_token_id=0, options=STRICT), expected)
    with pytest.raises(ArgumentError, match="attention_mask: expected one, since a prompt ends in pad_token_id"):
        torch_mpk.generate(model, ids.flip(1), 5, pad_token_id=0)


def test_results_can_be_trained_on(model):
    """Neither they nor what a model keeps, as frequencies that follow the length, are tensors of inference mode."""
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model.config.max_position_embeddings = 8
    changing = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval().to(model.device)
    tokens = torch_mpk.generate(changing, random_ids(2, 6, model.device), 6)
    assert not any(t.is_inference() for t in (tokens, *changing.buffers(), *changing.parameters()))
    loss = changing(tokens, labels=tokens).loss
    loss.backward()
    assert all(weight.grad is not None for weight in changing.parameters())
    tokens.clamp_(max=3)
    assert tokens.max() == 3


@pytest.mark.parametrize("given", ["ids", "weights"])
def test_the_meta_device_is_refused(model, given):
    ids = random_ids(1, 3, model.device)
    if given == "ids":
        with pytest.raises(ArgumentError, match="input_ids: expected a tensor that has values, got one on the meta"):
            torch_mpk.generate(model, ids.to("meta"), 2)
        return
    model.lm_head.to("meta")
    with pytest.raises(ArgumentError, match=r"weights that have values.*got lm_head\.weight on the meta device"):
        torch_mpk.generate(model, ids, 2)


class Replacing(BaseStreamer):
    """Gives a model other modules, weights and settings while it generates."""

    def __init__(self, model):
        self.model, self.count = model, 0

    def put(self, value):
        self.count += 1
        layer = self.model.model.layers[0]
        if self.count == 5:
            torch.manual_seed(1)
            layer.mlp = torch.nn.Linear(64, 64)
        if self.count == 8:
            layer.mlp.weight = torch.nn.Parameter(-3 * layer.mlp.weight)
        if self.count == 10:
            self.model.model.norm.variance_epsilon = 100.0

    def end(self):
        pass


@pytest.mark.slow
def test_a_module_that_a_streamer_replaces_is_seen():
    ids = random_ids(2, 5).clamp(min=1)  # 0 is padding to Hugging Face
    results = []
    for run in (lambda m, **kwargs: m.generate(ids, do_sample=False, pad_token_id=0, **kwargs), None):
        torch.manual_seed(0)
        model = tiny_model("qwen3", dtype=torch.float32, num_layers=1)
        kwargs = {"max_new_tokens": 12, "streamer": Replacing(model)}
        results.append(run(model, **kwargs) if run else torch_mpk.generate(model, ids, options=STRICT, **kwargs))
    torch.manual_seed(0)
    unchanged = torch_mpk.generate(tiny_model("qwen3", dtype=torch.float32, num_layers=1), ids, 12)
    assert torch.equal(*results)
    assert not torch.equal(results[0], unchanged)


def test_under_autocast_everything_runs_eagerly_with_one_warning(model):
    ids, mask = (tensor.to(model.device) for tensor in left_padded(3, 5))
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
        with pytest.warns(MpkWarning, match="torch_mpk.generate runs eagerly: autocast is enabled") as caught:
            actual = torch_mpk.generate(model, ids, 6, attention_mask=mask)
        assert len(caught) == 1
        with pytest.raises(AutocastError):
            torch_mpk.generate(model, ids, 6, options=STRICT)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("left_out", thinned(["", "top_k", "top_p", "min_p", "temperature"], 0))
def test_steps_draw_what_is_drawn_between_steps_else(model, left_out, tmp_path, monkeypatch):
    ids = random_ids(3, 5, model.device)
    settings = {"do_sample": True, "temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01}
    settings |= {left_out: {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}[left_out]} if left_out else {}

    def draw(**kwargs):
        torch.manual_seed(3)
        return torch_mpk.generate(model, ids, 12, options=STRICT, **settings | kwargs)

    with monkeypatch.context() as between:
        never = property(lambda decode: None, lambda decode, draws: None)
        between.setattr(sys.modules["torch_mpk.generate"]._Decode, "draws", never)
        expected = draw()
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    assert torch.equal(draw(), expected)
    if not left_out:
        assert not torch.equal(draw(temperature=2.0, top_p=0.99), expected)
        assert len(list(tmp_path.iterdir())) == 1, "another build for other values"


def test_samples_follow_the_distribution(model):
    ids = random_ids(1, 5, model.device).expand(16, 5).contiguous()  # the most rows a kernel takes
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 12, "top_p": 0.9, "options": STRICT}

    def draw(seed):
        generator = torch.Generator(model.device).manual_seed(seed)
        return torch_mpk.generate(model, ids, 2, generator=generator, **settings)[:, 5:]

    draws = [draw(seed) for seed in range(8)]
    assert torch.equal(draws[0], draw(0))
    assert not torch.equal(draws[0], draws[1])
    drawn = torch.cat(draws)[:, 0]
    with torch.inference_mode():
        probabilities = (model(ids[:1]).logits[0, -1].float() / 0.7).softmax(-1)
    ordered, order = probabilities.topk(12)
    ordered /= ordered.sum()
    kept = order[ordered.cumsum(0) - ordered < 0.9].tolist()
    assert set(drawn.tolist()) <= set(kept)
    counts = torch.bincount(drawn, minlength=order.max() + 1)
    assert counts[kept[0]] > 128 * 0.5 * float(probabilities[kept[0]])


@pytest.mark.slow
def test_a_penalty_of_repetition_is_hugging_faces(model):
    ids, mask = (tensor.to(model.device) for tensor in left_padded(3, 5))
    settings = {"repetition_penalty": 1.7, "do_sample": False, "attention_mask": mask}
    expected = model.generate(ids, max_new_tokens=16, pad_token_id=0, **settings)
    assert not torch.equal(expected, torch_mpk.generate(model, ids, 16, attention_mask=mask, options=STRICT))
    assert torch.equal(torch_mpk.generate(model, ids, 16, options=STRICT, **settings), expected)


@pytest.mark.slow
def test_what_is_far_less_likely_than_the_best_is_not_drawn(model):
    ids = random_ids(2, 5, model.device)
    greedy = torch_mpk.generate(model, ids, 10, options=STRICT)
    assert torch.equal(torch_mpk.generate(model, ids, 10, do_sample=True, min_p=1.0, options=STRICT), greedy)


def test_rows_stop_behind_a_stop_string(model):
    tokenizer = letters()
    ids = random_ids(2, 5, model.device)
    free = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    stops = ["".join(chr(33 + token) for token in free[0, 9:11]), "no such text"]
    eos = min(set(range(1, VOCAB_SIZE)) - set(free.flatten().tolist()))  # never comes: without one, theirs do not end
    settings = {"stop_strings": stops, "tokenizer": tokenizer, "eos_token_id": eos, "pad_token_id": 0}
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, **settings)
    assert torch.equal(torch_mpk.generate(model, ids, 12, options=STRICT, **settings), expected)
    assert not torch.equal(expected[0], free[0, : expected.shape[1]]) or expected.shape != free.shape
    [row] = torch_mpk.generate(model, ids[:1], 12, options=STRICT, stop_strings=stops[0], tokenizer=tokenizer).tolist()
    assert row == free[0, : len(row)].tolist()
    assert len(row) <= 11


def test_a_model_is_not_kept_alive():
    import gc
    import weakref

    model = tiny_model(num_layers=1)
    alive = weakref.ref(model)
    torch_mpk.generate(model, random_ids(1, 3), 3, options=STRICT)
    del model
    gc.collect()
    assert alive() is None


SAMPLED = {"do_sample": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": torch.ones(3, dtype=torch.int64)}, r"input_ids: expected a shape \[batch, prompt\], got \[3\]"),
        ({"input_ids": torch.ones(1, 3)}, "input_ids: expected int64, got torch.float32"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        (SAMPLED | {"temperature": 0.0}, "temperature: expected a number > 0"),
        (SAMPLED | {"top_p": 1.5}, r"top_p: expected a number in \[0, 1\], got 1.5"),
        (SAMPLED | {"top_k": -1}, "top_k: expected an int >= 0, got -1"),
        (SAMPLED | {"min_p": -0.1}, r"min_p: expected a number in \[0, 1\], got -0.1"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected a number > 0, got 0"),
        ({"stop_strings": ""}, "stop_strings: expected a text or a list of texts, got ''"),
        ({"stop_strings": ["a"]}, "tokenizer: expected the model's tokenizer, which stop_strings need, got None"),
        ({"attention_mask": torch.ones(1, 2)}, r"attention_mask: expected the shape \[1, 3\], got \[1, 2\]"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "attention_mask: expected padding on the left .*padding_side"),
        ({"input_ids": [[1, 2]]}, r"input_ids: expected a tensor, got \[\[1, 2\]\]"),
        ({"attention_mask": [[1]]}, r"attention_mask: expected a tensor, got \[\[1\]\]"),
        ({"max_new_tokens": 3.0}, "max_new_tokens: expected an int, got 3.0"),
        (
            {"eos_token_id": torch.tensor([1.5])},
            "eos_token_id: expected an int, a list or a tensor of ints, or None, got",
        ),
        ({"eos_token_id": "</s>"}, "eos_token_id: expected an int, a list or a tensor of ints, or None, got '</s>'"),
        ({"eos_token_id": [1, 2.5]}, r"eos_token_id: expected an int, .* or None, got \[1, 2.5\]"),
        ({"pad_token_id": "0"}, "pad_token_id: expected an int or None, got '0'"),
        (SAMPLED | {"top_k": 2.5}, "top_k: expected an int >= 0, got 2.5"),
        (SAMPLED | {"temperature": "1"}, "temperature: expected a number > 0, got '1'"),
        ({"max_cache_len": 32.0}, "max_cache_len: expected an int or None, got 32.0"),
        ({"max_new_tokens": None}, "max_new_tokens: expected an int, got None"),
        ({"do_sample": 1}, "do_sample: expected True or False, got 1"),
        ({"streamer": print}, "streamer: expected an object with methods put and end, or None, got <built-in"),
        ({"generation_config": {}}, r"generation_config: expected a transformers.GenerationConfig or None, got \{\}"),
        ({"options": {"fallbakc": "error"}}, r"unknown option 'fallbakc' \(did you mean 'fallback'\?\)"),
        ({"options": {"verify": -1}}, "option 'verify': expected True, False or an int >= 0, got -1"),
        ({"max_cache_len": 4}, r"max_cache_len: expected at least 6 for 3 \+ 4 tokens, got 4"),
    ],
)
def test_wrong_arguments_are_an_error(changes, message):
    arguments = {"input_ids": torch.ones(1, 3, dtype=torch.int64), "max_new_tokens": 4} | changes
    with pytest.raises(ValueError, match=message):
        torch_mpk.generate(None, **arguments)


LEAN = {"freeze": True, "guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}  # docs/performance.md


@pytest.mark.parametrize("options", thinned([STRICT, STRICT | LEAN], 0), ids=["all guards", "lean"])
def test_hugging_face_generate_runs_through_the_backend(model, tmp_path, monkeypatch, options):
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    config = CompileConfig(backend="mpk", mode=None, options=options)
    config._compile_all_devices = True
    for _ in range(2):
        ids, mask = (tensor.to(model.device) for tensor in left_padded(2, 5))
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
        actual = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=8,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static",
            compile_config=config,
        )
        assert torch.equal(actual, expected)
    assert len(list(tmp_path.iterdir())) == 1


def test_drafts_from_the_prompt_change_no_token(model, monkeypatch):
    drafts = []
    draft = PromptLookup.draft
    monkeypatch.setattr(PromptLookup, "draft", lambda self, count: drafts.append(draft(self, count)) or drafts[-1])
    for ids in (random_ids(1, 6, model.device).repeat(1, 4), random_ids(1, 9, model.device)):
        expected = torch_mpk.generate(model, ids, 40, options=STRICT)
        drafts.clear()
        seen = Recorder()
        actual = torch_mpk.generate(model, ids, 40, prompt_lookup_num_tokens=4, streamer=seen, options=STRICT)
        assert torch.equal(actual, expected)
        assert torch.equal(seen.new_tokens(), expected[:, ids.shape[1] :].cpu())
        assert any(drafts)
        assert len(drafts) < 39, "no draft was right"
        eos = int(expected[0, ids.shape[1] + 20])
        ended = torch_mpk.generate(model, ids, 40, eos_token_id=eos, options=STRICT)
        drafted = torch_mpk.generate(model, ids, 40, eos_token_id=eos, prompt_lookup_num_tokens=7, options=STRICT)
        assert torch.equal(drafted, ended)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"prompt_lookup_num_tokens": 16}, "an int from 1 to 15, or None"),
        ({"prompt_lookup_num_tokens": 2.0}, "an int from 1 to 15, or None"),
        ({"do_sample": True}, "greedy search without a penalty"),
        ({"repetition_penalty": 1.2}, "greedy search without a penalty"),
        ({"input_ids": random_ids(2, 4)}, "one sequence"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]])}, "a prompt without padding"),
        ({"max_cache_len": 16}, r"at least 17 for 4 \+ 10 tokens and drafts of 4"),
    ],
)
def test_drafts_that_cannot_be_checked_are_refused(arguments, expected):
    arguments = {"input_ids": random_ids(1, 4), "prompt_lookup_num_tokens": 4} | arguments
    with pytest.raises(ArgumentError, match=expected):
        torch_mpk.generate(tiny_model(num_layers=1), max_new_tokens=10, **arguments)


def test_a_draft_is_what_followed_the_longest_run_of_tokens_last():
    lookup = PromptLookup([1, 2, 3, 4, 9, 2, 3, 5])
    assert lookup.draft(3) == []
    lookup.extend([2, 3])
    assert lookup.draft(3) == [5, 2, 3]
    lookup.extend([4])
    assert lookup.draft(2) == [9, 2]
    assert PromptLookup([]).draft(2) == []


def test_sliding_windows_cannot_forget_a_draft():
    config = {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention"]}
    model = tiny_model(num_layers=1, **config)
    with pytest.raises(ArgumentError, match="of full attention alone"):
        torch_mpk.generate(model, random_ids(1, 4), 4, prompt_lookup_num_tokens=2)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 40])
def test_prompts_in_compiled_chunks_give_eager_s_tokens(device, length):
    is_cpu = device.type == "cpu"
    dtype = torch.float32 if is_cpu else torch.bfloat16  # a GPU's prompts are 16-bit
    model = tiny_model("qwen3", dtype=dtype, device=device, num_layers=1, head_dim=64)
    ids = random_ids(2, length, device)
    mask = torch.ones_like(ids)
    mask[0, : length // 3] = 0
    for kwargs in ({}, {"attention_mask": mask}):
        tokens = torch_mpk.generate(model, ids, 6, prefill_chunk_size=20, options=STRICT, **kwargs)
        if is_cpu:
            assert torch.equal(tokens, torch_mpk.generate(model, ids, 6, **kwargs))
            continue
        # Each is what eager finds likeliest behind those before it, or as good as that.
        present = torch.nn.functional.pad(kwargs.get("attention_mask", torch.ones_like(ids)), (0, 5), value=1)
        positions = (present.cumsum(-1) - 1).clamp(min=0)
        with torch.inference_mode():
            logits = (
                model(tokens[:, :-1], attention_mask=present, position_ids=positions).logits[:, length - 1 :].float()
            )
        chosen = logits.gather(-1, tokens[:, length:, None])[..., 0]
        assert (logits.amax(-1) - chosen <= 0.05 * logits.abs().amax()).all()


@pytest.mark.slow
def test_prompts_of_any_length_share_a_build_for_each_bucket(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    model = tiny_model("qwen3", dtype=torch.float32, num_layers=1)
    for length in (16, 20, 33, 36, 5):
        ids = random_ids(1, length)
        tokens = torch_mpk.generate(model, ids, 1, prefill_chunk_size=16, max_cache_len=64, options=STRICT)
        assert torch.equal(tokens, torch_mpk.generate(model, ids, 1, max_cache_len=64))
    assert len(list(tmp_path.iterdir())) == 2  # of up to 16 tokens, and of 1


@pytest.mark.gpu
def test_on_a_gpu_prompts_are_compiled_where_the_cache_s_length_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    model = tiny_model("qwen3", dtype=torch.bfloat16, device="cuda", num_layers=1, head_dim=64)
    for length, cache in ((40, None), (40, 128), (60, 128)):
        torch_mpk.generate(model, random_ids(1, length, "cuda"), 2, max_cache_len=cache, options=STRICT)
    assert len(list(tmp_path.iterdir())) == 2  # of a step and a prompt's bucket


@pytest.mark.slow
def test_a_draft_is_checked_behind_a_compiled_prompt():
    model = tiny_model("qwen3", dtype=torch.float32, num_layers=1)
    ids = random_ids(1, 6).repeat(1, 4)
    plain = torch_mpk.generate(model, ids, 20)
    both = {"prompt_lookup_num_tokens": 3, "prefill_chunk_size": 16}
    assert torch.equal(torch_mpk.generate(model, ids, 20, options=STRICT, **both), plain)


@pytest.mark.parametrize("name", thinned(["DeepSeek-V3", "Falcon"]))
def test_compiled_chunks_of_heads_that_the_configuration_does_not_say(name):
    """One key head, and values of another size than keys."""
    torch.manual_seed(0)
    model, ids = MODELS[name].make(), random_ids(2, 9)
    plain = torch_mpk.generate(model, ids, 6)
    assert torch.equal(torch_mpk.generate(model, ids, 6, prefill_chunk_size=16, options=STRICT), plain)
    model.to(torch.bfloat16)  # of whose cache nothing is known yet
    torch_mpk.generate(model, ids, 2, prefill_chunk_size=16, options=STRICT)


@pytest.mark.parametrize("size", [8, 8193, 64.0, True])
def test_a_chunk_of_another_size_is_refused(size):
    model = tiny_model("qwen3", num_layers=1)
    with pytest.raises(ArgumentError, match="prefill_chunk_size.*an int from 16 to 8192, or None"):
        torch_mpk.generate(model, random_ids(1, 4), 2, prefill_chunk_size=size)


def test_compiled_chunks_and_sliding_windows_exclude_each_other():
    model = tiny_model("qwen3", num_layers=1, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(ArgumentError, match="prefill_chunk_size: expected a model of full attention alone"):
        torch_mpk.generate(model, random_ids(1, 4), 2, prefill_chunk_size=16)


@pytest.mark.parametrize("length", thinned([4, 12]))
def test_windows_that_slide_take_few_builds(length):
    """Prompts shorter and longer than the window. It counts tokens in Python, and is full at some step."""
    torch.manual_seed(0)
    model, (ids, mask) = MODELS["Gemma 3"].make(), left_padded(2, length)
    timing.recent.clear()
    ours = torch_mpk.generate(model, ids, 12, attention_mask=mask, options=STRICT)
    assert len(timing.recent) <= 3
    assert torch.equal(ours, model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False))


@pytest.mark.parametrize("name", thinned(["LFM2", "Falcon-H1"], 0))
def test_recurrent_layers_pass_over_padding(name):
    torch.manual_seed(0)
    model, (ids, mask) = MODELS[name].make(), left_padded(2, 6)
    ours = torch_mpk.generate(model, ids, 8, attention_mask=mask, options=STRICT)
    assert torch.equal(ours, model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False))


def test_a_model_with_an_encoder_is_refused():
    config = AutoConfig.for_model("t5", d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4, vocab_size=VOCAB_SIZE)
    with pytest.raises(ArgumentError, match="model: expected a decoder alone, got T5"):
        torch_mpk.generate(AutoModelForSeq2SeqLM.from_config(config).eval(), random_ids(1, 4), 2)


def test_a_model_that_keeps_nothing_in_the_cache_is_refused():
    """Each of its steps would see one token."""
    config = AutoConfig.for_model("openai-gpt", n_embd=16, n_layer=1, n_head=2, n_positions=32, vocab_size=VOCAB_SIZE)
    with pytest.raises(ArgumentError, match="model: expected one .*, got OpenAIGPTLMHeadModel"):
        torch_mpk.generate(AutoModelForCausalLM.from_config(config).eval(), random_ids(1, 4), 2)
