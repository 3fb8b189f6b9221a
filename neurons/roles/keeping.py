"""What the orchestrator keeps for good: sealed segments in the blob store, and after them its state in the state store.

A stored state takes the place of the journal before it, and the journal is the only thing a segment could be made from again:
so a state is stored once every segment sealed before it lies in the blob store, and not earlier.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version

from subnet.errors import InvariantBroken, NotFound, TransientFailure
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
    """Stores every segment, and then the newest state; `on_kept` hears of each segment when it is there.

    While the blob store is away segments wait, and of the states the newest: one that another replaces is not worth its memory.
    """

    def __init__(self, *, journal: Journal, blobs: BlobStore, clock: Clock, on_kept: Callable[[Segment], None]) -> None:
        self._journal = journal
        self._blobs = blobs
        self._clock = clock
        self._on_kept = on_kept
        self._sealed: list[tuple[str, Segment]] = []
        self._newest: StoredState | None = None
        self._is_due = asyncio.Event()

    def keep(self, segments: Sequence[Segment], state: State, *, at_record: int) -> None:
        """Take segments that were just sealed, and the state as the journal's records up to `at_record` left it.

        The state is encoded here and now, for it goes on changing.
        """
        self._newest = StoredState(at_record=at_record, data=encode_state(state, written_by=version("strata")))
        self._sealed += [(segment_key(state.run_id, segment.index), segment) for segment in segments]
        self._is_due.set()

    async def run(self) -> None:
        """Store what comes, for ever. Raises InvariantBroken, Superseded."""
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            sealed, self._sealed = self._sealed, []
            state, self._newest = self._newest, None
            for key, segment in sealed:
                await self._store_segment(key, segment)
            if state is not None:
                await self._store_state(state)

    async def _store_segment(self, key: str, segment: Segment) -> None:
        data = encode_segment(segment)

        async def put() -> None:
            if await self._blobs.size(key) is None:
                await self._blobs.put(key, data)
                log.info("segment sealed", extra={"segment": segment.index, "entries": len(segment.entries)})
            elif await self._blobs.get(key) != data:  # this journal made it before, or another software did
                raise InvariantBroken(
                    f"segment {segment.index} lies in the blob store already, and this journal comes to another; it was left. "
                    "If Strata was updated since the last start, start the version before once more."
                )

        await until_done(put, name="StoreSegment", clock=self._clock)
        self._on_kept(segment)

    async def _store_state(self, state: StoredState) -> None:
        await until_done(lambda: self._journal.put_state(state), name="StoreState", clock=self._clock)
        log.info("state stored", extra={"at_record": state.at_record, "size_bytes": len(state.data)})
