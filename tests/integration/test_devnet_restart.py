"""kill -9 of a devnet process at any moment: it comes back at its last block."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bittensor.keyfiles import Keypair

from neurons.devnet import ask
from subnet.adapters.chain import BittensorChain
from subnet.adapters.chain_accounts import ChainAccounts
from subnet.adapters.chain_session import ChainLimits
from subnet.errors import StartupRefused, TransientFailure

PROGRAM = """
import sys
from pathlib import Path
from neurons.devnet import run_devnet
from subnet.devnet.config import DevnetConfig
sys.exit(run_devnet(DevnetConfig(port=int(sys.argv[1]), block_time_s=0.05, directory=Path(sys.argv[2]))))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def process(port: int, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A devnet process that is killed without warning at the end."""
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, str(port), str(directory)], stdout=subprocess.DEVNULL)
    try:
        yield child
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()


async def answering(url: str) -> Any:
    """The node's status, as soon as it answers."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return await ask(url, "devnet_status")
        except StartupRefused:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)


async def test_what_a_client_was_told_is_still_true_after_kill_9(tmp_path: Path) -> None:
    port = free_port()
    url = f"ws://127.0.0.1:{port}"
    alice = Keypair.create_from_uri("//Alice")
    chain = BittensorChain(url, 1, alice, limits=ChainLimits(connect_timeout_s=2.0, metagraph_max_age_s=0.0))
    seen, head, digest = 0, 0, None
    for round_number in range(3):
        with process(port, tmp_path):
            status = await answering(url)
            assert status["block"] >= head
            assert await chain.block_hash(head) == digest or round_number == 0
            target = Keypair.create_from_uri(f"//Target{round_number}").ss58_address
            await ChainAccounts(chain).transfer(alice, target, 5.0)
            seen += 1
            for earlier in range(seen):
                address = Keypair.create_from_uri(f"//Target{earlier}").ss58_address
                assert await chain.balance(address) == 5.0
            head = await chain.block() - 3
            digest = await chain.block_hash(head)
            assert digest is not None
    with contextlib.suppress(TransientFailure):
        await chain.close()
