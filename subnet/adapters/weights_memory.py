"""What this key last set or committed, on disk, so that a restart neither sets twice nor forgets.

Where a subnet reveals weights later, the chain shows only that something was committed, not what.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from subnet.adapters.system import write_atomically
from subnet.types import Hotkey, Uid


class LastWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One validator's newest weights on one subnet: their digest, and the block that took them."""

    hotkey: Hotkey
    netuid: int
    at_block: int
    digest: str


class WeightsMemory:
    """A small file for each (hotkey, netuid); without a directory nothing is remembered."""

    def __init__(self, directory: Path | None, hotkey: Hotkey, netuid: int) -> None:
        self._path = None if directory is None else directory / f"weights-{hotkey}-{netuid}.json"
        self._hotkey = hotkey
        self._netuid = netuid

    def remembers(self, values: Mapping[Uid, int], *, at_block: int) -> bool:
        """Whether these weights are what the chain took from this key at `at_block`."""
        last = self._load()
        return last is not None and (last.at_block, last.digest) == (at_block, _digest(values))

    def remember(self, values: Mapping[Uid, int], *, at_block: int) -> None:
        """Keep what the chain took."""
        if self._path is not None:
            last = LastWeights(hotkey=self._hotkey, netuid=self._netuid, at_block=at_block, digest=_digest(values))
            write_atomically(self._path, msgspec.json.encode(last))

    def _load(self) -> LastWeights | None:
        if self._path is None or not self._path.is_file():
            return None
        try:
            last = msgspec.json.decode(self._path.read_bytes(), type=LastWeights)
        except msgspec.DecodeError:
            return None
        return last if (last.hotkey, last.netuid) == (self._hotkey, self._netuid) else None


def _digest(values: Mapping[Uid, int]) -> str:
    text = ",".join(f"{uid}:{value}" for uid, value in sorted(values.items()))
    return hashlib.sha256(text.encode()).hexdigest()
