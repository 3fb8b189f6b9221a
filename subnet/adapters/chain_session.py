"""One connection to the chain that survives bad days: limits on every wait, reconnects, one writer for each key.

The SDK's own faults that are worked around here are listed in chain.md 2.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import bittensor as bt
from bittensor.settings import NETWORKS, default_fallback_endpoints, resolve_endpoint

from subnet.errors import InvalidConfig, Refused, TransientFailure

T = TypeVar("T")

_TRANSIENT_NAMES = {
    "AlreadyImported",
    "AncientBirthBlock",
    "BadProof",
    "Dropped",
    "ExhaustsResources",
    "FinalityTimeout",
    "Future",
    "Invalid",
    "PriorityTooLow",
    "Retracted",
    "Stale",
    "Usurped",
}
"""Answers of the pool that say nothing about the call itself; BadProof is what an old runtime version looks like."""
_NEEDS_NEW_CLIENT = {"BadProof"}
_NONSENSE = (ValueError, TypeError, LookupError, AttributeError)
"""What the SDK raises for an answer that does not decode: an endpoint's fault, as silence is."""
_FAILURES = (bt.BittensorError, ConnectionError, OSError, *_NONSENSE)
_CLOSE_TIMEOUT_S = 2.0
_LOCK_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainLimits:
    """How long to wait for what. The defaults follow the chain's block time once it is known."""

    connect_timeout_s: float = 20.0
    """For all endpoints together, at each connect."""
    read_timeout_s: float | None = None
    """For one read; None is three block times, but 5 to 30 s."""
    submit_timeout_s: float | None = None
    """For one transaction to be final; None is twelve block times and 20 s."""
    operation_timeout_s: float | None = None
    """For a write with all its attempts; None is three times as long."""
    stall_after_s: float | None = None
    """Without a new block for so long, the endpoint is given up; None is five block times, but at least 10 s."""
    num_attempts: int = 5
    """How often a transaction is sent at most."""
    metagraph_max_age_s: float = 1.0
    """How old a cached metagraph may be; writes always read it anew."""


class _LinkFailed(TransientFailure):
    """An open connection did not answer: worth one more try on a new one."""


@dataclass(slots=True)
class _Link:
    """A connected client and the endpoint it talks to."""

    client: bt.Client
    substrate: "_Substrate"
    endpoint: str
    block_time_s: float


@dataclass(slots=True)
class _Progress:
    """The newest block seen, and when it was new."""

    number: int = -1
    at_s: float = 0.0


