"""What the report of a local subnet says of stages that train apart."""

from dataclasses import replace

import msgspec
import pytest

from neurons.checks import Finding, History
from neurons.local.apart import (
    can_be_repeated,
    disturbed,
    every_stage_learns,
    round_rows,
    round_work,
    together_say_more,
)
from neurons.local.evidence import Evidence
from neurons.local.notes import Repeated
from neurons.local.plan import Part
from neurons.settings import NodeConfig
from subnet.config import BlockTrainConfig, Objective, RunKind
from subnet.orchestration.ledger import EpochPublished, Evaluated, SampleDropped, UpdateMergedLate
from subnet.types import Epoch, Metagraph, SampleId, StageIndex
from tests.unit.recorded import CONFIG, A, B, Book, C, D, V, ref

APART = msgspec.structs.replace(CONFIG, kind=RunKind.BLOCKTRAIN)
SAME = (Repeated(epoch=Epoch(0), same=(True, True)),)


def book() -> Book:
    """One round: A and B in stage 0, C and D in stage 1, a sample each."""
    made = Book(config=APART).start(0)
    for number, hotkey in enumerate((A, C, B, D)):
        made.sample(0, number, hotkey, loss=float(number))
    return made


def evidence(made: Book, *, repeated: tuple[Repeated, ...] = (), restarts: dict[str, int] | None = None) -> Evidence:
    return Evidence(
        config=NodeConfig(run=APART),
        parts={A: Part(name="m1", role="miner", wallet="miners", port=1)},
        history=History(owner=A, record=made.finish(0, A, B, C, D).record()),
        whole=Finding(name="whole", holds=True, detail=""),
        discovery=None,
        metagraph=Metagraph(netuid=2, at_block=1, owner_hotkey=A, tempo=10, neurons=()),
        weights={},
        repeated=repeated,
        restarts=restarts or {},
    )


def test_each_stage_of_each_round_has_a_row() -> None:
    rows = round_rows(evidence(book()))
    assert [(row.epoch, row.stage, row.loss, row.accepted, row.assigned) for row in rows] == [
        (0, 0, 1.0, 2, 2),
        (0, 1, 2.0, 2, 2),
    ]
    pipeline = evidence(book())
    assert round_rows(replace(pipeline, config=NodeConfig(run=CONFIG))) == ()


@pytest.mark.parametrize(("last", "holds"), [(1.0, True), (5.0, False)])
def test_a_stage_that_does_not_learn_is_named(last: float, holds: bool) -> None:
    made = Book(config=APART)
    for epoch, loss in enumerate((4.0, 4.5, last)):
        made.start(epoch).sample(epoch, 0, A, loss=loss).sample(epoch, 1, C, loss=loss)
        made.say(EpochPublished(epoch=Epoch(epoch), snapshots=(ref("s0"), ref("s1")), participants=((A,), (C,))))
    found = every_stage_learns(replace(evidence(book()), history=History(owner=A, record=made.seal().record())))
    assert found.holds is holds
    assert holds or found.detail == "stage 0 from 4.000 to 5.000; stage 1 from 4.000 to 5.000"
    assert every_stage_learns(evidence(book())).holds is None


@pytest.mark.parametrize(
    ("objective", "num_epochs", "loss", "holds"),
    [
        (Objective.POOLED, 4, 2.0, True),
        (Objective.POOLED, 4, 2.5, False),
        (Objective.POOLED, 3, 2.5, None),
        (Objective.GREEDY, 4, 2.5, None),
    ],
)
def test_stages_that_are_heard_together_must_add_to_the_first(
    objective: Objective, num_epochs: int, loss: float, holds: bool | None
) -> None:
    run = msgspec.structs.replace(
        APART,
        training=msgspec.structs.replace(APART.training, num_epochs=num_epochs),
        blocktrain=BlockTrainConfig(objective=objective),
    )
    unmeasured = replace(evidence(book()), config=NodeConfig(run=run))
    assert together_say_more(unmeasured).holds is False
    made = book()
    made.say(Evaluated(epoch=Epoch(0), validator=V, loss=loss, loss_wires_zeroed=2.25))
    found = together_say_more(replace(evidence(made), config=NodeConfig(run=run)))
    assert found.holds is holds
    assert f"{loss:.3f} against 2.250" in found.detail


def test_a_round_is_repeated_with_the_samples_of_each_worker_in_order() -> None:
    (account,) = evidence(book()).history.record.accounts.published()
    work = round_work(account)
    assert work.samples == ({A: (0,), B: (2,)}, {C: (1,), D: (3,)})
    assert len(work.snapshots) == 2


@pytest.mark.parametrize(
    ("repeated", "holds"),
    [(SAME, True), ((Repeated(epoch=Epoch(0), same=(True, False)),), False), ((), None)],
)
def test_other_bits_are_named(repeated: tuple[Repeated, ...], holds: bool | None) -> None:
    found = can_be_repeated(evidence(book(), repeated=repeated))
    assert found.holds is holds
    assert holds is not False or found.detail == "other bits: epoch 0 stage 1"


def test_a_repetition_that_ended_early_does_not_hold() -> None:
    two = book().finish(0, A, B, C, D).start(1)
    found = evidence(two, repeated=SAME)
    found.history.record.accounts.epochs[Epoch(1)] = replace(
        found.history.record.accounts.epochs[Epoch(0)], epoch=Epoch(1)
    )
    assert can_be_repeated(found) == Finding(
        name=can_be_repeated(found).name, holds=False, detail="it ended after 1 rounds; see its log"
    )


def test_what_the_record_does_not_tell_whole_is_not_repeated() -> None:
    assert disturbed(evidence(book())) == []
    restarted = evidence(book(), repeated=SAME, restarts={"m1": 1})
    assert can_be_repeated(restarted).detail == "does not apply: m1 cheated or was restarted"
    dropped = book().say(SampleDropped(epoch=Epoch(0), sample=SampleId(9), reason="its lease ran out"))
    assert disturbed(evidence(dropped)) == ["samples of epoch 0 were dropped"]
    late = book().say(UpdateMergedLate(epoch=Epoch(0), base_epoch=Epoch(0), hotkey=A, stage=StageIndex(0)))
    assert disturbed(evidence(late)) == ["an update came late into epoch 0"]
