"""OpenAI's completions as values: what a body may say, what answers and errors look like. No network here."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from subnet.errors import StrataError
from subnet.inference.jobs import End
from subnet.inference.sampling import MAX_LOGPROBS, Choice, Sampling
from subnet.inference.text import UNFINISHED
from subnet.types import Record

MAX_CHOICES = 16
"""Choices of one request: prompts times n."""
MAX_STOPS = 4
DEFAULT_TOKENS = 16
"""OpenAI's, of a request that does not say; null asks for all there is room for."""
EXAMPLE_PROMPT = "The state of the union is"
EXAMPLE_TOKENS = 64

Encode = Callable[[str], list[int]]


class BadRequest(StrataError):
    """A request that cannot be served as it stands; `param` is the field to change."""

    def __init__(self, reason: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(reason)
        self.param = param
        self.code = code
        self.status = status


class StreamOptions(Record, frozen=True):
    """Of a streamed answer."""

    include_usage: bool = False


class Body(Record, frozen=True):
    """Body of POST /v1/completions. Fields that this server cannot honour are taken at their neutral value only."""

    model: str
    prompt: str | list[str | int | list[int]] = ""
    max_tokens: Annotated[int, Meta(ge=1)] | msgspec.UnsetType | None = msgspec.UNSET
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Meta(ge=0)] | None = 0
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    user: Annotated[str, Meta(max_length=256)] | None = None
    echo: bool | None = False
    best_of: int | None = None
    suffix: str | None = None
    presence_penalty: float | None = 0
    frequency_penalty: float | None = 0
    logit_bias: dict[str, float] | None = None


class Limits(Record, frozen=True):
    """What one request may ask for."""

    max_positions: Annotated[int, Meta(ge=2)]
    """Prompt and completion together, in tokens."""
    max_tokens: Annotated[int, Meta(ge=1)]
    max_body_bytes: Annotated[int, Meta(ge=1024)] = 1 << 20


def example(model: str, encode: Encode, limits: Limits) -> str:
    """A body to be typed, which `limits` allow wherever they leave room for a token after the prompt."""
    room = limits.max_positions - len(encode(EXAMPLE_PROMPT))
    max_tokens = max(1, min(EXAMPLE_TOKENS, limits.max_tokens, room))
    return json.dumps({"model": model, "prompt": EXAMPLE_PROMPT, "max_tokens": max_tokens, "stream": True})


class Asked(Record, frozen=True):
    """A checked request: for each choice its prompt and how its tokens are drawn, in order of their index."""

    model: str
    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[Sampling, ...]
    max_tokens: int
    stop: tuple[str, ...]
    num_logprobs: int | None
    is_streamed: bool
    wants_usage: bool
    num_prompt_tokens: int


def read_body(
    data: bytes, encode: Encode, *, models: Sequence[str], limits: Limits, vocab_size: int, fresh_seed: int
) -> Asked:
    """A checked request. Raises BadRequest."""
    try:
        body = msgspec.json.decode(data, type=Body)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error), param=_field(str(error))) from error
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if body.model not in models:
        raise BadRequest(
            f"model {body.model!r} is not served here; it is {', '.join(models)}",
            param="model",
            code="model_not_found",
            status=404,
        )
    _refuse_unserved(body)
    prompts = _prompts(body, encode, vocab_size)
    count = body.n or 1
    if len(prompts) * count > MAX_CHOICES:
        raise BadRequest(f"prompts times n must be at most {MAX_CHOICES}, got {len(prompts) * count}", param="n")
    max_tokens = _max_tokens(body, prompts, limits)
    seed = fresh_seed if body.seed is None else body.seed % (1 << 63)
    sampling = Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=body.top_p or 1.0,
        top_k=min(body.top_k or 0, vocab_size),
        num_logprobs=body.logprobs or 0,
    )
    num_choices = len(prompts) * count
    return Asked(
        model=body.model,
        prompts=tuple(prompt for prompt in prompts for _ in range(count)),
        samplings=tuple(
            msgspec.structs.replace(sampling, seed=(seed + index) % (1 << 63)) for index in range(num_choices)
        ),
        max_tokens=max_tokens,
        stop=_stops(body),
        num_logprobs=body.logprobs,
        is_streamed=bool(body.stream),
        wants_usage=body.stream_options is not None and body.stream_options.include_usage,
        num_prompt_tokens=sum(len(prompt) for prompt in prompts),
    )


def _field(text: str) -> str | None:
    """The field that msgspec names: "... - at `$.prompt`", or the one it does not know."""
    if "unknown field" in text:
        return text.split("`")[1]
    return text.rsplit("`$.", 1)[1].split("`")[0] if "`$." in text else None


