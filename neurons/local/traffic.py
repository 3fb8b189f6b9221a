"""What a miner has to move through the blob store by the protocol, from the public record alone (papers.md A6, B3).

Per epoch of a miner that took part, W its update's bytes, N updates merged by as many miners: it uploads W, reads its shards of
every update, uploads them reduced, and reads the merged whole, 4W + 2W/N for N > 1. Snapshots, and what challenges ask for, come
on top. Everything is exact to the byte where a process was not interrupted; heads of HTTP are not counted.
"""

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from neurons.scoring import Record
from subnet.config import RunConfig
from subnet.merging.schedule import ITEM_BYTES
from subnet.model.partition import neighbours_of
from subnet.orchestration.accounts import EpochAccount
from subnet.orchestration.ledger import Answered, RunCreated
from subnet.orchestration.merge import snapshot_uploaders
from subnet.types import BlobRef, Hotkey, StageIndex


@dataclass(slots=True)
class Expected:
    """Bytes by kind of object, in both directions."""

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """All of it."""
        return self.sent.total() + self.received.total()


def expected_bytes(record: Record, hotkey: Hotkey) -> Expected:
    """Over every epoch in whose roster `hotkey` is. Nothing of a record without a beginning."""
    found, created = Expected(), record.accounts.created
    if created is None:
        return found
    config = msgspec.json.decode(created.config_json, type=RunConfig)
    before, has_start = created.snapshots, False
    for account in record.accounts.published():
        stage = account.stage_of.get(hotkey)
        if stage is not None and account.snapshots is not None:
            _add_start(found, config, before, stage, has_start=has_start)
            has_start = hotkey in account.snapshots.participants[stage]
            if has_start:
                _add_merge(found, created, account, hotkey, stage)
                if hotkey in _uploaders(account, stage):
                    found.sent["snapshot"] += account.snapshots.snapshots[stage].size_bytes
        before = account.snapshots.snapshots if account.snapshots is not None else before
    for answer in [entry.fact for entry in record.entries if isinstance(entry.fact, Answered)]:
        if answer.hotkey == hotkey:
            found.sent["checkpoint"] += answer.start.size_bytes + answer.end.size_bytes
            found.sent["evidence"] += answer.evidence.size_bytes
    return found


def _add_start(
    found: Expected, config: RunConfig, snapshots: tuple[BlobRef, ...], stage: StageIndex, *, has_start: bool
) -> None:
    """The published params an epoch starts from: its own unless it stepped to them itself, and its neighbours'."""
    if not has_start:
        found.received["snapshot"] += snapshots[stage].size_bytes
    found.received["snapshot"] += sum(snapshots[other].size_bytes for other in neighbours_of(config, stage))


def _add_merge(found: Expected, created: RunCreated, account: EpochAccount, hotkey: Hotkey, stage: StageIndex) -> None:
    assert account.snapshots is not None
    whole = created.num_elements[stage] * ITEM_BYTES
    late = sum(update.stage == stage for update in account.merged_late)
    num_updates = len(account.snapshots.participants[stage]) + late
    mine = [shard.accepted.size_bytes for shard in account.shards if shard.stage == stage and hotkey in shard.reducers]
    found.sent["upload"] += whole
    found.received["upload"] += num_updates * sum(mine)
    found.sent["shard"] += sum(mine)
    found.received["shard"] += whole


def _uploaders(account: EpochAccount, stage: StageIndex) -> tuple[Hotkey, ...]:
    assert account.snapshots is not None and account.beacon is not None
    return snapshot_uploaders(account.snapshots.participants[stage], beacon=account.beacon.beacon, stage=stage)
