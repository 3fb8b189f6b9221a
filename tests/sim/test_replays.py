"""`strata audit --replay` on what a whole run left: the same outcomes, and a changed one is seen."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

from neurons.replays import NAME, answered_challenges, replayed
from neurons.roles.validator import ValidatorPorts
from neurons.scoring import Record
from neurons.virtual import VirtualPlan, VirtualResult
from subnet.errors import InvariantBroken, StartupRefused
from subnet.frames import digest
from subnet.orchestration.ledger import Answered, CaseClosed, RunCreated
from subnet.ports import Blobs
from subnet.sim.strategies import IdentityWorker
from subnet.types import BlobRef, Digest, Outcome
from tests.sim.world import QUICK, altered, cheat_at, facts, simulate

NUM_MINERS = 4


@dataclass(frozen=True, slots=True)
class Keeping:
    """Keeps what a validator downloads, by digest."""

    blobs: Blobs
    kept: dict[Digest, bytes] = field(default_factory=dict)

    async def put(self, url: str, data: bytes) -> None:
        await self.blobs.put(url, data)

    async def get(self, url: str, *, start: int = 0, size_bytes: int | None = None, limit_bytes: int) -> bytes:
        data = await self.blobs.get(url, start=start, size_bytes=size_bytes, limit_bytes=limit_bytes)
        self.kept[digest(data)] = data
        return data

    async def get_into(self, url: str, buffer: memoryview, *, start: int = 0) -> int:
        raise AssertionError("a validator downloads whole objects")


@pytest.fixture(scope="module")
def ran() -> tuple[VirtualResult, dict[Digest, bytes]]:
    kept: dict[Digest, bytes] = {}

    def keep(ports: ValidatorPorts) -> ValidatorPorts:
        return replace(ports, blobs=Keeping(ports.blobs, kept))

    plan = VirtualPlan(
        seed=2,
        num_miners=NUM_MINERS,
        workers=cheat_at(2, IdentityWorker, num_miners=NUM_MINERS),
        validator_ports={"v1": keep, "v2": keep},
    )
    return simulate(plan, altered(QUICK, training={"min_miners": NUM_MINERS})), kept


@pytest.fixture
def blobs(ran: tuple[VirtualResult, dict[Digest, bytes]], tmp_path: Path) -> Path:
    """The objects of the run as files."""
    result, kept = ran
    created = result.record.accounts.created
    assert created is not None
    refs = [*created.snapshots]
    for fact in facts(result):
        if isinstance(fact, Answered):
            refs += [fact.start, fact.end, fact.evidence]
    refs += [
        ref
        for account in result.record.accounts.published()
        if account.snapshots
        for ref in account.snapshots.snapshots
    ]
    for ref in refs:
        if ref.digest in kept:
            path = tmp_path / ref.key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(kept[ref.digest])
    return tmp_path


def changed(record: Record, **changes: object) -> Record:
    """The same record, but every closed case says something else."""
    entries = [
        msgspec.structs.replace(entry, fact=msgspec.structs.replace(entry.fact, **changes))
        if isinstance(entry.fact, CaseClosed)
        else entry
        for entry in record.entries
    ]
    return Record(entries=entries, accounts=record.accounts, num_segments=record.num_segments, head=record.head)


def test_every_closed_audit_replays_to_what_is_recorded(
    ran: tuple[VirtualResult, dict[Digest, bytes]], blobs: Path
) -> None:
    record = ran[0].record
    outcomes = [outcome for _, outcome in answered_challenges(record)]
    assert {Outcome.PASS, Outcome.FAIL} == set(outcomes)
    finding, lines = replayed(record, blobs, 100)
    assert finding.holds
    assert len(lines) == len(outcomes)
    assert sum("fail, " in line and "recorded: fail" in line for line in lines) == outcomes.count(Outcome.FAIL)
    _, two = replayed(record, blobs, 2)
    assert len(two) == 2
    assert replayed(record, blobs, 2)[1] == two, "the sample is drawn, the same for everybody"


def test_a_changed_outcome_is_seen(ran: tuple[VirtualResult, dict[Digest, bytes]], blobs: Path) -> None:
    finding, lines = replayed(changed(ran[0].record, outcome="pass"), blobs, 100)
    assert finding.holds is False
    differing = [line for line in lines if line.endswith("recorded: pass  DIFFERS")]
    assert finding.detail.endswith(f"{len(differing)} differ; first {differing[0].removesuffix('  DIFFERS')}")
    assert answered_challenges(changed(ran[0].record, outcome="inconclusive")) == []


def test_a_garbled_object_is_a_fail_and_a_missing_one_is_left_out(
    ran: tuple[VirtualResult, dict[Digest, bytes]], blobs: Path
) -> None:
    challenge = next(one for one, outcome in answered_challenges(ran[0].record) if outcome is Outcome.PASS)
    assert challenge.evidence is not None
    (blobs / challenge.evidence.key).write_bytes(b"x")
    finding, lines = replayed(ran[0].record, blobs, 100)
    assert finding.holds is False
    assert sum("is not the one announced" in line for line in lines) == 1
    finding, lines = replayed(ran[0].record, blobs / "nowhere", 100)
    assert (finding.name, finding.holds, lines) == (NAME, None, [])
    assert "no objects are left" in finding.detail


def test_another_text_and_a_broken_record_are_named(
    ran: tuple[VirtualResult, dict[Digest, bytes]], blobs: Path
) -> None:
    record = ran[0].record
    created = record.accounts.created
    assert isinstance(created, RunCreated)
    assert replayed(Record(), blobs, 1)[0].holds is None
    accounts = replace(record.accounts, created=msgspec.structs.replace(created, corpus_digest=Digest("0" * 64)))
    other = Record(entries=record.entries, accounts=accounts, num_segments=1, head=record.head)
    with pytest.raises(StartupRefused, match="is not on this machine"):
        replayed(other, blobs, 1)
    lost = {epoch: replace(account, snapshots=None) for epoch, account in record.accounts.epochs.items()}
    with pytest.raises(InvariantBroken, match="does not say what epoch 1 began from"):
        answered_challenges(Record(entries=record.entries, accounts=replace(record.accounts, epochs=lost)))


def test_a_ref_is_a_place_below_the_directory(blobs: Path) -> None:
    ref = BlobRef(key="runs/r/x", digest=digest(b""), size_bytes=0)
    assert (blobs / ref.key).is_relative_to(blobs)
