"""One unit of work: leased once, attested by neighbours, credited once (trust.md 1.2, 3)."""

from typing import Any

import msgspec
import pytest

from subnet import receipts, wire
from subnet.config import Bottleneck
from subnet.frames import digest
from subnet.orchestration import work
from subnet.orchestration.events import HeardFrom, Wake
from subnet.orchestration.ledger import Credited, Leased, LossRecorded, OutputRepeated, SampleDropped, Voided
from subnet.types import Direction, Epoch, Lease, Phase, Receipt, SampleId, StageIndex
from tests.unit.orchestration import CONFIG, MINERS, RUN, STRANGER, Run, passes

SIX = MINERS
"""Joined in this order: m1 at stage 2, m2 at 1, m3 at 0, and once more round."""


@pytest.fixture
def run() -> Run:
    run = Run()
    run.begin(*SIX)
    return run


def first_lease(run: Run) -> Lease:
    return run.lease(run.state.current.roster[0][0])[0]


def num_credited(run: Run) -> int:
    return len(run.facts(Credited))


def test_a_sample_that_everybody_attests_is_credited_once_for_each_stage(run: Run) -> None:
    lease = first_lease(run)
    run.work(lease)
    assert [(fact.stage, fact.hotkey) for fact in run.facts(Credited)] == [
        (stage, lease.hops[stage]) for stage in (1, 0, 2)
    ] or num_credited(run) == 3
    assert [fact.loss for fact in run.facts(LossRecorded)] == [1.5]
    assert not run.state.current.open_samples


def test_the_same_batch_again_is_acknowledged_again_and_credits_nothing(run: Run) -> None:
    lease = first_lease(run)
    batch = passes(lease, 0, 3)
    head = receipts.extend(receipts.first_head(RUN, Epoch(0), lease.hops[0]), batch)
    request = wire.PostReceipts(epoch=Epoch(0), num_before=0, receipts=batch, head=head)
    first = run.ask(lease.hops[0], request)
    again = run.ask(lease.hops[0], request)
    assert first == again
    assert isinstance(again, wire.Ack) and again.num_receipts == 2
    run.work(lease, without=(lease.hops[0],))
    assert num_credited(run) == 3


def test_an_empty_batch_is_acknowledged(run: Run) -> None:
    answer = run.post(SIX[0])
    assert isinstance(answer, wire.Ack) and answer.num_receipts == 0


@pytest.mark.parametrize("stage", range(3))
def test_a_unit_waits_for_what_its_neighbours_attest(run: Run, stage: int) -> None:
    lease = first_lease(run)
    run.work(lease, without=(lease.hops[stage],))
    before = num_credited(run)
    assert lease.hops[stage] not in {fact.hotkey for fact in run.facts(Credited)}
    run.post(lease.hops[stage], *passes(lease, stage, 3))
    assert num_credited(run) == 3 > before


def test_digests_that_neighbours_do_not_name_earn_nothing(run: Run) -> None:
    lease = first_lease(run)
    forward, backward = passes(lease, 1, 3)
    other = digest(b"another")
    run.post(lease.hops[1], msgspec.structs.replace(forward, input_digest=other), backward)
    run.work(lease, without=(lease.hops[1],))
    assert {fact.stage for fact in run.facts(Credited)} == {0, 2}
    again = first_lease(run)
    forward, backward = passes(again, 1, 3)
    run.post(again.hops[1], forward, msgspec.structs.replace(backward, input_digest=other))
    run.work(again, without=(again.hops[1],))
    assert [fact.stage for fact in run.facts(Credited) if fact.sample == again.sample].count(StageIndex(1)) == 0


def test_an_input_worked_before_earns_nothing(run: Run) -> None:
    """The same activation under another sample: whoever passes it on, or works it twice, gains no unit."""
    one, two = first_lease(run), first_lease(run)
    stage_1 = one.hops[1]
    run.work(one)
    forward, backward = passes(one, 1, 3)
    replayed = [msgspec.structs.replace(receipt, sample=two.sample) for receipt in (forward, backward)]
    lease = run.state.current.samples[two.sample].lease
    run.state.current.samples[two.sample].lease = msgspec.structs.replace(
        lease, hops=(lease.hops[0], stage_1, lease.hops[2])
    )
    run.post(stage_1, *replayed)
    assert [fact for fact in run.facts(Credited) if fact.sample == two.sample] == []


