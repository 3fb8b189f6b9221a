"""A real orchestrator in a process of its own: state machine, routes, embedded state store, directory of blobs."""

import asyncio
import resource
import secrets
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from benches.measure import answer_questions, run_loop
from benches.refereeing import Refereeing
from neurons.lifecycle import spare_what_is_loaded
from neurons.roles.orchestrator import Orchestrator
from neurons.roles.ports import OrchestratorPorts
from subnet import wire
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.blobs import DirectoryBlobStore
from subnet.adapters.embedded_store import start_embedded
from subnet.adapters.http_server import mount_control, mount_public
from subnet.adapters.listener import Listener, ListenLimits
from subnet.adapters.memory_chain import MemoryChainConfig, MemoryChainState
from subnet.adapters.state import RedisStateStore
from subnet.adapters.system import SystemClock, ThreadCompute
from subnet.config import RunConfig
from subnet.orchestration.events import Created, decode_event
from subnet.orchestration.ledger import LossRecorded
from subnet.types import Hotkey

OWNER = KeypairSigner.from_uri("//Bench//owner")
_ONE_ADDRESS = ListenLimits(requests_per_s_per_address=1e6)
"""The whole fleet calls from one address."""


def discovery(run_id: str) -> wire.Discovery:
    """What the chain says of the run."""
    return wire.Discovery(u="http://127.0.0.1", r=run_id, v=wire.PROTOCOL_VERSION, c="")


def orchestrator_process(connection: Connection, directory: str, hotkeys: list[Hotkey], genesis: str) -> None:
    """Serve the run that the encoded event `genesis` creates; `hotkeys` are registered."""
    spare_what_is_loaded()
    created = decode_event(genesis.encode())
    assert isinstance(created, Created)
    run_loop(_serve(connection, Path(directory), hotkeys, created))


async def _serve(connection: Connection, directory: Path, hotkeys: list[Hotkey], created: Created) -> None:
    clock = SystemClock()
    chain = MemoryChainState(clock, MemoryChainConfig(max_uids=len(hotkeys) + 1), owner_hotkey=OWNER.hotkey)
    for hotkey in hotkeys:
        chain.register(hotkey, "miner")
    embedded = await asyncio.to_thread(start_embedded, directory / "state")
    try:
        await _serve_on(connection, directory, chain, created, embedded.url)
    finally:
        await asyncio.to_thread(embedded.stop)


async def _serve_on(
    connection: Connection, directory: Path, chain: MemoryChainState, created: Created, state_url: str
) -> None:
    clock = SystemClock()
    store = RedisStateStore(state_url, "bench")
    listener = Listener(_ONE_ADDRESS)
    await listener.start("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.port}"
    blobs = DirectoryBlobStore(directory / "blobs", f"{url}/v1/blobs", secret=secrets.token_bytes(32), clock=clock)
    config = msgspec.json.decode(created.config_json, type=RunConfig)
    ports = OrchestratorPorts(
        signer=OWNER,
        store=store,
        blobs=blobs,
        chain=chain.view(OWNER.hotkey),
        compute=ThreadCompute(),
        clock=clock,
        may_lead=lambda: True,
    )
    refereeing = Refereeing(config, ports, created.run_id)
    orchestrator = Orchestrator(
        config=config,
        ports=ports,
        discovery=discovery(created.run_id),
        genesis=lambda: created,
    )
    mount_control(listener, orchestrator.handle, receiver=OWNER.hotkey, clock=clock)
    mount_public(listener, orchestrator.public)
    blobs.mount_on(listener)

    async def reply(question: Any) -> object:
        await orchestrator.is_ready.wait()
        if question == "referee":
            await refereeing.start()
        elif question == "rest":
            await refereeing.stop()
        state = orchestrator.state
        losses = [entry.fact for entry in state.ledger.tail or () if isinstance(entry.fact, LossRecorded)]
        return {
            "url": url,
            "cpu_s": time.process_time(),
            "shards": refereeing.num_shards,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "stages": {hotkey: member.stage for hotkey, member in state.members.items()},
            "registered": len(state.registered),
            "credited": sum(len(work.credited) for work in state.current.work.values()),
            "phase": state.phase,
            "losses": len(losses),
        }

    work = asyncio.create_task(orchestrator.run())
    questions = asyncio.create_task(answer_questions(connection, reply))
    await asyncio.wait({work, questions}, return_when=asyncio.FIRST_COMPLETED)
    work.cancel()
    await asyncio.wait({work})
    if not work.cancelled():
        work.result()
    await listener.stop()
    await store.close()
