"""The turn of the whole machine: phases, time, repeated requests, and what a crash may have swallowed."""

import msgspec
import pytest

from subnet import wire
from subnet.errors import ProtocolViolation
from subnet.orchestration import machine
from subnet.orchestration.events import (
    Answer,
    AwaitBlock,
    BlockSeen,
    ChainSeen,
    CommitRoot,
    HeardFrom,
    Requested,
    RootIncluded,
    Ticked,
    chain_seen,
    decode_event,
    encode_event,
)
from subnet.orchestration.ledger import BeaconSeen, EpochStarted, RunCreated
from subnet.orchestration.retention import EPOCHS_KEPT
from subnet.orchestration.state import ANSWERS_KEPT, State
from subnet.types import Epoch, Hotkey, Metagraph, Neuron, Outcome, Phase, Uid
from tests.unit.orchestration import CONFIG, MINERS, RUN, VALIDATORS, Run, created

SIX = MINERS
ENDLESS = msgspec.structs.replace(CONFIG, training=msgspec.structs.replace(CONFIG.training, num_epochs=0))


def whole_epoch(run: Run) -> None:
    run.train()
    run.commit()
    run.upload()
    run.merge()


def close_cases(run: Run) -> None:
    """Every open audit is answered and passed, every drawn shard recomputed."""
    for (epoch, miner), case in list(run.state.cases.items()):
        if case.outcome is None:
            run.done(miner, run.answer(miner, epoch))
            run.done(case.asked[-1], run.verdict(case.asked[-1], miner, Outcome.PASS, epoch))
    run.recompute()


def test_a_run_from_genesis_to_its_end() -> None:
    run = Run()
    run.begin(*SIX)
    assert len(run.facts(RunCreated)) == 1
    whole_epoch(run)
    assert run.is_in(Phase.PUBLISHED)
    run.ready(*SIX)
    assert run.is_in(Phase.TRAINING)
    whole_epoch(run)
    assert run.is_in(Phase.CLOSING)
    close_cases(run)
    assert run.is_in(Phase.CLOSING), "held-out losses are still missing"
    for epoch, evaluation in list(run.state.evaluations.items()):
        run.done(evaluation.validator, wire.PostEvaluation(epoch=epoch, loss=2.0, loss_wires_zeroed=3.0))
    run.recompute()
    assert run.is_in(Phase.FINISHED)
    assert run.state.ledger.num_segments == 2
    run.tick(1e6)
    assert run.is_in(Phase.FINISHED)


def test_a_run_that_nobody_closes_finishes_at_its_deadlines() -> None:
    run = Run()
    run.begin(*SIX)
    whole_epoch(run)
    run.ready(*SIX)
    whole_epoch(run)
    run.recompute()
    for _ in range(20):
        run.tick(CONFIG.deadlines.verdict_s)
    assert run.is_in(Phase.FINISHED)


def test_a_run_without_an_end_goes_on() -> None:
    run = Run(config=ENDLESS)
    run.begin(*SIX)
    for _ in range(5):
        whole_epoch(run)
        run.ready(*SIX)
        close_cases(run)
    assert run.state.epoch == 5
    assert [fact.epoch for fact in run.facts(EpochStarted)] == list(range(6))
    assert [fact.beacon for fact in run.facts(BeaconSeen)] == [f"b{n}" for n in range(1, 6)]


def endless() -> Run:
    """In the training phase of epoch 0, with nothing to end the run."""
    run = Run(config=msgspec.structs.replace(CONFIG, training=msgspec.structs.replace(CONFIG.training, num_epochs=0)))
    run.begin(*SIX)
    return run


def test_nobody_is_asked_to_measure_an_epoch_whose_objects_are_gone() -> None:
    """Its evaluator was away all the time. Back, it would ask for them for ever."""
    run = endless()
    for _ in range(5):
        whole_epoch(run)
        run.ready(*SIX)
        close_cases(run)
    assert run.state.evaluations
    assert min(run.state.evaluations) > run.state.epoch - EPOCHS_KEPT


