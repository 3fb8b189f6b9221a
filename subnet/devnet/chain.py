"""The chain: blocks on top of each other, the pool they are made from, the past that can still be read."""

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from subnet.devnet import runtime
from subnet.devnet.codec import Codec
from subnet.devnet.config import DevnetConfig
from subnet.devnet.context import Context, Storage
from subnet.devnet.extrinsics import Extrinsic, PoolError, check_signature, parse
from subnet.devnet.genesis import write_genesis
from subnet.devnet.pallets import balances
from subnet.devnet.pallets.shield import Shield, ciphertext_of
from subnet.devnet.pool import Pool
from subnet.devnet.scale import compact
from subnet.devnet.state import Changes, State, View
from subnet.errors import NotFound, ProtocolViolation

_HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class Block:
    """A sealed block: its place, its bytes, and what it changed."""

    number: int
    digest: str
    parent: str
    state_root: str
    extrinsics_root: str
    slot: int
    extrinsics: tuple[bytes, ...]
    changes: Changes

    @property
    def extrinsic_digests(self) -> list[str]:
        """Hashes of the extrinsics, the timestamp included."""
        return [_digest(extrinsic) for extrinsic in self.extrinsics]

    @property
    def header(self) -> dict[str, Any]:
        """The header as JSON-RPC shows it."""
        return {
            "parentHash": self.parent,
            "number": hex(self.number),
            "stateRoot": self.state_root,
            "extrinsicsRoot": self.extrinsics_root,
            "digest": {"logs": ["0x" + _aura_log(self.slot).hex()]},
        }