def test_who_sends_the_same_for_two_samples_is_audited_from_then_on(run: Run) -> None:
    """Recorded once an epoch; a sample worked again after a restart is no repetition, nor is an equal loss."""
    one, two, three = (first_lease(run) for _ in range(3))
    sender = one.hops[0]
    forward, backward = passes(one, 0, 3)
    run.post(sender, forward, backward)
    run.post(sender, *passes(one, 0, 3))
    assert not run.facts(OutputRepeated)
    for lease in (two, three):
        fresh, _ = passes(lease, 0, 3)
        run.post(sender, msgspec.structs.replace(fresh, output_digest=forward.output_digest))
    (fact,) = run.facts(OutputRepeated)
    assert (fact.hotkey, fact.first, fact.sample) == (sender, one.sample, two.sample)
    assert run.state.members[sender].flagged_until == run.config.audit.flag_epochs
    last = one.hops[2]
    for lease in (one, two):
        run.post(last, *passes(lease, 2, 3))
    assert len(run.facts(OutputRepeated)) == 1


def test_in_the_control_that_sends_nothing_every_sample_looks_alike_and_is_paid() -> None:
    """Once a run without any channel credited one sample for each miner."""
    model = msgspec.structs.replace(CONFIG.model, bottleneck=Bottleneck.K0)
    run = Run(config=msgspec.structs.replace(CONFIG, model=model))
    run.begin(*SIX)
    nothing = digest(b"nothing")
    for lease in (first_lease(run), first_lease(run)):
        for stage, miner in enumerate(lease.hops):
            forward, backward = passes(lease, stage, 3)
            forward = msgspec.structs.replace(
                forward,
                input_digest=nothing if stage else forward.input_digest,
                output_digest=nothing if stage < 2 else forward.output_digest,
            )
            backward = msgspec.structs.replace(
                backward,
                input_digest=nothing if stage < 2 else backward.input_digest,
                output_digest=nothing if stage else backward.output_digest,
            )
            run.post(miner, forward, backward)
    assert num_credited(run) == 2 * 3
    assert not run.facts(OutputRepeated)


def test_two_samples_with_the_same_loss_are_both_credited(run: Run) -> None:
    """The last stage's backward starts from its loss alone; equal losses once looked like a replayed input."""
    for miner in run.state.current.roster[0]:
        for lease in run.lease(miner, 2):
            run.work(lease)
    assert num_credited(run) == 3 * 4


def test_receipts_of_steps_drops_strangers_and_unknown_samples_credit_nothing(run: Run) -> None:
    lease = first_lease(run)
    forward, _ = passes(lease, 0, 3)
    step = Receipt(
        run_id=RUN, epoch=Epoch(0), sample=SampleId(-1), branch=0, stage=StageIndex(0),
        direction=Direction.STEP, params_version=0,
    )  # fmt: skip
    drop = msgspec.structs.replace(step, direction=Direction.DROP, sample=lease.sample)
    unknown = msgspec.structs.replace(forward, sample=SampleId(999))
    assert isinstance(run.post(lease.hops[0], step, drop, unknown, forward, forward), wire.Ack)
    other = next(hotkey for hotkey in run.state.current.roster[0] if hotkey != lease.hops[0])
    assert isinstance(run.post(other, forward), wire.Ack)
    assert num_credited(run) == 0


def test_work_after_its_lease_earns_nothing(run: Run) -> None:
    lease = first_lease(run)
    run.now_s += run.config.deadlines.sample_s + 1
    run.work(lease)
    assert num_credited(run) == 0
    run.tick()
    assert [fact.reason for fact in run.facts(SampleDropped)] == ["its lease ran out"]
    run.tick()
    assert len(run.facts(SampleDropped)) == 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"epoch": Epoch(1)}, "epoch"),
        ({"num_before": 1}, "chain"),
        ({"num_before": -1}, "chain"),
        ({"head": digest(b"no")}, "chain"),
    ],
)
def test_a_batch_that_does_not_fit_the_chain_is_refused(run: Run, change: dict[str, Any], code: str) -> None:
    miner = SIX[0]
    head = receipts.first_head(RUN, Epoch(0), miner)
    request = wire.PostReceipts(epoch=Epoch(0), num_before=0, receipts=(), head=head)
    assert run.refusal(miner, msgspec.structs.replace(request, **change)) == code


