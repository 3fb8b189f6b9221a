"""The node: a websocket server, subscriptions, and a block every `block_time_s` (chain.md 3)."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from websockets.asyncio.server import Server, ServerConnection, broadcast, serve
from websockets.exceptions import ConnectionClosed

from subnet.devnet.chain import Block, Chain
from subnet.devnet.config import DevnetConfig
from subnet.devnet.extrinsics import Extrinsic, PoolError
from subnet.devnet.faults import FaultCommands, Faults
from subnet.devnet.journal import Journal
from subnet.devnet.rpc import Rpc, RpcError
from subnet.errors import StartupRefused

PORT_TAKEN_EXIT_CODE = 69
_MAX_MESSAGE_BYTES = 4 << 20
_HEADS = {
    "chain_subscribeNewHeads": "chain_newHead",
    "chain_subscribeNewHead": "chain_newHead",
    "chain_subscribeAllHeads": "chain_newHead",
    "chain_subscribeFinalizedHeads": "chain_finalizedHead",
    "chain_subscribeFinalisedHeads": "chain_finalizedHead",
}


@dataclass(slots=True)
class _Client:
    """One connection, its subscriptions by id, and what to send after the answer now being made."""

    socket: ServerConnection
    heads: dict[str, str] = field(default_factory=dict)
    after: list[tuple[str, str, Any]] = field(default_factory=list)
    loses_answer: bool = False


@dataclass(frozen=True, slots=True)
class _Watch:
    """A client's interest in one extrinsic; `block` once it is included."""

    client: _Client
    subscription: str
    block: Block | None = None


