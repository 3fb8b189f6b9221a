"""What a record proves by itself and against the chain: each check holds for an honest record, and names what does not hold."""

import msgspec
import pytest

from incentives.weights import to_u16
from neurons import checks
from neurons.checks import History, read_history
from subnet.orchestration.ledger import AnyFact, Committed, Credited, EpochPublished, ScoresPosted, VerdictRecorded
from subnet.types import Epoch, Hotkey, Uid
from tests.unit import small_record
from tests.unit.small_record import HOTKEYS, NAMES, OWNER, VALIDATOR, metagraph, segments


def history(data: list[bytes] | None = None) -> History:
    found, whole = read_history(data or segments(), owner=OWNER.hotkey)
    assert whole.holds, whole.detail
    return found


def on_chain(found: History, *, segment: int = -1) -> dict[Hotkey, dict[Uid, int]]:
    uids = metagraph().by_hotkey()
    row = {uids[hotkey].uid: value for hotkey, value in to_u16(found.boards[segment].weights).items()}
    return {VALIDATOR.hotkey: row}


def test_an_honest_record_holds() -> None:
    found = history()
    findings = [
        checks.check_invariants(found),
        checks.check_verdicts(found, OWNER.verify),
        checks.check_outcomes(found),
        checks.check_commit_roots(found),
        checks.check_posted(found),
        checks.check_roots(found, small_record.discovery(found), is_final=True),
        checks.check_weights(found, metagraph(), on_chain(found), names=NAMES, is_final=True),
    ]
    assert [finding for finding in findings if not finding.holds] == []
    assert found.final_weights().keys() == set(HOTKEYS)
    assert checks.published_epochs(found) == (0, 1)


@pytest.mark.parametrize("segment", [0, 1])
def test_every_altered_byte_is_found_in_its_segment(segment: int) -> None:
    data = segments()
    num_found = 0
    for at in range(0, len(data[segment]), 97):
        altered = bytearray(data[segment])
        altered[at] ^= 1
        _, whole = read_history([*data[:segment], bytes(altered), *data[segment + 1 :]], owner=OWNER.hotkey)
        assert whole.holds is False
        assert f"segment {segment}" in whole.detail
        num_found += 1
    assert num_found > 50


def test_the_altered_event_is_named() -> None:
    data = segments()
    at = data[0].index(b'"loss":2.5')
    _, whole = read_history([data[0][:at] + b'"loss":2.4' + data[0][at + 10 :], data[1]], owner=OWNER.hotkey)
    assert whole.detail == "segment 0, event 6 (LossRecorded): altered, its head does not follow"


def test_no_segment_is_no_record() -> None:
    found, whole = read_history([], owner=OWNER.hotkey)
    assert whole.holds is False
    assert found.final_weights() == {} == found.final_scores()
    assert checks.check_invariants(found).holds is False


def test_a_unit_without_a_lease_is_named() -> None:
    def change(fact: AnyFact) -> AnyFact | None:
        if isinstance(fact, Credited) and fact.epoch == 1 and fact.stage == 0:
            return msgspec.structs.replace(fact, hotkey=HOTKEYS[1])
        return fact

    finding = checks.check_invariants(history(segments(change)))
    assert finding.holds is False
    assert "is credited without a lease" in finding.detail


def test_a_verdict_that_its_validator_did_not_sign_is_named() -> None:
    def change(fact: AnyFact) -> AnyFact | None:
        if isinstance(fact, VerdictRecorded):
            return VerdictRecorded(verdict=msgspec.structs.replace(fact.verdict, reason="something else"))
        return fact

    finding = checks.check_verdicts(history(segments(change)), OWNER.verify)
    assert finding.holds is False
    assert f"is not signed by {VALIDATOR.hotkey}" in finding.detail


def test_a_pass_that_no_verdict_says_is_named() -> None:
    finding = checks.check_outcomes(history(segments(lambda fact: None if isinstance(fact, VerdictRecorded) else fact)))
    assert finding.holds is False
    assert "is closed with pass, which its verdicts and absences do not come to" in finding.detail