def test_a_chain_is_not_rewritten(run: Run) -> None:
    lease = first_lease(run)
    forward, backward = passes(lease, 0, 3)
    run.post(lease.hops[0], forward, backward)
    other = msgspec.structs.replace(forward, params_version=5)
    head = receipts.extend(receipts.first_head(RUN, Epoch(0), lease.hops[0]), (other,))
    request = wire.PostReceipts(epoch=Epoch(0), num_before=0, receipts=(other,), head=head)
    assert run.refusal(lease.hops[0], request) == "chain"


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": "other"},
        {"epoch": Epoch(3)},
        {"stage": StageIndex(2)},
        {"input_digest": "0" * 65},
        {"output_digest": "x" * 99},
    ],
)
def test_receipts_of_another_run_epoch_or_stage_or_with_other_text_are_refused(
    run: Run, change: dict[str, Any]
) -> None:
    lease = first_lease(run)
    forward, _ = passes(lease, 0, 3)
    answer = run.post(lease.hops[0], msgspec.structs.replace(forward, **change))
    assert isinstance(answer, wire.ErrorBody) and answer.code == "receipt"
    assert lease.hops[0] not in run.state.current.work


def test_receipts_after_the_commitment_and_in_other_phases_are_refused(run: Run) -> None:
    run.train()
    miner = SIX[0]
    run.done(miner, run.commitment(miner))
    answer = run.post(miner)
    assert isinstance(answer, wire.ErrorBody) and answer.code == "committed"
    run.commit(*SIX[1:])
    answer = run.post(SIX[0])
    assert isinstance(answer, wire.ErrorBody) and answer.code == "phase"
    answer = run.ask(STRANGER, wire.LeaseSamples(epoch=Epoch(0), count=1))
    assert isinstance(answer, wire.ErrorBody)


def test_a_last_stage_that_reports_no_loss_leaves_none_on_record(run: Run) -> None:
    """Its audit will say what that is; the sample counts for the others."""
    lease = first_lease(run)
    forward, backward = passes(lease, 2, 3)
    run.post(lease.hops[2], msgspec.structs.replace(forward, loss=None), backward)
    run.work(lease, without=(lease.hops[2],))
    assert num_credited(run) == 3
    assert not run.facts(LossRecorded)


# ---- leases ----------------------------------------------------------------------------------------------------------


def test_leases_are_counted_and_follow_the_drawn_pathways(run: Run) -> None:
    roster = run.state.current.roster[0]
    leases = run.lease(roster[0], 1000)
    assert len(leases) == work.LEASES_AT_ONCE
    assert len({lease.sample for lease in leases}) == len(leases)
    assert all(lease.hops[0] == roster[0] for lease in leases)
    assert run.lease(roster[0], -1) == []
    assert len(run.facts(Leased)) == len(leases)


def test_leases_are_for_the_first_stage_of_the_roster(run: Run) -> None:
    later = run.state.current.roster[1][0]
    request = wire.LeaseSamples(epoch=Epoch(0), count=1)
    assert run.refusal(later, request) == "roster"
    assert run.refusal(STRANGER, request) == "roster"
    assert run.refusal(later, wire.LeaseSamples(epoch=Epoch(1), count=1)) == "epoch"


def test_who_begins_samples_and_finishes_none_gets_no_more_of_them(run: Run) -> None:
    """Each lease is on record for ever, and one miner could fill it until nobody can read it."""
    miner, other = run.state.current.roster[0]
    num_spare = work.LEASES_AT_ONCE + work.SPARE_TARGETS * CONFIG.training.target_batches
    leases = [lease for _ in range(2) for lease in run.lease(miner, num_spare)]
    request = wire.LeaseSamples(epoch=Epoch(0), count=1)
    assert len(leases) == num_spare and run.refusal(miner, request) == "leases"
    assert len(run.lease(other)) == 1
    run.work(leases[0])
    assert len(run.lease(miner, 8)) == 1, "as many as it finishes"
    assert run.refusal(miner, request) == "leases"


