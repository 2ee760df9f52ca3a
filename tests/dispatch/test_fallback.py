"""What torch_mpk does not take runs as without it, announced once."""

import contextlib
import copy
import logging
import pickle
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends import registry
from torch._subclasses import FakeTensorMode
from transformers import DynamicCache, EncoderDecoderCache, StaticCache, T5Config, T5ForConditionalGeneration

from tests.thinned import thinned
from torch_mpk import _C
from torch_mpk.backend import build, calls, pipeline
from torch_mpk.capture.graph import capture
from torch_mpk.config import Options
from torch_mpk.dispatch import fallback
from torch_mpk.dispatch.admission import check_graph
from torch_mpk.errors import MpkWarning, OptionError, PrefillDeclined, UnsupportedError
from torch_mpk.testing.tiny import Decoding, random_ids, tiny_model


def compiled(function, **options):
    return torch.compile(function, backend="mpk", options=options)


def test_grad_mode_runs_eagerly_and_gives_gradients():
    model = tiny_model(num_layers=1, dtype=torch.float32)
    step = compiled(model)
    token = random_ids(1, 1)
    with pytest.warns(MpkWarning, match=r"wrap the call in torch\.inference_mode\(\)"):
        step(input_ids=token, use_cache=False).logits.sum().backward()
    torch._dynamo.reset_code_caches()
    with warnings.catch_warnings():
        warnings.simplefilter("error", MpkWarning)
        step(input_ids=token, use_cache=False)
    ours = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    model(input_ids=token, use_cache=False).logits.sum().backward()
    assert all(torch.equal(grad, weight.grad) for grad, weight in zip(ours, model.parameters(), strict=True))


def test_autocast_runs_eagerly():
    model = tiny_model(num_layers=1, dtype=torch.float32)
    step = compiled(model)
    token = random_ids(1, 1)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.warns(MpkWarning, match="autocast is enabled for cpu") as record:
            actual = step(input_ids=token, use_cache=False).logits
        expected = model(input_ids=token, use_cache=False).logits
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual, expected)
    assert len(record) == 1


def test_a_growing_cache_runs_eagerly():
    model = tiny_model(num_layers=1)
    step = compiled(model)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    prompt = random_ids(1, 5)
    with torch.inference_mode(), warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always", MpkWarning)
        for cache in caches:
            model(input_ids=prompt, past_key_values=cache)
        for _ in range(3):
            token = random_ids(1, 1)
            actual, expected = (
                run(input_ids=token, past_key_values=cache).logits
                for run, cache in zip((step, model), caches, strict=True)
            )
            assert torch.equal(actual, expected)
    (warning,) = (warning for warning in record if warning.category is MpkWarning)
    assert "layers[0].keys grows with every call" in str(warning.message)
    assert "transformers.StaticCache" in str(warning.message)


@pytest.mark.parametrize("is_given", thinned([False, True], 1))
def test_a_first_call_without_a_static_cache_says_what_to_pass(is_given):
    model, token = tiny_model(num_layers=1), random_ids(1, 1)

    def arguments():
        return {"input_ids": token} | ({"past_key_values": DynamicCache(config=model.config)} if is_given else {})

    with torch.inference_mode(), pytest.warns(MpkWarning) as record:
        actual = compiled(model)(**arguments()).logits
        assert torch.equal(actual, model(**arguments()).logits)
    (warning,) = (warning for warning in record if warning.category is MpkWarning)
    message = (
        r"this graph eagerly: a key/value cache that is empty before this call grows .*: pass a transformers\.Stat"
    )
    assert re.search(message, str(warning.message))


@pytest.mark.parametrize("batch", thinned([1, 2], 0))
@pytest.mark.parametrize("options", [{"max_positions": 1}, {"max_positions": 3}])
def test_prefill_runs_eagerly_without_a_warning(caplog, options, batch):
    model = tiny_model(num_layers=1)
    prompt, ids = random_ids(batch, 3), random_ids(batch, 4)
    caches = [Decoding(model, prompt).cache for _ in range(2)]
    with torch.inference_mode(), warnings.catch_warnings(), caplog.at_level(logging.INFO, "torch_mpk"):
        warnings.simplefilter("error", MpkWarning)
        actual, expected = (
            run(input_ids=ids, past_key_values=c).logits
            for run, c in zip((compiled(model, **options), model), caches, strict=True)
        )
    assert torch.equal(actual, expected)
    assert "a step over 4 positions (prefill), where max_positions is" in caplog.text


