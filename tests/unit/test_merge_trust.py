"""Copied uploads and agreeing shards that are false: what is drawn, what is recorded, and whom it convicts (trust.md 5)."""

from typing import Any

import pytest

from subnet import wire
from subnet.config import MergeConfig, RunConfig, TrainingConfig
from subnet.frames import digest
from subnet.merging.schedule import shard_plans
from subnet.orchestration import machine, merge, merge_trust
from subnet.orchestration.events import AuditShard, Created, ShardRecomputed, decode_event, encode_event
from subnet.orchestration.ledger import AnyFact, Ledger, ReducerConvicted, ShardAudited, UploadCopied
from subnet.orchestration.state import EpochState, Member, PublishedEpoch, Sample, StageMerge, State, Turn, Work
from subnet.types import (
    NO_DIGEST,
    BlobRef,
    Digest,
    Endpoint,
    Epoch,
    Hotkey,
    Lease,
    NumericMode,
    Phase,
    SampleId,
    StageIndex,
)
from tests.unit.recorded import A, B, Book, C, D, ref

E = Hotkey("5E" + "x" * 46)
CHUNK, ELEMENTS = 64, 48  # three chunks of sixteen values
CONFIG = RunConfig(
    training=TrainingConfig(num_stages=2, min_batches=1, target_batches=1),
    merge=MergeConfig(chunk_bytes=CHUNK, audit_fraction=1.0),
)
ZERO = digest(bytes(CHUNK))


def chunks(*names: str) -> tuple[Digest, ...]:
    return tuple(ZERO if name == "0" else digest(name.encode()) for name in names)


def member(hotkey: Hotkey, stage: int) -> Member:
    return Member(
        hotkey=hotkey,
        stage=StageIndex(stage),
        endpoint=Endpoint(host="h", port=1),
        mode=NumericMode.FP32,
        session="s",
        first_epoch=Epoch(0),
    )


def commitment(digests: tuple[Digest, ...]) -> wire.CommitEpoch:
    return wire.CommitEpoch(
        epoch=Epoch(1),
        num_receipts=0,
        head=NO_DIGEST,
        checkpoints=(),
        num_batches=1,
        upload_digest=digest(repr(digests).encode()),
        upload_bytes=ELEMENTS * 4,
        chunk_digests=digests,
    )


def turn_with(uploads: dict[Hotkey, tuple[Digest, ...]], config: RunConfig = CONFIG) -> Turn:
    """Everybody of stage 0 has worked on one sample and committed; E holds stage 1."""
    state = State(run_id="r", num_elements=(ELEMENTS, ELEMENTS), snapshots=(ref("s0"), ref("s1")))
    state.members = {hotkey: member(hotkey, 0) for hotkey in uploads} | {E: member(E, 1)}
    state.current = EpochState(epoch=Epoch(1), roster=(tuple(sorted(uploads)), (E,)), next_beacon="beacon")
    state.current.commits = {hotkey: commitment(digests) for hotkey, digests in uploads.items()}
    for number, hotkey in enumerate(uploads):
        state.current.work[hotkey] = Work(head=NO_DIGEST, credited={SampleId(number): None})
    return Turn(state=state, config=config, now_s=1.0)


def said(turn: Turn) -> list[AnyFact]:
    return [entry.fact for entry in turn.state.ledger.tail or []]


def test_two_uploads_of_the_same_bytes_are_void_and_left_out() -> None:
    turn = turn_with({A: chunks("a", "b", "0"), B: chunks("a", "b", "0"), C: chunks("x", "y", "0")})
    merge_trust.note_copies(turn)
    (copied,) = [fact for fact in said(turn) if isinstance(fact, UploadCopied)]
    assert (copied.pair, copied.stage) == ((A, B), 0)
    assert copied.share == pytest.approx(2 / 3)
    turn.state.current.uploaded = {hotkey: ref(hotkey) for hotkey in (A, B, C)}
    merge.open_merges(turn, {})
    plan = turn.state.current.merges[0].plan
    assert plan is not None
    assert [upload.hotkey for upload in plan.uploads] == [C]
    assert {hotkey for shard in plan.shards for hotkey in shard.reducers} == {A, B, C}


def test_chunks_that_nothing_was_learned_in_and_work_below_the_least_say_nothing() -> None:
    turn = turn_with({A: chunks("a", "0", "0"), B: chunks("b", "0", "0"), C: chunks("0", "0", "0")})
    merge_trust.note_copies(turn)
    assert not said(turn)
    idle = turn_with({A: chunks("a", "b", "c"), B: chunks("a", "b", "c")})
    idle.state.current.work[B].credited = {}
    merge_trust.note_copies(idle)
    assert not idle.state.current.copied


def test_a_last_chunk_of_zeros_is_known_by_its_length() -> None:
    turn = turn_with({A: (digest(bytes(40)),), B: (digest(bytes(40)),)})
    turn.state.num_elements = (10, 10)
    merge_trust.note_copies(turn)
    assert not said(turn)


def merged_turn(*, fraction: float = 1.0) -> tuple[Turn, PublishedEpoch]:
    """Epoch 0 was merged by A, B and C: shard 0 and 1 agreed, shard 2 was refereed; stage 1 stayed as it was."""
    config = RunConfig(training=CONFIG.training, merge=MergeConfig(chunk_bytes=CHUNK, audit_fraction=fraction))
    turn = turn_with({hotkey: chunks(hotkey, "1", "2") for hotkey in (A, B, C)}, config)
    plan = wire.MergePlan(
        epoch=Epoch(0),
        stage=StageIndex(0),
        num_elements=ELEMENTS,
        uploads=(),
        shards=shard_plans(ELEMENTS, [A, B, C], beacon="b", stage=StageIndex(0), epoch=Epoch(0), chunk_bytes=CHUNK),
    )
    done = StageMerge(plan=plan, accepted={number: ref(f"shard{number}") for number in range(3)})
    done.agreed = {0: None, 1: None}
    return turn, EpochState(epoch=Epoch(0), merges=[done, StageMerge(snapshot=ref("s1"))]).published()


