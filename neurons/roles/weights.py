"""A validator's weights over time: set when the record yields new ones, and again each tempo while it does not."""

from collections.abc import Mapping
from dataclasses import dataclass

from subnet.ports import Chain
from subnet.types import Hotkey


@dataclass(frozen=True, slots=True)
class _Posted:
    """Weights that are on chain, and the block after which they are set again."""

    weights: Mapping[Hotkey, float]
    renew_after: int


class PostedWeights:
    """What this process set last. A restart begins with the newest record, so nothing of this is kept on disk."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._posted: _Posted | None = None

    async def put(self, weights: Mapping[Hotkey, float]) -> int:
        """Set weights; returns the block. Raises Refused, TransientFailure, NotFound."""
        at_block = await self._chain.set_weights(weights)
        tempo = (await self._chain.metagraph()).tempo
        self._posted = _Posted(dict(weights), at_block + tempo)
        return at_block

    async def renew(self) -> int | None:
        """Set the same again a tempo after the last time, or the chain takes this validator for gone; None when not due."""
        if self._posted is None or await self._chain.block() <= self._posted.renew_after:
            return None
        return await self.put(self._posted.weights)
