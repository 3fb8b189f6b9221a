"""The orchestrator's whole state, and the turn in which one event changes it.

Plain data, owned and changed by `machine.step` alone. Iteration order is that of insertion or sorted, never of a set.
"""

import math
from dataclasses import dataclass, field

from subnet import wire
from subnet.config import RunConfig, RunKind
from subnet.orchestration.events import AnyEffect, DeleteObjects
from subnet.orchestration.ledger import AnyFact, Ledger
from subnet.types import (
    NO_DIGEST,
    BlobRef,
    Digest,
    Endpoint,
    Epoch,
    Hotkey,
    Lease,
    LossFlag,
    Noise,
    NumericMode,
    Outcome,
    Phase,
    Receipt,
    SampleId,
    StageIndex,
    Verdict,
)

RECENT_LOSSES = 20
"""Losses that a recent mean is taken of."""
ANSWERS_KEPT = 64
"""Answers remembered for each hotkey, so that a repeated request gets the stored one."""


@dataclass(slots=True)
class Member:
    """A miner that joined. `ready_epoch` is the epoch whose starting params it holds, -1 for none."""

    hotkey: Hotkey
    stage: StageIndex
    endpoint: Endpoint
    mode: NumericMode
    session: str
    first_epoch: Epoch
    is_live: bool = True
    ready_epoch: int = -1
    banned_until: int = -1
    absences: list[int] = field(default_factory=list)
    epochs_credited: int = 0
    flagged_until: int = -1
    """Newest epoch in which a recorded flag makes its audit certain."""


@dataclass(slots=True)
class Sample:
    """One microbatch on its way: the newest lease, what each hop attested under it, and what was credited, by hop."""

    lease: Lease
    forward: list[Receipt | None]
    backward: list[Receipt | None]
    credited: list[bool]
    is_open: bool = True


@dataclass(slots=True)
class Work:
    """One miner's books in one epoch: its receipt chain and the samples it is credited for."""

    head: Digest
    receipts: list[Receipt] = field(default_factory=list)
    heads: list[Digest] = field(default_factory=list)
    credited: dict[SampleId, None] = field(default_factory=dict)
    seen_inputs: dict[tuple[str, Digest], SampleId] = field(default_factory=dict)
    seen_outputs: dict[tuple[str, Digest], SampleId] = field(default_factory=dict)
    has_repeated: bool = False


@dataclass(slots=True)
class Late:
    """An update whose commitment came in time and which is in no merge yet; `ref` is None until its bytes are here."""

    stage: StageIndex
    commit: wire.CommitEpoch
    num_batches: int
    ref: BlobRef | None


@dataclass(slots=True)
class StageMerge:
    """The merge of one stage. `plan` is None when nobody takes part: then params and momentum stay as they are."""

    plan: wire.MergePlan | None = None
    copies: dict[int, dict[Hotkey, BlobRef]] = field(default_factory=dict)
    accepted: dict[int, BlobRef] = field(default_factory=dict)
    agreed: dict[int, None] = field(default_factory=dict)
    """Shards accepted because both copies were equal: what nobody has recomputed."""
    referee_asked: dict[int, None] = field(default_factory=dict)
    doubted: dict[int, None] = field(default_factory=dict)
    """Shards for which a reducer left an upload out: equal copies are not enough, the orchestrator looks itself."""
    whole_at_s: float = math.inf
    """When the last shard was accepted."""
    uploaders: tuple[Hotkey, ...] = ()
    outer: dict[Hotkey, Digest] = field(default_factory=dict)
    stored: dict[Hotkey, BlobRef] = field(default_factory=dict)
    is_outer_refereed: bool = False
    snapshot: BlobRef | None = None


@dataclass(frozen=True, slots=True)
class PublishedEpoch:
    """What is still asked of an epoch once it is published; its samples and receipts are in the ledger."""

    epoch: Epoch
    roster: tuple[tuple[Hotkey, ...], ...]
    commit_root: Digest
    merges: tuple[StageMerge, ...]
    recent_losses: tuple[float, ...]