def asked(turn: Turn) -> list[tuple[int, BlobRef]]:
    return [(effect.shard, effect.accepted) for effect in turn.effects if isinstance(effect, AuditShard)]


def test_only_agreeing_shards_are_drawn_and_a_crash_loses_none() -> None:
    turn, merged = merged_turn()
    merge_trust.draw_shard_audits(turn, None, beacon="later")
    assert not turn.effects
    merge_trust.draw_shard_audits(turn, merged, beacon="later")
    assert asked(turn) == [(0, ref("shard0")), (1, ref("shard1"))]
    again = Turn(state=turn.state, config=turn.config, now_s=2.0)
    again.effects = machine.outstanding(turn.state, turn.config)
    assert asked(again) == asked(turn)
    none, merged = merged_turn(fraction=0.0)
    merge_trust.draw_shard_audits(none, merged, beacon="later")
    assert not none.effects


def recomputed(shard: int, found: BlobRef) -> ShardRecomputed:
    return ShardRecomputed(at_s=3.0, epoch=Epoch(0), stage=StageIndex(0), shard=shard, ref=found)


def test_a_shard_that_comes_out_the_same_convicts_nobody() -> None:
    turn, merged = merged_turn()
    merge_trust.draw_shard_audits(turn, merged, beacon="later")
    merge_trust.shard_recomputed(turn, recomputed(0, ref("shard0")))
    (audited,) = said(turn)
    assert isinstance(audited, ShardAudited)
    assert audited.recomputed == audited.accepted
    merge_trust.shard_recomputed(turn, recomputed(0, ref("other")))
    assert len(said(turn)) == 1, "a second answer changes nothing"
    assert all(one.banned_until < 0 for one in turn.state.members.values())


def test_a_false_shard_convicts_both_reducers_with_the_evidence_on_record() -> None:
    turn, merged = merged_turn()
    first, second = merged.merges[0].plan.shards[1].reducers if merged.merges[0].plan else (A, B)
    lease = Lease(run_id="r", epoch=Epoch(1), sample=SampleId(7), branch=0, attempt=0, hops=(first, E), deadline_s=9.0)
    turn.state.current.samples[SampleId(7)] = Sample(lease, [None, None], [None, None], [False, False])
    turn.state.current.open_samples[SampleId(7)] = None
    turn.state.members[second].banned_until = 10_000
    merge_trust.draw_shard_audits(turn, merged, beacon="later")
    event = decode_event(encode_event(recomputed(1, ref("truth"))))
    effects = machine.step(turn.state, event, turn.config)
    assert effects
    (audited,) = [fact for fact in said(turn) if isinstance(fact, ShardAudited)]
    one, other = [fact for fact in said(turn) if isinstance(fact, ReducerConvicted)]
    assert (audited.reducers, audited.accepted, audited.recomputed) == (
        (first, second),
        ref("shard1"),
        ref("truth"),
    )
    assert (one.hotkey, one.epoch, one.banned_until) == (first, 0, 1 + turn.config.audit.ban_epochs)
    assert (other.hotkey, other.banned_until) == (second, 10_000)
    assert not turn.state.current.open_samples, "a banned miner holds no lease"
    assert ref("truth").key in turn.state.objects[Epoch(1)], "the evidence outlives the epoch it is about"


def test_a_run_does_not_close_while_a_shard_is_being_recomputed() -> None:
    turn, merged = merged_turn()
    state = turn.state
    state.phase, state.phase_deadline_s = Phase.CLOSING, 1e9
    merge_trust.draw_shard_audits(turn, merged, beacon="later")
    machine.step(state, recomputed(0, ref("shard0")), turn.config)
    assert state.phase is Phase.CLOSING
    machine.step(state, recomputed(1, ref("shard1")), turn.config)
    assert state.phase.value == "finished"


def test_an_account_is_void_for_a_copy_and_failed_for_a_false_shard() -> None:
    book = Book().start(0).sample(0, 0, A, C).sample(0, 1, B, D)
    book.say(UploadCopied(epoch=Epoch(0), stage=StageIndex(0), pair=(A, B), share=1.0)).finish(0, A, B, C, D)
    book.say(
        ShardAudited(
            epoch=Epoch(0),
            stage=StageIndex(1),
            shard=0,
            reducers=(C, D),
            accepted=ref("x"),
            recomputed=ref("y"),
        ),
        ReducerConvicted(
            epoch=Epoch(0),
            hotkey=C,
            stage=StageIndex(1),
            shard=0,
            banned_until=Epoch(9),
            at_epoch=Epoch(1),
        ),
    ).seal()
    account = book.record().accounts.epochs[Epoch(0)]
    assert account.voided == (A, B)
    assert account.failed == (C,)
    assert [audit.shard for audit in account.shard_audits] == [0]


def test_the_first_event_still_makes_an_empty_book() -> None:
    created: dict[str, Any] = {
        "run_id": "r",
        "config_json": "",
        "incentives_json": "",
        "corpus_digest": NO_DIGEST,
        "snapshots": (),
        "num_elements": (),
        "stage_flops": (),
        "beacon": "b",
    }
    state = State()
    machine.step(state, Created(at_s=0.0, **created), CONFIG)
    assert isinstance(state.ledger, Ledger)
    assert not machine.outstanding(state, CONFIG)
