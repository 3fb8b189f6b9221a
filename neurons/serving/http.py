"""The gateway's HTTP side: /v1/completions (whole or streamed), /v1/models, /health, /metrics."""

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from neurons.serving.completions import (
    Asked,
    BadRequest,
    Limits,
    answer_json,
    choice_json,
    error_json,
    example,
    read_body,
    usage_json,
)
from neurons.serving.gateway import Answer, Gateway
from neurons.serving.growing import GrowingChoice, Unfinished
from subnet.adapters.listener import Listener
from subnet.adapters.listener import read_body as read_bytes
from subnet.adapters.metrics import Measure, renderer
from subnet.errors import Backpressure, ProtocolViolation, TransientFailure
from subnet.inference.jobs import End, Ended, Job, Token
from subnet.ports import Clock

LOOK_EVERY_S = 0.25
"""While nothing comes, how often to look whether the client is still there."""
WRITE_S = 30.0
"""A client that does not read for this long is gone."""
BODY_S = 30.0
RETRY_AFTER_S = 1
GONE = 499
"""The status, for the metrics alone, of a request whose client went away."""
_ENDED = web.ResponseKey("ended", int)
"""What is kept with a response that had begun: the status that its end would have had."""
_EVENT_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx in front of us would hold the events back
}


class ClientGone(Exception):
    """Nobody reads the answer any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The model's text side."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    eos_ids: tuple[int, ...]
    vocab_size: int


class CompletionsApi:
    """Routes of one gateway. `names` are the model ids it answers to, with the tokens
    that come at once under each (0: all); `api_key` empty: everybody may ask."""

    def __init__(
        self,
        gateway: Gateway,
        text: Text,
        *,
        names: Mapping[str, int],
        limits: Limits,
        clock: Clock,
        api_key: str = "",
        version: str = "",
    ) -> None:
        self._gateway = gateway
        self._text = text
        self.names = names
        self._limits = limits
        self._clock = clock
        self._api_key = api_key
        self._started_s = int(clock.now())
        self._metrics = renderer("serve", version, self._measures)
        self.is_stopping = False
        self.num_requests: dict[int, int] = {}
        """By the status they were answered with, or would have been, had it come to that before the first token; 499: the client
        went away."""

    @property
    def needs_key(self) -> bool:
        """Whether clients must give a key."""
        return bool(self._api_key)

    @property
    def example(self) -> str:
        """A body to be typed, to see whether it answers."""
        return example(next(iter(self.names)), self._text.encode, self._limits)

    def mount(self, listener: Listener) -> None:
        """Offer every route."""
        listener.mount("/v1/completions", self._guarded(self._completions))
        listener.mount("/v1/models", self._guarded(self._models))
        listener.mount("/v1/models/", self._guarded(self._models))
        listener.mount("/v1/", self._guarded(self._nothing))
        listener.mount("/health", self._health)
        listener.mount("/metrics", self._metrics_page)

    # ---- every request -------------------------------------------------------------------------------------------

    def _guarded(
        self, answer: Callable[[web.BaseRequest, str], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.BaseRequest, str], Awaitable[web.StreamResponse]]:
        """Key, then the answer; every known failure in OpenAI's shape."""

        async def handle(request: web.BaseRequest, rest: str) -> web.StreamResponse:
            try:
                self._check_key(request)
                response = await answer(request, rest)
            except BadRequest as error:
                kind = "authentication_error" if error.status == 401 else "invalid_request_error"
                response = _error(error.status, str(error), kind=kind, param=error.param, code=error.code)
            except ProtocolViolation as error:
                response = _error(400, str(error), kind="invalid_request_error")
            except Backpressure as error:
                response = _error(429, str(error), kind="rate_limit_error", code="queue_full")
            except TransientFailure as error:
                response = _error(503, str(error), kind="server_error", code="unavailable")
            except Unfinished as error:
                response = _json_bytes(_status_of(error.ended), _ended_badly(error.ended))
            except ClientGone:
                response = web.Response(status=GONE)
            status = response.get(_ENDED, response.status)
            self.num_requests[status] = self.num_requests.get(status, 0) + 1
            return response

        return handle

    def _check_key(self, request: web.BaseRequest) -> None:
        if not self._api_key:
            return
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        # bytes that are no UTF-8 arrive as surrogates
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._api_key.encode()):
            raise BadRequest("give this server's key as: Authorization: Bearer KEY", code="invalid_api_key", status=401)

    async def _nothing(self, request: web.BaseRequest, rest: str) -> web.StreamResponse:
        raise BadRequest(f"there is no {request.method} {request.path[:100]} here", code="not_found", status=404)

    async def _models(self, request: web.BaseRequest, rest: str) -> web.StreamResponse:
        rows = [
            {"id": name, "object": "model", "created": self._started_s, "owned_by": "strata"} for name in self.names
        ]
        if request.method != "GET":
            raise BadRequest("models are read with GET", status=405)
        if not rest:
            return _json({"object": "list", "data": rows})
        found = next((row for row in rows if row["id"] == rest), None)
        if found is None:
            raise BadRequest(f"model {rest[:100]!r} is not served here", code="model_not_found", status=404)
        return _json(found)

    async def _health(self, request: web.BaseRequest, rest: str) -> web.StreamResponse:
        batcher = self._gateway.batcher
        is_up = batcher.is_whole and not self.is_stopping
        status = "stopping" if self.is_stopping else "ok" if is_up else "a stage has no host"
        facts = {
            "status": status,
            "models": list(self.names),
            "num_waiting": batcher.num_waiting,
            "num_running": batcher.num_running,
            "hosts": self._gateway.facts(),
        }
        return _json(facts, status=200 if is_up else 503)

    async def _metrics_page(self, request: web.BaseRequest, rest: str) -> web.StreamResponse:
        return web.Response(body=self._metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    def _measures(self) -> Iterator[Measure]:
        batcher = self._gateway.batcher
        yield Measure(name="strata_serve_waiting", text="Sequences without a place.", value=batcher.num_waiting)
        yield Measure(name="strata_serve_running", text="Sequences with a place.", value=batcher.num_running)
        yield Measure(name="strata_serve_steps_in_flight", text="Steps under way.", value=batcher.num_in_flight)
        yield Measure(
            name="strata_serve_tokens_total", text="Tokens made.", value=self._gateway.num_tokens, is_total=True
        )
        yield Measure(name="strata_serve_steps_total", text="Steps sent.", value=self._gateway.num_steps, is_total=True)
        for status, count in sorted(self.num_requests.items()):
            yield Measure(
                name="strata_serve_requests_total",
                text="Requests by the status of their answer, or of their end where that was another; 499: the client went away.",
                value=count,
                labels={"status": str(status)},
                is_total=True,
            )
        for stage in range(batcher.num_stages):
            yield Measure(
                name="strata_serve_hosts",
                text="Live hosts of each stage.",
                value=len(batcher.hosts_of(stage)),
                labels={"stage": str(stage)},
            )

    # ---- completions ---------------------------------------------------------------------------------------------

    async def _completions(self, request: web.BaseRequest, rest: str) -> web.StreamResponse:
        if request.method != "POST":
            raise BadRequest("completions are asked for with POST", status=405)
        if self.is_stopping:
            raise TransientFailure("this server is stopping")
        asked = await self._read(request)
        keys = self._gateway.take_keys(len(asked.prompts))
        client = request.remote or ""
        jobs = [
            Job(
                key=key,
                client=client,
                prompt=prompt,
                max_tokens=asked.max_tokens,
                sampling=sampling,
                stop_ids=self._text.eos_ids,
                num_at_once=self.names[asked.model] or asked.max_tokens,
            )
            for key, prompt, sampling in zip(keys, asked.prompts, asked.samplings, strict=True)
        ]
        stream = self._gateway.submit(jobs)
        grown = {
            key: GrowingChoice(index, self._text.decode, asked.stop, asked.num_logprobs is not None)
            for index, key in enumerate(keys)
        }
        try:
            if asked.is_streamed:
                return await self._stream(request, asked, stream, grown)
            return await self._whole(request, asked, stream, grown)
        finally:
            self._gateway.cancel(keys)

    async def _read(self, request: web.BaseRequest) -> Asked:
        limits = self._limits
        if (request.content_length or 0) > limits.max_body_bytes:
            raise BadRequest(
                f"the body must be at most {limits.max_body_bytes} bytes", code="body_too_large", status=413
            )
        data = await read_bytes(request, limit_bytes=limits.max_body_bytes, timeout_s=BODY_S)
        if room := self._gateway.max_positions:  # hosts may have been started with less than this gateway
            limits = msgspec.structs.replace(limits, max_positions=min(limits.max_positions, room))
        return await asyncio.to_thread(  # a tokenizer takes a second for a megabyte
            read_body,
            data,
            self._text.encode,
            models=list(self.names),
            limits=limits,
            vocab_size=self._text.vocab_size,
            fresh_seed=secrets.randbits(62),
        )

    async def _whole(
        self, request: web.BaseRequest, asked: Asked, stream: asyncio.Queue[Answer], grown: Mapping[int, GrowingChoice]
    ) -> web.StreamResponse:
        texts = dict.fromkeys(grown, "")
        while any(choice.finish_reason is None for choice in grown.values()):
            answer = await _next(stream, request)
            texts[answer.key] += self._grow(grown[answer.key], answer)
        choices = [_choice_json(choice, texts[key]) for key, choice in grown.items()]
        usage = _usage(asked, grown)
        return web.Response(
            body=answer_json(_completion_id(), int(self._clock.now()), asked.model, choices, usage=usage),
            content_type="application/json",
        )

    async def _stream(
        self, request: web.BaseRequest, asked: Asked, stream: asyncio.Queue[Answer], grown: Mapping[int, GrowingChoice]
    ) -> web.StreamResponse:
        """Server-sent events. The headers wait for the first token, so that an early failure has its status."""
        response = web.StreamResponse(headers=_EVENT_HEADERS)
        try:
            try:
                await self._pieces(request, response, asked, stream, grown)
            except Unfinished as error:
                if not response.prepared:
                    raise
                response[_ENDED] = _status_of(error.ended)
                await _write(response, _ended_badly(error.ended))
        except ClientGone:
            if not response.prepared:
                raise
            response[_ENDED] = GONE
        return response

    async def _pieces(
        self,
        request: web.BaseRequest,
        response: web.StreamResponse,
        asked: Asked,
        stream: asyncio.Queue[Answer],
        grown: Mapping[int, GrowingChoice],
    ) -> None:
        """Everything that is said in a stream. Raises Unfinished, ClientGone."""
        completion_id, created_s = _completion_id(), int(self._clock.now())
        later = None if asked.wants_usage else msgspec.UNSET
        while any(choice.finish_reason is None for choice in grown.values()):
            answer = await _next(stream, request)
            choice = grown[answer.key]
            is_open = choice.finish_reason is None
            text = self._grow(choice, answer)
            if not response.prepared:
                await _prepare(response, request)
            if text or (is_open and choice.finish_reason is not None):
                piece = _choice_json(choice, text)
                await _write(response, answer_json(completion_id, created_s, asked.model, [piece], usage=later))
        if asked.wants_usage:
            usage = _usage(asked, grown)
            await _write(response, answer_json(completion_id, created_s, asked.model, [], usage=usage))
        await _write(response, b"[DONE]")

    def _grow(self, choice: GrowingChoice, answer: Answer) -> str:
        """Text to show. Raises Unfinished."""
        text = choice.take(answer)
        if choice.finish_reason is not None and isinstance(answer, Token):
            self._gateway.cancel([answer.key])  # at a stop text: hosts would go on
        return text


async def _next(stream: asyncio.Queue[Answer], request: web.BaseRequest) -> Answer:
    """The next answer. Raises ClientGone."""
    while True:
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ClientGone
        try:
            async with asyncio.timeout(LOOK_EVERY_S):
                return await stream.get()
        except TimeoutError:
            continue


async def _prepare(response: web.StreamResponse, request: web.BaseRequest) -> None:
    try:
        await response.prepare(request)
    except ConnectionError as error:
        raise ClientGone from error


async def _write(response: web.StreamResponse, data: bytes) -> None:
    try:
        async with asyncio.timeout(WRITE_S):
            await response.write(b"data: " + data + b"\n\n")
    except (ConnectionError, TimeoutError) as error:
        raise ClientGone from error


def _choice_json(choice: GrowingChoice, text: str) -> dict[str, Any]:
    return choice_json(choice.index, text, finish_reason=choice.finish_reason, logprobs=choice.fresh_logprobs())


def _usage(asked: Asked, grown: Mapping[int, GrowingChoice]) -> dict[str, int]:
    return usage_json(asked.num_prompt_tokens, sum(len(choice.choices) for choice in grown.values()))


def _status_of(ended: Ended) -> int:
    return 504 if ended.end is End.TIMEOUT else 503


def _ended_badly(ended: Ended) -> bytes:
    """Why a completion ended unfinished, in OpenAI's shape."""
    if ended.end is End.TIMEOUT:
        return error_json("the completion did not end in time", kind="server_error", code="timeout")
    reason = ended.detail or "a stage of the model was lost and has no other host"
    return error_json(f"the completion ended early: {reason}", kind="server_error", code="unavailable")


def _error(status: int, message: str, *, kind: str, param: str | None = None, code: str | None = None) -> web.Response:
    return _json_bytes(status, error_json(message, kind=kind, param=param, code=code))


def _json(value: object, *, status: int = 200) -> web.Response:
    return _json_bytes(status, msgspec.json.encode(value))


def _json_bytes(status: int, body: bytes) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else None
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def _completion_id() -> str:
    return f"cmpl-{secrets.token_hex(12)}"
