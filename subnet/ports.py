"""What the core asks of the world. Each port has one suite in tests/contract, run on every adapter.

A MUST in a docstring is a test. Every method that waits is async, and ends: adapters put a time limit on each exchange.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from subnet import frames, wire
from subnet.types import BlobRef, Digest, Endpoint, Epoch, Hotkey, Metagraph, SampleId, Uid

T = TypeVar("T")


class Clock(Protocol):
    """Wall time. The only source of time for roles."""

    def now(self) -> float:
        """Unix time in seconds."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait; in virtual time this is what makes the clock move."""
        ...


class Compute(Protocol):
    """Where tensor work runs, away from the event loop, one call at a time."""

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` and return its result; calls MUST be executed one at a time in the order they were made."""
        ...


class Signer(Protocol):
    """A hotkey that signs, and the check of anyone's signature."""

    @property
    def hotkey(self) -> Hotkey:
        """The address whose signatures `sign` makes."""
        ...

    def sign(self, message: bytes) -> str:
        """Hex signature of `message`."""
        ...

    def verify(self, hotkey: Hotkey, message: bytes, signature: str) -> bool:
        """Whether `signature` is `hotkey`'s of `message`; malformed input is False, never an exception."""
        ...


class Blobs(Protocol):
    """The blob store as a miner or validator sees it: two calls on URLs the orchestrator granted."""

    async def put(self, url: str, data: bytes) -> None:
        """Upload exactly the granted bytes. Raises Refused (grant does not fit), TransientFailure."""
        ...

    async def get(self, url: str, *, start: int = 0, size_bytes: int | None = None, limit_bytes: int) -> bytes:
        """Download a range, at most `limit_bytes`. Raises NotFound, TransientFailure, ProtocolViolation (too long)."""
        ...

    async def get_into(self, url: str, buffer: memoryview, *, start: int = 0) -> int:
        """Download what `buffer` holds, from byte `start` on; how many bytes came, fewer only where the object ends.

        For large objects of a known size: nothing is kept but `buffer`. Raises NotFound, TransientFailure, ProtocolViolation
        (the store gives more than was asked for).
        """
        ...


class BlobStore(Protocol):
    """The blob store as its owner, the orchestrator, sees it. Keys are made by the orchestrator, never by a client."""

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Store atomically: a reader MUST see nothing or all of it. Raises TransientFailure."""
        ...

    async def get(self, key: str, *, start: int = 0, size_bytes: int | None = None) -> bytes:
        """Read a range. Raises NotFound, TransientFailure."""
        ...

    async def size(self, key: str) -> int | None:
        """Size in bytes, or None when there is no such object."""
        ...

    async def delete(self, key: str) -> None:
        """Remove; a key that is not there is no error. Raises TransientFailure."""
        ...

    async def delete_under(self, prefix: str) -> None:
        """Remove every object whose key begins with `prefix` and a slash; MUST leave all others. Raises TransientFailure."""
        ...

    def upload_url(self, ref: BlobRef, *, expires_at_s: float) -> str:
        """URL that takes exactly `ref.size_bytes` bytes with digest `ref.digest` under `ref.key`, until it expires."""
        ...

    def download_url(self, key: str, *, expires_at_s: float) -> str:
        """URL that gives `key`, with ranges, until it expires."""
        ...


@dataclass(frozen=True, slots=True)
class StoredState:
    """What the journal's records up to number `at_record` come to."""

    at_record: int
    data: bytes


class Journal(Protocol):
    """The orchestrator's write-ahead record: one ordered stream of opaque entries, whose beginning a stored state replaces."""

    async def append(self, entries: list[bytes]) -> int:
        """Write and flush all of `entries`, in order; after the return they MUST survive SIGKILL of everything.

        Returns the number of the record that holds them, counted from 1; 0 when there were none. A writer that has not read
        what another wrote MUST be found, also when it was trimmed since: raises Superseded.
        """
        ...

    def read(self, *, after: int = 0) -> AsyncIterator[bytes]:
        """Every entry of the records after number `after`, oldest first; appends go on after what was read last.

        Raises InvariantBroken when a record is missing, DamagedState when there never was a record `after`, TransientFailure
        when it was trimmed in favour of a newer state.
        """
        ...

    async def put_state(self, state: StoredState) -> None:
        """Replace the stored state and trim the journal up to its record; whatever is killed, one of the two MUST be whole.

        A reader MUST find the old state and every record after it, or the new state and every record after that. Raises
        Superseded when a newer state is there: another process has written it.
        """
        ...

    async def get_state(self) -> StoredState | None:
        """The stored state, None before the first. Raises DamagedState, TransientFailure when another process replaces it."""
        ...


class StateStore(Journal, Protocol):
    """Journal and leader lease over one store (Redis, or embedded)."""

    async def hold_lease(self, name: str, holder: str, *, for_s: float) -> str:
        """Take or renew the lease `name` for `holder`; returns who holds it now."""
        ...

    async def release_lease(self, name: str, holder: str) -> None:
        """Give the lease up if `holder` has it."""
        ...


class Disk(Protocol):
    """A role's own durable directory."""

    async def write(self, name: str, data: bytes) -> None:
        """Write atomically (temporary file, flush, rename)."""
        ...

    async def read(self, name: str) -> bytes | None:
        """Content, or None when there is none."""
        ...

    async def names(self) -> list[str]:
        """Names present, sorted; half-written files are not among them."""
        ...

    async def delete(self, name: str) -> None:
        """Remove; absence is no error."""
        ...


class Chain(Protocol):
    """The subnet's chain, for one netuid and one key (chain.md). Every call has its own time limit.

    Reads raise TransientFailure when the chain cannot be reached. Writes verify after submitting by reading back.
    """

    async def block(self) -> int:
        """Number of the newest block."""
        ...

    async def block_hash(self, number: int) -> str | None:
        """Hex hash of the finalized block `number`, None while it is not final yet."""
        ...

    async def metagraph(self) -> Metagraph:
        """The subnet now. Raises NotFound when the netuid does not exist."""
        ...

    async def commitment(self, hotkey: Hotkey) -> bytes | None:
        """The record `hotkey` committed on this subnet, or None."""
        ...

    async def commit(self, data: bytes) -> int:
        """Put `data` into this key's commitment slot; returns the block that includes it. Raises TransientFailure, Refused."""
        ...

    async def set_weights(self, weights: Mapping[Hotkey, float]) -> int:
        """Post weights (by hotkey, summing to 1) at the right moment of the tempo; returns the block.

        Maps to uids against one metagraph, drops keys that are not registered or re-registered, verifies by reading back.
        Raises Refused (with the chain's reason) and TransientFailure.
        """
        ...

    async def weights(self, hotkey: Hotkey) -> dict[Uid, int]:
        """The u16 weights that `hotkey` has on chain, by uid; empty when it has none."""
        ...

    async def serve(self, endpoint: Endpoint) -> None:
        """Announce this key's endpoint on chain; a rate limit is waited out once, then Refused."""
        ...


class Control(Protocol):
    """Signed requests to the orchestrator. Retries with the same request id until `timeout_s`."""

    async def call(self, request: wire.Request, *, timeout_s: float = 30.0) -> wire.Response:
        """Raises Refused (the orchestrator said no), TransientFailure (no answer in time), ProtocolViolation."""
        ...


class PublicRecord(Protocol):
    """What anyone may read of a run, without a key."""

    async def read(self, name: str, *, limit_bytes: int) -> bytes:
        """`run`, `config`, `status`, `ledger/INDEX` or `snapshots/STAGE`.

        Raises NotFound, TransientFailure, ProtocolViolation (too long).
        """
        ...


FrameHandler = Callable[[Hotkey, frames.Frame], Awaitable[None]]
"""Takes one verified frame from one verified sender. Raises Backpressure, ProtocolViolation, Refused."""


class Peers(Protocol):
    """Frames between miners."""

    async def send(self, receiver: Hotkey, endpoint: Endpoint, frame: frames.Frame) -> None:
        """Deliver once. Raises Backpressure (429), Refused, TransientFailure. A repeat of a taken frame MUST be harmless."""
        ...

    def on_frame(self, handler: FrameHandler) -> None:
        """Set what receives frames; before it is set, senders see Backpressure."""
        ...


class Corpus(Protocol):
    """Text as token ids; both functions are pure."""

    def tokens(self, epoch: Epoch, sample: SampleId) -> npt.NDArray[np.int64]:
        """(B, T + 1) token ids of a training sample: inputs are [:, :-1], targets [:, 1:]."""
        ...

    def heldout(self, index: int) -> npt.NDArray[np.int64]:
        """(B, T + 1) token ids of a held-out microbatch, disjoint from every training sample."""
        ...

    @property
    def digest(self) -> Digest:
        """Digest of the manifest; part of the run's identity."""
        ...