# ---- gathering and starting ------------------------------------------------------------------------------------------


def test_the_first_epoch_waits_for_enough_miners_or_for_its_deadline() -> None:
    run = Run()
    run.feed(created())
    run.chain()
    run.join(*SIX[:3])
    run.ready(*SIX[:3])
    assert run.is_in(Phase.GATHERING)
    run.tick(CONFIG.deadlines.gathering_s)
    assert run.is_in(Phase.TRAINING)
    assert [len(stage) for stage in run.state.current.roster] == [1, 1, 1]


def test_the_first_epoch_waits_for_validators_or_for_its_deadline() -> None:
    waits = msgspec.structs.replace(CONFIG, training=msgspec.structs.replace(CONFIG.training, min_validators=2))
    for validators, waits_on in (((), True), (VALIDATORS[:1], True), (VALIDATORS[:2], False)):
        run = Run(config=waits)
        run.feed(created(waits))
        run.chain()
        run.join(*SIX)
        run.ready(*SIX)
        for validator in validators:
            run.done(validator, wire.Enlist())
        assert run.is_in(Phase.GATHERING if waits_on else Phase.TRAINING)
        run.tick(waits.deadlines.gathering_s)
        assert run.is_in(Phase.TRAINING)


def test_no_epoch_starts_while_a_stage_has_nobody() -> None:
    run = Run()
    run.feed(created())
    run.chain()
    run.join(*SIX[:2])
    run.ready(*SIX[:2])
    run.tick(10 * CONFIG.deadlines.gathering_s)
    assert run.is_in(Phase.GATHERING)
    run.join(SIX[2])
    run.ready(SIX[2])
    assert run.is_in(Phase.TRAINING)


def test_a_published_epoch_is_waited_for_and_then_begun_without_the_slowest() -> None:
    run = Run()
    run.begin(*SIX)
    whole_epoch(run)
    run.ready(*SIX[:5])
    assert run.is_in(Phase.PUBLISHED)
    run.tick(CONFIG.deadlines.ready_s)
    assert run.is_in(Phase.TRAINING)
    assert SIX[5] not in [hotkey for stage in run.state.current.roster for hotkey in stage]


def test_training_goes_on_while_a_stage_is_behind_or_gone() -> None:
    run = Run()
    run.begin(*SIX)
    for miner in run.state.current.roster[1]:
        run.feed(HeardFrom(at_s=run.now_s, hotkey=miner, is_live=False))
    assert run.is_in(Phase.TRAINING)
    run.tick(CONFIG.deadlines.training_s)
    assert run.is_in(Phase.COMMITTING)


# ---- requests --------------------------------------------------------------------------------------------------------


def test_the_same_request_id_gets_the_same_answer_and_changes_nothing() -> None:
    run = Run()
    run.begin(*SIX)
    miner = run.state.current.roster[0][0]
    request = wire.LeaseSamples(epoch=Epoch(0), count=2)
    first = run.ask(miner, request, request_id="same")
    head = run.state.ledger.head
    assert run.ask(miner, request, request_id="same") == first
    assert run.ask(miner, wire.Leave(num_open_samples=0), request_id="same") == first
    assert run.state.ledger.head == head
    assert run.ask(miner, request, request_id="other") != first
    refused = run.ask(miner, wire.Ready(epoch=Epoch(9), anchor=run.state.snapshots[0].digest), request_id="no")
    assert isinstance(refused, wire.ErrorBody)
    assert run.ask(miner, request, request_id="no") == refused


def test_answers_are_kept_for_a_while_only() -> None:
    run = Run()
    run.begin(*SIX)
    for number in range(2 * ANSWERS_KEPT):
        run.ask(SIX[0], wire.UploadDone(epoch=Epoch(0)), request_id=f"q{number}")
    assert len(run.state.answers[SIX[0]]) == ANSWERS_KEPT


