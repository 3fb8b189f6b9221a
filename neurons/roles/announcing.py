"""The owner's record on chain, kept equal to the newest roots of the run (chain.md 2)."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec

from neurons.roles.keeping import RETRY_S
from neurons.roles.ports import OrchestratorPorts
from subnet import wire
from subnet.errors import Refused, TransientFailure
from subnet.types import Digest

log = logging.getLogger("strata.orchestrator")

LOOK_S = 60.0
"""So often the record is read back although nothing is new: the chain takes it from whoever holds the owner's key, also from a
leader that was paused while it wrote and goes on after another has taken its place."""


class Announcer:
    """What the record should say, `discovery`, and the one task that writes it."""

    def __init__(self, *, ports: OrchestratorPorts, discovery: wire.Discovery) -> None:
        self.discovery = discovery
        self._ports = ports
        self._is_due = asyncio.Event()

    def note_root(self, epoch: int, root: Digest) -> None:
        """The commitments of `epoch` are closed under `root`; (-1, "") before the first."""
        self.discovery = msgspec.structs.replace(self.discovery, e=epoch, m=root)
        self._is_due.set()

    def note_sealed(self, num_segments: int, head: Digest) -> None:
        """So many segments lie in the blob store; `head` is the ledger's after them."""
        if num_segments >= self.discovery.n:
            self.discovery = msgspec.structs.replace(self.discovery, n=num_segments, s=head)
        self._is_due.set()

    async def run(self, on_included: Callable[[wire.Discovery, int], None]) -> None:
        """Write what is new, for ever; `on_included` hears of each record that a block includes, and of the block."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._is_due.wait()
            self._is_due.clear()
            wanted = self.discovery
            try:
                self._ports.require_lead()
                at_block = await self._ports.chain.commit(wire.encode(wanted))
            except (TransientFailure, Refused) as error:
                log.warning("on-chain record not updated, trying again", extra={"reason": str(error)})
                self._is_due.set()
                await self._ports.clock.sleep(RETRY_S)
                continue
            on_included(wanted, at_block)
