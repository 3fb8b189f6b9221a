"""What a miner has to move, from the record alone, against the papers' formula; and rounds of stages that train apart."""

import msgspec
import pytest

from neurons.local.traffic import expected_bytes
from subnet.config import RunConfig, RunKind
from subnet.frames import digest
from subnet.lanes import lanes
from subnet.orchestration.ledger import Answered, BeaconSeen, EpochPublished, EpochStarted, ShardMerged
from subnet.orchestration.rounds import mean_losses, participation
from subnet.types import BlobRef, Epoch, Hotkey, StageIndex
from tests.unit.recorded import CONFIG, STAGES, A, B, Book, C, D, ref

APART = msgspec.structs.replace(CONFIG, kind=RunKind.BLOCKTRAIN)
W = 64 * 4
"""Bytes of one stage's update."""
SNAPSHOT = 1000


def merged(epoch: int, stage: int, shard: int, *reducers: Hotkey, size_bytes: int) -> ShardMerged:
    accepted = BlobRef(key=f"{epoch}/{stage}/{shard}", digest=digest(b"shard"), size_bytes=size_bytes)
    return ShardMerged(
        epoch=Epoch(epoch),
        stage=StageIndex(stage),
        shard=shard,
        reducers=reducers,
        reported=(accepted.digest,) * len(reducers),
        accepted=accepted,
        is_refereed=len(reducers) == 1,
    )


def book(config: RunConfig, *, num_epochs: int = 2, second: tuple[Hotkey, ...] = STAGES[1]) -> Book:
    """Two of stage 0 and some of stage 1 merge in every epoch; each stage is one shard."""
    made = Book(config=config)
    for epoch in range(num_epochs):
        made.say(
            EpochStarted(epoch=Epoch(epoch), beacon="b", roster=STAGES),
            BeaconSeen(epoch=Epoch(epoch), at_block=1, beacon=f"b{epoch}"),
            merged(epoch, 0, 0, A, B, size_bytes=W),
            merged(epoch, 1, 0, *second, size_bytes=W),
            EpochPublished(
                epoch=Epoch(epoch),
                snapshots=(ref("s0", SNAPSHOT), ref("s1", SNAPSHOT)),
                participants=(STAGES[0], second),
            ),
        )
    return made


@pytest.mark.parametrize("config", [CONFIG, APART])
def test_a_merge_of_two_is_four_updates_and_two_halves(config: RunConfig) -> None:
    found = expected_bytes(book(config, num_epochs=1).seal().record(), A)
    assert found.total - found.sent["snapshot"] - found.received["snapshot"] == 4 * W + 2 * W // 2
    assert found.sent == {"upload": W, "shard": W, "snapshot": SNAPSHOT}


def test_a_lone_miner_reads_its_own_update_back() -> None:
    found = expected_bytes(book(APART, num_epochs=1, second=(C,)).seal().record(), C)
    assert (found.sent["upload"], found.received["upload"], found.sent["shard"], found.received["shard"]) == (W,) * 4


def test_who_stepped_pulls_no_params_again_and_neighbours_are_pulled_every_epoch() -> None:
    """A greedy stage 1 computes with stage 0; the genesis snapshots of the record have 4 bytes."""
    record = book(APART, second=(C,)).seal().record()
    assert expected_bytes(record, A).received["snapshot"] == 4
    assert expected_bytes(record, C).received["snapshot"] == 4 + (4 + SNAPSHOT)
    assert expected_bytes(record, D).received["snapshot"] == (4 + SNAPSHOT) + (4 + SNAPSHOT)
    assert not expected_bytes(record, D).sent
    pipeline = book(CONFIG, second=(C,)).seal().record()
    assert expected_bytes(pipeline, C).received["snapshot"] == 4


def test_what_a_challenge_asks_for_is_counted() -> None:
    answered = Answered(epoch=Epoch(0), hotkey=A, segment=0, start=ref("a", 10), end=ref("b", 20), evidence=ref("c", 7))
    found = expected_bytes(book(APART).say(answered).seal().record(), A)
    assert (found.sent["checkpoint"], found.sent["evidence"]) == (30, 7)
    assert not expected_bytes(book(APART).say(answered).seal().record(), B).sent["evidence"]


def test_an_empty_record_asks_for_nothing() -> None:
    assert expected_bytes(Book().record(), A).total == 0


def test_rounds_are_told_of_published_epochs_alone() -> None:
    made = Book(config=APART).start(0)
    assert participation(made.seal().record().accounts.epoch(Epoch(0))) == ()
    made.sample(0, 0, A, loss=2.0).sample(0, 2, B, loss=3.0).sample(0, 1, C, loss=7.0)
    account = made.finish(0, A, B, C).record().accounts.epoch(Epoch(0))
    assert mean_losses(account, lanes(APART)) == (2.5, 7.0)
    assert [one.share for one in participation(account)] == [1.0, 1.0]
