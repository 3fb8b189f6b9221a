"""What the record proves about draws of audits, flags, and shards that were recomputed; for `strata audit` (trust.md 1, 4, 5)."""

from dataclasses import dataclass, field

import msgspec

from incentives.config import ClaspConfig
from incentives.flags import Flag
from neurons.checks import Finding, History, Verify
from neurons.flagging import find_flags
from subnet import wire
from subnet.config import RunConfig
from subnet.merging.audits import audited_shards
from subnet.orchestration.accounts import EpochAccount
from subnet.orchestration.audits import audit_probability, is_drawn
from subnet.orchestration.ledger import (
    AnyFact,
    BeaconSeen,
    Challenged,
    Committed,
    Credited,
    EpochPublished,
    Flagged,
    OutputRepeated,
    Voided,
)
from subnet.receipts import flag_bytes
from subnet.types import Epoch, Hotkey, LossFlag, SampleId, StageIndex

FLAG_TOLERANCE = 1e-3
"""Relative difference between a flag's numbers and the same least squares on another machine."""
EDGE = 2.0
"""A flag just over the threshold may be just under it here: what is recomputed is judged at twice the level."""
_REDUCERS = 2
_ITEM_BYTES = 4
_SETTLED_EPOCHS = 2
"""Epochs after which a drawn shard has been recomputed and its outcome sealed."""


def check_audit_draws(history: History) -> Finding:
    """Who was challenged in an epoch is whom its beacon draws, by probation and by the flags on record at that moment."""
    name = "audits fell on the miners that the beacons draw"
    created = history.record.accounts.created
    if created is None:
        return Finding(name=name, holds=False, detail="the record does not begin with the run's creation")
    found = _Draws(msgspec.json.decode(created.config_json, type=RunConfig))
    for entry in history.record.entries:
        found.add(entry.fact)
    for epoch, drawn in found.drawn.items():
        challenged = found.challenged.get(epoch, {})
        for hotkey in sorted(set(drawn) ^ set(challenged)) if challenged else ():
            what = "drawn and not audited" if hotkey in drawn else "audited and not drawn"
            return Finding(name=name, holds=False, detail=f"epoch {epoch}: {hotkey} was {what}")
    count = sum(map(len, found.challenged.values()))
    return Finding(name=name, holds=True, detail=f"{count} audits")


@dataclass(slots=True)
class _Draws:
    """What decides whom a beacon draws, as it stood at each moment of the record."""

    config: RunConfig
    units: dict[tuple[Epoch, Hotkey], dict[SampleId, None]] = field(default_factory=dict)
    epochs_credited: dict[Hotkey, int] = field(default_factory=dict)
    flagged_until: dict[Hotkey, int] = field(default_factory=dict)
    commits: dict[Epoch, dict[Hotkey, Committed]] = field(default_factory=dict)
    drawn: dict[Epoch, dict[Hotkey, None]] = field(default_factory=dict)
    challenged: dict[Epoch, dict[Hotkey, None]] = field(default_factory=dict)

    def add(self, fact: AnyFact) -> None:
        """Let the next event happen."""
        match fact:
            case Credited():
                self.units.setdefault((fact.epoch, fact.hotkey), {})[fact.sample] = None
            case Voided():
                for sample in fact.samples:
                    self.units.get((fact.epoch, fact.hotkey), {}).pop(sample, None)
            case Committed():
                self._commit(fact)
            case Flagged():
                until = fact.flag.epoch + self.config.audit.flag_epochs
                self.flagged_until[fact.flag.hotkey] = max(self.flagged_until.get(fact.flag.hotkey, -1), until)
            case OutputRepeated():
                until = fact.epoch + self.config.audit.flag_epochs
                self.flagged_until[fact.hotkey] = max(self.flagged_until.get(fact.hotkey, -1), until)
            case BeaconSeen():
                self.drawn[fact.epoch] = dict.fromkeys(self._drawn_by(fact))
            case Challenged():
                self.challenged.setdefault(fact.epoch, {})[fact.hotkey] = None
            case _:
                pass

    def _commit(self, fact: Committed) -> None:
        self.commits.setdefault(fact.epoch, {})[fact.hotkey] = fact
        weight = min(fact.num_batches, len(self.units.get((fact.epoch, fact.hotkey), {})))
        if weight >= self.config.training.min_batches:
            self.epochs_credited[fact.hotkey] = self.epochs_credited.get(fact.hotkey, 0) + 1

    def _drawn_by(self, fact: BeaconSeen) -> list[Hotkey]:
        return [
            hotkey
            for hotkey, commit in sorted(self.commits.get(fact.epoch, {}).items())
            if len(commit.checkpoints) > 1
            and is_drawn(
                hotkey,
                audit_probability(
                    self.config.audit,
                    epochs_credited=self.epochs_credited.get(hotkey, 0),
                    is_flagged=self.flagged_until.get(hotkey, -1) >= fact.epoch,
                ),
                beacon=fact.beacon,
                epoch=fact.epoch,
            )
        ]


