"""What a body of /v1/completions may say, and what is answered when it says something else."""

import json
from typing import Any

import pytest

from neurons.serving.completions import Asked, BadRequest, Limits, example, logprobs_json, read_body
from subnet.inference.sampling import Choice

LIMITS = Limits(max_positions=64, max_tokens=40)


def read(limits: Limits = LIMITS, /, **fields: Any) -> Asked:
    body = json.dumps({"model": "m", "prompt": "ab", **fields}).encode()
    return read_body(body, lambda text: list(text.encode()), models=["m"], limits=limits, vocab_size=256, fresh_seed=7)


def test_defaults_are_openais() -> None:
    asked = read()
    assert asked.prompts == ((97, 98),)
    assert (asked.max_tokens, asked.is_streamed, asked.num_logprobs, asked.stop) == (16, False, None, ())
    sampling = asked.samplings[0]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (1.0, 1.0, 0, 7)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", [[97]]),
        (["a", "bc"], [[97], [98, 99]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [5]], [[97], [5]]),
    ],
)
def test_every_way_to_give_prompts(prompt: object, prompts: list[list[int]]) -> None:
    assert [list(each) for each in read(prompt=prompt).prompts] == prompts


def test_who_does_not_say_how_many_tokens_gets_what_there_is_room_for() -> None:
    """Sixteen are OpenAI's default, and nothing that the client asked for."""
    assert read(prompt="a" * 60).max_tokens == 4
    assert read(Limits(max_positions=64, max_tokens=8)).max_tokens == 8


def test_choices_of_each_prompt_stand_together_and_draw_apart() -> None:
    asked = read(prompt=["a", "b"], n=2, seed=5, temperature=0.5)
    assert asked.prompts == ((97,), (97,), (98,), (98,))
    assert [sampling.seed for sampling in asked.samplings] == [5, 6, 7, 8]
    assert asked.num_prompt_tokens == 2


def test_more_than_all_tokens_to_choose_from_are_all() -> None:
    """The number goes to the hosts as 64 bits."""
    assert read(top_k=10**20).samplings[0].top_k == 256


def test_what_clients_send_as_null_is_left_out() -> None:
    nulls = (
        "max_tokens",
        "temperature",
        "top_p",
        "n",
        "stream",
        "stop",
        "logprobs",
        "user",
        "best_of",
        "suffix",
        "echo",
    )
    asked = read(**dict.fromkeys(nulls))
    assert asked.max_tokens == 40
    assert asked.samplings[0].temperature == 1.0


@pytest.mark.parametrize(("limits", "max_tokens"), [(LIMITS, 39), (Limits(max_positions=4096, max_tokens=4096), 64)])
def test_the_request_that_is_printed_is_one_that_is_served(limits: Limits, max_tokens: int) -> None:
    """The prompt of 25 tokens and 64 more do not fit a model that was trained on 64."""
    body = example("m", lambda text: list(text.encode()), limits)
    asked = read(limits, **json.loads(body))
    assert (asked.max_tokens, asked.is_streamed) == (max_tokens, True)


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"prompt": 7}, "prompt", "Expected `str | array`"),
        ({"prompt": ""}, "prompt", "at least one token"),
        ({"prompt": []}, "prompt", "at least one text"),
        ({"prompt": ["a", 5]}, "prompt", "prompt must be a text, texts"),
        ({"prompt": [256]}, "prompt", "must be in [0, 256)"),
        ({"prompt": [-1]}, "prompt", "must be in [0, 256)"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"max_tokens": 41}, "max_tokens", "at most 40"),
        ({"max_tokens": 40, "prompt": "a" * 30}, "max_tokens", "leave room for 34"),
        ({"prompt": "a" * 64}, "prompt", "the prompt alone has 64"),
        ({"temperature": 3}, "temperature", "<= 2"),
        ({"top_p": 0}, "top_p", "> 0"),
        ({"top_k": -1}, "top_k", ">= 0"),
        ({"n": 17}, "n", "<= 16"),
        ({"n": 9, "prompt": ["a", "b"]}, "n", "at most 16, got 18"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "at most 4"),
        ({"stop": ""}, "stop", "none of them empty"),
        ({"logprobs": 6}, "logprobs", "<= 5"),
        ({"echo": True}, "echo", "not served here"),
        ({"suffix": "x"}, "suffix", "not served here"),
        ({"presence_penalty": 1}, "presence_penalty", "not served here"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not served here"),
        ({"best_of": 3}, "best_of", "not served here"),
        ({"tempurature": 1}, "tempurature", "unknown field"),
        ({"stream_options": {"x": 1}}, "x", "unknown field"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "set stream"),
    ],
)
def test_a_mistake_is_named(fields: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**fields)
    assert caught.value.param == param
    assert text in str(caught.value)


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(BadRequest, match="'other' is not served here; it is m") as caught:
        read(model="other")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"prompt": "a"}'])
def test_a_body_that_is_none(body: bytes) -> None:
    with pytest.raises(BadRequest):
        read_body(body, list, models=["m"], limits=LIMITS, vocab_size=256, fresh_seed=0)  # type: ignore[arg-type]


def test_tokens_that_are_no_text_have_names_of_their_own() -> None:
    choices = [
        Choice(token=97, logprob=-1.0, top=((97, -1.0), (98, -2.0))),
        Choice(token=1000, logprob=-2.0, top=((1000, -2.0), (1001, -2.5))),
    ]
    found = logprobs_json(choices, [0, 1], lambda ids: "".join(chr(token) if token < 256 else "�" for token in ids))
    assert found["tokens"] == ["a", "token_id:1000"]
    assert found["top_logprobs"] == [{"a": -1.0, "b": -2.0}, {"token_id:1000": -2.0, "token_id:1001": -2.5}]
    assert found["text_offset"] == [0, 1]
