"""A chain endpoint that answers nonsense is left for the next, like one that is silent, and ends no node."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import bittensor as bt
import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

from subnet.adapters.chain import BittensorChain
from subnet.adapters.chain_session import ChainLimits, ChainSession
from subnet.adapters.commitment_fields import from_fields
from subnet.devnet.config import DevnetConfig
from subnet.devnet.node import Node
from subnet.errors import InvalidConfig, Refused, TransientFailure

NETUID = 1
Bend = Callable[[Any], Any]


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with Node(DevnetConfig(port=0, block_time_s=0.05)).running() as running:
        yield running


@contextlib.asynccontextmanager
async def bending(node: Node, bend: Bend) -> AsyncIterator[tuple[str, list[bool]]]:
    """An endpoint before `node` that bends results once its switch, a list, holds True; its URL and the switch."""
    switch: list[bool] = []

    async def relay(asker: ServerConnection) -> None:
        async with connect(node.url, max_size=None) as source:
            async for question in asker:
                await source.send(question)
                answer = json.loads(await source.recv())
                if switch and "result" in answer:
                    answer["result"] = bend(answer["result"])
                await asker.send(json.dumps(answer))

    async with serve(relay, "127.0.0.1", 0, max_size=None) as server:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}", switch


def _shorter(result: Any) -> Any:
    return result[: len(result) // 2 // 2 * 2] if isinstance(result, str) and len(result) > 70 else result


def _ones(result: Any) -> Any:
    return "0x" + "ff" * (len(result) // 2 - 1) if isinstance(result, str) and len(result) > 70 else result


BENDS: dict[str, Bend] = {
    "nothing": lambda result: None,
    "a number": lambda result: 7,
    "no hex": lambda result: "0xzz",
    "no text": lambda result: {},
    "half": _shorter,
    "ones": _ones,
}


@pytest.mark.parametrize("bend", BENDS.values(), ids=BENDS)
async def test_nonsense_is_a_transient_failure_and_the_next_endpoint_is_asked(node: Node, bend: Bend) -> None:
    async with bending(node, bend) as (url, switch):
        alone = BittensorChain(url, NETUID, fallback_endpoints=())
        await alone.block()
        switch.append(True)
        with pytest.raises(TransientFailure, match="does not decode"):
            for read in (alone.fresh_metagraph, alone.hyperparameters):
                await read()
        await alone.close()
        with contextlib.suppress(TransientFailure):  # an endpoint that greets with nonsense cannot be connected to
            await alone.block()
        await alone.close()
        switch.clear()
        chain = BittensorChain(url, NETUID, fallback_endpoints=[node.url])
        await chain.block()
        switch.append(True)
        assert (await chain.fresh_metagraph()).netuid == NETUID
        await chain.close()


async def test_a_network_that_nobody_knows_is_a_mistake_of_the_configuration() -> None:
    for network in ("finny", "http://127.0.0.1:9944"):
        chain = BittensorChain(network, NETUID)
        with pytest.raises(InvalidConfig, match=r"node\.network must be one of .*finney"):
            await chain.block()
        await chain.close()


async def test_a_refusal_because_an_earlier_attempt_landed_is_no_refusal(node: Node) -> None:
    """A socket that drops hides a success; what is sent again is then too fast, and the weights are set all the same."""
    session = ChainSession(node.url, fallback_endpoints=(), limits=ChainLimits())
    sent: list[int] = []

    async def send(client: bt.Client) -> bt.ExtrinsicResult:
        sent.append(len(sent))
        if len(sent) == 1:
            raise ConnectionError("the socket dropped")
        raise bt.ChainError("setting weights too fast", name="SettingWeightsTooFast")

    async def landed_late() -> int | None:
        return 42 if len(sent) > 1 else None

    async def never() -> int | None:
        return None

    assert await session.submit("weights", send, landed_late, key="k") == 42
    with pytest.raises(Refused) as refused:
        await session.submit("weights", send, never, key="k")
    assert refused.value.code == "SettingWeightsTooFast"
    await session.close()


def test_text_that_begins_like_hex_is_text() -> None:
    assert from_fields([{"Raw4": "0xzz"}]) == b"0xzz"
    assert from_fields([{"Raw5": "0xabc"}]) == b"0xabc"
    assert from_fields([{"Raw2": "0xabcd"}]) == b"\xab\xcd"