def test_a_chain_holds_no_more_than_work_can_have_made(run: Run) -> None:
    lease = first_lease(run)
    step = msgspec.structs.replace(passes(lease, 0, 3)[0], direction=Direction.STEP)
    most = 2 * work.RECEIPTS_PER_UNIT
    assert isinstance(run.post(lease.hops[0], *([step] * most)), wire.Ack)
    answer = run.post(lease.hops[0], step)
    assert isinstance(answer, wire.ErrorBody) and answer.code == "receipt"
    first_lease(run)
    assert isinstance(run.post(lease.hops[0], step), wire.Ack)


def test_a_banned_miner_gets_no_lease(run: Run) -> None:
    miner = run.state.current.roster[0][0]
    run.state.members[miner].banned_until = 3
    assert run.refusal(miner, wire.LeaseSamples(epoch=Epoch(0), count=1)) == "banned"


def test_a_hop_that_is_gone_is_replaced_when_leasing(run: Run) -> None:
    gone, left = run.state.current.roster[1]
    run.feed(HeardFrom(at_s=0.0, hotkey=gone, is_live=False))
    leases = [lease for miner in run.state.current.roster[0] for lease in run.lease(miner, 4)]
    assert {lease.hops[1] for lease in leases} == {left}
    run.feed(HeardFrom(at_s=0.0, hotkey=left, is_live=False))
    assert run.lease(run.state.current.roster[0][0], 4) == [], "no samples while a stage has nobody"


def test_a_hop_that_cannot_be_reached_is_rerouted(run: Run) -> None:
    lease = first_lease(run)
    answer = run.ask(lease.hops[0], wire.Reroute(lease=lease, stage=StageIndex(1)))
    assert isinstance(answer, wire.Leases)
    (new,) = answer.leases
    assert (new.attempt, new.sample) == (1, lease.sample)
    assert new.hops[1] != lease.hops[1] and new.hops[0] == lease.hops[0]
    assert run.refusal(lease.hops[0], wire.Reroute(lease=lease, stage=StageIndex(1))) == "lease"
    run.work(new)
    assert num_credited(run) == 3


def test_who_takes_over_a_hop_is_not_paid_for_what_the_one_before_it_attested(run: Run) -> None:
    """Nor may the orchestrator fall over it: the new one has said nothing yet, and has no books."""
    lease = first_lease(run)
    run.work(lease, without=lease.hops[:1])
    (new,) = run.ask(lease.hops[0], wire.Reroute(lease=lease, stage=StageIndex(1))).leases  # type: ignore[union-attr]
    assert isinstance(run.post(lease.hops[0], *passes(lease, 0, 3)), wire.Ack)
    assert num_credited(run) == 1, "the last stage, whose neighbour attests it; the hop before waits for its new miner"
    run.work(new, without=(lease.hops[0], lease.hops[2]))
    assert sorted(fact.hotkey for fact in run.facts(Credited)) == sorted(new.hops)


def test_a_hop_that_is_credited_is_not_taken_away(run: Run) -> None:
    lease = first_lease(run)
    run.work(lease, without=lease.hops[:1])
    run.post(lease.hops[0], passes(lease, 0, 3)[0])
    assert lease.hops[1] in {fact.hotkey for fact in run.facts(Credited)}
    assert run.refusal(lease.hops[0], wire.Reroute(lease=lease, stage=StageIndex(1))) == "lease"


@pytest.mark.parametrize("stage", [0, 3, -1])
def test_only_the_miner_before_the_hop_asks_for_another(run: Run, stage: int) -> None:
    lease = first_lease(run)
    assert run.refusal(lease.hops[0], wire.Reroute(lease=lease, stage=StageIndex(stage))) == "lease"
    assert run.refusal(lease.hops[0], wire.Reroute(lease=lease, stage=StageIndex(2))) == "lease"
    unknown = msgspec.structs.replace(lease, sample=SampleId(10_000))
    assert run.refusal(lease.hops[0], wire.Reroute(lease=unknown, stage=StageIndex(1))) == "lease"


