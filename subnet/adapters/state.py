"""Journal, stored state and leader lease on Redis or Valkey (ports.StateStore).

The journal is one stream with consecutive ids chosen here: an append whose answer was lost is recognised when it is made
again, and a second writer of the same journal is found at its first append. The stored state is one list: the number of the
journal's record that it is as of, then its bytes in pieces.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar, cast

import redis.asyncio as redis
from redis.exceptions import RedisError, ResponseError

from subnet.errors import DamagedState, InvalidConfig, InvariantBroken, Superseded, TransientFailure
from subnet.ports import StoredState

T = TypeVar("T")

_PAGE = 256
_EXCHANGE_S = 10.0
_APPEND_S = 30.0
_PAUSE_S = 0.1
_FLUSH_MS = 5000
_PIECE_BYTES = 1 << 20
"""Of a stored state in one exchange: what else waits for the server meanwhile waits for no more than that."""
_PIECES_LIVE_MS = 600_000
"""Pieces of a state that was never put in its place are forgotten by then."""
_STORE = """
local stored = tonumber(redis.call('LINDEX', KEYS[2], 0) or '0')
if stored >= tonumber(ARGV[1]) then
  redis.call('UNLINK', KEYS[1])
  return stored
end
if redis.call('LLEN', KEYS[1]) ~= tonumber(ARGV[2]) then return redis.error_reply('pieces of the state are missing') end
redis.call('PERSIST', KEYS[1])
redis.call('RENAME', KEYS[1], KEYS[2])
redis.call('XTRIM', KEYS[3], 'MINID', '=', ARGV[3])
return tonumber(ARGV[1])
"""
"""One script, so that the new state and the shorter journal come about together, in memory and in the append-only file."""
_HOLD = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return holder end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class RedisStateStore:
    """State of one run in the keys `<namespace>:...` of a server at `url`."""

    def __init__(self, url: str, namespace: str) -> None:
        # A lost connection is retried here, where it is known whether a repetition is safe, and not by the client.
        self._redis: redis.Redis = redis.Redis.from_url(
            url, socket_timeout=_EXCHANGE_S, socket_connect_timeout=_EXCHANGE_S, retry=None, decode_responses=False
        )
        self._namespace = namespace
        self._journal = f"{namespace}:journal"
        self._state = f"{namespace}:state"
        self._next_id: int | None = None
        self._flushes_itself: bool | None = None
        self._writing = asyncio.Lock()

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    # ---- journal -------------------------------------------------------------------------------------------------

    async def append(self, entries: list[bytes]) -> int:
        """Write and flush all of `entries` as one record, in the order of the calls; returns its number, 0 for none.

        Raises TransientFailure: call again with the same entries. Superseded: another process writes this journal.
        """
        if not entries:
            return 0
        fields: list[bytes] = []
        for index, entry in enumerate(entries):
            fields += (b"%d" % index, entry)
        async with self._writing:
            deadline = asyncio.get_running_loop().time() + _APPEND_S
            while True:
                try:
                    return await self._append_once(entries, fields)
                except TransientFailure:
                    if asyncio.get_running_loop().time() + _PAUSE_S > deadline:
                        raise
                await asyncio.sleep(_PAUSE_S)

    async def _append_once(self, entries: list[bytes], fields: list[bytes]) -> int:
        if self._flushes_itself is None:
            self._flushes_itself = await self._check_durability()
        if self._next_id is None:
            self._next_id = await self._last_id() + 1
        number = self._next_id
        await _bounded(self._write(number, entries, fields))
        self._next_id = number + 1
        return number

    async def _write(self, at: int, entries: list[bytes], fields: list[bytes]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.execute_command("XADD", self._journal, f"{at}-0", *fields)
        if not self._flushes_itself:
            pipeline.execute_command("WAITAOF", 1, 0, _FLUSH_MS)
        added, *flushed = await pipeline.execute(raise_on_error=False)
        for result in flushed:
            if isinstance(result, Exception):
                raise result
            if int(result[0]) < 1:
                raise TransientFailure("the state store has not flushed its journal to disk in time")
        if isinstance(added, ResponseError) and "equal or smaller" in str(added):
            if await self._entries_at(at) != entries:
                raise Superseded(
                    f"another process has written record {at} of journal {self._journal}: it leads this run now, and nothing "
                    "of this one's was added. Started again, this orchestrator stands by for it"
                )
        elif isinstance(added, Exception):
            raise added

    async def _entries_at(self, at: int) -> list[bytes]:
        found = _records(await self._redis.xrange(self._journal, min=f"{at}-0", max=f"{at}-0"))
        return found[0][1] if found else []

    async def _last_id(self) -> int:
        newest = _records(await _bounded(self._redis.xrevrange(self._journal, count=1)))
        return newest[0][0] if newest else await self._stored_at()  # nothing was written since the journal was trimmed

    async def _check_durability(self) -> bool:
        """Whether every answer already means flushed (`appendfsync always`); else appends wait for it.

        Raises InvalidConfig for a server that keeps nothing on disk, or not everything in memory.
        """
        try:
            config = await _bounded(self._redis.config_get("appendonly", "appendfsync", "maxmemory-policy"))
        except TransientFailure as error:
            if isinstance(error.__cause__, ResponseError):
                return False  # a managed server that hides its configuration: WAITAOF tells
            raise
        if config.get("appendonly", "yes") != "yes":
            raise InvalidConfig("the state store keeps no append-only file: set `appendonly yes` on the Redis server")
        if str(config.get("maxmemory-policy")).startswith("allkeys"):
            raise InvalidConfig(
                "the state store drops keys when its memory is full: set `maxmemory-policy noeviction` on the Redis server"
            )
        return bool(config.get("appendfsync") == "always")

    async def read(self, *, after: int = 0) -> AsyncIterator[bytes]:
        """Every entry of the records after number `after`, oldest first; appends go on after what was read last."""
        last = after
        while True:
            page = _records(await _bounded(self._redis.xrange(self._journal, min=f"({last}-0", count=_PAGE)))
            for number, entries in page:
                if number != last + 1:
                    await self._check_untrimmed(last)
                    raise InvariantBroken(f"journal {self._journal} lacks record {last + 1}")
                last = number
                for entry in entries:
                    yield entry
            if len(page) < _PAGE:
                break
        await self._check_untrimmed(last)
        await self._check_reached(last)
        self._next_id = last + 1

    async def _check_untrimmed(self, last: int) -> None:
        """Whether a reader that has come as far as record `last` has missed none. Raises TransientFailure."""
        at = await self._stored_at()
        if at > last:
            raise TransientFailure(f"journal {self._journal} begins after record {at} now: read the stored state again")

    async def _check_reached(self, last: int) -> None:
        """Whether the journal ever came to record `last`, after which its reader began or ended. Raises DamagedState."""
        newest = 0
        if await _bounded(self._redis.exists(self._journal)):
            newest = int((await _bounded(self._redis.xinfo_stream(self._journal)))["last-generated-id"].split(b"-")[0])
        if newest < last:
            raise DamagedState(
                f"the stored state is as of record {last}, and journal {self._journal} ends with record {newest}: what came "
                "after is lost. Nothing was changed.\n"
                "Restore the state store from a backup, or point --state-url at its replica."
            )

    # ---- stored state --------------------------------------------------------------------------------------------

    async def put_state(self, state: StoredState) -> None:
        """Replace the stored state and trim the journal up to its record, both at once; appends go on meanwhile.

        Raises TransientFailure: call again. Superseded: another process has stored a newer state.
        """
        pieces = [b"%d" % state.at_record]
        pieces += [state.data[at : at + _PIECE_BYTES] for at in range(0, len(state.data), _PIECE_BYTES)]
        place = f"{self._state}:{secrets.token_hex(8)}"
        for piece in pieces:
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.rpush(place, piece)
            pipeline.pexpire(place, _PIECES_LIVE_MS)
            await _bounded(pipeline.execute())
        arguments = (str(state.at_record), str(len(pieces)), f"{state.at_record + 1}-0")
        evaluated = self._redis.eval(_STORE, 3, place, self._state, self._journal, *arguments)
        newest = int(await _bounded(cast("Awaitable[int]", evaluated)))
        if newest > state.at_record:
            raise Superseded(
                f"another process has stored the state as of record {newest} of journal {self._journal}, newer than this one's "
                f"as of record {state.at_record}: it leads this run now. Started again, this orchestrator stands by for it"
            )

    async def get_state(self) -> StoredState | None:
        """The stored state, None before the first. Raises TransientFailure when another process is replacing it."""
        at_record = await self._stored_at()
        if not at_record:
            return None
        num_pieces = await _bounded(self._redis.llen(self._state))
        pieces = [await self._piece(place) for place in range(1, num_pieces)]
        if await self._stored_at() != at_record:
            raise TransientFailure(f"the state of {self._namespace} was replaced while it was read; try again")
        return StoredState(at_record=at_record, data=b"".join(pieces))

    async def _stored_at(self) -> int:
        """The record that the stored state is as of, 0 for none. Raises DamagedState."""
        number = await self._piece(0) or b"0"
        if not number.isdigit():
            raise DamagedState(
                f"{self._state} does not begin with the number of a record, but with {number[:20]!r}. Nothing was changed.\n"
                "Restore the state store from a backup, or point --state-url at its replica."
            )
        return int(number)

    async def _piece(self, place: int) -> bytes:
        return await _bounded(cast("Awaitable[bytes | None]", self._redis.lindex(self._state, place))) or b""

    # ---- lease -------------------------------------------------------------------------------------------------

    async def hold_lease(self, name: str, holder: str, *, for_s: float) -> str:
        """Take or renew the lease; returns who holds it now."""
        evaluated = self._redis.eval(_HOLD, 1, f"{self._namespace}:lease:{name}", holder, str(_ms(for_s)))
        return bytes(await _bounded(cast("Awaitable[bytes]", evaluated))).decode()

    async def release_lease(self, name: str, holder: str) -> None:
        """Give the lease up if `holder` has it."""
        evaluated = self._redis.eval(_RELEASE, 1, f"{self._namespace}:lease:{name}", holder)
        await _bounded(evaluated)


async def _bounded(exchange: Awaitable[T]) -> T:
    """One exchange within its time. Raises TransientFailure."""
    try:
        async with asyncio.timeout(_EXCHANGE_S):
            return await exchange
    except (RedisError, OSError, TimeoutError) as error:
        raise TransientFailure(f"the state store does not answer: {error or 'timed out'}") from error


def _records(found: object) -> list[tuple[int, list[bytes]]]:
    """Number and entries of each record; the client's types know nothing of `decode_responses=False`."""
    records = cast("list[tuple[bytes, dict[bytes, bytes]]]", found or [])
    return [(int(identifier.split(b"-")[0]), list(fields.values())) for identifier, fields in records]


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
