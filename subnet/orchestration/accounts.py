"""The ledger read as accounts: what each hotkey did in each epoch, and what was found about it. Scores follow from this alone."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from subnet.orchestration.ledger import (
    Absent,
    AnyFact,
    BeaconSeen,
    CaseClosed,
    Committed,
    Credited,
    Entry,
    EpochPublished,
    EpochStarted,
    Evaluated,
    LossRecorded,
    RootCommitted,
    RunCreated,
    SampleDropped,
    ShardMerged,
    UploadAccepted,
    VerdictRecorded,
    Voided,
)
from subnet.types import Contribution, Epoch, Hotkey, Outcome, SampleId, StageIndex, Verdict


@dataclass(slots=True)
class EpochAccount:
    """One epoch. `units` holds the samples each hotkey is credited for; voided ones are gone from it."""

    epoch: Epoch
    is_published: bool = False
    stage_of: dict[Hotkey, StageIndex] = field(default_factory=dict)
    units: dict[Hotkey, dict[SampleId, None]] = field(default_factory=dict)
    num_voided: dict[Hotkey, int] = field(default_factory=dict)
    losses: dict[SampleId, float] = field(default_factory=dict)
    num_dropped: int = 0
    committed: dict[Hotkey, Committed] = field(default_factory=dict)
    uploaded: dict[Hotkey, None] = field(default_factory=dict)
    absent: dict[Hotkey, None] = field(default_factory=dict)
    outcomes: dict[Hotkey, Outcome] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    shards: list[ShardMerged] = field(default_factory=list)
    evaluation: Evaluated | None = None
    root: RootCommitted | None = None
    beacon: BeaconSeen | None = None
    snapshots: EpochPublished | None = None

    @property
    def failed(self) -> tuple[Hotkey, ...]:
        """Hotkeys convicted for this epoch, sorted."""
        return tuple(sorted(hotkey for hotkey, outcome in self.outcomes.items() if outcome is Outcome.FAIL))

    @property
    def voided(self) -> tuple[Hotkey, ...]:
        """Hotkeys whose whole epoch does not count: no accepted upload, or absent from a challenge; sorted."""
        unpaid = {hotkey: None for hotkey in self.units if hotkey not in self.uploaded} | self.absent
        return tuple(sorted(unpaid))

    def contributions(self, stage_flops: tuple[int, ...]) -> tuple[Contribution, ...]:
        """Credited work by hotkey, volume in units of the lightest stage's microbatch FLOPs."""
        lightest = min(stage_flops)
        return tuple(
            Contribution(
                hotkey=hotkey,
                epoch=self.epoch,
                stage=self.stage_of[hotkey],
                units=len(samples),
                volume=len(samples) * (stage_flops[self.stage_of[hotkey]] / lightest),
            )
            for hotkey, samples in sorted(self.units.items())
        )


@dataclass(slots=True)
class Accounts:
    """The whole record, folded. `epochs` is in order; `created` is None until the first entry was read."""

    created: RunCreated | None = None
    epochs: dict[Epoch, EpochAccount] = field(default_factory=dict)

    def add(self, entries: Iterable[Entry]) -> "Accounts":
        """Fold further entries in."""
        for entry in entries:
            if isinstance(entry.fact, RunCreated):
                self.created = entry.fact
            else:
                self._add(entry.fact)
        return self

    def epoch(self, epoch: Epoch) -> EpochAccount:
        """The account of an epoch, opened when it is not there."""
        return self.epochs.setdefault(epoch, EpochAccount(epoch=epoch))

    def published(self) -> list[EpochAccount]:
        """Epochs that ended, oldest first."""
        return [account for _, account in sorted(self.epochs.items()) if account.is_published]

    def _add(self, fact: AnyFact) -> None:
        if isinstance(fact, VerdictRecorded):
            self.epoch(fact.verdict.epoch).verdicts.append(fact.verdict)
            return
        match fact:
            case Credited() | Voided() | LossRecorded() | SampleDropped():
                self._add_work(self.epoch(fact.epoch), fact)
            case EpochStarted() | Committed() | UploadAccepted() | ShardMerged() | EpochPublished():
                self._add_merge(self.epoch(fact.epoch), fact)
            case Absent() | CaseClosed():
                self._add_audit(self.epoch(fact.epoch), fact)
            case RootCommitted():
                self.epoch(fact.epoch).root = fact
            case BeaconSeen():
                self.epoch(fact.epoch).beacon = fact
            case Evaluated():
                self.epoch(fact.epoch).evaluation = fact
            case _:
                pass

    @staticmethod
    def _add_work(account: EpochAccount, fact: Credited | Voided | LossRecorded | SampleDropped) -> None:
        match fact:
            case Credited():
                account.units.setdefault(fact.hotkey, {})[fact.sample] = None
            case Voided():
                account.num_voided[fact.hotkey] = account.num_voided.get(fact.hotkey, 0) + len(fact.samples)
                for sample in fact.samples:
                    account.units[fact.hotkey].pop(sample, None)
            case LossRecorded():
                account.losses[fact.sample] = fact.loss
            case SampleDropped():
                account.num_dropped += 1

    @staticmethod
    def _add_merge(
        account: EpochAccount, fact: EpochStarted | Committed | UploadAccepted | ShardMerged | EpochPublished
    ) -> None:
        match fact:
            case EpochStarted():
                account.stage_of = {
                    hotkey: StageIndex(stage) for stage, roster in enumerate(fact.roster) for hotkey in roster
                }
            case Committed():
                account.committed[fact.hotkey] = fact
            case UploadAccepted():
                account.uploaded[fact.hotkey] = None
            case ShardMerged():
                account.shards.append(fact)
            case EpochPublished():
                account.is_published = True
                account.snapshots = fact

    @staticmethod
    def _add_audit(account: EpochAccount, fact: Absent | CaseClosed) -> None:
        match fact:
            case Absent():
                account.absent[fact.hotkey] = None
            case CaseClosed():
                account.outcomes[fact.hotkey] = Outcome(fact.outcome)