def test_rerouting_away_from_one_neighbour_is_limited(run: Run) -> None:
    """Nobody chooses its partners by calling the others unreachable."""
    miner = run.state.current.roster[0][0]
    leases = run.lease(miner, 8)
    partner = leases[0].hops[1]
    codes = [
        run.ask(miner, wire.Reroute(lease=lease, stage=StageIndex(1))) for lease in leases if lease.hops[1] == partner
    ]
    assert isinstance(codes[0], wire.Leases)
    assert all(isinstance(answer, wire.ErrorBody) and answer.code == "no-replica" for answer in codes[1:])
    assert "too many re-routes between two miners" in {fact.reason for fact in run.facts(SampleDropped)}


def test_without_a_replica_the_sample_is_dropped(run: Run) -> None:
    lease = first_lease(run)
    other = next(hotkey for hotkey in run.state.current.roster[1] if hotkey != lease.hops[1])
    run.feed(HeardFrom(at_s=0.0, hotkey=other, is_live=False))
    assert run.refusal(lease.hops[0], wire.Reroute(lease=lease, stage=StageIndex(1))) == "no-replica"
    assert [fact.reason for fact in run.facts(SampleDropped)] == ["no replica to re-route to"]


def test_the_last_open_sample_wakes_those_who_wait_to_commit(run: Run) -> None:
    lease = first_lease(run)
    run.train(rounds=3)
    assert run.is_in(Phase.COMMITTING) and list(run.state.current.open_samples) == [lease.sample]
    run.effects.clear()
    run.work(lease)
    assert not run.state.current.open_samples
    assert any(isinstance(effect, Wake) for effect in run.effects)


# ---- resuming --------------------------------------------------------------------------------------------------------


def test_a_restarted_miner_goes_on_from_its_checkpoint_and_loses_what_came_after(run: Run) -> None:
    one, two = first_lease(run), first_lease(run)
    run.work(one)
    run.post(two.hops[0], passes(two, 0, 3)[0])
    miner = one.hops[0]
    first = receipts.first_head(RUN, Epoch(0), miner)
    answer = run.ask(miner, wire.Resume(epoch=Epoch(0), num_receipts=0, head=first))
    assert answer == wire.Resumed(num_receipts=0)
    assert [(fact.hotkey, fact.samples) for fact in run.facts(Voided)] == [(miner, (one.sample,))]
    assert [fact.reason for fact in run.facts(SampleDropped)] == ["a miner that held it restarted"]
    again = run.ask(miner, wire.Resume(epoch=Epoch(0), num_receipts=0, head=first))
    assert again == wire.Resumed(num_receipts=0)
    assert len(run.facts(Voided)) == 1


def test_a_restart_takes_no_sample_from_miners_that_the_restarted_one_never_worked_with(run: Run) -> None:
    """Whoever likes can write a receipt of any sample into its own chain, and cut it off again."""
    lease = first_lease(run)
    other = next(hotkey for hotkey in run.state.current.roster[0] if hotkey != lease.hops[0])
    run.post(other, passes(lease, 0, 3)[0])
    first = receipts.first_head(RUN, Epoch(0), other)
    assert run.ask(other, wire.Resume(epoch=Epoch(0), num_receipts=0, head=first)) == wire.Resumed(num_receipts=0)
    assert list(run.state.current.open_samples) == [lease.sample] and not run.facts(SampleDropped)


def test_who_is_ahead_of_the_record_posts_the_rest_again(run: Run) -> None:
    miner = SIX[0]
    answer = run.ask(miner, wire.Resume(epoch=Epoch(0), num_receipts=7, head=digest(b"ahead")))
    assert answer == wire.Resumed(num_receipts=0)
    assert run.state.members[miner].ready_epoch == 0


def test_resuming_from_another_chain_or_after_the_commitment_is_refused(run: Run) -> None:
    miner = SIX[0]
    wrong = wire.Resume(epoch=Epoch(0), num_receipts=0, head=digest(b"other"))
    assert run.refusal(miner, wrong) == "chain"
    assert run.refusal(miner, msgspec.structs.replace(wrong, num_receipts=-1)) == "chain"
    assert run.refusal(STRANGER, wrong) == "not-joined"
    run.train()
    run.done(miner, run.commitment(miner))
    assert run.refusal(miner, wrong) == "committed"


def test_signatures_are_put_on_leases_in_order(run: Run) -> None:
    leases = tuple(run.lease(run.state.current.roster[0][0], 2))
    signed = work.sign_leases(leases, ("aa", "bb"))
    assert [lease.signature for lease in signed.leases] == ["aa", "bb"]
