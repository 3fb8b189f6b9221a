"""Adapters without I/O, threads or real time: for unit tests and the virtual-time simulation, same rules as the real ones."""

from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from subnet.adapters.grants import Grant, check_grant, check_range, check_upload, grant_url, split_url
from subnet.adapters.system import check_name
from subnet.errors import DamagedState, NotFound, ProtocolViolation, Refused, Superseded, TransientFailure
from subnet.frames import digest
from subnet.ports import Clock, StoredState
from subnet.types import BlobRef

T = TypeVar("T")

_BASE_URL = "memory://blobs"
_SECRET = b"grants of a store that lives in one process"


class ManualClock:
    """Time that stands still unless somebody sleeps (ports.Clock)."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now

    def now(self) -> float:
        """Unix time in seconds."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Move the time forward at once."""
        self._now += max(0.0, seconds)


class InlineCompute:
    """Runs work at once on the caller's task (ports.Compute)."""

    async def run(self, work: Callable[[], T]) -> T:
        """Result of `work`."""
        return work()


class MemoryDisk:
    """A directory in memory (ports.Disk); keep the object over a simulated kill, as a disk would."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    async def write(self, name: str, data: bytes) -> None:
        """Write atomically."""
        self._files[check_name(name)] = bytes(data)

    async def read(self, name: str) -> bytes | None:
        """Content, or None when there is none."""
        return self._files.get(check_name(name))

    async def names(self) -> list[str]:
        """Names present, sorted."""
        return sorted(self._files)

    async def delete(self, name: str) -> None:
        """Remove; absence is no error."""
        self._files.pop(check_name(name), None)


class ReplayMemory:
    """Keys seen within their time: bounded by rate times retention, for one process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._expires_at_s: dict[str, float] = {}
        self._order: deque[tuple[float, str]] = deque()

    async def remember_once(self, key: str, *, for_s: float) -> bool:
        """True the first time within `for_s` seconds."""
        now = self._clock.now()
        while self._order and self._order[0][0] <= now:
            expired_at_s, oldest = self._order.popleft()
            if self._expires_at_s.get(oldest) == expired_at_s:
                del self._expires_at_s[oldest]
        if self._expires_at_s.get(key, now) > now:
            return False
        self._expires_at_s[key] = now + for_s
        self._order.append((now + for_s, key))
        return True


class MemoryStateStore:
    """Journal, stored state and leases of one process (ports.StateStore); a write takes `flush_s`."""

    def __init__(self, clock: Clock, *, flush_s: float = 0.0) -> None:
        self._clock = clock
        self._flush_s = flush_s
        self._records: dict[int, list[bytes]] = {}
        self._newest = 0
        self._stored: StoredState | None = None
        self._leases: dict[str, tuple[str, float]] = {}

    async def append(self, entries: list[bytes]) -> int:
        """Write all of `entries`, in order; returns the record's number, 0 when there were none."""
        if not entries:
            return 0
        await self._flush()
        self._newest += 1
        self._records[self._newest] = [bytes(entry) for entry in entries]
        return self._newest

    async def read(self, *, after: int = 0) -> AsyncIterator[bytes]:
        """Every entry of the records after number `after`, oldest first.

        Raises TransientFailure when they were trimmed, DamagedState when there never was a record `after`.
        """
        if after > self._newest:
            raise DamagedState(f"the journal ends with record {self._newest}, and its reader begins after {after}")
        if self._stored is not None and self._stored.at_record > after:
            raise TransientFailure(
                f"the journal begins after record {self._stored.at_record} now: read the state again"
            )
        for entries in [entries for number, entries in self._records.items() if number > after]:
            for entry in entries:
                yield entry

    async def put_state(self, state: StoredState) -> None:
        """Replace the stored state and trim the journal up to its record. Raises Superseded when a newer one is there."""
        await self._flush()
        if self._stored is not None and self._stored.at_record > state.at_record:
            raise Superseded(f"another process has stored the state as of record {self._stored.at_record}")
        self._stored = state
        self._records = {number: entries for number, entries in self._records.items() if number > state.at_record}

    async def get_state(self) -> StoredState | None:
        """The stored state, None before the first."""
        return self._stored

    async def _flush(self) -> None:
        if self._flush_s:
            await self._clock.sleep(self._flush_s)

    async def hold_lease(self, name: str, holder: str, *, for_s: float) -> str:
        """Take or renew the lease; returns who holds it now."""
        now = self._clock.now()
        current, expires_at_s = self._leases.get(name, (holder, now))
        if current != holder and expires_at_s > now:
            return current
        self._leases[name] = (holder, now + for_s)
        return holder

    async def release_lease(self, name: str, holder: str) -> None:
        """Give the lease up if `holder` has it."""
        if self._leases.get(name, ("", 0.0))[0] == holder:
            del self._leases[name]


