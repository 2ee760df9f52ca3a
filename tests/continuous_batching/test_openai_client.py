"""What an OpenAI client gets from ``python -m torch_mpk serve``."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import openai
import pytest
import torch

from tests.continuous_batching.engine import alone
from tests.continuous_batching.server import NUM_PAGES, PAGE, Server, pieces, post, text
from tests.continuous_batching.test_interrupted_server import check_in_the_middle_of_a_stream

MOST = PAGE * NUM_PAGES  # tokens that the cache holds


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    """Servers in the order in which they were started. The last one may run."""
    started: list[Server] = []
    yield started
    for each in started:
        each.end()


@pytest.fixture
def server(servers: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    """The server of earlier tests, unless one of them has ended it: pytest may run them in another order."""
    if not servers or servers[-1].process.poll() is not None:
        servers.append(Server(tmp_path_factory.mktemp("server")))
        servers[-1].wait(120)
    return servers[-1]


def expected(server: Server, prompt: str, max_tokens: int = 12) -> str:
    return server.tokenizer.decode(alone(server.model, server.tokenizer(prompt).input_ids, max_tokens))


def test_a_client_gets_the_tokens_of_eager_generate(server: Server) -> None:
    """And the reply alone, not the prompt in front of it."""
    reply = server.ask("a first question")
    assert text(reply) == expected(server, "a first question")
    assert reply.model == server.name
    assert reply.choices[0].finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (16, 12)


def test_a_stream_brings_the_same_text_in_pieces(server: Server) -> None:
    chunks = list(server.ask("tell me more", stream=True, stream_options={"include_usage": True}))
    got = pieces(chunks)
    assert len(got) > 1
    assert "".join(got) == expected(server, "tell me more")
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]
    assert chunks[-1].usage.completion_tokens == 12


def test_two_clients_at_once_get_what_each_gets_alone(server: Server) -> None:
    prompts = ["one of two", "and the other, longer one"]
    with ThreadPoolExecutor(2) as clients:
        got = list(clients.map(lambda prompt: "".join(pieces(server.ask(prompt, 40, stream=True))), prompts))
    assert got == [expected(server, prompt, 40) for prompt in prompts]


def test_requests_draw_each_in_its_own_way(server: Server) -> None:
    flat = {"temperature": 2, "top_p": 1}
    asked: list[dict[str, Any]] = [
        flat | {"seed": 1},
        flat | {"seed": 1},
        flat | {"seed": 2},
        flat,
        flat | {"top_k": 1},
        flat | {"min_p": 1},
        flat | {"top_p": 1e-6},
        {"temperature": 0, "seed": 1},
        {"temperature": None},  # this model's own configuration is greedy
    ]
    with ThreadPoolExecutor(4) as clients:
        got = list(clients.map(lambda how: text(server.ask("how", 24, **how)), asked))
    assert got[0] == got[1]
    assert len({got[0], got[2], got[3]}) == 3
    assert set(got[4:]) == {expected(server, "how", 24)}


def test_choices_are_drawn_each_for_itself(server: Server) -> None:
    asked = {"n": 3, "temperature": 1, "seed": 5}
    reply = server.ask("three of them", **asked)
    texts = [choice.message.content for choice in reply.choices]
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert reply.usage.completion_tokens == 3 * 12
    streamed = ["", "", ""]
    for chunk in server.ask("three of them", stream=True, **asked):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_ends_in_front_of_a_stop_string(server: Server, stream: bool) -> None:
    whole = expected(server, "stop here", 40)
    stop = whole[17:20]
    reply = server.ask("stop here", 40, stop=["nowhere in it", stop], stream=stream)
    wanted = whole[: whole.index(stop)]
    if stream:
        assert "".join(pieces(reply)) == wanted
    else:
        assert text(reply) == wanted
        assert reply.choices[0].finish_reason == "stop"


def test_log_probabilities_are_the_models(server: Server) -> None:
    reply = server.ask("how likely", logprobs=True)
    prompt = server.tokenizer("how likely").input_ids
    ids = alone(server.model, prompt, 12)
    server.model.set_attn_implementation("sdpa")
    logits = server.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    wanted = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)
    found = reply.choices[0].logprobs.content
    assert [token.token for token in found] == [server.tokenizer.decode([token]) for token in ids]
    torch.testing.assert_close(torch.tensor([token.logprob for token in found]), wanted, rtol=1e-3, atol=1e-4)


def test_prompts_without_a_chat(server: Server) -> None:
    prompts = ["one prompt", "another"]
    complete = server.client().completions.create
    reply = complete(model=server.name, prompt=prompts, max_tokens=12, temperature=0, logprobs=0)
    assert [choice.text for choice in reply.choices] == [expected(server, prompt) for prompt in prompts]
    assert len(reply.choices[1].logprobs.token_logprobs) == 12
    ids = server.tokenizer(prompts[0]).input_ids
    assert (
        complete(model=server.name, prompt=ids, max_tokens=12, temperature=0).choices[0].text == reply.choices[0].text
    )
    stream = complete(model=server.name, prompt=prompts[0], max_tokens=12, temperature=0, stream=True)
    assert "".join(choice.text for chunk in stream for choice in chunk.choices) == reply.choices[0].text


def test_responses(server: Server) -> None:
    create = server.client().responses.create
    asked = {"model": server.name, "max_output_tokens": 12, "temperature": 0}
    assert create(input="say it so", **asked).output_text == expected(server, "say it so")
    turns = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "then"}]
    reply = create(input=turns, instructions="so: ", **asked)
    assert reply.output_text == expected(server, "so: firstthen")
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len("so: firstthen"), 12)
    events = list(create(input="say it so", stream=True, **asked))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == expected(server, "say it so")
    assert len(deltas) > 1 and events[-1].type == "response.completed"
    for wrong, reason in (
        ({"previous_response_id": "one"}, "previous_response_id: not supported"),
        ({"input": []}, "input: expected a text"),
        ({"input": [{"type": "input_image", "image_url": "x"}]}, "input: expected parts that are text"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "nothing"}]}, "Unsupported input item type"),
        ({"max_output_tokens": MOST}, "max_output_tokens asks for"),
    ):
        with pytest.raises(openai.BadRequestError, match=reason):
            create(**{"input": "x"} | asked | wrong)


def test_a_stream_that_is_closed_frees_its_pages(server: Server) -> None:
    """Each could have all pages but a few to itself, so that a leak would keep the last ones from being served."""
    for number in range(4):
        stream = server.ask(f"{number} is closed early", 80, stream=True)
        assert len(list(islice(stream, 5))) == 5
        stream.close()
    with server.client().responses.create(model=server.name, input="a response", stream=True) as response:
        next(iter(response))
    assert text(server.ask("after them", 80)) == expected(server, "after them", 80)


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}]} | fields


TOO_LONG = chat(messages=[{"role": "user", "content": "x" * (MOST + 1)}])
REFUSED = [
    ("{", "the body is not JSON"),
    ([], "expected a JSON object, got list"),
    ({}, "messages: this field is required"),
    (chat(messages=[]), "messages: "),
    (chat(messages=["x"]), "messages.0: "),
    (chat(messages=[{"role": "user", "content": ""}]), "is empty"),
    (chat(messages=[{"role": "user"}]), "is empty"),
    (chat(messages=[{"role": "user", "content": 5}]), "messages.0.content: expected a text, or a list of parts"),
    (chat(messages=[{"role": "nobody", "content": "x"}]), "messages.0.role: "),
    (chat(messages=[{"role": "system", "content": ""}]), "the prompt has no tokens"),
    (chat(messages=[{"role": "assistant", "tool_calls": [{}]}]), "messages: "),
    (TOO_LONG, f"{MOST + 1} tokens are more than the {MOST}"),
    (chat(max_tokens=MOST), "max_tokens asks for"),
    (chat(max_tokens=0), "max_tokens: "),
    (chat(max_tokens=-1), "max_tokens: "),
    (chat(max_tokens="5"), "max_tokens: "),
    (chat(max_completion_tokens=1.5), "max_completion_tokens: "),
    (chat(temperature="hot"), "temperature: "),
    (chat(temperature=-1), "temperature: "),
    (chat(temperature=1e-9), "temperature: expected 0"),
    (chat(top_p=0), "top_p: "),
    (chat(top_p=1.1), "top_p: "),
    (chat(n=0), "n: "),
    (chat(seed=1.5), "seed: "),
    (chat(stop=[1]), "stop: expected a text or up to"),
    (chat(stop=""), "stop: expected a text or up to"),
    (chat(stream="yes"), "stream: "),
    (chat(logprobs=1), "logprobs: "),
    (chat(logprobs=True, top_logprobs=2), "top_logprobs: not supported"),
    (chat(frequency_penalty=0.5), "frequency_penalty: not supported"),
    (chat(response_format={"type": "json_object"}), "response_format: not supported"),
    (chat(tools=[{"type": "function", "function": {"name": "f"}}]), "tools: the chat template"),
    (chat(logit_bias={"5": 1}), "logit_bias: not supported"),
    (chat(no_such_field=1), "no_such_field: no field of this route"),
]


def test_what_cannot_be_answered_is_refused_and_the_connection_stays(server: Server) -> None:
    connection = server.connection()
    for body, reason in REFUSED:
        status, answer = post(connection, "/v1/chat/completions", body)
        assert status == 400, (body, answer)
        assert reason in answer["error"]["message"], answer
        assert answer["error"]["type"] == "invalid_request_error"
    for body, reason in (({"prompt": []}, "prompt: expected a text"), ({"prompt": [10**6]}, "is not in [0, ")):
        status, answer = post(connection, "/v1/completions", body)
        assert status == 400
        assert reason in answer["error"]["message"]
    status, answer = post(connection, "/v1/nothing", {})
    assert (status, answer["error"]["message"]) == (404, "POST /v1/nothing: Not Found")
    socket = connection.sock
    status, answer = post(connection, "/v1/chat/completions", chat(max_tokens=3))
    assert (status, connection.sock is socket) == (200, True)
    assert answer["choices"][0]["message"]["content"] == expected(server, "x", 3)


def test_errors_are_those_of_openais_client(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        server.ask("x" * (MOST + 1), max_tokens=None)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as refused:
        server.ask("x", presence_penalty=1)
    assert refused.value.param == "presence_penalty"
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        server.client().completions.create(model="another", prompt="x")
    assert text(server.ask("and one that fits")) == expected(server, "and one that fits")


def test_what_changes_nothing_is_accepted(server: Server) -> None:
    neutral = {"frequency_penalty": 0.0, "presence_penalty": 0, "n": 1, "response_format": {"type": "text"}}
    got = server.ask("neutral", user="somebody", logit_bias={}, top_logprobs=None, **neutral)
    assert text(got) == expected(server, "neutral")


def test_a_reply_may_take_all_room_that_there_is(server: Server) -> None:
    reply = server.ask("x" * (MOST - 5), max_tokens=None)
    assert reply.usage.completion_tokens == 5
    assert reply.choices[0].finish_reason == "length"


def test_the_server_says_what_it_serves_and_what_it_did(server: Server) -> None:
    assert [model.id for model in server.client().models.list()] == [server.name]
    assert server.health() == (200, {"status": "ready"})
    before = server.metrics()
    server.ask("count me", 7)
    after = server.metrics()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown['mpk_requests_total{route="/v1/chat/completions",status="200"}'] == 1
    assert grown["mpk_prompt_tokens_total"] == len("count me")
    assert grown["mpk_generated_tokens_total"] == grown["mpk_step_seconds_count"] == 7
    assert grown["mpk_step_seconds_sum"] > 0
    assert after["mpk_requests_running"] == after["mpk_requests_waiting"] == 0


def test_an_interrupt_ends_the_server_in_the_middle_of_a_stream(server: Server) -> None:
    """The last of them, as a rule: a server for itself would take another start."""
    check_in_the_middle_of_a_stream(server, 1)