def test_a_request_that_only_reads_has_no_place_in_the_journal() -> None:
    run = Run()
    run.begin(*SIX)
    event = Requested(at_s=0.0, sender=SIX[0], request_id="r", request=wire.Poll(known_version=0, wait_s=0.0))
    with pytest.raises(ProtocolViolation):
        machine.step(run.state, event, run.config)


def test_time_never_goes_back() -> None:
    run = Run()
    run.begin(*SIX)
    run.tick(50.0)
    run.feed(Ticked(at_s=1.0))
    assert run.state.now_s == run.now_s


# ---- what the edge asks ----------------------------------------------------------------------------------------------


def test_the_next_tick_is_when_time_alone_changes_something() -> None:
    run = Run()
    run.feed(created())
    assert machine.next_tick_s(run.state, run.config) == machine.IDLE_TICK_S
    run = Run()
    run.begin(*SIX)
    assert machine.next_tick_s(run.state, run.config) == run.state.now_s + machine.IDLE_TICK_S
    run.tick(CONFIG.deadlines.training_s - 2)
    assert machine.next_tick_s(run.state, run.config) == run.state.phase_deadline_s
    lease = run.lease(run.state.current.roster[0][0])[0]
    run.now_s = lease.deadline_s - 1
    run.feed(ChainSeen(at_s=run.now_s, registered=tuple(sorted(run.state.registered.items())), permits=VALIDATORS))
    assert machine.next_tick_s(run.state, run.config) <= lease.deadline_s


def test_what_a_crash_swallowed_is_asked_for_again() -> None:
    run = Run()
    assert machine.outstanding(run.state, run.config) == []
    run.begin(*SIX)
    assert machine.outstanding(run.state, run.config) == []
    run.train()
    assert machine.outstanding(run.state, run.config) == []
    for miner in SIX:
        run.done(miner, run.commitment(miner))
    root = run.state.current.commit_root
    assert machine.outstanding(run.state, run.config) == [CommitRoot(epoch=Epoch(0), root=root)]
    run.feed(RootIncluded(at_s=run.now_s, epoch=Epoch(0), at_block=10))
    assert machine.outstanding(run.state, run.config) == [AwaitBlock(epoch=Epoch(0), at_block=12)]
    run.feed(BlockSeen(at_s=run.now_s, epoch=Epoch(0), at_block=12, block_hash="b1"))
    run.upload()
    run.state.current.merges[0].plan = None
    assert machine.outstanding(run.state, run.config) == []


# ---- the journal -----------------------------------------------------------------------------------------------------


def test_the_journal_rebuilds_the_same_state() -> None:
    run = Run()
    run.begin(*SIX)
    whole_epoch(run)
    again, effects = State(), []
    for event in run.events:
        effects += machine.step(again, decode_event(encode_event(event)), run.config)
    assert again == run.state
    assert [e for e in effects if isinstance(e, Answer)][-1].response == wire.Done()


def test_the_machine_sees_keys_and_permits_of_a_metagraph_sorted() -> None:
    def neuron(name: str, uid: int, *, permit: bool) -> Neuron:
        return Neuron(
            uid=Uid(uid), hotkey=Hotkey(name), coldkey="c", stake=1.0, validator_permit=permit, registered_at_block=uid,
            last_update_block=0, is_active=True, incentive=0.0, dividends=0.0, emission=0.0,
        )  # fmt: skip

    graph = Metagraph(
        netuid=1, at_block=5, owner_hotkey=Hotkey("o"), tempo=10,
        neurons=(neuron("z", 0, permit=True), neuron("a", 1, permit=False)),
    )  # fmt: skip
    seen = chain_seen(graph, at_s=3.0)
    assert seen.registered == (("a", 1), ("z", 0))
    assert seen.permits == ("z",)
    assert decode_event(encode_event(seen)) == seen


def test_a_journal_that_is_not_ours_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_event(b'{"event":"Invented","at_s":0.0}')
    assert RUN in encode_event(created()).decode()
