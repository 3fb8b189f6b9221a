"""Who holds which stage: joining, coming back, leaving, moving (system.md 3)."""

from typing import Any

import msgspec
import pytest

from subnet import wire
from subnet.frames import digest
from subnet.orchestration.events import ChainSeen, HeardFrom, Wake
from subnet.orchestration.ledger import Assigned, Enlisted
from subnet.types import Epoch, Hotkey, NumericMode, Phase
from tests.unit.orchestration import CONFIG, HERE, MINERS, STRANGER, VALIDATORS, Run, created

JOIN = wire.Join(endpoint=HERE, mode=NumericMode.FP32, session="s1")


@pytest.fixture
def run() -> Run:
    run = Run()
    run.feed(created())
    run.chain()
    return run


def test_each_joiner_goes_to_the_emptiest_stage_the_later_on_a_tie(run: Run) -> None:
    run.join(*MINERS)
    assert [run.stage_of(miner) for miner in MINERS] == [2, 1, 0, 2, 1, 0]
    assert [fact.stage for fact in run.facts(Assigned)] == [2, 1, 0, 2, 1, 0]


def test_joining_again_changes_nothing_but_the_process(run: Run) -> None:
    run.join(*MINERS[:3])
    run.ready(MINERS[0])
    again = run.ask(MINERS[0], msgspec.structs.replace(JOIN, session="m1-1"))
    assert isinstance(again, wire.Joined) and again.stage == 2
    assert run.state.members[MINERS[0]].ready_epoch == 0, "the same process asks again"
    run.ask(MINERS[0], msgspec.structs.replace(JOIN, session="m1-2"))
    assert run.state.members[MINERS[0]].ready_epoch == -1, "another process has to load the params first"
    assert len(run.facts(Assigned)) == 3


@pytest.mark.parametrize(
    ("sender", "change", "code"),
    [
        (STRANGER, {}, "not-registered"),
        (VALIDATORS[0], {}, "role"),
        (MINERS[0], {"protocol_version": 0}, "protocol-version"),
        (MINERS[0], {"protocol_version": 99}, "protocol-version"),
        (MINERS[0], {"mode": NumericMode.BF16_AUTOCAST}, "mode"),
    ],
)
def test_who_may_not_join_is_told_the_rule(sender: Hotkey, change: dict[str, Any], code: str) -> None:
    training = msgspec.structs.replace(CONFIG.training, modes=(NumericMode.FP32,))
    run = Run(config=msgspec.structs.replace(CONFIG, training=training))
    run.feed(created())
    run.chain()
    run.done(VALIDATORS[0], wire.Enlist())
    assert run.refusal(sender, msgspec.structs.replace(JOIN, **change)) == code


def test_the_note_says_what_a_joiner_waits_for() -> None:
    run = Run()
    run.begin(*MINERS[:3])
    late = run.ask(MINERS[3], JOIN)
    assert isinstance(late, wire.Joined)
    assert (late.first_epoch, "waits for epoch 1" in late.note) == (1, True)
    run.state.members[MINERS[0]].banned_until = 9
    banned = run.ask(MINERS[0], JOIN)
    assert isinstance(banned, wire.Joined) and "banned until epoch 9" in banned.note
    run.chain()
    early = Run()
    early.feed(created())
    early.chain()
    first = early.ask(MINERS[0], JOIN)
    assert isinstance(first, wire.Joined) and first.note == "works in epoch 0"


def test_a_validator_enlists_once_with_a_permit_and_never_mines(run: Run) -> None:
    assert run.refusal(MINERS[0], wire.Enlist()) == "permit"
    run.done(VALIDATORS[0], wire.Enlist())
    run.done(VALIDATORS[0], wire.Enlist())
    assert [fact.validator for fact in run.facts(Enlisted)] == [VALIDATORS[0]]
    assert run.refusal(VALIDATORS[0], wire.Enlist(protocol_version=2)) == "protocol-version"
    run.join(MINERS[0])
    run.chain(permits=(*VALIDATORS, MINERS[0]))
    assert run.refusal(MINERS[0], wire.Enlist()) == "role"


def test_ready_means_these_params_and_this_epoch(run: Run) -> None:
    run.join(MINERS[0])
    anchor = run.state.snapshots[2].digest
    assert run.refusal(MINERS[0], wire.Ready(epoch=Epoch(1), anchor=anchor)) == "epoch"
    assert run.refusal(MINERS[0], wire.Ready(epoch=Epoch(0), anchor=digest(b"x"))) == "anchor"
    assert run.refusal(STRANGER, wire.Ready(epoch=Epoch(0), anchor=anchor)) == "not-joined"


def test_only_the_process_that_joined_last_can_leave(run: Run) -> None:
    run.join(MINERS[0])
    run.done(MINERS[0], wire.Leave(num_open_samples=0, session="an older one"))
    assert run.state.members[MINERS[0]].is_live
    run.done(MINERS[0], wire.Leave(num_open_samples=0, session="m1-1"))
    assert not run.state.members[MINERS[0]].is_live


def test_silence_and_a_sign_of_life(run: Run) -> None:
    run.join(MINERS[0])
    run.done(VALIDATORS[0], wire.Enlist())
    for hotkey in (MINERS[0], VALIDATORS[0], STRANGER):
        run.feed(HeardFrom(at_s=1.0, hotkey=hotkey, is_live=False))
    assert not run.state.members[MINERS[0]].is_live
    assert not run.state.auditors[VALIDATORS[0]]
    effects = run.feed(HeardFrom(at_s=2.0, hotkey=MINERS[0], is_live=False))
    assert not any(isinstance(effect, Wake) for effect in effects), "nothing changed"
    run.feed(HeardFrom(at_s=3.0, hotkey=MINERS[0], is_live=True))
    assert run.state.members[MINERS[0]].is_live


def test_a_slot_that_changed_hands_is_not_its_old_holder(run: Run) -> None:
    """A later registration of the same key is another registration; one that kept its slot stays."""
    run.join(MINERS[0], MINERS[1], MINERS[2])
    keys = ((MINERS[0], 5), (MINERS[1], 1))
    run.feed(ChainSeen(at_s=1.0, registered=keys, permits=()))
    assert [run.state.members[miner].is_live for miner in MINERS[:3]] == [False, True, False]
    assert run.state.validators == ()


def test_a_spare_moves_to_a_stage_without_miners_at_the_epochs_end() -> None:
    run = Run()
    run.begin(*MINERS[:4])
    run.train(rounds=4)
    run.commit()
    run.upload()
    gone = run.state.current.roster[1][0]
    run.feed(HeardFrom(at_s=run.now_s, hotkey=gone, is_live=False))
    run.merge()
    assert run.is_in(Phase.PUBLISHED)
    moved = run.facts(Assigned)[-1]
    assert (moved.stage, moved.first_epoch) == (1, 1)
    assert run.stage_of(moved.hotkey) == 1
    assert run.state.members[moved.hotkey].ready_epoch == -1


def test_no_stage_gives_its_last_miner() -> None:
    run = Run()
    run.begin(*MINERS[:3])
    run.train(rounds=4)
    run.commit()
    run.upload()
    gone = run.state.current.roster[1][0]
    run.feed(HeardFrom(at_s=run.now_s, hotkey=gone, is_live=False))
    run.merge()
    assert len(run.facts(Assigned)) == 3
