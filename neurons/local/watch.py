"""What a local subnet is doing now, from where anybody could read it: the orchestrator's public status, and the chain."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import aiohttp
import msgspec

from neurons.local.chain import open_chain
from neurons.local.plan import Plan
from subnet import wire
from subnet.adapters.chain import BittensorChain
from subnet.adapters.public import HttpPublic
from subnet.dashboard.views import RunView
from subnet.errors import NotFound, ProtocolViolation, TransientFailure
from subnet.types import Hotkey, Metagraph, Uid

_STATUS_LIMIT_BYTES = 8 << 20
_NUM_LOSSES = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One look. What could not be read is as it was at the last look; `is_stale` says so of the run."""

    at_s: float
    run: RunView | None = None
    is_stale: bool = False
    metagraph: Metagraph | None = None
    weights: dict[Hotkey, dict[Uid, int]] = field(default_factory=dict)
    losses: tuple[float, ...] = ()


class Watch:
    """Looks at one local subnet, gently: everything here shares the cores with those who train."""

    def __init__(self, plan: Plan, session: aiohttp.ClientSession, *, validators: Sequence[Hotkey]) -> None:
        self._validators = validators
        self._public = HttpPublic(session, plan.url)
        self._chain: BittensorChain = open_chain(plan.chain_url)
        self._seen_update: dict[Hotkey, int] = {}
        self.last = Snapshot(at_s=time.time())

    @property
    def chain(self) -> BittensorChain:
        """A connection to the chain that only reads."""
        return self._chain

    @property
    def public(self) -> HttpPublic:
        """The orchestrator's public routes."""
        return self._public

    async def close(self) -> None:
        """Close the connection to the chain."""
        await self._chain.close()

    async def look(self) -> Snapshot:
        """Read everything once."""
        snapshot = await self._look_at_run(replace(self.last, at_s=time.time()))
        self.last = await self._look_at_chain(snapshot)
        return self.last

    async def _look_at_run(self, snapshot: Snapshot) -> Snapshot:
        try:
            data = await self._public.read("status", limit_bytes=_STATUS_LIMIT_BYTES)
            run = wire.decode(RunView, data, limit_bytes=_STATUS_LIMIT_BYTES)
        except (TransientFailure, NotFound, ProtocolViolation):  # starting, or restarting
            return replace(snapshot, is_stale=True)
        losses = snapshot.losses
        if run.recent_loss is not None and (not losses or losses[-1] != run.recent_loss):
            losses = (*losses, run.recent_loss)[-_NUM_LOSSES:]
        return replace(snapshot, run=run, is_stale=False, losses=losses)

    async def _look_at_chain(self, snapshot: Snapshot) -> Snapshot:
        try:
            metagraph = await self._chain.metagraph()
            weights = dict(snapshot.weights)
            neurons = metagraph.by_hotkey()
            for hotkey in self._validators:
                updated = neurons[hotkey].last_update_block if hotkey in neurons else None
                if updated is not None and updated != self._seen_update.get(hotkey):
                    weights[hotkey] = await self._chain.weights(hotkey)
                    self._seen_update[hotkey] = updated
        except (TransientFailure, NotFound):
            return snapshot
        return replace(snapshot, metagraph=metagraph, weights=weights)

    async def discovery(self) -> wire.Discovery | None:
        """The owner's record on chain, None when there is none."""
        metagraph = await self._chain.fresh_metagraph()
        data = await self._chain.commitment(metagraph.owner_hotkey)
        if data is None:
            return None
        try:
            return msgspec.json.decode(data, type=wire.Discovery)
        except msgspec.DecodeError:
            return None
