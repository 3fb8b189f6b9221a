"""Whether peers can dial a node: each way in which they cannot is told apart."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from neurons.claims import directory_claim
from neurons.findings import Level
from neurons.reach_checks import Answer, ReachFacts, reach_findings, read_reach
from neurons.settings import NodeSettings
from subnet.types import Endpoint


def facts(**fields: Any) -> ReachFacts:
    """A node behind a router that forwards its port."""
    made: dict[str, Any] = {
        "listen_host": "0.0.0.0",
        "port": 8_091,
        "announced": Endpoint(host="8.8.8.8", port=18_091),
        "taken_by": "",
        "is_local": False,
        "answer": Answer.OURS,
        "own_address": "10.0.0.5",
    }
    return ReachFacts(**{**made, **fields})


def test_a_node_that_can_be_dialled_hears_how_to_be_certain() -> None:
    port, reach = reach_findings(facts())
    assert (port.code, reach.code) == ("port", "reach") and "nc -vz 8.8.8.8 18091" in reach.text


@pytest.mark.parametrize(
    ("changed", "code", "words", "remedy"),
    [
        ({"answer": Answer.SILENT}, "not_reachable", "does not answer", "forward it to 10.0.0.5:8091"),
        ({"answer": Answer.REFUSED}, "not_reachable", "refuses connections", "open port 18091"),
        ({"answer": Answer.STRANGERS}, "not_reachable", "another program answers", "nc -vz 8.8.8.8 18091"),
        ({"answer": Answer.NO_ADDRESS}, "not_reachable", "has no address", "check --external-host"),
        ({"announced": Endpoint(host="192.168.1.5", port=1)}, "not_reachable", "leads nowhere", "--external-host"),
        ({"announced": Endpoint(host="localhost", port=1)}, "not_reachable", "leads nowhere", "--external-host"),
        (
            {"outside": Answer.SILENT, "seen_address": "9.9.9.9"},
            "not_reachable",
            "dialled 9.9.9.9:18091: nothing",
            "open port 18091",
        ),
        ({"outside": Answer.STRANGERS, "seen_address": "8.8.8.8"}, "not_reachable", "another program", "10.0.0.5:8091"),
        (
            {"announced": Endpoint(host="10.0.0.5", port=1), "outside": Answer.OURS, "seen_address": "9.9.9.9"},
            "not_reachable",
            "leads nowhere",
            "--external-host 9.9.9.9",
        ),
        ({"taken_by": "port 8091 is taken by pid 7 (nginx).\nStop it."}, "port_taken", "pid 7 (nginx)", "Stop it."),
    ],
)
def test_each_obstacle_is_told_apart(changed: dict[str, Any], code: str, words: str, remedy: str) -> None:
    (found,) = [finding for finding in reach_findings(facts(**changed)) if finding.level is not Level.OK]
    assert found.level is (Level.PROBLEM if code == "port_taken" else Level.WARNING), (
        "out of reach it works all the same"
    )
    assert found.code == code and words in found.text and remedy in found.remedy


def test_who_was_dialled_from_outside_need_not_guess() -> None:
    seen = facts(outside=Answer.OURS, seen_address="8.8.8.8", answer=Answer.SILENT)  # a router without hairpin
    assert [finding.level for finding in reach_findings(seen)] == [Level.OK, Level.OK]
    other = reach_findings(facts(outside=Answer.OURS, seen_address="9.9.9.9"))[-1]
    assert (other.code, other.level) == ("address_differs", Level.WARNING) and "9.9.9.9" in other.remedy
    named = facts(outside=Answer.OURS, seen_address="9.9.9.9", announced=Endpoint(host="node.example.org", port=1))
    assert reach_findings(named)[-1].code == "reach"


def test_a_node_that_runs_already_has_its_port_and_a_local_run_needs_no_outside() -> None:
    running = facts(taken_by="port 8091 is taken by pid 7 (python strata miner).\nStop it.", is_running=True)
    local = facts(is_local=True, announced=Endpoint(host="127.0.0.1", port=8_091))
    for found in (reach_findings(running), reach_findings(local)):
        assert {finding.level for finding in found} == {Level.OK}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def stranger() -> AsyncIterator[int]:
    """Another program that listens and says something."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.org")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


async def test_what_answers_at_the_announced_address_is_found_by_dialling_it(tmp_path: Path) -> None:
    node = NodeSettings(listen_host="127.0.0.1", port=free_port(), data_dir=str(tmp_path))

    async def answer(port: int, of: NodeSettings = node, host: str = "127.0.0.1") -> Answer:
        return (await read_reach(of, Endpoint(host=host, port=port), orchestrator_url=None)).answer

    assert await answer(node.port) is Answer.OURS
    assert await answer(free_port()) is Answer.REFUSED
    assert await answer(node.port, host="no-such-host.invalid") is Answer.NO_ADDRESS
    async with stranger() as port:
        assert await answer(port) is Answer.STRANGERS
        taken = NodeSettings(listen_host="127.0.0.1", port=port, data_dir=str(tmp_path))
        found = await read_reach(taken, Endpoint(host="127.0.0.1", port=port), orchestrator_url="http://localhost:1")
        assert f"port {port} is taken" in found.taken_by and found.is_local and not found.is_running
        with directory_claim(tmp_path, "run-1", role="miner"):
            ours = await read_reach(taken, Endpoint(host="127.0.0.1", port=port), orchestrator_url=None)
        assert ours.is_running and ours.answer is Answer.OURS
    remote = await read_reach(node, Endpoint(host="127.0.0.1", port=node.port), orchestrator_url="http://8.8.8.8:1")
    assert not remote.is_local and remote.own_address
    named = await read_reach(node, Endpoint(host="127.0.0.1", port=node.port), orchestrator_url="https://x.example")
    assert not named.is_local
