"""What a person sees of a local subnet while it runs: lines where there is no terminal, a picture where there is one."""

import io
from dataclasses import replace

import msgspec
from rich.console import Console

from neurons.local.lines import changes
from neurons.local.screen import curve, screen
from neurons.local.supervisor import ProcessNote
from neurons.local.watch import Snapshot
from subnet.config import RunKind
from subnet.dashboard.views import AuditView, EvaluationView, MinerView, RunView, StageView
from subnet.types import Epoch, Hotkey, Phase, StageIndex, Uid
from tests.unit.small_record import HOTKEYS, NAMES, VALIDATOR, metagraph

MINERS = tuple(
    MinerView(
        hotkey=hotkey,
        stage=StageIndex(stage),
        is_live=stage != 1,
        is_in_roster=stage != 2,
        units=10 + stage,
        has_committed=stage == 0,
        has_uploaded=False,
        banned_until=-1,
    )
    for stage, hotkey in enumerate(HOTKEYS)
)
RUN = RunView(
    at_s=100.0,
    run_id="run-1",
    epoch=Epoch(1),
    phase=Phase.TRAINING,
    phase_since_s=90.0,
    phase_deadline_s=150.0,
    num_open_samples=2,
    num_samples=30,
    recent_loss=2.25,
    stages=tuple(
        StageView(stage=StageIndex(stage), num_live=1, num_accepted=stage, num_shards=3, is_published=False)
        for stage in range(3)
    ),
    miners=MINERS,
    validators=(VALIDATOR.hotkey,),
    audits=(),
    evaluations=(),
    posted={},
    sealed_segments=1,
    ledger_head="h",
    num_ledger_entries=77,
)
LOOK = Snapshot(at_s=100.0, run=RUN, metagraph=metagraph(), losses=(3.0, 2.5, 2.25))


def audit(outcome: str, *, reason: str = "near enough") -> AuditView:
    return AuditView(
        epoch=Epoch(0),
        hotkey=HOTKEYS[0],
        segment=1,
        validators=(VALIDATOR.hotkey,),
        is_answered=True,
        outcome=outcome,
        reasons=(reason,),
        rel_d=0.0123,
        rel_dw=0.5,
        published_rule_passes=True,
    )


def seen(**fields: object) -> Snapshot:
    return replace(LOOK, run=msgspec.structs.replace(RUN, **fields))


def test_nothing_is_said_when_nothing_changed() -> None:
    assert changes(LOOK, LOOK, NAMES, unigram=3.0) == []
    assert changes(Snapshot(at_s=0.0), Snapshot(at_s=1.0, is_stale=True), NAMES, unigram=None) == []


def test_phases_losses_audits_and_convictions_are_one_line_each() -> None:
    after = seen(
        phase=Phase.COMMITTING,
        evaluations=(EvaluationView(epoch=Epoch(0), loss=2.4, loss_wires_zeroed=2.9),),
        audits=(audit("fail", reason="a pass lies 1.2 from its replay"),),
        miners=(msgspec.structs.replace(MINERS[0], banned_until=217), *MINERS[1:]),
    )
    assert changes(LOOK, after, NAMES, unigram=3.0) == [
        "epoch 1  committing  miners 1+1+1  loss 2.250",
        "epoch 0  held-out loss 2.400 = 0.800 of unigram 3.000, with wires zeroed 2.900",
        "epoch 0  audit of m1 by v1: fail  relD 0.0123  dw 0.5000  a pass lies 1.2 from its replay",
        "m1 is convicted and banned until epoch 217",
    ]
    assert changes(after, after, NAMES, unigram=3.0) == []


def test_a_published_epoch_tells_whose_work_it_took_up_and_blocks_what_the_first_of_them_knows() -> None:
    took = tuple(msgspec.structs.replace(stage, num_assigned=2, num_merged=1) for stage in RUN.stages)
    found = (EvaluationView(epoch=Epoch(1), loss=2.4, loss_wires_zeroed=2.9),)
    after = seen(epoch=Epoch(2), stages=took, evaluations=found, kind=RunKind.BLOCKTRAIN)
    assert changes(LOOK, after, NAMES, unigram=None) == [
        "epoch 1  merged by stage, of the miners assigned: 1/2  1/2  1/2",
        "epoch 2  training  miners 1+1+1  loss 2.250",
        "epoch 1  held-out loss 2.400, the first stage alone 2.900",
    ]


