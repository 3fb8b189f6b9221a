"""What the orchestrator keeps for good: sealed segments in the blob store, and after them its state in the state store.

A stored state takes the place of the journal before it, and the journal is the only thing a segment could be made from again:
so a state is stored once every segment sealed before it lies in the blob store, and not earlier.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version

from subnet.errors import NotFound, TransientFailure
from subnet.orchestration.ledger import Segment
from subnet.orchestration.segments import encode_segment, segment_key
from subnet.orchestration.state import State
from subnet.orchestration.stored import encode_state
from subnet.ports import BlobStore, Clock, Journal, StoredState

log = logging.getLogger("strata.orchestrator")

RETRY_S = 1.0


async def until_done(work: Callable[[], Awaitable[None]], *, name: str, clock: Clock) -> None:
    """Do `work` again until a store or a peer that does not answer has answered."""
    while True:
        try:
            await work()
            return
        except (TransientFailure, NotFound) as error:
            log.warning("effect retried", extra={"effect": name, "reason": str(error)})
            await clock.sleep(RETRY_S)


class Keeper:
    """Stores segments and states one after the other; `on_kept` hears of each segment when it is there."""

    def __init__(self, *, journal: Journal, blobs: BlobStore, clock: Clock, on_kept: Callable[[Segment], None]) -> None:
        self._journal = journal
        self._blobs = blobs
        self._clock = clock
        self._on_kept = on_kept
        self._sealed: asyncio.Queue[tuple[str, tuple[Segment, ...], StoredState]] = asyncio.Queue()

    def keep(self, segments: Sequence[Segment], state: State, *, at_record: int) -> None:
        """Take segments that were just sealed, and the state as the journal's records up to `at_record` left it.

        The state is encoded here and now, for it goes on changing.
        """
        stored = StoredState(at_record=at_record, data=encode_state(state, written_by=version("strata")))
        self._sealed.put_nowait((state.run_id, tuple(segments), stored))

    async def run(self) -> None:
        """Store what comes, for ever."""
        while True:
            run_id, segments, state = await self._sealed.get()
            for segment in segments:
                await self._store_segment(run_id, segment)
            await self._store_state(state)

    async def _store_segment(self, run_id: str, segment: Segment) -> None:
        key = segment_key(run_id, segment.index)

        async def put() -> None:
            if await self._blobs.size(key) is None:
                await self._blobs.put(key, encode_segment(segment))
                log.info("segment sealed", extra={"segment": segment.index, "entries": len(segment.entries)})

        await until_done(put, name="StoreSegment", clock=self._clock)
        self._on_kept(segment)

    async def _store_state(self, state: StoredState) -> None:
        await until_done(lambda: self._journal.put_state(state), name="StoreState", clock=self._clock)
        log.info("state stored", extra={"at_record": state.at_record, "size_bytes": len(state.data)})
