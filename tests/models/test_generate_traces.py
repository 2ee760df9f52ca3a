"""Steps of ``torch_mpk.generate`` are not traced anew for another model object, nor in another process."""

import enum
import functools

import pytest
import torch
from torch._dynamo.utils import counters

import torch_mpk
from torch_mpk.testing.tiny import random_ids, tiny_model
from torch_mpk.traces import known

ARGUMENTS = {"do_sample": False, "eos_token_id": [], "max_cache_len": 64, "options": {"fallback": "error"}}

pytestmark = pytest.mark.usefixtures("empty_cache")


def made():
    return tiny_model("qwen3", dtype=torch.float32, num_layers=1)


def num_traces(model, **arguments):
    """How often Dynamo traces a call, whose tokens are those of Hugging Face's ``generate``."""
    ids, before = random_ids(2, 5), counters["stats"]["unique_graphs"]
    tokens = torch_mpk.generate(model, ids, 6, **ARGUMENTS | arguments)
    count = counters["stats"]["unique_graphs"] - before
    every = torch.ones_like(ids)  # else 0 is padding
    plain = model.generate(
        ids, attention_mask=every, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(tokens, plain)
    return count


class Action(str, enum.Enum):
    NONE, RAISE = "none", "raise"


def renaming_a_keyword(forward):
    """As transformers decorates it from 5.24 on, with a member of an enumeration."""

    @functools.wraps(forward)
    def wrapped(*args, **kwargs):
        action = Action.RAISE if "past_key_values" in kwargs and "cache" in kwargs else Action.NONE
        if action == Action.RAISE:
            raise ValueError("both")
        return forward(*args, **kwargs)

    return wrapped


@pytest.mark.parametrize("is_decorated", [False, True])
def test_a_trace_serves_other_models_and_later_processes(monkeypatch, is_decorated):
    model = made()
    if is_decorated:
        monkeypatch.setattr(type(model), "forward", renaming_a_keyword(type(model).forward))
    assert num_traces(model) == 1
    assert num_traces(made()) == 0
    torch.compiler.reset()
    known.forget()  # as in a new process: what is left is on the disk
    assert num_traces(made()) == 0


@pytest.mark.slow
def test_changed_weights_need_no_other_trace_and_a_hook_does():
    assert num_traces(made()) == 1
    another = made()
    assert num_traces(another) == 0
    with torch.no_grad():
        another.lm_head.weight.copy_(another.lm_head.weight.roll(1, 0))  # which needs no other trace
    assert num_traces(another) == 0
    hook = another.lm_head.register_forward_hook(lambda module, args, output: output.roll(1, -1))
    assert num_traces(another) == 1
    hook.remove()
    assert num_traces(another) <= 1


@pytest.mark.slow
def test_another_cache_length_or_batch_is_another_trace():
    assert num_traces(made()) == 1
    assert num_traces(made(), max_cache_len=128) == 1
    assert num_traces(made()) == 0


@pytest.mark.slow
def test_drawn_tokens_come_by_a_trace_too():
    def tokens(model):
        torch.manual_seed(5)
        ids, before = torch.arange(10).view(2, 5), counters["stats"]["unique_graphs"]
        found = torch_mpk.generate(model, ids, 8, **ARGUMENTS | {"do_sample": True, "temperature": 0.7, "top_k": 9})
        return found, counters["stats"]["unique_graphs"] - before

    model = made()
    first, count = tokens(model)
    assert count == 1
    torch.compiler.reset()
    known.forget()
    another = made()
    another.load_state_dict(model.state_dict())
    second, count = tokens(another)
    assert count == 0
    assert torch.equal(first, second)