class Chain:
    """A chain that one author extends."""

    def __init__(self, config: DevnetConfig) -> None:
        self.config = config
        self.codec = Codec(block_time_s=config.block_time_s)
        self.pool = Pool()
        self.state = State(kept_blocks=config.kept_blocks)
        self._hashes = bytearray()
        self._blocks: deque[Block] = deque(maxlen=config.kept_blocks)
        self._shield = Shield(b"devnet")
        self.finality_lag = config.finality_lag
        self._root_changes: list[Callable[[Context], None]] = []
        self._upgrades = [(0, self.codec.spec_version)]

    def start(self, *, now_ms: int) -> Block:
        """Make block 0."""
        ctx = Context(self.codec, self.state, block=0, now_ms=now_ms)
        write_genesis(ctx, self.config, self._shield)
        return self._seal(ctx, [])

    @property
    def head(self) -> Block:
        """The newest block."""
        return self._blocks[-1]

    @property
    def finalized_number(self) -> int:
        """Number of the newest block that cannot be undone."""
        return max(0, self.head.number - self.finality_lag)

    def block_hash(self, number: int) -> str | None:
        """Hash of a block of this chain, however old."""
        start = number * _HASH_BYTES
        if not 0 <= start < len(self._hashes):
            return None
        return "0x" + self._hashes[start : start + _HASH_BYTES].hex()

    def block(self, digest: str | None) -> Block | None:
        """A block that is still kept, by hash; the newest for None."""
        if digest is None:
            return self.head
        return next((block for block in reversed(self._blocks) if block.digest == digest), None)

    def view(self, digest: str | None) -> View:
        """State as of a block. Raises NotFound when it is not kept any more."""
        block = self.block(digest)
        if block is None:
            raise NotFound(f"State already discarded for {digest}")
        return self.state.at(self.head.number - block.number)

    def storage(self, digest: str | None = None) -> Storage:
        """Typed state as of a block."""
        return Storage(self.codec, self.view(digest))

    def nonce(self, who: str) -> int:
        """An account's nonce in the newest state."""
        return balances.nonce(self.storage(), who)

    def submit(self, raw: bytes) -> Extrinsic:
        """Take an extrinsic into the pool. Raises PoolError."""
        extrinsic = self._checked(raw, block=self.head.number)
        self.pool.add(extrinsic, account_nonce=self.nonce(extrinsic.signer), block=self.head.number)
        return extrinsic

    def author(self, *, now_ms: int) -> tuple[Block, list[Extrinsic]]:
        """Make the next block. Returns it, and what the pool gave up on."""
        number = self.head.number + 1
        dropped = self.pool.drop_stale(self.nonce, block=number)
        ctx = Context(self.codec, self.state, block=number, now_ms=now_ms)
        bodies = [runtime.begin_block(ctx)]
        for change in self._root_changes:
            change(ctx)
        self._root_changes.clear()
        for extrinsic in self.pool.take_ready(self.nonce):
            if self._include(ctx, extrinsic, bodies):
                self._include_shielded(ctx, extrinsic, bodies)
            else:
                dropped.append(extrinsic)
        runtime.end_block(ctx)
        return self._seal(ctx, bodies), dropped

    def undo(self, num_blocks: int, *, is_replay: bool = False) -> list[Block]:
        """Take the newest blocks back, as a reorganisation does; their extrinsics return to the pool.

        Finalized blocks stay, except when a journal is replayed, which only tells what was done.
        """
        allowed = self.state.num_kept - 1 if is_replay else self.head.number - self.finalized_number
        undone = []
        for _ in range(min(num_blocks, allowed)):
            self.state.undo()
            undone.append(self._blocks.pop())
            del self._hashes[-_HASH_BYTES:]
        self.pool.restore([parse(self.codec, raw) for block in reversed(undone) for raw in block.extrinsics[1:]])
        return undone

    def restore(self, block: Block) -> None:
        """Put back a block that was kept on disk, applying what it changed."""
        for key, value in block.changes.items():
            self.state.put(key, value)
        self.state.seal()
        self.append(block)

    def restore_hashes(self, hashes: bytes) -> None:
        """Put back the hashes of the blocks below the first one restored."""
        self._hashes[:] = hashes

    @property
    def hashes(self) -> bytes:
        """Hashes of all blocks, one after another."""
        return bytes(self._hashes)

    def as_root(self, change: Callable[[Context], None]) -> None:
        """Have the next block change storage, as a sudo key would."""
        self._root_changes.append(change)

    def upgrade(self) -> int:
        """Raise the runtime's spec version from the next block on; returns it."""
        spec_version = self.codec.spec_version + 1
        self.codec = Codec(block_time_s=self.config.block_time_s, spec_version=spec_version)
        self._upgrades.append((self.head.number, spec_version))
        return spec_version

    def spec_version_at(self, digest: str | None) -> int:
        """The runtime version in the state of a block."""
        block = self.block(digest)
        number = 0 if block is None else block.number
        return next(spec for start, spec in reversed(self._upgrades) if number >= start)

    def _checked(self, raw: bytes, *, block: int) -> Extrinsic:
        extrinsic = parse(self.codec, raw)
        check_signature(self.codec, extrinsic, block=block, block_hash=self.block_hash)
        runtime.check_payment(self.storage(), extrinsic)
        return extrinsic

    def _include(self, ctx: Context, extrinsic: Extrinsic, bodies: list[bytes]) -> bool:
        try:
            runtime.check_payment(ctx, extrinsic)
        except PoolError:
            return False
        runtime.apply_extrinsic(ctx, extrinsic, index=len(bodies))
        bodies.append(extrinsic.raw)
        return True

    def _include_shielded(self, ctx: Context, outer: Extrinsic, bodies: list[bytes]) -> None:
        """Open a shielded extrinsic and apply what was inside, in the same block; what does not fit is lost."""
        if (outer.call.pallet, outer.call.function) != ("MevShield", "submit_encrypted"):
            return
        try:
            inner = self._checked(self._shield.open(ciphertext_of(outer.call.args)), block=ctx.block - 1)
        except (PoolError, ProtocolViolation):
            return
        if inner.nonce == balances.nonce(ctx, inner.signer):
            self._include(ctx, inner, bodies)

    def _seal(self, ctx: Context, bodies: list[bytes]) -> Block:
        changes = self.state.seal()
        parent = self.head.digest if self._blocks else "0x" + bytes(_HASH_BYTES).hex()
        previous_root = self.head.state_root if self._blocks else self.codec.metadata_v15.hex()
        slot = round(ctx.now_ms / 1_000 / self.config.block_time_s)
        roots = _state_root(previous_root, changes), _digest(b"".join(bodies))
        header = bytes.fromhex(parent[2:]) + compact(ctx.block) + bytes.fromhex(roots[0][2:] + roots[1][2:])
        digest = _digest(header + compact(1) + _aura_log(slot))
        block = Block(ctx.block, digest, parent, *roots, slot, tuple(bodies), changes)
        self.append(block)
        return block

    def append(self, block: Block) -> None:
        """Put a sealed block, whose changes are in the state already, on top."""
        self._blocks.append(block)
        self._hashes += bytes.fromhex(block.digest[2:])


def _digest(data: bytes) -> str:
    return "0x" + hashlib.blake2b(data, digest_size=_HASH_BYTES).hexdigest()


def _state_root(previous: str, changes: Changes) -> str:
    """A commitment to the state: hash chain over changes (a trie would say the same, more slowly)."""
    hasher = hashlib.blake2b(previous.encode(), digest_size=_HASH_BYTES)
    for key in sorted(changes):
        value = changes[key]
        hasher.update(len(key).to_bytes(4, "little") + key)
        hasher.update(b"\x00" if value is None else b"\x01" + len(value).to_bytes(4, "little") + value)
    return "0x" + hasher.hexdigest()


def _aura_log(slot: int) -> bytes:
    """The pre-runtime digest item with which a block's author claims its slot."""
    body = slot.to_bytes(8, "little")
    return b"\x06aura" + compact(len(body)) + body