@pytest.mark.parametrize("attention", thinned(["sdpa", "eager"], 1))
@pytest.mark.parametrize("options", [{"max_positions": 1}, {"max_positions": 3}])
def test_prefill_that_is_not_ours_is_an_error_where_asked_to(attention, options):
    model = tiny_model(num_layers=1, attention=attention)
    step = compiled(model, fallback="error", **options)
    with torch.inference_mode(), pytest.raises(Exception, match=r"a step over 4 positions \(prefill\), where max_pos"):
        step(input_ids=random_ids(2, 4), use_cache=False)


def test_prompts_of_several_lengths_say_once_that_compiling_them_brings_nothing(monkeypatch):
    model, captured = tiny_model(num_layers=1), []
    capture = calls.capture
    for module in (calls, build):
        monkeypatch.setattr(module, "capture", lambda *args, **kwargs: captured.append(0) or capture(*args, **kwargs))
    step = compiled(model, max_positions=1)
    with torch.inference_mode(), warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always", MpkWarning)
        for length in (3, 4, 5, 6, 7, 8, 9):
            ids = random_ids(2, length)
            logits = [run(input_ids=ids, use_cache=False).logits for run in (step, model)]
            assert torch.equal(*logits)
    (warning,) = (each for each in record if each.category is MpkWarning)
    assert "prompts of several lengths eagerly, so compiling them brings nothing" in str(warning.message)
    assert "raise max_positions" in str(warning.message)
    assert len(captured) == 3  # the first length; and all others, once with their sizes and once for any


class DotInteractions(torch.nn.Module):
    """A recommender: several categories of each row are looked up, and their products taken (Naumov et al., 2019)."""

    def __init__(self):
        super().__init__()
        self.tables = torch.nn.ModuleList([torch.nn.Embedding(50, 16) for _ in range(2)])
        self.bottom, self.top = torch.nn.Linear(8, 16), torch.nn.Linear(16 + 9, 1)

    def forward(self, dense, ids):
        x = self.bottom(dense)
        vectors = torch.stack([x, *(table(each).sum(1) for table, each in zip(self.tables, ids, strict=True))], 1)
        return self.top(torch.cat([x, torch.bmm(vectors, vectors.mT).flatten(1)], 1))


class Resampler(torch.nn.Module):
    """Learned queries that attend to the features of an image."""

    def __init__(self):
        super().__init__()
        self.queries, self.keys, self.out = torch.nn.Parameter(torch.randn(6, 32)), *_linears((32, 64), (32, 32))

    def forward(self, x):
        k, v = self.keys(x).unflatten(-1, (2, 4, 8)).permute(2, 0, 3, 1, 4)
        q = self.queries.view(6, 4, 8).transpose(0, 1).expand(len(x), -1, -1, -1)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(1, 2).flatten(2))


def _linears(*sizes):
    return [torch.nn.Linear(*size) for size in sizes]


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (DotInteractions, lambda: (torch.randn(3, 8), torch.randint(0, 50, (2, 3, 4)))),
        (Resampler, lambda: (torch.randn(2, 9, 32),)),
    ],
)
def test_several_ids_or_queries_alone_are_no_prompt(make, inputs):
    model = make()
    with torch.inference_mode():
        args = inputs()
        torch.testing.assert_close(compiled(model, fallback="error")(*args), model(*args))


