"""The chain on disk: one file that only grows, so that kill -9 loses nothing that a client was told.

Each record is length, checksum, msgpack. A half-written last record is cut off at start. The operating
system keeps what was written when the process dies; a power cut may cost the last seconds.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from subnet.devnet.chain import Block, Chain
from subnet.devnet.config import DevnetConfig
from subnet.errors import StartupRefused

FILE_NAME = "chain.log"
OTHER_CHAIN_EXIT_CODE = 73
_CHECKSUM_BYTES = 8
_LENGTH_BYTES = 4
COMPACT_ABOVE_BYTES = 64 << 20
"""Size at which the file is rewritten as the state and the newest block."""


class _BlockRecord(msgspec.Struct, frozen=True, tag="block", array_like=True):
    number: int
    digest: str
    parent: str
    state_root: str
    extrinsics_root: str
    slot: int
    extrinsics: tuple[bytes, ...]
    changes: dict[bytes, bytes | None]


class _Undo(msgspec.Struct, frozen=True, tag="undo", array_like=True):
    num_blocks: int


class _Snapshot(msgspec.Struct, frozen=True, tag="snapshot", array_like=True):
    """State and hashes below the next block record, and the settings the chain was made with."""

    settings: str
    state: dict[bytes, bytes]
    hashes: bytes


_Entry = _BlockRecord | _Undo | _Snapshot
_DECODER = msgspec.msgpack.Decoder(_Entry)


class Journal:
    """Writes blocks to the chain's file."""

    def __init__(self, directory: Path, config: DevnetConfig) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"{directory} cannot be made a directory: {error.strerror}.\nName another with --dir."
            raise StartupRefused(reason, OTHER_CHAIN_EXIT_CODE) from error
        self._path = directory / FILE_NAME
        self._settings = _settings(config)
        self._file: BinaryIO | None = None

    def restore(self, chain: Chain) -> bool:
        """Replay the file into a chain that has not started. False when there is nothing to replay."""
        data = self._path.read_bytes() if self._path.exists() else b""
        end = 0
        for entry, entry_end in _entries(data):
            _replay(chain, entry, self._settings, self._path)
            end = entry_end
        self._file = self._path.open("ab")
        self._file.truncate(end)
        if end == 0:
            self._append(_Snapshot(self._settings, {}, b""))
        return bool(chain.hashes)

    def block(self, chain: Chain, block: Block) -> None:
        """Keep one more block; a file that has grown large is rewritten from the state."""
        if self._file is not None and self._file.tell() > COMPACT_ABOVE_BYTES:
            self._compact(chain)
        else:
            self._append(_record(block))

    def undo(self, num_blocks: int) -> None:
        """Take back the newest blocks."""
        self._append(_Undo(num_blocks))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, entry: _Entry) -> None:
        if self._file is None:
            raise StartupRefused(f"{self._path} is not open; restore the chain before adding blocks", 70)
        self._file.write(_framed(entry))
        self._file.flush()

    def _compact(self, chain: Chain) -> None:
        below = chain.hashes[:-32]
        fresh = self._path.with_suffix(".new")
        with fresh.open("wb") as file:
            file.write(_framed(_Snapshot(self._settings, dict(chain.state.everything()), below)))
            file.write(_framed(_record(chain.head)))
        self.close()
        fresh.replace(self._path)
        self._file = self._path.open("ab")


def _settings(config: DevnetConfig) -> str:
    """Digest of the settings that make two chains different."""
    made_with = (
        config.block_time_s,
        config.subnets,
        sorted(config.prefunded.items()),
        config.alice_tao,
        config.stake_threshold_tao,
    )
    return hashlib.blake2b(repr(made_with).encode(), digest_size=16).hexdigest()


def _framed(entry: _Entry) -> bytes:
    body = msgspec.msgpack.encode(entry)
    checksum = hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest()
    return len(body).to_bytes(_LENGTH_BYTES, "little") + checksum + body


def _entries(data: bytes) -> Iterator[tuple[_Entry, int]]:
    """Whole records and where each ends; the first one that is cut short or damaged ends the file."""
    position = 0
    while position + _LENGTH_BYTES + _CHECKSUM_BYTES <= len(data):
        length = int.from_bytes(data[position : position + _LENGTH_BYTES], "little")
        start = position + _LENGTH_BYTES + _CHECKSUM_BYTES
        body = data[start : start + length]
        checksum = data[position + _LENGTH_BYTES : start]
        if len(body) < length or hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest() != checksum:
            return
        position = start + length
        yield _DECODER.decode(body), position


def _replay(chain: Chain, entry: _Entry, settings: str, path: Path) -> None:
    if isinstance(entry, _Snapshot):
        if entry.settings != settings:
            reason = f"{path} holds a chain made with other settings; choose another directory or delete that file"
            raise StartupRefused(reason, OTHER_CHAIN_EXIT_CODE)
        for key, value in entry.state.items():
            chain.state.put(key, value)
        if entry.state:
            chain.state.seal()
        chain.restore_hashes(entry.hashes)
    elif isinstance(entry, _Undo):
        chain.undo(entry.num_blocks, is_replay=True)
    else:
        block = Block(
            entry.number,
            entry.digest,
            entry.parent,
            entry.state_root,
            entry.extrinsics_root,
            entry.slot,
            entry.extrinsics,
            dict(entry.changes),
        )
        chain.restore(block)


def _record(block: Block) -> _BlockRecord:
    return _BlockRecord(
        block.number,
        block.digest,
        block.parent,
        block.state_root,
        block.extrinsics_root,
        block.slot,
        block.extrinsics,
        block.changes,
    )