def _refuse_unserved(body: Body) -> None:
    neutral: dict[str, tuple[object, ...]] = {
        "echo": (False, None),
        "suffix": (None, ""),
        "presence_penalty": (0, None),
        "frequency_penalty": (0, None),
        "logit_bias": (None, {}),
        "best_of": (None, 1, body.n),
    }
    for name, allowed in neutral.items():
        if getattr(body, name) not in allowed:
            raise BadRequest(f"{name} is not served here; leave it out", param=name)
    if body.stream_options is not None and not body.stream:
        raise BadRequest(
            "stream_options are of a streamed answer: set stream, or leave them out", param="stream_options"
        )


def _prompts(body: Body, encode: Encode, vocab_size: int) -> list[tuple[int, ...]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        found = [tuple(encode(prompt))]
    elif prompt and all(isinstance(each, int) for each in prompt):
        found = [tuple(each for each in prompt if isinstance(each, int))]
    elif any(isinstance(each, int) for each in prompt):
        raise BadRequest("prompt must be a text, texts, token ids, or lists of token ids", param="prompt")
    else:
        found = [
            tuple(encode(each)) if isinstance(each, str) else tuple(each)
            for each in prompt
            if not isinstance(each, int)
        ]
    if not found:
        raise BadRequest("prompt must hold at least one text", param="prompt")
    for ids in found:
        if not ids:
            raise BadRequest("prompt must hold at least one token", param="prompt")
        if not all(0 <= token < vocab_size for token in ids):
            raise BadRequest(f"token ids of prompt must be in [0, {vocab_size})", param="prompt")
    return found


def _max_tokens(body: Body, prompts: Sequence[Sequence[int]], limits: Limits) -> int:
    longest = max(len(prompt) for prompt in prompts)
    room = limits.max_positions - longest
    if room < 1:
        raise BadRequest(
            f"this model reads and writes at most {limits.max_positions} tokens, the prompt alone has {longest}",
            param="prompt",
            code="context_length_exceeded",
        )
    most = min(room, limits.max_tokens)
    if body.max_tokens is None:
        return most
    if body.max_tokens is msgspec.UNSET:
        return min(DEFAULT_TOKENS, most)
    if body.max_tokens > limits.max_tokens:
        raise BadRequest(f"max_tokens must be at most {limits.max_tokens}, got {body.max_tokens}", param="max_tokens")
    if body.max_tokens > room:
        raise BadRequest(
            f"this model reads and writes at most {limits.max_positions} tokens: {longest} of the prompt leave room for "
            f"{room}, max_tokens is {body.max_tokens}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return body.max_tokens


def _stops(body: Body) -> tuple[str, ...]:
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stops) > MAX_STOPS or not all(stops):
        raise BadRequest(f"stop must be at most {MAX_STOPS} texts, none of them empty", param="stop")
    return stops


# ---- answers ---------------------------------------------------------------------------------------------------------

FINISH_REASONS = {End.STOP: "stop", End.LENGTH: "length"}
"""The ends that are an answer; the others are errors."""


def choice_json(index: int, text: str, *, finish_reason: str | None, logprobs: object = None) -> dict[str, Any]:
    """One entry of `choices`."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def answer_json(
    completion_id: str,
    created_s: int,
    model: str,
    choices: Sequence[Mapping[str, Any]],
    *,
    usage: Mapping[str, int] | msgspec.UnsetType | None = msgspec.UNSET,
) -> bytes:
    """A completion, or one piece of a streamed one; `usage` null: it comes with a later piece."""
    fields: dict[str, Any] = {
        "id": completion_id,
        "object": "text_completion",
        "created": created_s,
        "model": model,
        "choices": choices,
    }
    if usage is not msgspec.UNSET:
        fields["usage"] = usage
    return msgspec.json.encode(fields)


def usage_json(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, int]:
    """Tokens read and written."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


def logprobs_json(
    choices: Sequence[Choice], offsets: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """The `logprobs` of a choice, token by token, with where each begins in its text. One that is no text is token_id:N."""

    def name(token: int) -> str:
        text = decode([token])
        return f"token_id:{token}" if UNFINISHED in text else text

    return {
        "tokens": [name(choice.token) for choice in choices],
        "token_logprobs": [choice.logprob for choice in choices],
        "top_logprobs": [{name(token): logprob for token, logprob in choice.top} for choice in choices],
        "text_offset": list(offsets),
    }


def error_json(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    """An error in OpenAI's shape."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
