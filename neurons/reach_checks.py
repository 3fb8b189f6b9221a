"""Whether peers can reach this node: its port, the address it announces, and what answers there; part of `strata doctor`."""

import asyncio
import contextlib
import enum
import ipaddress
import secrets
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from neurons.claims import last_holder, require_free_port
from neurons.findings import Finding, Level
from neurons.settings import NodeSettings
from subnet.adapters.http_client import open_session
from subnet.adapters.reach import SAID_BYTES, Dialled, Reached, ask_reach
from subnet.errors import NotFound, ProtocolViolation, Refused, StartupRefused, TransientFailure
from subnet.types import Endpoint

_PROBE_TIMEOUT_S = 5.0
_TOKEN_BYTES = SAID_BYTES


class Answer(enum.StrEnum):
    """What became of a connection from here to the announced address."""

    OURS = "ours"
    STRANGERS = "stranger's"
    REFUSED = "refused"
    SILENT = "silent"
    NO_ADDRESS = "no address"


_OUTSIDE = {
    Answer.STRANGERS: "another program answers there",
    Answer.REFUSED: "connections are refused",
    Answer.SILENT: "nothing answers",
    Answer.NO_ADDRESS: "it has no address",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachFacts:
    """How this node listens, and what it tells its peers to dial.

    `taken_by` says who has the port, "" when it is free; `is_running` when that is this very node. `is_local` when the run's
    orchestrator is on this machine too.
    """

    listen_host: str
    port: int
    announced: Endpoint
    taken_by: str
    is_running: bool = False
    is_local: bool
    answer: Answer
    own_address: str
    """This machine's address towards the outside, as its routing table has it."""
    outside: Answer | None = None
    """What the run's orchestrator found when it dialled `seen_address`; None when it was not asked, or did not say."""
    seen_address: str = ""
    """Where this machine's requests come from, as the orchestrator sees it."""


def reach_findings(facts: ReachFacts) -> list[Finding]:
    """Who could not dial this node, and why."""
    where = f"{facts.announced.host}:{facts.announced.port}"
    found = [_about_port(facts)]
    if facts.is_local:
        return [*found, Finding("reach", Level.OK, f"the run is on this machine, peers dial {where}")]
    if _is_private(facts.announced.host):
        text = f"peers would be told to dial {where}, which leads nowhere from outside; this machine is {facts.own_address}"
        remedy = (
            f"name the address they can dial: --external-host {facts.seen_address or 'ADDRESS'}, and --external-port PORT "
            f"if the router forwards another; forward it to {facts.own_address}:{facts.port}"
        )
        return [*found, _not_reachable(text, remedy)]
    return [*found, _about_answer(facts, where) if facts.outside is None else _about_outside(facts, facts.outside)]


def _about_port(facts: ReachFacts) -> Finding:
    if not facts.taken_by:
        return Finding("port", Level.OK, f"port {facts.port} is free on {facts.listen_host}")
    text, _, remedy = facts.taken_by.partition("\n")
    if facts.is_running:
        return Finding("port", Level.OK, f"this node is running already: {text}")
    return Finding("port_taken", Level.PROBLEM, text, remedy)


def _about_answer(facts: ReachFacts, where: str) -> Finding:
    certain = f"to be certain, type on another machine while this node runs: nc -vz {where.replace(':', ' ')}"
    if facts.answer is Answer.OURS:
        return Finding("reach", Level.OK, f"{where} leads here from this machine; {certain}")
    if facts.answer is Answer.NO_ADDRESS:
        text = f"{facts.announced.host} has no address"
        return _not_reachable(text, "check --external-host")
    text = {
        Answer.STRANGERS: f"another program answers at {where}",
        Answer.REFUSED: f"{where} refuses connections",
        Answer.SILENT: f"{where} does not answer",
    }[facts.answer]
    remedy = f"open port {facts.announced.port} in the firewall and forward it to {facts.own_address}:{facts.port}; {certain}"
    return _not_reachable(text, remedy)


def _about_outside(facts: ReachFacts, outside: Answer) -> Finding:
    """The run's orchestrator has dialled this machine: what it found is what peers will find."""
    dialled = f"{facts.seen_address}:{facts.announced.port}"
    if outside is not Answer.OURS:
        text = f"the run's orchestrator dialled {dialled}: {_OUTSIDE[outside]}"
        remedy = f"open port {facts.announced.port} in the firewall and forward it to {facts.own_address}:{facts.port}"
        return _not_reachable(text, remedy)
    if _is_another(facts.announced.host, facts.seen_address):
        text = f"peers are told to dial {facts.announced.host}, the run's orchestrator sees you at {facts.seen_address}"
        remedy = f"if that is no second address of yours: --external-host {facts.seen_address}"
        return Finding("address_differs", Level.WARNING, text, remedy)
    return Finding("reach", Level.OK, f"the run's orchestrator dialled {dialled} and found this node")


def _not_reachable(text: str, remedy: str) -> Finding:
    """It works all the same (DESIGN D84), so nothing stands in the way."""
    meanwhile = "until then what peers send comes through the run's store, which takes longer"
    return Finding("not_reachable", Level.WARNING, text, f"{remedy}; {meanwhile}")


def _is_another(announced: str, seen: str) -> bool:
    """Whether two addresses differ; a name is not looked up."""
    try:
        return ipaddress.ip_address(announced) != ipaddress.ip_address(seen)
    except ValueError:
        return False


def _is_private(host: str) -> bool:
    """Whether an address means something only on this machine or in its own network; a name may mean anything."""
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return host == "localhost"


async def read_reach(node: NodeSettings, announced: Endpoint, *, orchestrator_url: str | None) -> ReachFacts:
    """Listen on the node's port for a moment, dial the address it announces, and let the orchestrator dial too."""
    taken_by = ""
    try:
        require_free_port(node.listen_host, node.port)
    except StartupRefused as error:
        taken_by = str(error)
    token = secrets.token_bytes(_TOKEN_BYTES)
    async with _answering(node, token, is_free=not taken_by):
        answer = await _dial(announced, token, may_be_other=bool(taken_by))
        reached = await _ask(orchestrator_url, announced.port)
    return ReachFacts(
        listen_host=node.listen_host,
        port=node.port,
        announced=announced,
        taken_by=taken_by,
        is_running=f"by pid {last_holder(node.data_path)} " in taken_by,
        is_local=orchestrator_url is not None and _is_loopback(urlsplit(orchestrator_url).hostname or ""),
        answer=answer,
        own_address=_own_address(),
        outside=None if reached is None else _as_answer(reached, token, may_be_other=bool(taken_by)),
        seen_address="" if reached is None else reached.address,
    )


async def _ask(orchestrator_url: str | None, port: int) -> Reached | None:
    """What the orchestrator finds; None when there is none, or it cannot say."""
    if orchestrator_url is None:
        return None
    async with open_session() as session:
        try:
            return await ask_reach(session, orchestrator_url, port)
        except (TransientFailure, NotFound, ProtocolViolation, Refused):
            return None


def _as_answer(reached: Reached, token: bytes, *, may_be_other: bool) -> Answer:
    match reached.dialled:
        case Dialled.OPEN:
            return Answer.OURS if may_be_other or reached.said == token.hex() else Answer.STRANGERS
        case Dialled.REFUSED:
            return Answer.REFUSED
        case Dialled.SILENT:
            return Answer.SILENT


@contextlib.asynccontextmanager
async def _answering(node: NodeSettings, token: bytes, *, is_free: bool) -> AsyncIterator[None]:
    """Answer every connection to the node's port with `token`, when the port is free."""
    if not is_free:
        yield
        return

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(token)
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, node.listen_host, node.port)
    try:
        yield
    finally:
        server.close()
        await server.wait_closed()


async def _dial(announced: Endpoint, token: bytes, *, may_be_other: bool) -> Answer:
    """What answers at an address. A node that runs already answers nothing until it is spoken to, which is enough."""
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(announced.host, announced.port)
            with contextlib.closing(writer):
                if may_be_other:
                    return Answer.OURS
                return Answer.OURS if await reader.read(_TOKEN_BYTES) == token else Answer.STRANGERS
    except socket.gaierror:
        return Answer.NO_ADDRESS
    except TimeoutError:
        return Answer.SILENT
    except OSError:
        return Answer.REFUSED


def _own_address() -> str:
    """The address this machine sends from to the outside; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