class Node:
    """Serves one chain."""

    def __init__(
        self, config: DevnetConfig, *, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    ) -> None:
        self.config = config
        self.chain = Chain(config)
        self.faults = Faults()
        self._now_ms = now_ms
        self._rpc = Rpc(self.chain)
        self._commands = FaultCommands(self.chain, self.faults, self.reorganise)
        self._journal = None if config.directory is None else Journal(config.directory, config)
        self._clients: dict[ServerConnection, _Client] = {}
        self._watches: dict[str, list[_Watch]] = {}
        self._ids = itertools.count(1)
        self._announced = 0
        self._port = config.port
        self._own_methods: Mapping[str, Callable[[_Client, Sequence[Any]], Any]] = {
            "author_submitAndWatchExtrinsic": self._submit_and_watch,
            "author_unwatchExtrinsic": self._unsubscribe,
            "devnet_drop": lambda client, params: self.drop_all(but=client.socket),
            "devnet_newBlock": lambda client, params: self.make_block().digest,
            "devnet_status": lambda client, params: self.status(),
            "state_subscribeRuntimeVersion": self._subscribe_runtime,
            "state_subscribeStorage": self._subscribe_storage,
        }

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"ws://{self.config.host}:{self._port}"

    def status(self) -> dict[str, Any]:
        """The node in a few numbers."""
        chain = self.chain
        return {
            "block": chain.head.number,
            "finalized": chain.finalized_number,
            "block_time_s": self.config.block_time_s,
            "spec_version": chain.codec.spec_version,
            "netuids": [netuid for netuid in chain.storage().netuids() if netuid],
            "waiting_extrinsics": len(chain.pool),
            "connections": len(self._clients),
            "is_stalled": self.faults.is_stalled,
            "directory": None if self.config.directory is None else str(self.config.directory),
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Node"]:
        """Start, make blocks while the body runs, stop."""
        self._start_chain()
        try:
            async with await self._listen() as server, asyncio.TaskGroup() as tasks:
                self._port = next(iter(server.sockets)).getsockname()[1]
                producer = tasks.create_task(self._produce())
                try:
                    yield self
                finally:
                    producer.cancel()
                    self.drop_all()
        except ExceptionGroup as group:  # the task group wraps even what its user raised; that arrives as itself
            if len(group.exceptions) > 1:
                raise
            raise group.exceptions[0] from None
        finally:
            if self._journal is not None:
                self._journal.close()

    def make_block(self) -> Block:
        """Author one block now and tell everybody."""
        block, dropped = self.chain.author(now_ms=self._now_ms())
        if self._journal is not None:
            self._journal.block(self.chain, block)
        self._announce(block)
        self._tell_watchers(block, dropped)
        return block

    async def _listen(self) -> Server:
        try:
            return await serve(
                self._serve_client,
                self.config.host,
                self.config.port,
                compression=None,
                max_size=_MAX_MESSAGE_BYTES,
                ping_interval=None,
            )
        except OSError as error:
            address = f"{self.config.host}:{self.config.port}"
            reason = f"cannot listen on {address} ({error.strerror}); free the port or choose another with --port"
            raise StartupRefused(reason, PORT_TAKEN_EXIT_CODE) from error

    def _start_chain(self) -> None:
        if self._journal is not None and self._journal.restore(self.chain):
            return
        genesis = self.chain.start(now_ms=self._now_ms())
        if self._journal is not None:
            self._journal.block(self.chain, genesis)

    async def _produce(self) -> None:
        """Blocks at a steady pace; a late one is not caught up with a burst."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self.config.block_time_s
        while True:
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not self.faults.is_stalled:
                self.make_block()
            due = max(due + self.config.block_time_s, loop.time())

    async def _serve_client(self, socket: ServerConnection) -> None:
        client = self._clients[socket] = _Client(socket)
        try:
            async for message in socket:
                request = _decoded(message)
                is_batch = isinstance(request, list)
                requests = request if is_batch else [request]
                if self.faults.is_frozen and not any(map(_is_command, requests)):
                    continue
                answers = [self._answered(client, one) for one in requests]
                if client.loses_answer:
                    socket.transport.abort()
                await socket.send(msgspec.json.encode(answers if is_batch else answers[0]).decode())
                for method, subscription, result in client.after:
                    self._push(client, method, subscription, result)
                client.after.clear()
        except ConnectionClosed:
            pass
        finally:
            del self._clients[socket]

    def _answered(self, client: _Client, request: Any) -> dict[str, Any]:
        if not isinstance(request, dict) or not isinstance(request.get("method"), str):
            return {"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": "Invalid request"}}
        method, params = request["method"], request.get("params") or []
        envelope = {"jsonrpc": "2.0", "id": request.get("id")}
        try:
            return {**envelope, "result": self._answer(client, method, params)}
        except RpcError as error:
            body: dict[str, Any] = {"code": error.code, "message": error.message}
            if error.data is not None:
                body["data"] = error.data
            return {**envelope, "error": body}

    def _answer(self, client: _Client, method: str, params: Sequence[Any]) -> Any:
        self.faults.check(method)
        if method in self._own_methods:
            return self._own_methods[method](client, params)
        if method in self._commands.methods:
            return self._commands.methods[method](params)
        if method in _HEADS:
            return self._subscribe_heads(client, _HEADS[method])
        if "unsubscribe" in method:
            return self._unsubscribe(client, params)
        return self._rpc.answer(method, params)

    def _subscribe_heads(self, client: _Client, kind: str) -> str:
        subscription = f"heads-{next(self._ids)}"
        client.heads[subscription] = kind
        is_final = kind == "chain_finalizedHead"
        digest = self.chain.block_hash(self.chain.finalized_number) if is_final else None
        block = self.chain.block(digest)
        if block is not None:
            client.after.append((kind, subscription, block.header))
        return subscription

    def _subscribe_runtime(self, client: _Client, params: Sequence[Any]) -> str:
        subscription = f"runtime-{next(self._ids)}"
        client.after.append(("state_runtimeVersion", subscription, self._rpc.runtime_version([])))
        return subscription

    def _subscribe_storage(self, client: _Client, params: Sequence[Any]) -> str:
        subscription = f"storage-{next(self._ids)}"
        client.after.append(("state_storage", subscription, self._rpc.query_storage([params[0]])[0]))
        return subscription

    def _unsubscribe(self, client: _Client, params: Sequence[Any]) -> bool:
        client.heads.pop(str(params[0]), None)
        return True

    def _submit_and_watch(self, client: _Client, params: Sequence[Any]) -> str:
        try:
            extrinsic = self.chain.submit(bytes.fromhex(str(params[0]).removeprefix("0x")))
        except PoolError as error:
            raise RpcError(error.code, error.message, error.data) from error
        except (IndexError, ValueError) as error:
            raise RpcError(-32602, f"Invalid params: {error}") from error
        subscription = f"watch-{next(self._ids)}"
        self._watches.setdefault(extrinsic.digest, []).append(_Watch(client, subscription))
        client.after.append(("author_extrinsicUpdate", subscription, "ready"))
        client.loses_answer = self.faults.is_lossy
        return subscription

    def drop_all(self, *, but: ServerConnection | None = None) -> int:
        """Cut every connection, without a closing handshake."""
        others = [other for other in self._clients if other is not but]
        for socket in others:
            socket.transport.abort()
        return len(others)

    def reorganise(self, num_blocks: int) -> int:
        """Undo blocks that are not final; the next block takes their place."""
        undone = self.chain.undo(num_blocks)
        if self._journal is not None and undone:
            self._journal.undo(len(undone))
        return len(undone)

    def _announce(self, block: Block) -> None:
        """New and newly finalized heads, to who subscribed."""
        finalized = self.chain.finalized_number
        fresh = range(max(self._announced + 1, finalized - 16), finalized + 1)
        digests = [self.chain.block_hash(number) for number in fresh]
        finals = [final for final in map(self.chain.block, digests) if final is not None]
        self._announced = max(self._announced, finalized)
        for client in list(self._clients.values()):
            for subscription, kind in client.heads.items():
                for shown in [block] if kind == "chain_newHead" else finals:
                    self._push(client, kind, subscription, shown.header)

    def _tell_watchers(self, block: Block, dropped: list[Extrinsic]) -> None:
        """Status of watched extrinsics: included, finalized, or given up."""
        for extrinsic in dropped:
            for watch in self._watches.pop(extrinsic.digest, []):
                self._push(watch.client, "author_extrinsicUpdate", watch.subscription, "invalid")
        for digest in block.extrinsic_digests:
            for watch in self._watches.pop(digest, []):
                self._push(watch.client, "author_extrinsicUpdate", watch.subscription, {"inBlock": block.digest})
                self._watches.setdefault(block.digest, []).append(_Watch(watch.client, watch.subscription, block))
        for key, watches in list(self._watches.items()):
            included = watches[0].block
            if included is None or included.number > self.chain.finalized_number:
                continue
            is_canonical = self.chain.block_hash(included.number) == included.digest
            status = {"finalized" if is_canonical else "retracted": included.digest}
            for watch in self._watches.pop(key):
                self._push(watch.client, "author_extrinsicUpdate", watch.subscription, status)

    def _push(self, client: _Client, method: str, subscription: str, result: Any) -> None:
        """Send without waiting: a client that does not read must not hold up the chain."""
        if self.faults.is_frozen:
            return
        params = {"subscription": subscription, "result": result}
        message = msgspec.json.encode({"jsonrpc": "2.0", "method": method, "params": params})
        broadcast([client.socket], message.decode())


def _decoded(message: str | bytes) -> Any:
    try:
        return msgspec.json.decode(message)
    except msgspec.DecodeError:
        return None


def _is_command(request: Any) -> bool:
    """Whether a request is for the node's operator, who is heard even when the node is frozen."""
    return isinstance(request, dict) and str(request.get("method")).startswith("devnet_")
