"""The findings that decide a local subnet's exit code, each shown to fail for the reason it exists."""

import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from incentives.weights import to_u16
from neurons.checks import read_history
from neurons.local.evidence import Evidence, encode_report
from neurons.local.judging import judge
from neurons.local.notes import Counters, MergeCount, Trained, read_counters, read_training, read_unigram
from neurons.local.plan import Part
from neurons.local.report import make_report, one_screen
from neurons.settings import NodeConfig
from subnet.config import Bottleneck, RunConfig
from subnet.orchestration.ledger import AnyFact, CaseClosed, EpochPublished, Evaluated, VerdictRecorded
from subnet.types import Hotkey, Outcome
from tests.unit import small_record
from tests.unit.small_record import CONFIG, HOTKEYS, NAMES, OWNER, VALIDATOR, Change, metagraph, segments, unchanged

AUDITED = msgspec.structs.replace(CONFIG, audit=msgspec.structs.replace(CONFIG.audit, probability=1.0))
PASS_BYTES = 8 * 128 * 2  # B * T values of one bf16 channel
HONEST = Counters(
    activation_payload_bytes_sent=4 * PASS_BYTES,
    gradient_payload_bytes_sent=4 * PASS_BYTES,
    frame_head_bytes_sent=900,
    passes_sent=8,
    merges=(MergeCount(epoch=0, num_miners=2, vector_bytes=100, sent=300, received=200),),
)


def evidence(
    change: Change = unchanged,
    *,
    run: RunConfig = CONFIG,
    cheat: str = "",
    earned: float = 1.0,
    counters: Counters = HONEST,
    unigram: float | None = 3.0,
    restarts: int = 0,
) -> Evidence:
    history, whole = read_history(segments(change), owner=OWNER.hotkey)
    uids = metagraph().by_hotkey()
    row = {uids[hotkey].uid: value for hotkey, value in to_u16(history.final_weights()).items()}
    parts = {OWNER.hotkey: Part(name="orchestrator", role="orchestrator", wallet="owner", port=1)}
    for number, hotkey in enumerate(HOTKEYS):
        dishonest = cheat if number == 0 else ""
        parts[hotkey] = Part(name=NAMES[hotkey], role="miner", wallet="miners", port=2, cheat=dishonest)
    parts[VALIDATOR.hotkey] = Part(name="v1", role="validator", wallet="validator-1", port=3)
    return Evidence(
        config=NodeConfig(run=run),
        parts=parts,
        history=history,
        whole=whole,
        discovery=small_record.discovery(history),
        metagraph=metagraph(earned=earned),
        weights={VALIDATOR.hotkey: row},
        counters={"m1": counters},
        unigram=unigram,
        reference=Trained(num_samples=8, heldout_loss=1.4),
        restarts={"m2": restarts},
    )


def failed(found: Evidence) -> list[str]:
    return [finding.name for finding in judge(found, OWNER.verify) if finding.holds is False]


def detail(found: Evidence, words: str) -> tuple[bool | None, str]:
    return next((finding.holds, finding.detail) for finding in judge(found, OWNER.verify) if words in finding.name)


def run_of(num_epochs: int, **model: object) -> RunConfig:
    training = msgspec.structs.replace(CONFIG.training, num_epochs=num_epochs)
    return msgspec.structs.replace(CONFIG, training=training, model=msgspec.structs.replace(CONFIG.model, **model))


def replaced_losses(loss: float, zeroed: float) -> Change:
    def change(fact: AnyFact) -> AnyFact | None:
        if isinstance(fact, Evaluated):
            return msgspec.structs.replace(fact, loss=loss, loss_wires_zeroed=zeroed)
        return fact

    return change


def test_an_honest_run_holds_and_says_what_does_not_apply() -> None:
    found = evidence()
    assert failed(found) == []
    assert detail(found, "unigram") == (
        None,
        "1.500 = 0.500 of 3.000; does not apply: 2 epochs are fewer than 4",
    )
    assert detail(found, "two epochs before")[0] is None
    assert detail(found, "1/128") == (True, "1/128.0: 16384 bytes in 8 passes (headers 900 apart)")


def test_what_took_the_detour_is_counted_once_and_shown_apart() -> None:
    detoured = msgspec.structs.replace(HONEST, frames_detoured=3, detoured_payload_bytes_sent=3 * PASS_BYTES)
    found = evidence(counters=detoured)
    assert detail(found, "1/128") == detail(evidence(), "1/128")
    shown = {}
    for name, one in (("by push", evidence()), ("by store", found)):
        out = Console(width=200, record=True, file=io.StringIO(), highlight=False)
        out.print(one_screen(make_report(one, (), took_s=1.0), Path("/net")))
        shown[name] = out.export_text()
    assert "6,144 of them in 3 passes through the store" in shown["by store"]
    assert "through the store" not in shown["by push"]


def test_losses_are_judged_at_the_default_length() -> None:
    good = evidence(run=run_of(4))
    assert detail(good, "unigram") == (True, "1.500 = 0.500 of 3.000")
    assert detail(good, "wires zeroed")[0] is True
    bad = evidence(replaced_losses(2.9, 2.8), run=run_of(4))
    assert detail(bad, "unigram") == (False, "2.900 = 0.967 of 3.000")
    assert detail(bad, "wires zeroed") == (False, "2.800 against 2.900")
    assert detail(bad, "every epoch is published") == (False, "2 of 4, every shard merged")
    assert detail(evidence(run=run_of(4), unigram=None), "unigram") == (False, "it was not measured")


