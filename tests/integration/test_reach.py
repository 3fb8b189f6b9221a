"""The orchestrator dials back whoever asks: what an open, a closed and a foreign port come to, over real sockets."""

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from neurons.reach_checks import Answer, read_reach
from neurons.settings import NodeSettings
from subnet.adapters import routes
from subnet.adapters.http_client import open_session
from subnet.adapters.listener import Listener
from subnet.adapters.reach import Dialled, ask_reach, asker, mount_reach
from subnet.errors import Backpressure, NotFound, ProtocolViolation, TransientFailure
from subnet.types import Endpoint
from tests.unit.test_reach_checks import free_port, stranger


@pytest.fixture
async def orchestrator() -> AsyncIterator[str]:
    listener = Listener()
    mount_reach(listener)
    await listener.start("127.0.0.1", 0)
    yield f"http://127.0.0.1:{listener.port}"
    await listener.stop()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with open_session() as opened:
        yield opened


async def test_an_asker_hears_what_is_at_its_own_port(orchestrator: str, session: aiohttp.ClientSession) -> None:
    async with stranger() as port:
        found = await ask_reach(session, orchestrator, port)
        assert (found.address, found.dialled) == ("127.0.0.1", Dialled.OPEN)
        assert bytes.fromhex(found.said) == b"220 mail.example"
    closed = await ask_reach(session, orchestrator, free_port())
    assert (closed.dialled, closed.said) == (Dialled.REFUSED, "")


async def test_a_node_that_waits_to_be_spoken_to_is_open(orchestrator: str, session: aiohttp.ClientSession) -> None:
    node = Listener()
    await node.start("127.0.0.1", 0)
    found = await ask_reach(session, orchestrator, node.port)
    await node.stop()
    assert (found.dialled, found.said) == (Dialled.OPEN, "")


def test_behind_a_proxy_the_address_that_the_proxy_names_is_dialled() -> None:
    assert asker("127.0.0.1", "203.0.113.9, 9.9.9.9") == "9.9.9.9"
    assert asker("::ffff:172.17.0.1", "::ffff:9.9.9.9") == "9.9.9.9"
    assert asker("10.0.0.1", "") == "10.0.0.1"
    assert (
        asker("::ffff:8.8.8.8", "9.9.9.9") == asker("8.8.8.8", "9.9.9.9") == "8.8.8.8"
    )  # nobody's proxy is seen there
    with pytest.raises(ProtocolViolation, match="closed"):
        asker(None, "9.9.9.9")


@pytest.mark.parametrize(
    "named",
    [
        "localhost",
        "10.0.0.5",
        "127.0.0.1",
        "::ffff:10.0.0.5",
        "::1",
        "169.254.169.254",
        "224.0.0.1",
        "fe80::1%" + "a" * 64,
    ],
)
async def test_nobody_has_the_owners_own_network_dialled(
    orchestrator: str, session: aiohttp.ClientSession, named: str
) -> None:
    for headers in ({"X-Forwarded-For": named}, {"X-Forwarded-For": f"9.9.9.9, {named}"}):
        async with session.get(f"{orchestrator}{routes.REACH}{free_port()}", headers=headers) as answer:
            assert answer.status == 400


@pytest.mark.parametrize(
    "port", ["0", "65536", "x", "22/24", "", "9" * 5000, "0000019999999", "000001" + "1" * 5000, "1%0A", "\u0661"]
)
async def test_what_is_no_port_is_not_dialled(orchestrator: str, session: aiohttp.ClientSession, port: str) -> None:
    async with session.get(f"{orchestrator}{routes.REACH}{port}") as answer:
        assert answer.status == 404


async def test_dialling_is_rationed_and_an_older_orchestrator_says_so(
    orchestrator: str, session: aiohttp.ClientSession
) -> None:
    port = free_port()
    with pytest.raises(Backpressure):
        for _ in range(20):
            await ask_reach(session, orchestrator, port)
    older = Listener()
    await older.start("127.0.0.1", 0)
    with pytest.raises(NotFound):
        await ask_reach(session, f"http://127.0.0.1:{older.port}", port)
    await older.stop()
    with pytest.raises(TransientFailure):
        await ask_reach(session, f"http://127.0.0.1:{port}", port)


async def test_the_doctor_lets_itself_be_dialled(orchestrator: str, tmp_path: Path) -> None:
    node = NodeSettings(listen_host="127.0.0.1", port=free_port(), data_dir=str(tmp_path))

    async def outside(port: int) -> tuple[Answer | None, str]:
        facts = await read_reach(node, Endpoint(host="127.0.0.1", port=port), orchestrator_url=orchestrator)
        return facts.outside, facts.seen_address

    assert await outside(node.port) == (Answer.OURS, "127.0.0.1")
    assert await outside(free_port()) == (Answer.REFUSED, "127.0.0.1")
    async with stranger() as port:
        assert await outside(port) == (Answer.STRANGERS, "127.0.0.1")
    facts = await read_reach(node, Endpoint(host="127.0.0.1", port=node.port), orchestrator_url="http://127.0.0.1:9")
    assert (facts.outside, facts.answer) == (None, Answer.OURS)
