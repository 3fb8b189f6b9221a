"""What the record says of one hotkey, epoch by epoch, with the place of every event: the raw material of `strata explain`."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from subnet.orchestration.ledger import (
    Absent,
    Answered,
    AnyFact,
    Assigned,
    CaseClosed,
    Challenged,
    Committed,
    Credited,
    Entry,
    EpochPublished,
    EpochStarted,
    Flagged,
    Leased,
    MergeMissed,
    OutputRepeated,
    ReducerConvicted,
    ShardAudited,
    UpdateMergedLate,
    UploadAccepted,
    UploadCopied,
    UploadRejected,
    VerdictRecorded,
    Voided,
)
from subnet.types import Epoch, Hotkey, LossFlag, Measures, SampleId, StageIndex

_Finding = (
    Flagged
    | OutputRepeated
    | UploadCopied
    | UploadRejected
    | UpdateMergedLate
    | MergeMissed
    | ShardAudited
    | ReducerConvicted
)
"""What is found about a miner beside the audits of its work."""


@dataclass(slots=True)
class Span:
    """How often something was recorded, and the first and last event that says so."""

    count: int = 0
    first: int = -1
    last: int = -1

    def add(self, seq: int, count: int = 1) -> None:
        """Count an event in."""
        self.count += count
        self.first = seq if self.first < 0 else self.first
        self.last = seq

    def text(self, what: str) -> str:
        """`30 units (events 44..400)`."""
        return f"{self.count} {what}{events(self.first, self.last)}"


def events(first: int, last: int) -> str:
    """Where it stands in the record; empty when it stands nowhere."""
    if first < 0:
        return ""
    return f" (event {first})" if first == last else f" (events {first}..{last})"


@dataclass(slots=True)
class EpochTrail:
    """One epoch of one hotkey. `notes` are audits and what else was found, in the order of the record."""

    epoch: Epoch
    stage: StageIndex | None = None
    leased: Span = field(default_factory=Span)
    credited: Span = field(default_factory=Span)
    voided: Span = field(default_factory=Span)
    committed: Span = field(default_factory=Span)
    uploaded: Span = field(default_factory=Span)
    published: Span = field(default_factory=Span)
    num_assigned: int = 0
    """Miners of the roster in this one's stage."""
    notes: list[str] = field(default_factory=list)
    samples: dict[SampleId, None] = field(default_factory=dict)