@dataclass(slots=True)
class ChainSession:
    """A shared connection to one chain. Endpoints are tried in order; a bad one is left for the next."""

    network: str
    fallback_endpoints: Sequence[str] | None = None
    limits: ChainLimits = field(default_factory=ChainLimits)
    lock_directory: Path | None = None
    _link: _Link | None = None
    _next_endpoint: int = 0
    _progress: _Progress = field(default_factory=_Progress)
    _opening: asyncio.Task[_Link] | None = None
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _retiring: set[asyncio.Task[None]] = field(default_factory=set)

    async def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
            await asyncio.wait([opening])
        link, self._link = self._link, None
        if link is not None:
            self._retire(link.substrate)
        if self._retiring:
            _, late = await asyncio.wait(self._retiring, timeout=_CLOSE_TIMEOUT_S)
            for task in late:
                task.cancel()

    async def block_time_s(self) -> float:
        """Seconds between blocks."""
        return (await self._connected()).block_time_s

    async def read(self, what: str, operation: Callable[[bt.Client], Awaitable[T]]) -> T:
        """Run one read within its limit, once more on a new connection. Raises TransientFailure."""
        return await self._read(what, lambda link: operation(link.client))

    async def block(self) -> int:
        """The newest block. An endpoint whose chain stands still is given up."""
        number = await self._read("block number", lambda link: link.client.block())
        now = asyncio.get_running_loop().time()
        if number > self._progress.number:
            self._progress = _Progress(number, now)
            return number
        stalled_s = now - self._progress.at_s
        if stalled_s > await self._stall_after_s():
            self._progress.at_s = now
            endpoint = self._link.endpoint if self._link else self.network
            self._abandon(self._link)
            raise TransientFailure(f"{endpoint} has shown no block after {number} for {stalled_s:.0f} s")
        return number

    async def block_hash(self, number: int) -> str | None:
        """Hash of a finalized block, None while it is not final."""

        async def get(link: _Link) -> str | None:
            if number > await link.substrate.finalized_block_number():
                return None
            return str(await link.substrate.block_hash(number))

        return await self._read(f"hash of block {number}", get)

    async def wait_for_block(self, number: int) -> int:
        """Wait until the chain has reached a block. Raises TransientFailure when it stands still."""
        while (now := await self.block()) < number:
            block_time_s = await self.block_time_s()
            wait_s = (number - now - 0.5) * block_time_s
            await asyncio.sleep(min(max(0.02, wait_s), max(0.1, 2 * block_time_s)))
        return now

    async def submit(
        self,
        what: str,
        send: Callable[[bt.Client], Awaitable[bt.ExtrinsicResult]],
        landed: Callable[[], Awaitable[int | None]],
        *,
        key: str,
    ) -> int:
        """Send a transaction until it has landed; returns the block that `landed` read from the chain.

        What the SDK reports is never taken as the last word: a socket that drops may hide a success, and a success may
        not be there. Raises Refused with the chain's reason, TransientFailure when it could not be done in time.
        """
        limit_s = await self._operation_timeout_s()
        try:
            async with asyncio.timeout(limit_s), self._writing, self._key_lock(key):
                return await self._attempt(what, send, landed)
        except TimeoutError as error:
            raise TransientFailure(f"{what} was not done within {limit_s:.0f} s") from error

    async def _attempt(
        self,
        what: str,
        send: Callable[[bt.Client], Awaitable[bt.ExtrinsicResult]],
        landed: Callable[[], Awaitable[int | None]],
    ) -> int:
        reason = ""
        for attempt in range(self.limits.num_attempts):
            if attempt:
                await asyncio.sleep(await self.block_time_s())
            refused = None
            try:
                reason = await self._send_once(send)
            except Refused as error:  # perhaps because an attempt that seemed lost was not
                refused = error
            block = await landed()
            if block is not None:
                return block
            if refused is not None:
                raise refused
        raise TransientFailure(f"{what} did not land in {self.limits.num_attempts} attempts; last: {reason}")

    async def _send_once(self, send: Callable[[bt.Client], Awaitable[bt.ExtrinsicResult]]) -> str:
        """Send and watch; returns why it may have failed, "" when it is said to have worked. Raises Refused."""
        link = await self._connected()
        limit_s = self.limits.submit_timeout_s or 12 * link.block_time_s + 20.0
        try:
            async with asyncio.timeout(limit_s):
                result = await send(link.client)
        except TimeoutError:
            self._abandon(link)
            return f"not final within {limit_s:.0f} s"
        except _FAILURES as error:
            reason = _say(error) if isinstance(error, _NONSENSE) else _transient_reason(error)
            self._abandon(link)
            return reason
        if result.success:
            return ""
        reason = _transient_reason(result.error or bt.ChainError(result.message))
        if getattr(result.error, "name", None) in _NEEDS_NEW_CLIENT:
            self._abandon(link)
        return reason

    async def _read(self, what: str, operation: Callable[[_Link], Awaitable[T]]) -> T:
        try:
            return await self._read_once(what, operation)
        except _LinkFailed:
            return await self._read_once(what, operation)

    async def _read_once(self, what: str, operation: Callable[[_Link], Awaitable[T]]) -> T:
        link = await self._connected()
        limit_s = self.limits.read_timeout_s or min(30.0, max(5.0, 3 * link.block_time_s))
        try:
            async with asyncio.timeout(limit_s):
                return await operation(link)
        except TimeoutError as error:
            self._abandon(link)
            raise _LinkFailed(f"{link.endpoint} did not answer ({what}) within {limit_s:.0f} s") from error
        except _FAILURES as error:
            self._abandon(link)
            raise _LinkFailed(f"{link.endpoint} could not answer ({what}): {_say(error)}") from error

    async def _connected(self) -> _Link:
        """The link, or the one attempt to make it that all callers share: none of them starts another when it fails."""
        if self._link is not None:
            return self._link
        if self._opening is None:
            self._opening = asyncio.create_task(self._connect(), name="chain connect")
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    def _opened(self, opening: asyncio.Task[_Link]) -> None:
        if self._opening is opening:
            self._opening = None
        if not opening.cancelled() and opening.exception() is None:
            self._link = opening.result()

    def _retire(self, substrate: "_Substrate") -> None:
        """Close a connection in its own time: a silent peer keeps a closing handshake waiting, and cutting it short leaks."""
        task = asyncio.create_task(_quietly_closed(substrate), name="chain close")
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _connect(self) -> _Link:
        """The first endpoint that answers, starting after the one that was given up."""
        endpoints = self._endpoints()
        reasons = []
        limit_s = self.limits.connect_timeout_s / len(endpoints)
        for offset in range(len(endpoints)):
            index = (self._next_endpoint + offset) % len(endpoints)
            try:
                async with asyncio.timeout(limit_s):
                    link = await self._open(endpoints[index])
            except TimeoutError:
                reasons.append(f"{endpoints[index]}: no answer in {limit_s:.0f} s")
            except _FAILURES as error:
                reasons.append(f"{endpoints[index]}: {_say(error)}")
            else:
                self._next_endpoint = index
                return link
        raise TransientFailure("no endpoint of the chain can be reached: " + "; ".join(reasons))

    async def _open(self, endpoint: str) -> _Link:
        substrate = _Substrate(endpoint, fallback_endpoints=[], archive_endpoints=[])
        client = bt.Client(endpoint, substrate=substrate)
        try:
            await client.connect()
            return _Link(client, substrate, endpoint, await client.block_time())
        except BaseException:
            self._retire(substrate)
            raise

    def _abandon(self, link: _Link | None) -> None:
        """Close a connection that failed, and start with the next endpoint when there is another."""
        if link is None or self._link is not link:
            return
        self._link = None
        self._next_endpoint = (self._next_endpoint + 1) % len(self._endpoints())
        self._retire(link.substrate)

    def _endpoints(self) -> list[str]:
        try:
            network, endpoint = resolve_endpoint(self.network)
        except ValueError:
            known = f"one of {', '.join(sorted(NETWORKS))}, or a websocket URL (ws:// or wss://)"
            raise InvalidConfig(f"node.network must be {known}, got {self.network!r}") from None
        fallbacks = self.fallback_endpoints
        if fallbacks is None:
            fallbacks = default_fallback_endpoints(network)
        return list(dict.fromkeys([endpoint, *fallbacks]))

    async def _stall_after_s(self) -> float:
        return self.limits.stall_after_s or max(10.0, 5 * await self.block_time_s())

    async def _operation_timeout_s(self) -> float:
        block_time_s = await self.block_time_s()
        return self.limits.operation_timeout_s or 3 * (self.limits.submit_timeout_s or 12 * block_time_s + 20.0)

    @contextlib.asynccontextmanager
    async def _key_lock(self, key: str) -> AsyncIterator[None]:
        """One transaction at a time for a key, across the processes that share `lock_directory`."""
        if self.lock_directory is None:
            yield
            return
        self.lock_directory.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        descriptor = os.open(self.lock_directory / f"chain-{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while not _try_lock(descriptor):  # noqa: ASYNC110 - another process holds it, no event will tell us
                await asyncio.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _Substrate(bt.RpcSubstrate):
    """The SDK's connection, which remembers what it opened: a connect that is cancelled forgets its socket otherwise."""

    opened: Any = None

    def _interface(self, endpoint: str, fallbacks: list[str]) -> Any:
        self.opened = super()._interface(endpoint, fallbacks)
        return self.opened


async def _quietly_closed(substrate: _Substrate) -> None:
    with contextlib.suppress(TimeoutError, *_FAILURES):
        await substrate.close()
        if substrate.opened is not None:
            await substrate.opened.close()


def _say(error: BaseException) -> str:
    return f"its answer does not decode ({error!r})" if isinstance(error, _NONSENSE) else str(error)


def _transient_reason(error: Any) -> str:
    """Why another attempt may help. Raises Refused when it cannot: the chain understood the call and said no."""
    name, code = getattr(error, "name", None), getattr(error, "code", None)
    is_known = code is not None and code is not bt.ErrorCode.UNKNOWN
    if name in _TRANSIENT_NAMES or code is bt.ErrorCode.EXPIRED or (name is None and not is_known):
        return str(error)
    label = name or (code.value if code is not None else type(error).__name__)
    raise Refused(label, f"{label}: {error}")
