"""Orchestrators over stores in memory, in virtual time: each is killed when its turn is over, what it stored stays."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from neurons.roles.orchestrator import Orchestrator
from neurons.roles.ports import OrchestratorPorts
from subnet import wire
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.memory import InlineCompute, MemoryBlobStore, MemoryStateStore
from subnet.adapters.memory_chain import MemoryChainConfig, MemoryChainState
from subnet.config import RunConfig
from subnet.orchestration.events import Created
from subnet.sim.loop import VirtualClock

OWNER = KeypairSigner.from_uri("//owner", deterministic=True)
BLOCK_S = 1.0


@dataclass
class World:
    """What outlives an orchestrator. `may_lead` is what its clock tells it."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    may_lead: bool = True

    def __post_init__(self) -> None:
        self.store = MemoryStateStore(self.clock)
        self.blobs = MemoryBlobStore(self.clock)
        self.chain = MemoryChainState(
            self.clock, MemoryChainConfig(block_time_s=BLOCK_S, tempo=20), owner_hotkey=OWNER.hotkey
        )

    def orchestrator(
        self, config: RunConfig, *, run_id: str, digest: str = "c", genesis: Callable[[], Created]
    ) -> Orchestrator:
        """A new one, not started; `digest` is what the chain pins of the configuration."""
        return Orchestrator(
            config=config,
            ports=OrchestratorPorts(
                signer=OWNER,
                store=self.store,
                blobs=self.blobs,
                chain=self.chain.view(OWNER.hotkey),
                compute=InlineCompute(),
                clock=self.clock,
                may_lead=lambda: self.may_lead,
            ),
            discovery=wire.Discovery(u="u", r=run_id, v=wire.PROTOCOL_VERSION, c=digest),
            genesis=genesis,
        )


async def killed(running: asyncio.Task[None]) -> None:
    """End an orchestrator between two of its steps, as SIGKILL would."""
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