def test_a_commitment_that_the_root_does_not_cover_is_named() -> None:
    def change(fact: AnyFact) -> AnyFact | None:
        return None if isinstance(fact, Committed) and fact.epoch == 1 and fact.hotkey == HOTKEYS[0] else fact

    finding = checks.check_commit_roots(history(segments(change)))
    assert (finding.holds, finding.detail) == (False, "epoch 1: the root is of other commitments")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("scores", {}, "score None for"),
        ("weights", {}, "weight None for"),
        ("ledger_head", "0" * 64, "scores of another record than segment 0's"),
        ("segment", 7, "scores of segment 7, which is not sealed"),
    ],
)
def test_a_post_that_the_record_does_not_yield_is_named(field: str, value: object, said: str) -> None:
    def change(fact: AnyFact) -> AnyFact | None:
        if not isinstance(fact, ScoresPosted):
            return fact
        return msgspec.structs.replace(fact, **{field: value})

    finding = checks.check_posted(history(segments(change)))
    assert finding.holds is False
    assert said in finding.detail


def test_roots_of_another_record_or_commitment_are_named() -> None:
    found = history()
    good = small_record.discovery(found)
    other_head = checks.check_roots(found, msgspec.structs.replace(good, s="1" * 64))
    assert other_head.holds is False and "the chain has 2 segments, head 1111111111111111" in other_head.detail
    other_root = checks.check_roots(found, msgspec.structs.replace(good, m="2" * 64))
    assert other_root.holds is False and "the chain has commit root 2222222222222222 of epoch 1" in other_root.detail
    longer = checks.check_roots(found, msgspec.structs.replace(good, n=3))
    assert longer.holds is False


def test_the_chain_may_lag_one_segment_behind_a_run_that_goes_on() -> None:
    found = history()
    behind = msgspec.structs.replace(small_record.discovery(found), n=1, s=found.boards[0].head)
    assert checks.check_roots(found, behind).holds is True
    assert checks.check_roots(found, behind, is_final=True).holds is False
    none_yet = msgspec.structs.replace(behind, n=0, s="")
    assert checks.check_roots(found, none_yet).holds is False
    next_epoch = msgspec.structs.replace(small_record.discovery(found), e=Epoch(2), m="3" * 64)
    assert checks.check_roots(found, next_epoch).holds is True
    assert checks.check_roots(found, next_epoch, is_final=True).holds is False


def test_weights_one_step_off_are_rounding_and_two_are_not() -> None:
    found = history()
    row = on_chain(found)[VALIDATOR.hotkey]
    uid = next(uid for uid, value in row.items() if value < 65_535)
    for off, holds in ((1, True), (2, False)):
        changed = {VALIDATOR.hotkey: {**row, uid: row[uid] + off}}
        finding = checks.check_weights(found, metagraph(), changed, names=NAMES)
        assert finding.holds is holds
    assert f"v1 gives uid {uid} (m" in finding.detail


def test_weights_that_are_missing_or_of_an_older_segment() -> None:
    def change(fact: AnyFact) -> AnyFact | None:
        is_late_work = isinstance(fact, Credited) and fact.epoch == 1 and fact.sample > 0 and fact.stage == 1
        return None if is_late_work else fact

    found = history(segments(change))
    assert checks.check_weights(found, metagraph(), {VALIDATOR.hotkey: {}}, names=NAMES).holds is False
    older = on_chain(found, segment=0)
    assert checks.check_weights(found, metagraph(), older, names=NAMES).holds is True
    assert checks.check_weights(found, metagraph(), older, names=NAMES, is_final=True).holds is False


def test_a_record_that_pays_nobody_says_so() -> None:
    def change(fact: AnyFact) -> AnyFact | None:
        return fact if isinstance(fact, EpochPublished) or not isinstance(fact, Credited | ScoresPosted) else None

    found = history(segments(change))
    assert checks.check_weights(found, metagraph(), {}, names=NAMES).holds is None