def test_a_step_with_a_table_of_distances_is_no_prompt():
    sizes = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    config = T5Config(**sizes, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    caches = [EncoderDecoderCache(*(StaticCache(config, max_cache_len=n) for n in (16, 7))) for _ in range(2)]
    with torch.inference_mode():
        encoded, tokens = model.encoder(random_ids(1, 7)), random_ids(1, 3).split(1, 1)

        def steps(run, cache):
            for token, is_first in zip(tokens, (True, False, False), strict=True):  # the first fills the other cache
                given = {"encoder_outputs": encoded, "decoder_input_ids": token, "past_key_values": cache}
                yield (model if is_first else run)(**given).logits

        ours = compiled(model, fallback="error")
        for actual, expected in zip(steps(ours, caches[0]), steps(model, caches[1]), strict=True):
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("arch", "dtype", "batch", "positions", "is_declined"),
    [
        (90, torch.bfloat16, 1, 64, False),
        (90, torch.float16, 2, 64, False),
        (90, torch.bfloat16, 1, 65, True),
        (90, torch.bfloat16, 2, 65, True),
        *(
            (arch, dtype, *rest)
            for arch, dtype in ((90, torch.float32), (80, torch.bfloat16))
            for rest in ((1, 16, False), (1, 17, True), (2, 1, False), (2, 2, True))
        ),
    ],
)
def test_a_gpu_takes_prompts_or_a_few_positions_of_one_sequence(arch, dtype, batch, positions, is_declined):
    def function(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    with FakeTensorMode():
        inputs = [torch.empty(batch, 2, length, 8, dtype=dtype, device="cuda") for length in (positions, 80, 80)]
    captured = capture(torch.fx.symbolic_trace(function), inputs)
    with pytest.raises(PrefillDeclined) if is_declined else contextlib.nullcontext():
        check_graph(captured, max_positions=64, target=_C.Target("cuda", arch, 132, 166912))


@pytest.mark.slow
def test_prefill_is_compiled_by_inductor_where_asked_to(monkeypatch):
    calls = []

    def inductor(gm, inputs):
        return lambda *args: calls.append(len(args)) or gm(*args)

    registry.lookup_backend("inductor")  # which is declared when it is first looked up
    monkeypatch.setitem(registry._COMPILER_FNS, "inductor", inductor)
    model, prompt = tiny_model(num_layers=1), random_ids(1, 4)
    with torch.inference_mode():
        expected = model(input_ids=prompt, use_cache=False).logits
        step = compiled(model, fallback="inductor", max_positions=1)
        assert torch.equal(step(input_ids=prompt, use_cache=False).logits, expected)
    assert len(calls) == 1


def test_an_unsupported_node_is_named_once():
    def function(x):
        return torch.linalg.inv(x + 1)

    x = torch.eye(3)
    step = compiled(function)
    place = r"eagerly: .*linalg_inv.* from .*test_fallback\.py:\d+ in function"
    with torch.inference_mode():
        with pytest.warns(MpkWarning, match=place) as record:
            assert torch.equal(step(x), function(x))
        assert len(record) == 1
        calls = Path(__file__).read_text().splitlines()
        assert record[0].filename == __file__ and "assert torch.equal(step(x)" in calls[record[0].lineno - 1]
        torch._dynamo.reset_code_caches()
        with warnings.catch_warnings():
            warnings.simplefilter("error", MpkWarning)
            assert torch.equal(step(x), function(x))


def test_the_fallback_may_be_inductor(monkeypatch):
    def inductor(gm, inputs):
        return lambda *args: [result + 100 for result in gm(*args)]  # tells it from eager

    monkeypatch.setitem(registry._COMPILER_FNS, "inductor", inductor)
    with torch.inference_mode(), pytest.warns(MpkWarning, match="leaves this graph to inductor: .*linalg_inv"):
        assert compiled(torch.linalg.inv, fallback="inductor")(torch.ones(1, 1)).item() == 101


def test_inductor_is_what_cuda_falls_back_to(monkeypatch):
    with FakeTensorMode():
        for device, expected in (("cpu", "eager"), ("cuda", "inductor")):
            inputs = [3, torch.empty(1, device=device)]
            assert fallback.choice(Options(), inputs) == expected
            assert fallback.choice(Options(fallback="error"), inputs) == "error"
        monkeypatch.setenv("TORCH_MPK_FORBID_COMPILE", "1")
        assert fallback.choice(Options(), inputs) == "eager"


def test_pytorchs_reasons_are_given_in_a_line():
    def function(cache, position, x):
        cache[:, position] = x  # which tracing would read the position for
        return cache @ x

    args = torch.eye(3), torch.tensor(2), torch.ones(3)
    why = "GuardOnDataDependentSymNode|known only at run time"  # from PyTorch 2.15 on the latter, which is ours
    with torch.inference_mode(), pytest.warns(MpkWarning, match=why) as record:
        assert compiled(function)(*args).tolist() == [1 + 1, 1 + 1, 1]
    assert len(str(record[0].message).splitlines()) == 1


def test_an_unsupported_node_raises_where_asked_to():
    step = compiled(lambda x: torch.linalg.inv(x), fallback="error")
    with torch.inference_mode(), pytest.raises(Exception, match="linalg_inv"):
        step(torch.eye(3))


def in_parts(x, weight, state):
    """Ours, a part that is not supported, ours; each writes ``state`` and reads what the others wrote."""
    y = torch.nn.functional.linear(x, weight)
    state.add_(y[0])
    z = torch.linalg.inv(y.reshape(1, 8, 8) + 9 * torch.eye(8, device=x.device)).reshape(8, 8) * state
    state.mul_(2)
    return torch.nn.functional.linear(z, weight) + state, y, state[1:]


def assert_in_parts(device="cpu", **options):
    x, weight, state = torch.randn(8, 8, device=device), torch.randn(8, 8, device=device), torch.zeros(8, device=device)
    other = state.clone()
    step = compiled(in_parts, min_segment_nodes=1, **options)
    with torch.inference_mode():
        for _ in range(2):
            actual, expected = step(x, weight, state), in_parts(x, weight, other)
            for ours, eager in zip((*actual, state), (*expected, other), strict=True):
                torch.testing.assert_close(ours, eager)
        assert actual[2].data_ptr() == state[1:].data_ptr()


def test_a_part_that_is_not_supported_runs_between_ours():
    with pytest.warns(MpkWarning, match="runs a part of this graph eagerly: linalg_inv") as record:
        assert_in_parts()
    assert len(record) == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_part_that_is_not_supported_is_compiled_by_inductor(device):
    options = {"fallback": "inductor"}
    with pytest.warns(MpkWarning, match="leaves a part of this graph to inductor: linalg_inv") as record:
        assert_in_parts(device, **options)
    assert sum(warning.category is MpkWarning for warning in record) == 1


def test_what_inductor_cannot_compile_runs_eagerly(monkeypatch):
    def inductor(gm, inputs):
        raise NotImplementedError("too odd")

    monkeypatch.setitem(registry._COMPILER_FNS, "inductor", inductor)
    with pytest.warns(MpkWarning) as record:
        assert_in_parts(fallback="inductor")
        with torch.inference_mode():
            assert compiled(torch.linalg.inv, fallback="inductor")(torch.full((1, 1), 2.0)).item() == 0.5
    parts, failed, whole = (str(warning.message) for warning in record)
    assert "leaves a part of this graph to inductor" in parts
    assert "inductor cannot compile what torch_mpk leaves to it, so that runs eagerly: NotImplementedError" in failed
    assert "leaves this graph to inductor" in whole


def test_parts_are_an_error_where_asked_to():
    with torch.inference_mode(), pytest.raises(Exception, match="linalg_inv"):
        compiled(in_parts, fallback="error", min_segment_nodes=1)(torch.randn(8, 8), torch.randn(8, 8), torch.zeros(8))


class Block(torch.nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.RMSNorm(16), torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.activation = activation

    def forward(self, x):
        return x + self.down(self.activation(self.up(self.norm(x))))


@pytest.mark.parametrize("how", ["other strides", "other sizes"])
def test_what_a_custom_operator_returns_is_laid_out_as_its_fake_says(how):
    name = f"mpk_test::{how.replace(' ', '_')}"

    @torch.library.custom_op(name, mutates_args=())
    def turned(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).mT.contiguous().mT if how == "other strides" else torch.cat([x, x])

    turned.register_fake(torch.empty_like)

    def function(x, weight):
        linear = torch.nn.functional.linear
        return linear(turned(linear(x, weight)), weight)

    x, weight = torch.randn(6, 8), torch.randn(8, 8)
    with torch.inference_mode(), warnings.catch_warnings(record=True):
        step = compiled(function, min_segment_nodes=1, fallback="eager")
        if how == "other strides":
            torch.testing.assert_close(step(x, weight), function(x, weight))
        else:
            with pytest.raises(UnsupportedError, match=r"it returned torch.float32\[12, 8\], but its fake"):
                step(x, weight)


@pytest.mark.slow
def test_one_unsupported_operation_costs_a_part_of_a_deep_model(monkeypatch):
    silu = torch.nn.functional.silu
    layers = [Block(silu) for _ in range(36)]
    layers[17].activation = lambda x: x.sort(dim=-1).values
    model = torch.nn.Sequential(*layers)
    x = torch.randn(2, 16)
    built = []
    build = pipeline.build
    monkeypatch.setattr(pipeline, "build", lambda *args: built.append(build(*args)) or built[-1])
    with torch.inference_mode(), pytest.warns(MpkWarning, match=r"a part of this graph eagerly: sort from .*, 17: "):
        step = compiled(model)
        torch.testing.assert_close(step(x), model(x))
    (program,) = built
    operations = [(segment.ours, segment.num_operations) for segment in program.partitioned.segments]
    assert operations == [(True, 17 * 5 + 2), (False, 2), (True, 2 + 18 * 5)]


def test_resetting_the_compiler_forgets_what_was_built(monkeypatch):
    built = []
    build = pipeline.build
    monkeypatch.setattr(pipeline, "build", lambda *args: built.append(build(*args)) or built[-1])
    linear = torch.nn.Linear(8, 8)
    for num_resets in (0, 1):
        with torch.inference_mode():
            steps = [torch.compile(linear, backend="mpk", fullgraph=how) for how in (True, False)]
            for step in steps:
                step(torch.randn(2, 8))
        assert len(built) == num_resets + 1  # one graph, compiled twice
        torch.compiler.reset()


def test_inputs_that_share_memory_run_eagerly():
    def function(x, y):
        x.add_(torch.nn.functional.linear(y, torch.ones(4, 4)))
        return y * 2

    def call(run):
        memory = torch.arange(20.0)
        result = run(memory[:16].view(4, 4), memory[4:].view(4, 4))
        return result, memory

    with torch.inference_mode(), pytest.warns(MpkWarning, match="share memory"):
        actual = call(compiled(function))
    assert all(map(torch.equal, actual, call(function)))


def test_a_dump_that_cannot_be_written_is_said_once_and_the_graph_still_compiles(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path / "file"))
    linear, x = torch.nn.Linear(8, 8), torch.ones(1, 8)
    with torch.inference_mode(), pytest.warns(MpkWarning) as record:
        for _ in range(2):
            torch._dynamo.reset_code_caches()
            torch.testing.assert_close(compiled(linear, fallback="error")(x), linear(x))
    (warning,) = record
    assert str(warning.message).startswith(f"TORCH_MPK_DUMP={tmp_path / 'file'}: the artefacts of a build are left out")


def test_disabled_is_eager(monkeypatch):
    monkeypatch.setenv("TORCH_MPK_DISABLE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(lambda x: torch.linalg.inv(x), fallback="error")(torch.eye(2)).equal(torch.eye(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_thread": 1},
            r"unknown option 'num_thread' \(did you mean 'num_threads'\?\): the options are fallback, ",
        ),
        ({"fallback": "eagre"}, "fallback.*one of inductor, eager, error.*did you mean 'eager'"),
        ({"num_threads": 0}, "num_threads.*an int from 1 to 4095, got 0"),
        ({"arch": 75}, "arch.*80, 90, 100, 120 or None, got 75"),
    ],
)
def test_wrong_options_are_an_error(options, message):
    with pytest.raises(OptionError, match=message):
        torch._dynamo.lookup_backend("mpk")(None, [], options=options)
    with pytest.raises(Exception, match="option"):
        compiled(lambda x: x + 1, **options)(torch.ones(2))


def test_any_mode_of_torch_is_accepted():
    for mode in ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
        step = torch.compile(torch.linalg.inv, backend="mpk", mode=mode)
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore", MpkWarning)
            assert step(torch.eye(2)).equal(torch.eye(2))
    with pytest.raises(OptionError, match="mode: expected one of .*, got 'fast'"):
        torch._dynamo.lookup_backend("mpk")(None, [], mode="fast")


def test_a_compiled_model_can_be_copied_and_pickled():
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU()), torch.randn(1, 8)
    step = compiled(model, fallback="error")
    with torch.inference_mode():
        expected = step(x)
        copied, unpickled = copy.deepcopy(step), pickle.loads(pickle.dumps(model))
        assert torch.equal(copied(x), expected)
        assert torch.equal(compiled(unpickled, fallback="error")(x), expected)