def test_an_audit_is_told_when_it_is_closed() -> None:
    open_one, closed = seen(audits=(audit(""),)), seen(audits=(audit("pass"),))
    assert changes(LOOK, open_one, NAMES, unigram=None) == []
    assert changes(open_one, closed, NAMES, unigram=None) == [
        "epoch 0  audit of m1 by v1: pass  relD 0.0123  dw 0.5000"
    ]


def test_the_end_of_the_run_is_told() -> None:
    assert changes(LOOK, seen(phase=Phase.CLOSING), NAMES, unigram=None) == [
        "the last epoch is published; the last audits are being judged"
    ]
    assert changes(LOOK, seen(phase=Phase.FINISHED), NAMES, unigram=None) == [
        "the run is finished: 1 segments, 77 events"
    ]


def test_weights_that_changed_are_told_as_shares() -> None:
    after = replace(LOOK, weights={VALIDATOR.hotkey: {Uid(1): 65_535, Uid(2): 65_535}})
    assert changes(LOOK, after, NAMES, unigram=None) == ["v1 set weights on chain: m1 50.0%  m2 50.0%"]


def test_an_orchestrator_that_falls_silent_is_told_once() -> None:
    silent = replace(LOOK, is_stale=True)
    assert changes(LOOK, silent, NAMES, unigram=None) == ["the orchestrator does not answer"]
    assert changes(silent, silent, NAMES, unigram=None) == []
    assert changes(silent, LOOK, NAMES, unigram=None) == ["the orchestrator answers again"]


def picture(snapshot: Snapshot, *, notes: tuple[ProcessNote, ...] = ()) -> str:
    out = Console(width=140, record=True, file=io.StringIO(), highlight=False)
    out.print(screen(snapshot, names=NAMES, processes=notes, news=["12:00:00  something"], unigram=3.0))
    return out.export_text()


def test_the_picture_shows_stages_losses_audits_and_pay() -> None:
    weights = {VALIDATOR.hotkey: {Uid(1): 65_535, Uid(2): 65_535}}
    evaluations = (EvaluationView(epoch=Epoch(0), loss=2.4, loss_wires_zeroed=2.9),)
    note = ProcessNote(
        name="m1", role="miner", pid=1, port=2, started_at=0.0, restarts=2, hotkey=HOTKEYS[0], log="m1.log"
    )
    shown = picture(replace(seen(audits=(audit("pass"),), evaluations=evaluations), weights=weights), notes=(note,))
    for part in (
        "epoch 1  training  10 s, at most 50 s more",
        "samples 28 done, 2 open",
        "stage 2  merged 2/3",
        "m1     10 units  committed  restarted 2x",
        "m2     11 units  silent",
        "m3     12 units  next epoch",
        "█▃▁ 2.250",
        "e0 2.400 (0.80)",
        "e0 m1 pass",
        "weights of v1",
        "50.0%",
        "earned, alpha",
        "something",
    ):
        assert part in shown, shown


def test_the_picture_before_anything_is_known() -> None:
    assert "starting ..." in picture(Snapshot(at_s=0.0))
    assert "does not answer" in picture(replace(LOOK, is_stale=True))


def test_a_curve_is_one_line_as_wide_as_asked() -> None:
    assert curve([1.0, 1.0], 10) == "▁▁"
    assert curve([float(value) for value in range(100)], 8) == "▁▂▃▄▅▆▇█"


def test_a_key_without_a_name_is_shown_by_its_address() -> None:
    stranger = msgspec.structs.replace(audit("pass"), hotkey=Hotkey("5Stranger"))
    assert "audit of 5Stranger by v1" in changes(LOOK, seen(audits=(stranger,)), NAMES, unigram=None)[0]