@dataclass(slots=True)
class EpochState:
    """Everything that begins and ends with one epoch."""

    epoch: Epoch
    beacon: str = ""
    roster: tuple[tuple[Hotkey, ...], ...] = ()
    cursors: dict[Hotkey, int] = field(default_factory=dict)
    num_lost: dict[Hotkey, int] = field(default_factory=dict)
    """Samples that a miner began and that came to nothing: dropped, or taken back from it."""
    samples: dict[SampleId, Sample] = field(default_factory=dict)
    open_samples: dict[SampleId, None] = field(default_factory=dict)
    reroutes: dict[tuple[Hotkey, Hotkey], int] = field(default_factory=dict)
    work: dict[Hotkey, Work] = field(default_factory=dict)
    commits: dict[Hotkey, wire.CommitEpoch] = field(default_factory=dict)
    commit_root: Digest = NO_DIGEST
    root_at_block: int = -1
    next_beacon: str = ""
    copied: dict[Hotkey, None] = field(default_factory=dict)
    """Whose upload is another's as well: left out of the merge and unpaid."""
    uploaded: dict[Hotkey, BlobRef] = field(default_factory=dict)
    merges: list[StageMerge] = field(default_factory=list)
    has_counted_missing: bool = False
    """Whether the merge has come to the point at which those who have not done their part are put on record."""

    @property
    def recent_losses(self) -> tuple[float, ...]:
        """Losses of the samples that were finished last, nats per token, oldest first."""
        losses = [
            sample.forward[-1].loss
            for sample in self.samples.values()
            if all(sample.credited) and sample.forward[-1] is not None and sample.forward[-1].loss is not None
        ]
        return tuple(losses[-RECENT_LOSSES:])

    def published(self) -> PublishedEpoch:
        """What is kept of it."""
        return PublishedEpoch(
            epoch=self.epoch,
            roster=self.roster,
            commit_root=self.commit_root,
            merges=tuple(self.merges),
            recent_losses=self.recent_losses,
        )


@dataclass(slots=True)
class Case:
    """One audit on its way to an outcome. `asked` lists validators drawn so far; a late answer counts while it is open.

    `rest` are further segments of the same epoch, to be audited one after the other as long as all is well.
    """

    challenge: wire.Challenge
    asked: list[Hotkey]
    verdicts: list[Verdict] = field(default_factory=list)
    due_s: float = 0.0
    outcome: Outcome | None = None
    rest: tuple[wire.Challenge, ...] = ()

    def awaits(self, validator: Hotkey) -> bool:
        """Whether this validator should still answer."""
        has_answered = any(verdict.validator == validator for verdict in self.verdicts)
        return self.outcome is None and validator in self.asked and not has_answered


@dataclass(frozen=True, slots=True)
class ShardAudit:
    """An agreeing shard drawn to be recomputed, and what both its copies were."""

    plan: wire.MergePlan
    accepted: BlobRef


@dataclass(slots=True)
class Evaluation:
    """Held-out loss of one published epoch, once its drawn validator has measured it."""

    validator: Hotkey
    snapshots: tuple[BlobRef, ...]
    loss: float | None = None
    loss_wires_zeroed: float | None = None


