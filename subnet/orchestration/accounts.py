"""The ledger read as accounts: what each hotkey did in each epoch, and what was found about it. Scores follow from this alone."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

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
    Flagged,
    Leased,
    LossRecorded,
    MergeMissed,
    ReducerConvicted,
    RootCommitted,
    RunCreated,
    SampleDropped,
    ShardAudited,
    ShardMerged,
    UpdateMergedLate,
    UploadAccepted,
    UploadCopied,
    UploadRejected,
    VerdictRecorded,
    Voided,
)
from subnet.types import (
    NO_DIGEST,
    Contribution,
    Epoch,
    Hotkey,
    LossFlag,
    Outcome,
    PathwayLoss,
    SampleId,
    StageIndex,
    Verdict,
)


@dataclass(slots=True)
class EpochAccount:
    """One epoch. `units` holds the samples each hotkey is credited for; voided ones are gone from it."""

    epoch: Epoch
    is_published: bool = False
    stage_of: dict[Hotkey, StageIndex] = field(default_factory=dict)
    units: dict[Hotkey, dict[SampleId, None]] = field(default_factory=dict)
    num_voided: dict[Hotkey, int] = field(default_factory=dict)
    hops: dict[SampleId, tuple[Hotkey, ...]] = field(default_factory=dict)
    """The newest lease's pathway of each sample."""
    losses: dict[SampleId, float] = field(default_factory=dict)
    num_dropped: int = 0
    committed: dict[Hotkey, Committed] = field(default_factory=dict)
    uploaded: dict[Hotkey, None] = field(default_factory=dict)
    absent: dict[Hotkey, None] = field(default_factory=dict)
    outcomes: dict[Hotkey, Outcome] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    flags: list[LossFlag] = field(default_factory=list)
    copied: dict[Hotkey, None] = field(default_factory=dict)
    rejected: dict[Hotkey, None] = field(default_factory=dict)
    """Whose upload could not be merged, or not all of it."""
    missed: dict[Hotkey, None] = field(default_factory=dict)
    """Who was there and did not do its part of the merge."""
    merged_late: list[UpdateMergedLate] = field(default_factory=list)
    """Updates of earlier epochs that this one's merge took up."""
    convicted: dict[Hotkey, None] = field(default_factory=dict)
    """Reducers whose agreeing copies were false."""
    shard_audits: list[ShardAudited] = field(default_factory=list)
    shards: list[ShardMerged] = field(default_factory=list)
    evaluation: Evaluated | None = None
    root: RootCommitted | None = None
    beacon: BeaconSeen | None = None
    snapshots: EpochPublished | None = None

    @property
    def failed(self) -> tuple[Hotkey, ...]:
        """Hotkeys convicted for this epoch, sorted."""
        failed = {hotkey: None for hotkey, outcome in self.outcomes.items() if outcome is Outcome.FAIL}
        return tuple(sorted(failed | self.convicted))

    @property
    def voided(self) -> tuple[Hotkey, ...]:
        """Hotkeys whose whole epoch does not count, sorted: no accepted upload, one that could not be merged or was
        copied, absent from a challenge or from the merge, a false copy of a shard."""
        unpaid = {hotkey: None for hotkey in self.units if hotkey not in self.uploaded} | self.absent | self.copied
        return tuple(sorted(unpaid | self.rejected | self.missed | dict.fromkeys(self.false_reducers)))

    @property
    def false_reducers(self) -> tuple[Hotkey, ...]:
        """Who reported another sum of a shard than the referee's; the arithmetic leaves no room for that; sorted."""
        false = {
            hotkey: None
            for shard in self.shards
            if shard.is_refereed
            for hotkey, reported in zip(shard.reducers, shard.reported, strict=True)
            if reported not in (NO_DIGEST, shard.accepted.digest)
        }
        return tuple(sorted(false))

    def pathway_losses(self) -> tuple[PathwayLoss, ...]:
        """Loss and pathway of every completed sample, in the order they were completed."""
        return tuple(
            PathwayLoss(epoch=self.epoch, sample=sample, pathway=self.hops[sample], loss=loss)
            for sample, loss in self.losses.items()
        )

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
        if isinstance(fact, Flagged):
            self.epoch(fact.flag.epoch).flags.append(fact.flag)
            return
        match fact:
            case Leased() | Credited() | Voided() | LossRecorded() | SampleDropped():
                self._add_work(self.epoch(fact.epoch), fact)
            case (
                EpochStarted() | Committed() | UploadAccepted() | UpdateMergedLate() | ShardMerged() | EpochPublished()
            ):
                self._add_merge(self.epoch(fact.epoch), fact)
            case UploadCopied() | UploadRejected() | MergeMissed() | ShardAudited() | ReducerConvicted():
                self._add_merge_trust(self.epoch(fact.epoch), fact)
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
    def _add_work(account: EpochAccount, fact: Leased | Credited | Voided | LossRecorded | SampleDropped) -> None:
        match fact:
            case Leased():
                account.hops[fact.sample] = fact.hops
            case Credited():
                account.units.setdefault(fact.hotkey, {})[fact.sample] = None
            case Voided():
                account.num_voided[fact.hotkey] = account.num_voided.get(fact.hotkey, 0) + len(fact.samples)
                for sample in fact.samples:
                    account.units.get(fact.hotkey, {}).pop(sample, None)
            case LossRecorded():
                account.losses[fact.sample] = fact.loss
            case SampleDropped():
                account.num_dropped += 1
            case _:
                assert_never(fact)

    @staticmethod
    def _add_merge(
        account: EpochAccount,
        fact: EpochStarted | Committed | UploadAccepted | UpdateMergedLate | ShardMerged | EpochPublished,
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
            case UpdateMergedLate():
                account.merged_late.append(fact)
            case ShardMerged():
                account.shards.append(fact)
            case EpochPublished():
                account.is_published = True
                account.snapshots = fact
            case _:
                assert_never(fact)

    @staticmethod
    def _add_merge_trust(
        account: EpochAccount, fact: UploadCopied | UploadRejected | MergeMissed | ShardAudited | ReducerConvicted
    ) -> None:
        match fact:
            case UploadCopied():
                account.copied |= dict.fromkeys(fact.pair)
            case UploadRejected():
                account.rejected[fact.hotkey] = None
            case MergeMissed():
                account.missed[fact.hotkey] = None
            case ShardAudited():
                account.shard_audits.append(fact)
            case ReducerConvicted():
                account.convicted[fact.hotkey] = None
            case _:
                assert_never(fact)

    @staticmethod
    def _add_audit(account: EpochAccount, fact: Absent | CaseClosed) -> None:
        match fact:
            case Absent():
                account.absent[fact.hotkey] = None
            case CaseClosed():
                account.outcomes[fact.hotkey] = Outcome(fact.outcome)
            case _:
                assert_never(fact)