@dataclass(slots=True)
class Trail:
    """All of one hotkey. `assigned` counts the stages it was given."""

    hotkey: Hotkey
    assigned: Span = field(default_factory=Span)
    epochs: dict[Epoch, EpochTrail] = field(default_factory=dict)

    def add(self, entries: Iterable[Entry]) -> "Trail":
        """Read further entries."""
        for entry in entries:
            self._add(entry.seq, entry.fact)
        return self

    def epoch(self, epoch: Epoch) -> EpochTrail:
        """The trail of an epoch, opened when it is not there."""
        return self.epochs.setdefault(epoch, EpochTrail(epoch))

    def _add(self, seq: int, fact: AnyFact) -> None:
        match fact:
            case Assigned():
                if fact.hotkey == self.hotkey:
                    self.assigned.add(seq)
            case EpochStarted() | EpochPublished():
                self._add_epoch(seq, fact)
            case Leased() | Credited() | Voided():
                self._add_work(seq, fact)
            case Committed() | UploadAccepted():
                if fact.hotkey == self.hotkey:
                    trail = self.epoch(fact.epoch)
                    if isinstance(fact, Committed):
                        trail.committed.add(seq, fact.num_batches)
                    else:
                        trail.uploaded.add(seq)
            case Challenged() | Answered() | Absent() | VerdictRecorded() | CaseClosed():
                self._add_audit(seq, fact)
            case _ if isinstance(fact, _Finding):
                self._add_finding(seq, fact)
            case _:
                pass

    def _add_epoch(self, seq: int, fact: EpochStarted | EpochPublished) -> None:
        if isinstance(fact, EpochPublished):
            if fact.epoch in self.epochs:
                self._add_published(seq, fact, self.epochs[fact.epoch])
            return
        for stage, roster in enumerate(fact.roster):
            if self.hotkey in roster:
                trail = self.epoch(fact.epoch)
                trail.stage, trail.num_assigned = StageIndex(stage), len(roster)

    def _add_published(self, seq: int, fact: EpochPublished, trail: EpochTrail) -> None:
        trail.published.add(seq)
        if trail.stage is not None and trail.stage < len(fact.participants):
            taken = fact.participants[trail.stage]
            is_in = "is in it" if self.hotkey in taken else "is not in it"
            trail.notes.append(
                f"merge      of {len(taken)} of {trail.num_assigned} miners of its stage; its update {is_in}{events(seq, seq)}"
            )

    def _add_work(self, seq: int, fact: Leased | Credited | Voided) -> None:
        if isinstance(fact, Leased):
            if self.hotkey in fact.hops and fact.sample not in self.epoch(fact.epoch).samples:
                self.epoch(fact.epoch).samples[fact.sample] = None
                self.epoch(fact.epoch).leased.add(seq)
        elif fact.hotkey == self.hotkey:
            if isinstance(fact, Credited):
                self.epoch(fact.epoch).credited.add(seq)
            else:
                self.epoch(fact.epoch).voided.add(seq, len(fact.samples))

    def _add_audit(self, seq: int, fact: Challenged | Answered | Absent | VerdictRecorded | CaseClosed) -> None:
        about = fact.verdict if isinstance(fact, VerdictRecorded) else fact
        if about.hotkey == self.hotkey:
            text = f"segment {about.segment}: {_audit_text(fact)}"
            self.epoch(about.epoch).notes.append(f"audit      {text}{events(seq, seq)}")

    def _add_finding(self, seq: int, fact: _Finding) -> None:
        about: tuple[Hotkey, ...]
        match fact:
            case Flagged():
                about, flag = (fact.flag.hotkey,), fact.flag
                epoch, text = flag.epoch, f"flag       {flag.validator[:8]}: {flag_text(flag)}"
            case OutputRepeated():
                about, epoch = (fact.hotkey,), fact.epoch
                text = f"repeated   it sent the same for samples {fact.first} and {fact.sample}: its audits are certain"
            case UploadCopied():
                about, epoch = fact.pair, fact.epoch
                text = f"copied     {fact.share:.0%} of its upload is {_others(fact.pair, self.hotkey)}'s: credit void"
            case UploadRejected():
                about, epoch = (fact.hotkey,), fact.epoch
                text = f"upload     its part of shard {fact.shard} is not what was committed: left out, credit void"
            case UpdateMergedLate():
                about, epoch = (fact.hotkey,), fact.base_epoch
                text = f"late       its update of this epoch is in the merge of epoch {fact.epoch}"
            case MergeMissed():
                about, epoch = (fact.hotkey,), fact.epoch
                text = "merge      its part was missing when half of the time was over: credit void"
            case ShardAudited():
                about, epoch = fact.reducers, fact.epoch
                is_true = fact.accepted.digest == fact.recomputed.digest
                result = "the same" if is_true else "not what both reducers stored"
                text = (
                    f"shard      {fact.shard}, shared with {_others(fact.reducers, self.hotkey)}: recomputed, {result}"
                )
            case ReducerConvicted():
                about, epoch = (fact.hotkey,), fact.epoch
                text = f"shard      {fact.shard} was false: banned until epoch {fact.banned_until}"
        if self.hotkey in about:
            self.epoch(epoch).notes.append(text + events(seq, seq))


def flag_text(flag: LossFlag) -> str:
    """What CLASP found, on one line."""
    return (
        f"its samples lose {flag.effect:+.4f} nats a token, error {flag.standard_error:.4f}, z {flag.z:.2f}, "
        f"over {flag.num_samples} samples"
    )


def _others(hotkeys: tuple[Hotkey, ...], own: Hotkey) -> str:
    return ", ".join(hotkey[:8] for hotkey in hotkeys if hotkey != own)


def _audit_text(fact: Challenged | Answered | Absent | VerdictRecorded | CaseClosed) -> str:
    match fact:
        case Challenged():
            own = f", made in {fact.mode}" if fact.mode else ""
            return f"drawn{own}, to be replayed by {fact.auditor[:8]}"
        case Answered():
            return "presented"
        case Absent():
            return "not presented in time"
        case VerdictRecorded():
            verdict = fact.verdict
            measured = f"; {measures_text(verdict.measures)}" if verdict.measures else ""
            mode = f" in {verdict.mode}" if verdict.mode else ""
            return f"{verdict.outcome} by {verdict.validator[:8]}{mode}: {verdict.reason}{measured}"
        case CaseClosed():
            banned = f", banned until epoch {fact.banned_until}" if fact.banned_until >= 0 else ""
            return f"closed in epoch {fact.at_epoch}: {fact.outcome}{banned}"


def measures_text(found: Measures) -> str:
    """What a replay measured, on one line."""
    return (
        f"relD {found.rel_d:.3g} (largest {found.rel_d_max:.3g}), token {found.rel_d_token:.3g}, "
        f"gradients {found.rel_d_backward:.3g}, dw {found.rel_dw:.3g}, loss {found.loss_error:.2g}, "
        f"cosine {found.cosine:.5f}, norms {found.norm_ratio:.4f}"
    )