def test_a_control_without_wires_is_not_judged_by_them() -> None:
    control = evidence(run=run_of(4, bottleneck=Bottleneck.K0))
    assert detail(control, "unigram")[0] is None
    assert detail(control, "wires zeroed")[0] is None
    assert detail(control, "1/128")[0] is None
    wide = evidence(run=run_of(4, bottleneck_width=2))
    assert "not width / 64" in detail(wide, "1/128")[1]


def test_a_stage_that_stood_still_is_named() -> None:
    genesis = segments()[0].split(b"\n")[1]
    first = msgspec.json.decode(genesis)["fact"]["snapshots"][1]

    def change(fact: AnyFact) -> AnyFact | None:
        if isinstance(fact, EpochPublished):
            still = msgspec.structs.replace(fact.snapshots[1], **first)
            return msgspec.structs.replace(fact, snapshots=(fact.snapshots[0], still, fact.snapshots[2]))
        return fact

    assert detail(evidence(change), "params moved") == (False, "stages that did not: 1")


@pytest.mark.parametrize(
    ("counters", "name", "said"),
    [
        (msgspec.structs.replace(HONEST, gradient_payload_bytes_sent=0), "1/128", "1/256.0"),
        (Counters(), "1/128", "no pass between stages was counted"),
        (
            msgspec.structs.replace(
                HONEST, merges=(MergeCount(epoch=0, num_miners=2, vector_bytes=100, sent=300, received=230),)
            ),
            "4W",
            "the worst is 1.0600",
        ),
    ],
)
def test_bytes_are_counted(counters: Counters, name: str, said: str) -> None:
    holds, shown = detail(evidence(counters=counters), name)
    assert holds is False
    assert said in shown


def test_what_killed_miners_had_counted_is_not_held_against_the_run() -> None:
    holds, shown = detail(evidence(counters=Counters(), restarts=1), "1/128")
    assert (holds, "what they had counted is lost" in shown) == (None, True)


def test_an_honest_miner_that_is_not_paid_is_named_with_the_reason() -> None:
    holds, shown = detail(evidence(earned=0.0), "every honest miner is paid")
    assert holds is False
    assert shown.startswith("unpaid: m1 (it has a weight, but no epoch of the chain has paid by it yet); m2")


def convicting(hotkey: Hotkey) -> Change:
    """The record in which `hotkey` fails its audit of epoch 0, and a second validator finds the same."""

    def change(fact: AnyFact) -> AnyFact | tuple[AnyFact, ...] | None:
        if isinstance(fact, CaseClosed) and fact.hotkey == hotkey and fact.epoch == 0:
            return msgspec.structs.replace(fact, outcome="fail", banned_until=217)
        if isinstance(fact, VerdictRecorded) and fact.verdict.hotkey == hotkey and fact.verdict.epoch == 0:
            return tuple(
                VerdictRecorded(verdict=small_record.verdict(fact.verdict.epoch, hotkey, Outcome.FAIL, signer=signer))
                for signer in (small_record.VALIDATOR, small_record.CONFIRMER)
            )
        return fact

    return change


def test_a_convicted_cheat_is_what_a_run_with_a_cheat_is_for() -> None:
    found = evidence(convicting(HOTKEYS[0]), cheat="identity", run=AUDITED)
    assert failed(found) == []
    holds, shown = detail(found, "m1 cheats (identity)")
    assert (holds, shown) == (True, "for epoch 0; far off; score 0 after 0 epochs")
    report = make_report(found, judge(found, OWNER.verify), took_s=1.0)
    assert report.cheats[0].published_rule_passes is True
    assert report.miners[0].reason.startswith("banned until epoch 217")


def test_a_cheat_that_gets_away_fails_the_run() -> None:
    found = evidence(cheat="identity", run=AUDITED)
    assert detail(found, "m1 cheats (identity)") == (False, "it was never convicted")
    assert CONFIG.audit.probability < 1.0
    assert detail(evidence(cheat="identity"), "m1 cheats")[0] is None


def test_an_honest_miner_that_is_convicted_fails_the_run() -> None:
    assert detail(evidence(convicting(HOTKEYS[1])), "no honest miner") == (False, "convicted: m2")


def test_the_report_is_one_screen_and_one_file() -> None:
    found = evidence(restarts=1)
    report = make_report(found, judge(found, OWNER.verify), took_s=61.0)
    out = Console(width=150, record=True, file=io.StringIO(), highlight=False)
    out.print(one_screen(report, Path("/net")))
    shown = out.export_text()
    for part in (
        "Run run-1 ended after 61 s.",
        "one process, 8 samples",
        "m2         1      8",
        "restarted 1x",
        "(as the scores)",
        "a miner's merge 1.000 of 4W + 2W/N",
        "Every invariant held.",
        "strata audit /net",
    ):
        assert part in shown, shown
    assert len(shown.splitlines()) < 60
    written = json.loads(encode_report(report))
    assert written["is_ok"] and written["reference_loss"] == 1.4 and len(written["findings"]) == len(report.findings)


def test_notes_that_are_missing_or_half_written_count_as_not_there(tmp_path: Path) -> None:
    assert read_counters(tmp_path) is None
    (tmp_path / "counters.json").write_text('{"passes_sent": 3, "merg')
    assert read_counters(tmp_path) is None
    (tmp_path / "counters.json").write_text('{"passes_sent": 3, "of_a_later_version": 1}')
    assert read_counters(tmp_path) == Counters(passes_sent=3)
    assert read_unigram(tmp_path / "text.json") is None
    assert read_training(tmp_path / "training.jsonl") is None
    (tmp_path / "training.jsonl").write_text('{"line":"Trained","num_samples":4,"heldout_loss":2.0}\n{"line":"Pro')
    assert read_training(tmp_path / "training.jsonl") == Trained(num_samples=4, heldout_loss=2.0)