def check_flags(history: History, verify: Verify) -> Finding:
    """Every flag is signed by its validator and follows from the recorded losses, within tolerance."""
    name = "every flag is signed and follows from the recorded losses"
    clasp, found, count = history.record.incentives().clasp, dict[Epoch, dict[Hotkey, Flag]](), 0
    for entry in history.record.entries:
        if not isinstance(entry.fact, Flagged):
            continue
        flag = entry.fact.flag
        if flag.epoch not in found:
            found[flag.epoch] = _recomputed(history, flag.epoch, clasp)
        wrong = _wrong_flag(flag, found[flag.epoch].get(flag.hotkey), verify)
        if wrong:
            detail = f"event {entry.seq}: {flag.validator}'s flag on {flag.hotkey} {wrong}"
            return Finding(name=name, holds=False, detail=detail)
        count += 1
    return Finding(name=name, holds=True, detail=f"{count} flags")


def _recomputed(history: History, epoch: Epoch, clasp: ClaspConfig) -> dict[Hotkey, Flag]:
    lenient = msgspec.structs.replace(
        clasp, alpha=min(0.49, EDGE * clasp.alpha), framing_alpha=min(0.5, EDGE * clasp.framing_alpha)
    )
    return {flag.hotkey: flag for flag in find_flags(history.record.accounts, epoch, lenient)}


def _wrong_flag(flag: LossFlag, ours: Flag | None, verify: Verify) -> str:
    """What is wrong with a flag, in words; empty when nothing is."""
    if not verify(flag.validator, flag_bytes(flag), flag.signature):
        return "is not signed by it"
    if ours is None:
        return "has no ground in the record"
    for what, theirs, value in (("effect", flag.effect, ours.effect), ("z", flag.z, ours.z)):
        if abs(theirs - value) > FLAG_TOLERANCE * max(1.0, abs(value)):
            return f"says {what} {theirs:.6g}, the record yields {value:.6g}"
    return ""


def check_shard_audits(history: History) -> Finding:
    """The agreeing shards that were recomputed are those drawn, and who was convicted by them was so with reason."""
    name = "agreeing shards were recomputed as drawn, and false ones convicted both reducers"
    record = history.record
    config = (
        msgspec.json.decode(record.accounts.created.config_json, type=RunConfig) if record.accounts.created else None
    )
    published = record.accounts.published()
    heads = {entry.fact.epoch: entry.head for entry in record.entries if isinstance(entry.fact, EpochPublished)}
    count = 0
    for account in published:
        wrong = _wrong_convictions(account)
        follower = record.accounts.epochs.get(Epoch(account.epoch + 1))
        if config is not None and not wrong:
            is_last = account.epoch + 1 == config.training.num_epochs
            beacon = follower.beacon.beacon if follower and follower.beacon else heads[account.epoch] if is_last else ""
            is_settled = account.epoch + _SETTLED_EPOCHS <= published[-1].epoch
            wrong = _wrong_draw(account, config, beacon, is_settled=is_settled) if beacon else ""
        if wrong:
            return Finding(name=name, holds=False, detail=f"epoch {account.epoch}: {wrong}")
        count += len(account.shard_audits)
    return Finding(name=name, holds=True, detail=f"{count} shards")


def _wrong_convictions(account: EpochAccount) -> str:
    false = [audit for audit in account.shard_audits if audit.accepted.digest != audit.recomputed.digest]
    guilty = {hotkey for audit in false for hotkey in audit.reducers}
    for hotkey in sorted(guilty ^ set(account.convicted)):
        return f"{hotkey} " + (
            "reduced a false shard and was not convicted" if hotkey in guilty else "was convicted for no shard"
        )
    return ""


def _wrong_draw(account: EpochAccount, config: RunConfig, beacon: str, *, is_settled: bool) -> str:
    audited = {(audit.stage, audit.shard) for audit in account.shard_audits}
    drawn: set[tuple[StageIndex, int]] = set()
    for stage in sorted({shard.stage for shard in account.shards}):
        agreed = [
            wire.ShardPlan(shard=one.shard, start=0, stop=one.accepted.size_bytes // _ITEM_BYTES, reducers=one.reducers)
            for one in sorted(account.shards, key=lambda one: one.shard)
            if one.stage == stage and not one.is_refereed and len(one.reducers) == _REDUCERS
        ]
        numbers = audited_shards(agreed, config.merge.audit_fraction, beacon=beacon, stage=stage, epoch=account.epoch)
        drawn |= {(stage, number) for number in numbers}
    for stage, shard in sorted(audited - drawn):
        return f"shard {shard} of stage {stage} was recomputed and not drawn"
    for stage, shard in sorted(drawn - audited) if is_settled else ():
        return f"shard {shard} of stage {stage} was drawn and not recomputed"
    return ""