class MemoryBlobStore:
    """Objects of one process (ports.BlobStore)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._objects: dict[str, bytes] = {}

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Store atomically."""
        self._objects[check_name(key)] = bytes(data)

    async def get(self, key: str, *, start: int = 0, size_bytes: int | None = None) -> bytes:
        """Read a range. Raises NotFound."""
        check_range(start, size_bytes)
        data = self._objects.get(check_name(key))
        if data is None or (start and start >= len(data)):
            raise NotFound(f"no object {key}, or none of its bytes from {start} on")
        return data[start:] if size_bytes is None else data[start : start + size_bytes]

    async def size(self, key: str) -> int | None:
        """Size in bytes, or None when there is no such object."""
        data = self._objects.get(check_name(key))
        return None if data is None else len(data)

    async def delete(self, key: str) -> None:
        """Remove; a key that is not there is no error."""
        self._objects.pop(check_name(key), None)

    async def delete_under(self, prefix: str) -> None:
        """Remove what lies under `prefix`."""
        for key in [key for key in self._objects if key.startswith(f"{check_name(prefix)}/")]:
            del self._objects[key]

    def upload_url(self, ref: BlobRef, *, expires_at_s: float) -> str:
        """URL that takes exactly these bytes until it expires."""
        return grant_url(_BASE_URL, _SECRET, Grant.upload(ref, expires_at_s))

    def download_url(self, key: str, *, expires_at_s: float) -> str:
        """URL that gives `key` until it expires."""
        return grant_url(_BASE_URL, _SECRET, Grant.download(key, expires_at_s))

    def redeem(self, url: str, *, method: str) -> Grant:
        """What `url` allows now. Raises Refused."""
        key, query = split_url(url, _BASE_URL)
        return check_grant(key, query, method=method, secret=_SECRET, now=self._clock.now())


class MemoryBlobs:
    """A miner's side of a MemoryBlobStore (ports.Blobs)."""

    def __init__(self, store: MemoryBlobStore) -> None:
        self._store = store

    async def put(self, url: str, data: bytes) -> None:
        """Upload exactly the granted bytes. Raises Refused."""
        grant = self._store.redeem(url, method="PUT")
        check_upload(grant, size_bytes=len(data), digest=digest(data))
        await self._store.put(grant.key, data)

    async def get(self, url: str, *, start: int = 0, size_bytes: int | None = None, limit_bytes: int) -> bytes:
        """Download a range. Raises NotFound, TransientFailure (ask for a new URL), ProtocolViolation (too long)."""
        try:
            grant = self._store.redeem(url, method="GET")
        except Refused as error:
            raise TransientFailure(error.reason) from error
        data = await self._store.get(grant.key, start=start, size_bytes=size_bytes)
        if len(data) > limit_bytes:
            raise ProtocolViolation(f"object {grant.key} gives {len(data)} bytes, limit {limit_bytes}")
        return data

    async def get_into(self, url: str, buffer: memoryview, *, start: int = 0) -> int:
        """Download as much as `buffer` holds. Raises NotFound, TransientFailure (ask for a new URL)."""
        data = await self.get(url, start=start, size_bytes=len(buffer), limit_bytes=len(buffer))
        buffer[: len(data)] = data
        return len(data)
