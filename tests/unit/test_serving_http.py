"""The gateway's HTTP side without a stage host: what is answered before a token is asked for."""

import asyncio
import threading
from collections.abc import AsyncIterator

import aiohttp
import pytest

from neurons.serving.completions import Limits
from neurons.serving.gateway import Gateway, Model
from neurons.serving.http import CompletionsApi, Text
from subnet.adapters.listener import Listener
from subnet.adapters.system import SystemClock
from subnet.inference.jobs import BatchLimits
from subnet.inference.messages import AUTOREGRESSIVE

SLOW = "a prompt that takes long to read"


class Reading:
    """Of the slow prompt: whether it has begun, and may end."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def encode(self, text: str) -> list[int]:
        self.has_begun.set()
        if text == SLOW and not self.may_end.wait(10):
            return []  # refused: nobody else was answered in the meantime
        return list(text.encode())


@pytest.fixture
def reading() -> Reading:
    return Reading()


@pytest.fixture
async def url(reading: Reading) -> AsyncIterator[str]:
    clock, listener = SystemClock(), Listener()
    gateway = Gateway(
        [], Model("digest", AUTOREGRESSIVE, 1), session="s", shared_key=b"", clock=clock, limits=BatchLimits()
    )
    api = CompletionsApi(
        gateway,
        Text(encode=reading.encode, decode=lambda ids: bytes(ids).decode(errors="replace"), eos_ids=(), vocab_size=256),
        names={"tiny": 1},
        limits=Limits(max_positions=64, max_tokens=32),
        clock=clock,
    )
    api.mount(listener)
    await listener.start("127.0.0.1", 0)
    yield f"http://127.0.0.1:{listener.port}"
    await listener.stop()


async def test_others_are_answered_while_a_long_prompt_is_read(url: str, reading: Reading) -> None:
    """A megabyte of text takes a tokenizer a second."""
    async with aiohttp.ClientSession() as session:

        async def ask() -> tuple[int, str]:
            async with session.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": SLOW}) as response:
                return response.status, (await response.json())["error"]["code"]

        asked = asyncio.create_task(ask())
        await asyncio.to_thread(reading.has_begun.wait, 10)
        async with session.get(f"{url}/v1/models") as response:
            assert response.status == 200
        reading.may_end.set()
        assert await asked == (503, "unavailable")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("POST", "/v1/models", 405, None),
        ("GET", "/v1/completions", 405, None),
        ("POST", "/v1/chat/completions", 404, "not_found"),
        ("GET", "/v1/embeddings%FF", 404, "not_found"),
    ],
)
async def test_what_is_not_here_is_refused_in_openais_shape(
    url: str, method: str, path: str, status: int, code: str | None
) -> None:
    async with aiohttp.ClientSession() as session, session.request(method, f"{url}{path}") as response:
        assert response.status == status
        error = (await response.json())["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", code)
