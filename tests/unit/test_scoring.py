"""From the sealed record to weights: the same fold for everybody, and nothing from a record that does not hold."""

import msgspec
import pytest

from incentives.config import IncentiveConfig, OnNoCredit
from neurons.scoring import Record, outcomes, parse_discovery, scored, weighted
from subnet import wire
from subnet.errors import InvariantBroken, NotFound, ProtocolViolation
from subnet.orchestration.accounts import Accounts
from subnet.orchestration.segments import encode_segment
from subnet.types import Epoch, Hotkey, Outcome
from tests.unit.orchestration import CONFIG, MINERS, Run, created


def recorded(incentives: IncentiveConfig, *, convict: Hotkey | None = None) -> list[bytes]:
    """Segments of a run of two epochs in which everybody works, and perhaps one is convicted."""
    run = Run()
    run.feed(msgspec.structs.replace(created(CONFIG), incentives_json=wire.encode(incentives).decode()))
    run.chain()
    for validator in ("v1", "v2", "v3"):
        run.done(Hotkey(validator), wire.Enlist())
    run.join(*MINERS)
    for _ in range(CONFIG.training.num_epochs):
        run.ready(*[miner for miner in MINERS if run.state.members[miner].banned_until < 0])
        run.tick(CONFIG.deadlines.ready_s)
        run.train()
        run.commit()
        for (epoch, miner), case in list(run.state.cases.items()):
            if case.outcome is None:
                run.done(miner, run.answer(miner, epoch))
                outcome = Outcome.FAIL if miner == convict else Outcome.PASS
                while case.outcome is None:
                    run.done(case.asked[-1], run.verdict(case.asked[-1], miner, outcome, epoch))
        for miner in sorted(run.state.current.commits):
            run.done(miner, wire.UploadDone(epoch=run.state.epoch))
        run.merge()
        run.recompute()
    for _ in range(9):
        run.tick(CONFIG.deadlines.verdict_s)
    return [encode_segment(segment) for segment in run.segments]


def read(segments: list[bytes]) -> Record:
    record = Record()
    for data in segments:
        record.add(data)
    return record


def test_equal_work_earns_equally_and_weights_sum_to_one() -> None:
    record = read(recorded(IncentiveConfig()))
    assert record.num_segments == 2
    weights = weighted(record, burn_hotkey=None)
    assert sorted(weights) == sorted(MINERS)
    assert sum(weights.values()) == pytest.approx(1.0)
    stage_of = record.accounts.published()[0].stage_of
    for stage in range(3):
        assert len({weights[miner] for miner in MINERS if stage_of[miner] == stage}) == 1
    assert [outcome.epoch for outcome in outcomes(record.accounts)] == [0, 1]


def test_a_convicted_miner_has_no_score_and_no_weight() -> None:
    record = read(recorded(IncentiveConfig(), convict=MINERS[0]))
    assert scored(record)[MINERS[0]].score == 0.0
    assert MINERS[0] not in weighted(record, burn_hotkey=None)
    assert "banned" in scored(record)[MINERS[0]].reason


def test_what_is_burned_goes_to_the_owner() -> None:
    owner = Hotkey("owner")
    record = read(recorded(IncentiveConfig(burn_share=0.25)))
    assert weighted(record, burn_hotkey=owner)[owner] == pytest.approx(0.25)
    idle = Record(accounts=Accounts(created=record.accounts.created))
    assert weighted(idle, burn_hotkey=owner) == {}
    assert IncentiveConfig().on_no_credit is OnNoCredit.NONE


class Shelf:
    """ports.PublicRecord over a list."""

    def __init__(self, segments: list[bytes]) -> None:
        self.segments = segments
        self.num_reads = 0

    async def read(self, name: str, *, limit_bytes: int) -> bytes:
        self.num_reads += 1
        part, _, index = name.partition("/")
        assert part == "ledger" and limit_bytes > 0
        return self.segments[int(index)]


async def test_a_record_is_followed_segment_by_segment() -> None:
    shelf = Shelf(recorded(IncentiveConfig()))
    record = Record()
    await record.follow(shelf, 1)
    await record.follow(shelf, 1)
    assert (record.num_segments, shelf.num_reads) == (1, 1)
    await record.follow(shelf, 2)
    assert record.head == read(shelf.segments).head


async def test_a_record_that_was_altered_yields_no_score() -> None:
    segments = recorded(IncentiveConfig())
    at = segments[0].index(b'"Credited"')
    segments[0] = segments[0][:at] + b'"credited"' + segments[0][at + 10 :]
    with pytest.raises(InvariantBroken, match="event"):
        await Record().follow(Shelf(segments), 2)


def test_a_record_without_a_beginning_yields_no_score() -> None:
    for look in (lambda: Record().incentives(), lambda: outcomes(Accounts())):
        with pytest.raises(InvariantBroken):
            look()


def test_the_owners_record_on_chain_is_read_strictly() -> None:
    found = wire.Discovery(u="http://h", r="run", v=1, c="d", n=2, s="head")
    assert parse_discovery(wire.encode(found)) == found
    with pytest.raises(NotFound):
        parse_discovery(None)
    with pytest.raises(ProtocolViolation):
        parse_discovery(b"somebody else's commitment")
    assert Epoch(found.e) == -1