@dataclass(slots=True)
class State:
    """The run. `epoch` is the one being worked on; `snapshots` are the params it starts from."""

    run_id: str = ""
    kind: RunKind = RunKind.PIPELINE
    config_json: str = ""
    incentives_json: str = ""
    corpus_digest: Digest = NO_DIGEST
    num_elements: tuple[int, ...] = ()
    stage_flops: tuple[int, ...] = ()
    neighbours: tuple[tuple[StageIndex, ...], ...] = ()
    """For each stage, the others whose published params its miners compute with; none in a pipeline."""
    snapshots: tuple[BlobRef, ...] = ()
    phase: Phase = Phase.GATHERING
    phase_since_s: float = 0.0
    phase_deadline_s: float = 0.0
    now_s: float = 0.0
    members: dict[Hotkey, Member] = field(default_factory=dict)
    registered: dict[Hotkey, int] = field(default_factory=dict)
    permits: tuple[Hotkey, ...] = ()
    auditors: dict[Hotkey, bool] = field(default_factory=dict)
    """Validators that enlisted, and whether each is live."""
    current: EpochState = field(default_factory=lambda: EpochState(epoch=Epoch(0)))
    previous: PublishedEpoch | None = None
    late: dict[tuple[Epoch, Hotkey], Late] = field(default_factory=dict)
    """Updates that may still be merged, by the epoch they were committed in."""
    cases: dict[tuple[Epoch, Hotkey], Case] = field(default_factory=dict)
    shard_audits: dict[tuple[Epoch, StageIndex, int], ShardAudit] = field(default_factory=dict)
    """Agreeing shards that are being recomputed, by epoch, stage and shard."""
    flags: dict[tuple[Epoch, Hotkey, Hotkey], LossFlag] = field(default_factory=dict)
    """Recent flags by epoch, miner and validator."""
    noise: dict[Hotkey, Noise] = field(default_factory=dict)
    """What validators measured of their machines."""
    evaluations: dict[Epoch, Evaluation] = field(default_factory=dict)
    posted: dict[Hotkey, wire.PostScores] = field(default_factory=dict)
    answers: dict[Hotkey, dict[str, wire.Response]] = field(default_factory=dict)
    """For each hotkey, by request id, oldest first."""
    objects: dict[Epoch, list[str]] = field(default_factory=dict)
    """Keys of what was stored for an epoch, to be deleted when it is old."""
    deletions: dict[Epoch, DeleteObjects] = field(default_factory=dict)
    """What is to be deleted and may not be yet, by the epoch whose publication asked for it."""
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def epoch(self) -> Epoch:
        """The epoch being worked on."""
        return self.current.epoch

    def neighbour_snapshots(self, stage: StageIndex) -> tuple[BlobRef, ...]:
        """What the stages that `stage` computes with start this epoch from; all of them were published together."""
        return tuple(self.snapshots[other] for other in self.neighbours[stage])

    @property
    def newest_root(self) -> tuple[int, Digest]:
        """Epoch and commit root of the newest epoch whose commitments are closed, (-1, "") before the first."""
        for work in (self.current, self.previous):
            if work is not None and work.commit_root:
                return work.epoch, work.commit_root
        return -1, NO_DIGEST

    @property
    def validators(self) -> tuple[Hotkey, ...]:
        """Enlisted validators that hold a permit, sorted."""
        return tuple(sorted(hotkey for hotkey in self.auditors if hotkey in self.permits))

    @property
    def live_validators(self) -> list[Hotkey]:
        """Those of `validators` that were heard of lately."""
        return [validator for validator in self.validators if self.auditors[validator]]

    def knows(self, hotkey: Hotkey) -> bool:
        """Whether a key is registered, or was when it joined or enlisted."""
        return hotkey in self.registered or hotkey in self.members or hotkey in self.auditors

    def live_roster(self, stage: int) -> list[Hotkey]:
        """Miners of the epoch's roster of a stage that are live there and not banned, in the roster's order."""
        return [hotkey for hotkey in self.current.roster[stage] if self.is_at_work(hotkey, stage)]

    def is_at_work(self, hotkey: Hotkey, stage: int) -> bool:
        """Whether a miner of the roster is live in this stage and not banned."""
        member = self.members[hotkey]
        return member.stage == stage and member.is_live and member.banned_until < self.epoch

    def live_members(self, stage: int) -> list[Hotkey]:
        """Live miners of a stage that are not banned, sorted."""
        return sorted(
            member.hotkey
            for member in self.members.values()
            if member.stage == stage and member.is_live and member.banned_until < self.epoch
        )


@dataclass(slots=True)
class Turn:
    """One event being handled: the state it changes, the configuration, the time, and the effects it asks for."""

    state: State
    config: RunConfig
    now_s: float
    effects: list[AnyEffect] = field(default_factory=list)
    may_advance: bool = True
    """Whether what the phase waits for can have come about in this turn."""
    has_lost_miners: bool = False
    """Whether a miner ceased to be live in this turn: who waits for it need not."""

    def record(self, fact: AnyFact) -> None:
        """Put a fact on the public record."""
        self.state.ledger.append(fact, at_s=self.now_s)

    def keep(self, epoch: Epoch, *refs: BlobRef) -> None:
        """Note objects of an epoch, so that they are deleted with it."""
        self.state.objects.setdefault(epoch, []).extend(ref.key for ref in refs)

    def ask(self, effect: AnyEffect) -> None:
        """Ask the edge to do something."""
        self.effects.append(effect)
